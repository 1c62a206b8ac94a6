"""Values of stored arrays, read in bounded pieces: what they are, and how two of them differ."""
