"""Entry point of the command; prints which of its libraries are not installed."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command with the arguments of this process, and end the process."""
    try:
        import click
        import rich
    except ModuleNotFoundError as error:
        sys.stderr.write(
            f"ckpt: the command needs {error.name}, which is not installed. Install ckpt-jax with "
            "the extra 'cli': python -m pip install 'ckpt-jax[cli]', or '.[cli]' in a clone\n"
        )
        raise SystemExit(2) from None
    del click, rich
    from ckpt.cli.app import run

    raise SystemExit(run(sys.argv[1:]))
