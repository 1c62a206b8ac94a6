"""Safetensors of other libraries, described as a manifest over their files."""
