"""`ckpt ui`: the page of a run."""

from __future__ import annotations

import webbrowser
from pathlib import Path

import anyio
import click

from ckpt._inspection.locations import RunRoot, root_at
from ckpt._tree.table import format_bytes
from ckpt.cli import options
from ckpt.cli.output import count_text, note
from ckpt.errors import CheckpointError, InvalidArgumentError

_LOOPBACK = ("127.0.0.1", "::1", "localhost")


@click.command()
@options.path
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen on.")
@click.option("--port", default=0, type=click.IntRange(0, 65535), help="Its port; 0 takes any.")
@click.option("--open", "opens", is_flag=True, help="Open the page in the browser.")
@click.option(
    "--export",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the page to this file instead of serving it.",
)
@click.option(
    "--steps",
    default=10,
    show_default=True,
    type=click.IntRange(1),
    help="With --export: how many of the newest steps the file has with their leaves.",
)
def ui(path: str, host: str, port: int, opens: bool, export: Path | None, steps: int) -> None:
    """Show a run on a page in the browser: its steps, trees, differences and saves.

    The page is served on this machine until Ctrl-C, and follows the run. It needs no network.
    """
    root = anyio.run(root_at, path)
    if export is not None:
        _export(root, export, steps)
    else:
        _serve(root, host, port, opens=opens)


def _export(root: RunRoot, file: Path, most: int) -> None:
    from ckpt.page.document import RunReader, StaticData, StepRecord, single_page

    async def read() -> StaticData:
        reader = RunReader(root)
        run = await reader.run(is_live=False)
        found: dict[str, StepRecord] = {}
        for each in run.listing["steps"][-most:]:
            number = each["step"]
            try:
                found[number] = await reader.step(int(number))
            except CheckpointError as error:
                note(f"warning: step {number} is left out: {error}")
        return StaticData(run, found, await reader.norms())

    data = anyio.run(read)
    try:
        file.write_text(single_page(data), encoding="utf-8")
    except OSError as error:
        raise InvalidArgumentError(f"--export {file}: {error.strerror}") from error
    steps = count_text(len(data.run.listing["steps"]), "step")
    size = format_bytes(file.stat().st_size)
    click.echo(f"{file}: {steps}, the leaves of {len(data.steps)}, {size}")


def _serve(root: RunRoot, host: str, port: int, *, opens: bool) -> None:
    from ckpt.page.document import RunReader
    from ckpt.page.server import PageServer, is_everywhere

    if host not in _LOOPBACK:
        who = "everybody in the network" if is_everywhere(host) else f"whoever can reach {host}"
        note(f"warning: {who} can read the run with the address below, which holds the token")
    try:
        server = PageServer(RunReader(root), host, port)
    except OSError as error:
        raise InvalidArgumentError(f"cannot listen on {host}:{port}: {error.strerror}") from error
    with server:
        click.echo(f"{server.url}")
        note("Ctrl-C ends it.")
        if opens:
            webbrowser.open(server.url)
        server.serve_forever()
