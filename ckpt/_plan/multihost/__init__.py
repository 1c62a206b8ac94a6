"""Planning for jobs of several processes: the writer and the readers of each part. Pure, no I/O."""
