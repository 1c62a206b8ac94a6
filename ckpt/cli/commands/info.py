"""`ckpt info`: summary of one checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime

import anyio
import click
import msgspec

from ckpt._inspection.leaf_records import CheckpointSummary, DroppedSummary, ItemSummary, summarize
from ckpt._inspection.locations import checkpoint_at
from ckpt._tree.table import format_bytes
from ckpt.cli import options
from ckpt.cli.output import count_text, fields, metric_text, show

_MOST_NAMED = 5


@click.command()
@options.path
@options.as_json
def info(path: str, as_json: bool) -> None:
    """Describe one checkpoint: who wrote it and when, its items, metrics and metadata."""
    show(summarize(anyio.run(checkpoint_at, path)), _view, as_json=as_json)


def _view(found: CheckpointSummary) -> Iterator[str]:
    metrics = (f"{name}={metric_text(value)}" for name, value in found.metrics.items())
    times = (f"{name} {seconds:.2f} s" for name, seconds in found.statistics.items())
    writer = (f"{library} {version}" for library, version in found.writer.items())
    metadata = found.metadata
    return fields(
        [
            ("path", found.path),
            ("step", "" if found.step is None else str(found.step)),
            ("format", "" if found.format == "ckpt" else found.format),
            ("committed", _time(found.committed)),
            ("arrays", format_bytes(found.nbytes)),
            ("files", _files(found)),
            *(("item", _item(item)) for item in found.items),
            ("health", _health(found)),
            *(("dropped", _dropped(item)) for item in found.dropped),
            ("metrics", ", ".join(metrics)),
            ("metadata", "" if metadata is None else msgspec.json.encode(metadata).decode()),
            ("begun from", found.parent or ""),
            *(("source", path) for path in found.sources),
            ("save", ", ".join(times)),
            ("written by", ", ".join(writer)),
        ]
    )


def _item(item: ItemSummary) -> str:
    parts = [
        count_text(item.leaves, "leaf", "leaves"),
        count_text(item.arrays, "array"),
        format_bytes(item.nbytes),
    ]
    return f"{item.name} ({item.handler}): {', '.join(parts)}"


def _health(found: CheckpointSummary) -> str:
    """Return notes on NaN, infinite and unequal values; empty if there are none."""
    reasons = []
    if found.nonfinite:
        named = [f"{leaf} ({count})" for leaf, count in found.nonfinite.items()]
        reasons.append(f"NaN or infinite values in {_first(named)}")
    if found.unequal:
        reasons.append(f"replicas differ in {_first(found.unequal)}")
    known = "" if found.nonfinite is None else "healthy"
    return "; ".join(reasons) or known


def _first(named: Sequence[str]) -> str:
    return ", ".join(named[:_MOST_NAMED]) + (", ..." if len(named) > _MOST_NAMED else "")


def _dropped(item: DroppedSummary) -> str:
    why = "by hand" if item.policy is None else f"by {item.policy}"
    return f"{item.name}: {format_bytes(item.stored_bytes)}, {_time(item.dropped)}, {why}"


def _time(time: datetime | None) -> str:
    return "" if time is None else f"{time:%Y-%m-%d %H:%M:%S} UTC"


def _files(found: CheckpointSummary) -> str:
    if found.files is None or found.stored_bytes is None:
        return ""
    text = f"{count_text(found.files, 'file')}, {format_bytes(found.stored_bytes)}"
    if found.process_count > 1:
        text += f", written by {found.process_count} processes"
    if found.shared_bytes:
        text += f", of which {format_bytes(found.shared_bytes)} are those of the step before"
    return text + ("; its arrays lie in the sources" if found.is_virtual else "")
