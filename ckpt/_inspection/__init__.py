"""What is stored, as records for people and programs: read from manifests, without jax."""
