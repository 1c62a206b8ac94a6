"""Assembled steps: the parts that processes have on disks of their own become one ordinary step."""
