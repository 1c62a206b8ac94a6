"""The command line: its commands, and their exit status."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Sequence
from typing import Any

import click
from click.shell_completion import shell_complete

import ckpt
from ckpt._tree.leaf_names import near_miss
from ckpt.cli import commands, exit_status
from ckpt.cli.output import Warnings, note, prepare_streams
from ckpt.errors import CheckpointError

# Shells set this variable to ask for completions; `ckpt completion` prints the code for that.
COMPLETION = "_CKPT_COMPLETE"
# More than the first sentence of any command's help, so that none is cut.
_LONG_HELP = 1000
_SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


class _Commands(click.Group):
    """The group of commands; a command is imported when it is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(commands.NAMES)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return commands.load(cmd_name) if cmd_name in commands.NAMES else None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in commands.NAMES and not ctx.resilient_parsing:
            hint = near_miss(args[0], commands.NAMES)
            if args[0] in commands.RENAMED:
                hint = f": use 'ckpt {commands.RENAMED[args[0]]}'"
            ctx.fail(f"There is no command {args[0]!r:.60}{hint}.")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for heading, names in commands.GROUPS.items():
            with formatter.section(heading):
                formatter.write_dl(
                    [(name, commands.load(name).get_short_help_str(_LONG_HELP)) for name in names]
                )

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            # Caught here, since click would print an empty line first.
            note("ckpt: interrupted")
            raise click.exceptions.Exit(exit_status.INTERRUPTED) from None


@click.group(
    cls=_Commands,
    context_settings=_SETTINGS,
    epilog="Exit status: 0 fine, 1 something was found (damage, a difference), 2 wrong use, "
    "3 the storage cannot be reached.",
)
@click.version_option(
    ckpt.__version__, message="ckpt %(version)s", help="Print the version and exit."
)
def app() -> None:
    """Look at checkpoints of JAX training, check them, move them and tidy them up.

    A PATH is a directory or a URL (s3://, gs://): the root of a run, one of its steps, or a single
    checkpoint. Where a command needs one step, a root stands for its latest.
    """


def run(arguments: Sequence[str]) -> int:
    """Run one command and return its exit status. An error is one line on standard error."""
    prepare_streams()
    if COMPLETION in os.environ:
        return shell_complete(app, {}, "ckpt", COMPLETION, os.environ[COMPLETION])
    logger = logging.getLogger("ckpt")
    warnings = Warnings(logging.WARNING)
    logger.addHandler(warnings)
    try:
        # Not `app.main`, which would end the process itself when the reader of the output goes
        # away.
        with app.make_context("ckpt", list(arguments)) as context:
            status = app.invoke(context)
        sys.stdout.flush()
        return status if isinstance(status, int) else exit_status.OK
    except click.exceptions.Exit as error:
        return error.exit_code
    except click.exceptions.NoArgsIsHelpError as error:
        sys.stderr.write(f"{error.format_message()}\n")
        return exit_status.USAGE
    except click.ClickException as error:
        where = getattr(error, "ctx", None)
        command = "ckpt" if where is None else where.command_path
        note(f"ckpt: {error.format_message()} See '{command} --help'.")
        return exit_status.USAGE
    except (CheckpointError, ExceptionGroup) as error:
        # Of several errors that were raised together, the first one is shown.
        first: BaseException = error
        while isinstance(first, ExceptionGroup):
            first = first.exceptions[0]
        if not isinstance(first, CheckpointError):
            raise
        # An error may list several problems in lines. In the command line, arguments are options.
        for line in f"ckpt: {first}".replace("if_exists='replace'", "--overwrite").split("\n"):
            note(line)
        return exit_status.status_of(first)
    except BrokenPipeError:
        # Otherwise the interpreter would fail to flush output that has no reader.
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return exit_status.CLOSED_PIPE
    except OSError as error:
        # The library raises its own errors only, so this error is from writing the output.
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        note(f"ckpt: the output cannot be written: {error.strerror or error}")
        return exit_status.UNREACHABLE
    except (KeyboardInterrupt, click.Abort):
        note("ckpt: interrupted")
        return exit_status.INTERRUPTED
    finally:
        logger.removeHandler(warnings)
