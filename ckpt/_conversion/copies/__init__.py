"""Copies of checkpoints, steps and roots between disks and stores."""
