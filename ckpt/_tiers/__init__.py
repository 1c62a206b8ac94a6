"""Places nearer than the root of a run: host memory and local disks."""
