"""A model of save and restore time from one host to ten thousand.

    python -m benchmarks.scale_report      # the tables of docs/explanation/scaling-tables.md

They are made from docs/explanation/scaling/simulation.json.

The constants stand here, each with its source; what the primary does is taken from the simulation.
"""

from __future__ import annotations

import json
import math
import sys
from dataclasses import dataclass
from typing import Any

from benchmarks.report import update_page
from benchmarks.scale_simulation import RESULTS

__all__ = ["Constants", "Row", "markdown", "restore_time", "save_time"]

PAGE = RESULTS.parent.with_name("scaling-tables.md")
Row = dict[str, Any]


@dataclass(frozen=True)
class Constants:
    """What the model takes from elsewhere. Seconds, bytes, and so many a second.

    Attributes:
        latency: Of one request to the store.
        bandwidth: Of a host to and from the store, all its streams together.
        stream: Of one stream: the manifest is one object, written by one request.
        lanes: Files that a process writes at a time.
        puts: That a prefix of the store takes.
        gets: That a prefix of the store gives.
        rate: Requests that the coordination service answers.
        service: Bytes that pass through it.
        requests: Of one process to it, for one save.
        group: Reports that the primary reads by one request.
        trip: Of one request to it.
    """

    latency: float = 0.04
    bandwidth: float = 1e9
    stream: float = 1e8
    lanes: int = 4
    puts: float = 3500
    gets: float = 5500
    rate: float = 8900
    service: float = 155e6
    requests: int = 8
    group: int = 32
    trip: float = 0.0005


def save_time(row: Row, given: Constants = Constants()) -> dict[str, float]:
    """Returns the parts of a save in seconds, from the first byte written to the last wait."""
    hosts = row["hosts"]
    files = row["share_files"]
    moved = row["share_bytes"] / given.bandwidth
    own = max(moved, math.ceil(files / given.lanes) * given.latency)
    all_puts = hosts * files / given.puts
    parts = {"write": max(own, all_puts)}
    parts["service"] = 0.0
    if hosts > 1:
        asked = hosts * given.requests / given.rate
        told = row["records_bytes"] / given.service
        parts["service"] = asked + told + math.ceil(hosts / given.group) * given.trip
    parts["join"] = row["unpack"] + row["join"] + row["index"] + row["encode"]
    over = row["index_bytes"], row["manifest_bytes"]
    parts["publish"] = sum(given.latency + nbytes / given.stream for nbytes in over)
    parts["total"] = sum(parts.values())
    return parts


def restore_time(row: Row, given: Constants = Constants()) -> dict[str, float]:
    """Returns the parts of a restore onto the same mesh in seconds.

    Every process reads the manifest, and what its devices need: with replicas that is more than
    its share of a save.
    """
    hosts = row["hosts"]
    needed = row["bytes"] * 8 / row["shards"] if hosts > 1 else row["bytes"]
    files = max(math.ceil(needed / row["share_bytes"] * row["share_files"]), 1)
    parts = {"manifest": given.latency + row["manifest_bytes"] / given.stream + row["decode"]}
    own = max(needed / given.bandwidth, math.ceil(files / given.lanes) * given.latency)
    parts["read"] = max(own, hosts * files / given.gets)
    parts["total"] = sum(parts.values())
    return parts


def markdown(rows: list[Row]) -> str:
    """Returns the tables of the page."""
    blocks = []
    for name in dict.fromkeys(row["name"] for row in rows):
        chosen = [row for row in rows if row["name"] == name]
        first = chosen[0]
        title = f"{name}: {first['leaves']:,} leaves, {first['bytes'] / 1e12:.2g} TB"
        blocks.append(f"### {title[0].upper()}{title[1:]}")
        blocks.append("What the planner and the primary do, measured:")
        blocks.append(_table(_MEASURED, chosen))
        blocks.append("What the model says of a save, in seconds:")
        blocks.append(_table(_SAVE, [{**row, **save_time(row)} for row in chosen]))
        blocks.append("And of a restore onto the same mesh, in seconds:")
        blocks.append(_table(_RESTORE, [{**row, **restore_time(row)} for row in chosen]))
    return "\n\n".join(blocks) + "\n"


def seconds_text(value: float) -> str:
    return f"{value:.3g}" if value < 100 else f"{value:,.0f}"


def format_bytes(value: float) -> str:
    units = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3))
    unit, factor = next((unit for unit in units if value >= unit[1]), ("B", 1))
    return f"{value / factor:.3g} {unit}"


_COUNT, _SECONDS, _SIZE = "{:,}".format, seconds_text, format_bytes
_MEASURED = [
    ("hosts", "hosts", _COUNT),
    ("chunks", "chunks", _COUNT),
    ("one process: plan, s", "plan", _SECONDS),
    ("its files", "share_files", _COUNT),
    ("its bytes", "share_bytes", _SIZE),
    ("its record", "record_bytes", _SIZE),
    ("primary: read records, s", "unpack", _SECONDS),
    ("join, s", "join", _SECONDS),
    ("index, s", "index", _SECONDS),
    ("manifest, s", "encode", _SECONDS),
    ("memory", "primary_peak_bytes", _SIZE),
    ("manifest", "manifest_bytes", _SIZE),
]
_SAVE = [
    ("hosts", "hosts", _COUNT),
    ("write own files", "write", _SECONDS),
    ("coordination", "service", _SECONDS),
    ("join on the primary", "join", _SECONDS),
    ("write index and manifest", "publish", _SECONDS),
    ("in all", "total", _SECONDS),
]
_RESTORE = [
    ("hosts", "hosts", _COUNT),
    ("manifest", "manifest", _SECONDS),
    ("read own shards", "read", _SECONDS),
    ("in all", "total", _SECONDS),
]


def _table(columns: list[tuple[str, str, Any]], rows: list[Row]) -> str:
    lines = ["| " + " | ".join(title for title, _, _ in columns) + " |"]
    lines.append("| " + " | ".join("---:" for _ in columns) + " |")
    lines += ["| " + " | ".join(show(row[key]) for _, key, show in columns) + " |" for row in rows]
    return "\n".join(lines)


def main() -> None:
    """Rewrites the tables of the page."""
    rows = json.loads(RESULTS.read_text(encoding="utf-8"))
    page = update_page(PAGE.read_text(encoding="utf-8"), markdown(rows))
    PAGE.write_text(page, encoding="utf-8")
    sys.stderr.write(f"wrote {PAGE}\n")


if __name__ == "__main__":
    main()
