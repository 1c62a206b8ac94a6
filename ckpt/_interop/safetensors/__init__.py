"""What others wrote as safetensors, described as a manifest over their files."""
