"""Deleting steps: by policy or by hand, permanently or into the trash."""
