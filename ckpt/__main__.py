"""`python -m ckpt` is the command `ckpt`."""

from ckpt.cli.entry import main

main()
