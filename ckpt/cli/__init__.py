"""The command `ckpt`: inspect, check, move and tidy up runs."""
