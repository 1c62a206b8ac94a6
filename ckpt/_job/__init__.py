"""Jobs: one process, or several that agree. Nothing outside asks which."""
