"""A model of saves, restores and recoveries of jobs with up to ten thousand hosts.

    python docs/explanation/scaling/scale_report.py     # rewrites the tables of scaling-tables.md

They are made from simulation.json and recovery.json, which the simulations write. The constants
stand here, each with its source; what is planned and said is taken from the simulations.
"""

from __future__ import annotations

import json
import math
import sys
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from benchmarks.pages import updated
from benchmarks.tables import table
from ckpt._job.shared_reads import _PART_BYTES as PART_BYTES
from docs.explanation.scaling.recovery_model import (
    STORE,
    Links,
    Transfer,
    chance_of_loss,
    held,
    numbered_anew,
    pulls,
    rack_of,
    ring,
    seconds,
    traffic,
)

__all__ = ["LOSSES", "Constants", "Given", "Row", "recoveries", "recovery", "restore_time",
           "save_time", "scaling", "steady", "tables"]  # fmt: skip

FOLDER = Path(__file__).parent
PAGE = FOLDER.with_name("scaling-tables.md")
LOSSES = ("a host", "a host, numbered anew", "a rack", "all")
Row = dict[str, Any]
# The heading of a column, the key of its cells, and how they are shown.
Columns = list[tuple[str, str, Any]]


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


_STORE_SIDE = Constants()


@dataclass(frozen=True)
class Given:
    """What the model takes from elsewhere, beside `Constants`. Bytes a second, and bytes.

    Attributes:
        stream: That one connection brings from memory to memory.
        nic: That the network of a host takes in each direction.
        store: That the store gives to all hosts.
        memory: At which a process restores what its own host has in memory.
        broadcast: What `restore(broadcast_bytes=...)` is called with.
    """

    stream: float
    nic: float = 12.5e9
    store: float = 25e9
    memory: float = (512 << 20) / 0.374
    broadcast: float = 1 << 30

    @property
    def links(self) -> Links:
        """Returns the links of a job."""
        return Links(self.nic, self.stream, _STORE_SIDE.bandwidth, self.store)


def recovery(job: Row, way: str, loss: str, given: Given) -> Row:
    """Returns the parts of a recovery in seconds, and bytes, of one job.

    Without a whole step in memory, the processes have agreed on that, and then go on from the root.

    Args:
        job: What was simulated.
        way: `"memory"`, `"root"` or `"broadcast"`.
        loss: One of `LOSSES`.
        given: The constants.
    """
    if way == "memory":
        moves = _pulled(job, loss)
        found = _from_root(job, given) if moves is None else _from_memory(job, moves, given)
        talks = ["memory", "root"] if moves is None else ["memory"]
    else:
        moves = None
        shared = way == "broadcast"
        found = _shared(job, given) if shared else _from_root(job, given)
        talks = ["root"]
    hosts = job["hosts"]
    transfers = found.pop("transfers")
    for talk in talks:
        transfers = transfers + _said(hosts, job[talk])
    moved = traffic(transfers, hosts)
    both = [sum(pair) for pair in zip(moved.sent, moved.received, strict=True)]
    found["coordination"] += sum(job[talk]["seconds"] for talk in talks)
    found["total"] = found["coordination"] + found["manifest"] + found["data"]
    found |= {"most": max(both), "mean": sum(both) / hosts, "store": moved.store}
    return {"hosts": hosts, "from": "memory" if moves is not None else "root"} | found


def _pulled(job: Row, loss: str) -> list[Transfer] | None:
    """Returns what the processes pull from each other; None if a part is in no memory."""
    hosts = job["hosts"]
    distance = rack_of(hosts)
    lost = {"a rack": range(distance), "all": range(hosts)}.get(loss, range(1))
    memory = held(hosts, distance, lost)
    if loss == "a host, numbered anew":
        memory = numbered_anew(memory)
    pairs = pulls(memory)
    nbytes = job["part_bytes"] + job["part_manifest_bytes"]
    return None if pairs is None else [Transfer(*pair, nbytes) for pair in pairs]


def _from_memory(job: Row, moves: list[Transfer], given: Given) -> Row:
    pulled = seconds(moves, job["hosts"], given.links)
    return {
        "transfers": moves,
        "coordination": 0.0,
        "manifest": job["part_decode"],
        "data": pulled + job["part_bytes"] / given.memory,
    }


def _from_root(job: Row, given: Given) -> Row:
    hosts = range(job["hosts"])
    times = restore_time(job)
    parts = [Transfer(STORE, host, job["part_bytes"]) for host in hosts]
    moved = seconds(parts, len(hosts), given.links)
    return {
        "transfers": _manifests(job) + parts,
        "coordination": 0.0,
        "manifest": times["manifest"],
        "data": max(times["read"], moved),
    }


