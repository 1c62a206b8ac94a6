"""`ckpt log`: lineage of a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator

import anyio
import click

from ckpt._inspection.listed_steps import Ancestor, Lineage, LoggedStep, lineage_of
from ckpt.cli import options
from ckpt.cli.output import count_text, metric_text, printable, show, table

# Libraries that the other ones are built on.
_BELOW = ("python", "numpy", "tensorstore")


@click.command()
@options.path
@options.as_json
def log(path: str, as_json: bool) -> None:
    """Show the steps of a run, and which checkpoints it and its parents have begun from."""
    show(anyio.run(lineage_of, path), _view, as_json=as_json)


def _view(lineage: Lineage) -> Iterator[str]:
    rows = [
        (
            "" if each.step is None else str(each.step),
            "-" if each.committed is None else f"{each.committed:%Y-%m-%d %H:%M:%S} UTC",
            ", ".join(f"{name}={metric_text(value)}" for name, value in each.metrics.items()),
            _writer(each),
        )
        for each in reversed(lineage.steps)
    ]
    if rows:
        yield from table(("step", "committed", "metrics", "written by"), rows, right=("step",))
    for ancestor in lineage.ancestors:
        yield printable(_ancestor(ancestor))
    yield click.style(printable(f"{lineage.path}: {_total(lineage)}"), dim=True)


def _total(lineage: Lineage) -> str:
    text = count_text(len(lineage.steps), "step")
    if not lineage.ancestors:
        return f"{text}, begun from scratch"
    return f"{text}, {count_text(len(lineage.ancestors), 'ancestor')}"


def _writer(step: LoggedStep) -> str:
    shown = {name: version for name, version in step.writer.items() if name not in _BELOW}
    text = ", ".join(f"{library} {version}" for library, version in shown.items())
    return text if step.process_count < 2 else f"{text}, {step.process_count} processes"


def _ancestor(ancestor: Ancestor) -> str:
    text = f"begun from {ancestor.path}"
    if ancestor.found is None:
        return f"{text} ({ancestor.reason})"
    time = ancestor.found.committed
    return text if time is None else f"{text}, committed {time:%Y-%m-%d %H:%M:%S} UTC"
