"""What is kept, what goes, and what dead writers left."""
