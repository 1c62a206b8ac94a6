"""Host memory: the staging arena, device-to-host copies, and buffers of restored arrays."""
