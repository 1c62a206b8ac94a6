"""Records of stored data for people and programs, read from manifests without jax."""
