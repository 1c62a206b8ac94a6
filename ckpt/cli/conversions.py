"""Conversions of checkpoints, for the commands that write them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from msgspec import Struct

from ckpt._inspection.locations import RunRoot, locate
from ckpt._redaction import redact
from ckpt._settings import IfTaken
from ckpt._tree.table import format_bytes
from ckpt.cli.output import count_text, printable
from ckpt.cli.progress import progress
from ckpt.errors import InvalidArgumentError

_BUDGET_BYTES = 256 << 20


class WrittenCheckpoint(Struct, frozen=True):
    """The result of a command that writes a checkpoint.

    Attributes:
        path: Path of the result.
        format: Its format.
        step: Its number, or None.
        arrays: Number of its arrays; None if they were not counted.
        nbytes: Bytes of its arrays.
        seconds: Duration of the conversion; None if it was not measured.
    """

    path: str
    format: str
    step: int | None
    arrays: int | None
    nbytes: int
    seconds: float | None


async def one_checkpoint(path: str) -> str:
    """Return the path of a checkpoint; for a root, the path of its latest step."""
    found = await locate(path)
    if not isinstance(found, RunRoot):
        return path
    return f"{found.location}/{(await found.index.found(None)).step_dir}"


def written(
    name: str,
    source: str | dict[str, float],
    target: str,
    format: Any,
    at: str | None,
    step: int | None,
    *,
    overwrite: bool,
) -> WrittenCheckpoint:
    """Convert one checkpoint, or the mean of several, with a progress line.

    Args:
        name: Text of the progress line.
        source: The checkpoint; or several, each with its weight.
        target: Path of the result.
        format: Its format, as `ckpt.convert` takes it.
        at: The branch, or None.
        step: Its number, or None.
        overwrite: True to replace an existing checkpoint.
    """
    from ckpt._calls.conversion import Conversion, convert_call
    from ckpt._runtime.loop import call_once

    with progress(name) as line:

        async def convert() -> Conversion:
            paths = {source: 1.0} if isinstance(source, str) else source
            found: dict[str, float] = {}
            for given, weight in paths.items():
                path = await one_checkpoint(given)
                if path in found:
                    raise InvalidArgumentError(f"{path} is given twice")
                found[path] = weight
            whole: Any = next(iter(found)) if isinstance(source, str) else found
            if_exists: IfTaken = "replace" if overwrite else "error"
            call = convert_call(
                whole, target, format, at, None, step, None, if_exists, _BUDGET_BYTES, (line,)
            )
            return await call()

        done = call_once(convert)
    path = redact(done.path)
    return WrittenCheckpoint(path, done.format, step, done.arrays, done.nbytes, done.seconds)


def written_view(done: WrittenCheckpoint) -> Iterator[str]:
    """Yield one line about the result."""
    parts = [
        "" if done.format == "ckpt" else done.format,
        "" if done.arrays is None else count_text(done.arrays, "array"),
        format_bytes(done.nbytes),
        "" if done.seconds is None else f"{done.seconds:.2f} s",
    ]
    yield f"{printable(done.path)}: {', '.join(filter(None, parts))}"
