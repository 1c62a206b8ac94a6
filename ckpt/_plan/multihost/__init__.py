"""Planning for jobs of several processes: who writes and reads what. Pure, no I/O."""