def _shared(job: Row, given: Given) -> Row:
    """Returns a restore in which the replicas of a part read it once.

    In every round each reads its share of a batch, all agree, and exchange; the share of the next
    batch is read meanwhile.
    """
    hosts, replicas = job["hosts"], job["replicas"]
    links = given.links
    rounds = _rounds(job["part_bytes"], replicas, given.broadcast)
    share = job["part_bytes"] / rounds / replicas
    asked = math.ceil(share / PART_BYTES)
    read = [Transfer(STORE, host, share) for host in range(hosts)]
    own = math.ceil(asked / _STORE_SIDE.lanes) * _STORE_SIDE.latency
    reading = max(seconds(read, hosts, links), own, hosts * asked / _STORE_SIDE.gets)
    # Those with the same part are a replica apart. The network of the devices has no connections.
    apart = hosts // replicas
    groups = [range(first, hosts, apart) for first in range(apart)]
    moved = [move for group in groups for move in ring(group, job["part_bytes"] / rounds)]
    exchange = seconds(moved, hosts, Links(given.nic, math.inf, math.inf, math.inf))
    every = [Transfer(*move[:2], move.nbytes * rounds) for move in read + moved]
    return {
        "transfers": _manifests(job) + every,
        "coordination": rounds * job["exchange"]["seconds"],
        "manifest": restore_time(job)["manifest"],
        "data": reading + (rounds - 1) * max(reading, exchange) + exchange,
    }


def _rounds(part: float, replicas: int, broadcast: float) -> int:
    """Returns how many batches a part is cut into, as `shared_reads` does with large parts."""
    return math.ceil(part / min(broadcast * replicas / (replicas + 2), part / 4))


def _manifests(job: Row) -> list[Transfer]:
    """Returns who reads the manifest: process 0, which hands it on, or all."""
    readers = 1 if job["handed"] else job["hosts"]
    return [Transfer(STORE, host, job["manifest_bytes"]) for host in range(readers)]


def _said(hosts: int, talk: Row) -> list[Transfer]:
    """Returns what goes to and from process 0, where the service of the job is."""
    told, heard = talk["told"] / hosts, talk["heard"] / hosts
    others = range(1, hosts)
    return [Transfer(host, 0, told) for host in others] + [
        Transfer(0, host, heard) for host in others
    ]


def steady(job: Row, given: Given) -> Row:
    """Returns what the copies of one snapshot take: a round in seconds, and bytes of a host."""
    nbytes = job["part_bytes"] + job["part_manifest_bytes"]
    hosts, distance = job["hosts"], rack_of(job["hosts"])
    moves = [Transfer(host, (host + distance) % hosts, nbytes) for host in range(hosts)]
    pulled = seconds(moves, hosts, given.links)
    took = pulled + job["copies"]["seconds"]
    moved = traffic(moves + _said(hosts, job["copies"]), hosts)
    shares = {
        f"share_{every}": sum(moved.received) / hosts / given.nic / max(every, took)
        for every in (60, 300)
    }
    sent, received = sum(moved.sent) / hosts, sum(moved.received) / hosts
    found = {"name": job["name"], "hosts": hosts, "sent": sent, "received": received}
    return found | {"round": took} | shares


def tables() -> dict[str, str]:
    """Returns what stands between the markers of the page, by their name."""
    simulated, lost = (
        json.loads((FOLDER / name).read_text(encoding="utf-8"))
        for name in ("simulation.json", "recovery.json")
    )
    return {"bench": scaling(simulated), "recovery": recoveries(lost)}


def scaling(rows: list[Row]) -> str:
    """Returns the tables of saves and restores."""
    blocks = []
    for name in dict.fromkeys(row["name"] for row in rows):
        chosen = [row for row in rows if row["name"] == name]
        first = chosen[0]
        title = f"{name}: {first['leaves']:,} leaves, {first['bytes'] / 1e12:.2g} TB"
        blocks += [
            f"### {title[0].upper()}{title[1:]}",
            "What the planner and the primary do, measured:",
            _table(_MEASURED, chosen, "---:"),
            "What the model says of a save, in seconds:",
            _table(_SAVE, [row | save_time(row) for row in chosen], "---:"),
            "And of a restore onto the same mesh, in seconds:",
            _table(_RESTORE, [row | restore_time(row) for row in chosen], "---:"),
        ]
    return "\n\n".join(blocks)


