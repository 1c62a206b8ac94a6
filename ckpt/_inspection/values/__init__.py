"""Values of stored arrays, read in bounded pieces: their figures, and their differences."""
