"""Restores on paper: what each process would read, and how much memory it would take."""
