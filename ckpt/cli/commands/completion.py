"""`ckpt completion`: code for shells that completes commands, options and paths."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from ckpt.cli.output import show_lines

_SHELLS = ("bash", "zsh", "fish")


@click.command()
@click.argument("shell", type=click.Choice(_SHELLS))
def completion(shell: str) -> None:
    """Print what lets a shell complete commands, options and paths.

    For bash, put this into ~/.bashrc: eval "$(ckpt completion bash)"
    """
    from ckpt.cli.app import COMPLETION, app

    made = get_completion_class(shell)
    assert made is not None
    show_lines([made(app, {}, "ckpt", COMPLETION).source()])
