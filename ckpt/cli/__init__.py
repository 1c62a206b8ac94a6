"""The command `ckpt`: look at runs, check them, move them and tidy them up."""
