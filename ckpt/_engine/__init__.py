"""Everything that moves bytes: host memory, and the flows save, restore and verify."""
