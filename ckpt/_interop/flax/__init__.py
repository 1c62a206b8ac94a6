"""Msgpack files of Flax as manifests, and the parts of that code that other readers use."""
