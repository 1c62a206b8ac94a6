"""What Flax wrote as msgpack: such a file as a manifest, and what other readers of it need."""