def recoveries(found: Row) -> str:
    """Returns the tables of jobs that lose hosts."""
    given = Given(found["pull_rate"])
    blocks = [f"One connection pulls {format_bytes(given.stream)} a second (measured)."]
    for name, title in _TITLES.items():
        rows = [
            _recovery_row(job, way, loss, given)
            for job in found["jobs"]
            if job["name"] == name
            for way, loss in _shown(job)
        ]
        blocks += [f"### Recovery: {title}", _table(_RECOVERY, rows)]
    # Copies of replicas are as those of parts of the same size without replicas.
    copied = [steady(job, given) for job in found["jobs"] if job["name"] != "replicas"]
    blocks += ["### What copies cost while training runs", _table(_COPIES, copied)]
    blocks += ["### How likely it is that a part is lost", _chances(found["chances"])]
    return "\n\n".join(blocks)


def _table(columns: Columns, rows: list[Row], first: str = "---") -> str:
    cells = [[show(row[key]) for _, key, show in columns] for row in rows]
    return table([title for title, _, _ in columns], cells, first=first)


def _recovery_row(job: Row, way: str, loss: str, given: Given) -> Row:
    found = recovery(job, way, loss, given)
    name = "root, `broadcast_bytes`" if way == "broadcast" else found["from"]
    name += ", after memory" if way == "memory" and name == "root" else ""
    return found | {"lost": loss if way == "memory" else "any", "from": name}


_TITLES = {
    "8 GiB a host": "8 GiB a host, cut over all hosts",
    "1 TB": "1 TB, cut over all hosts",
    "replicas": "64 GiB, cut over 8 hosts and replicated over the others",
}


def _shown(job: Row) -> list[tuple[str, str]]:
    """Returns the ways and losses that are shown of a job.

    Parts of replicas are pulled as all others are, and without memory it does not matter who is
    lost.
    """
    if job["name"] != "replicas":
        return [("memory", loss) for loss in LOSSES] + [("root", "all")]
    if job["replicas"] == 1:
        return []
    return [("memory", "a host"), ("root", "all"), ("broadcast", "all")]


def _chances(chances: list[Row]) -> str:
    lost = sorted({each["lost"] for each in chances})
    rows = []
    for (hosts, distance), group in groupby(chances, itemgetter("hosts", "distance")):
        by_lost = {each["lost"]: each for each in group}
        cells = [_chance(by_lost[count]) if count in by_lost else "" for count in lost]
        rows.append([f"{hosts:,}", str(distance), *cells])
    return table(("hosts", "distance", *(f"{count} lost" for count in lost)), rows)


def _chance(each: dict[str, Any]) -> str:
    exact = chance_of_loss(each["hosts"], each["distance"], each["lost"])
    return f"{float(exact):.2%} ({each['parts_lost'] / each['trials']:.2%})"


def seconds_text(value: float) -> str:
    return f"{value:.3g}" if value < 100 else f"{value:,.0f}"


def format_bytes(value: float) -> str:
    units = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3))
    unit, factor = next((unit for unit in units if value >= unit[1]), ("B", 1))
    return f"{value / factor:.3g} {unit}"


_COUNT, _SECONDS, _SIZE = "{:,}".format, seconds_text, format_bytes
_MEASURED: Columns = [
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
_SAVE: Columns = [
    ("hosts", "hosts", _COUNT),
    ("write own files", "write", _SECONDS),
    ("coordination", "service", _SECONDS),
    ("join on the primary", "join", _SECONDS),
    ("write index and manifest", "publish", _SECONDS),
    ("in all", "total", _SECONDS),
]
_RESTORE: Columns = [
    ("hosts", "hosts", _COUNT),
    ("manifest", "manifest", _SECONDS),
    ("read own shards", "read", _SECONDS),
    ("in all", "total", _SECONDS),
]
_RECOVERY: Columns = [
    ("lost", "lost", str),
    ("goes on from", "from", str),
    ("hosts", "hosts", _COUNT),
    ("coordination, s", "coordination", _SECONDS),
    ("manifest, s", "manifest", _SECONDS),
    ("data, s", "data", _SECONDS),
    ("in all, s", "total", _SECONDS),
    ("network of a host, most", "most", _SIZE),
    ("mean", "mean", _SIZE),
    ("read from the store", "store", _SIZE),
]
_COPIES: Columns = [
    ("state", "name", str),
    ("hosts", "hosts", _COUNT),
    ("a host sends", "sent", _SIZE),
    ("and receives", "received", _SIZE),
    ("a round, s", "round", _SECONDS),
    ("of the NIC, a snapshot a minute", "share_60", "{:.2%}".format),
    ("every 5 minutes", "share_300", "{:.2%}".format),
]


def main() -> None:
    """Rewrites the tables of the page."""
    text = PAGE.read_text(encoding="utf-8")
    for name, tables_of_name in tables().items():
        text = updated(text, name, tables_of_name)
    PAGE.write_text(text, encoding="utf-8")
    sys.stderr.write(f"wrote {PAGE}\n")


if __name__ == "__main__":
    main()
