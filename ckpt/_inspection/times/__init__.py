"""How long saves took, and what they cost a run."""
