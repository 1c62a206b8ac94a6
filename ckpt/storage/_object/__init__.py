"""Checkpoints in an object store: S3, Google Cloud Storage, or the memory of this process."""
