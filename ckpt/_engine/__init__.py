"""The engine moves all bytes: host memory, and the flows save, restore and verify."""
