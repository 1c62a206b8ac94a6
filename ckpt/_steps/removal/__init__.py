"""How steps go: by a policy or one by one, for good or into a trash from which they come back."""
