"""A model of how a job that has lost hosts goes on: times, and bytes on the network.

    python -m benchmarks.recovery_report  # the tables of docs/explanation/scaling-tables.md

They are made from docs/explanation/scaling/recovery.json. The constants stand here and in
`scale_report`, each with its source; what is planned and said is taken from the simulation.
"""

from __future__ import annotations

import json
import math
import sys
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Any

from benchmarks.figures import table, write_between
from benchmarks.recovery_model import (
    STORE,
    Links,
    Transfer,
    chance_of_loss,
    held,
    numbered_anew,
    pulls,
    ring,
    seconds,
    traffic,
)
from benchmarks.recovery_simulation import RESULTS, rack_of
from benchmarks.scale_report import PAGE, Constants, Row, format_bytes, restore_time, seconds_text
from ckpt._job.shared_reads import _PART_BYTES as PART_BYTES

__all__ = ["LOSSES", "Given", "markdown", "recovery", "steady"]

START, END = "<!-- recovery:start -->", "<!-- recovery:end -->"
LOSSES = ("a host", "a host, numbered anew", "a rack", "all")
STORE_SIDE = Constants()
WAYS = ("memory", "root", "broadcast")


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
        return Links(self.nic, self.stream, STORE_SIDE.bandwidth, self.store)


def recovery(job: Row, way: str, loss: str, given: Given) -> Row:
    """Returns the parts of a recovery in seconds, and bytes, of one job.

    Without a whole step in memory, the processes have agreed on that, and then go on from the root.

    Args:
        job: What was simulated.
        way: One of `WAYS`.
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
    own = math.ceil(asked / STORE_SIDE.lanes) * STORE_SIDE.latency
    reading = max(seconds(read, hosts, links), own, hosts * asked / STORE_SIDE.gets)
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
        every: sum(moved.received) / hosts / given.nic / max(every, took) for every in (60, 300)
    }
    sent, received = sum(moved.sent) / hosts, sum(moved.received) / hosts
    return {"hosts": hosts, "sent": sent, "received": received, "round": took, "shares": shares}


def markdown(found: Row) -> str:
    """Returns the tables of the section."""
    given = Given(found["pull_rate"])
    blocks = [f"One connection pulls {format_bytes(given.stream)} a second (measured)."]
    for name, title in _TITLES.items():
        chosen = [job for job in found["jobs"] if job["name"] == name]
        blocks += [f"### Recovery: {title}", _recoveries(chosen, given)]
    blocks += ["### What copies cost while training runs", _copies(found["jobs"], given)]
    blocks += ["### How likely it is that a part is lost", _chances(found["chances"])]
    return "\n\n".join(blocks) + "\n"


_TITLES = {
    "8 GiB a host": "8 GiB a host, cut over all hosts",
    "1 TB": "1 TB, cut over all hosts",
    "replicas": "64 GiB, cut over 8 hosts and replicated over the others",
}


def _recoveries(jobs: list[Row], given: Given) -> str:
    head = ["lost", "goes on from", "hosts", "coordination, s", "manifest, s", "data, s"]
    head += ["in all, s", "network of a host, most", "mean", "read from the store"]
    rows = []
    for job in jobs:
        for way, loss in _shown(job):
            found = recovery(job, way, loss, given)
            name = "root, `broadcast_bytes`" if way == "broadcast" else found["from"]
            name += ", after memory" if way == "memory" and name == "root" else ""
            times = [found[key] for key in ("coordination", "manifest", "data", "total")]
            sizes = [found[key] for key in ("most", "mean", "store")]
            rows.append(
                (
                    loss if way == "memory" else "any",
                    name,
                    f"{job['hosts']:,}",
                    *map(seconds_text, times),
                    *map(format_bytes, sizes),
                )
            )
    return table(head, rows)


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


def _copies(jobs: list[Row], given: Given) -> str:
    head = ["state", "hosts", "a host sends", "and receives", "a round, s"]
    head += ["of the NIC, a snapshot a minute", "every 5 minutes"]
    rows = []
    for job in jobs:
        if job["name"] == "replicas":
            # As of parts of the same size without replicas.
            continue
        found = steady(job, given)
        shares = [f"{share:.2%}" for share in found["shares"].values()]
        rows.append(
            (
                job["name"],
                f"{job['hosts']:,}",
                format_bytes(found["sent"]),
                format_bytes(found["received"]),
                seconds_text(found["round"]),
                *shares,
            )
        )
    return table(head, rows)


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


def main() -> None:
    """Rewrites the tables of the page."""
    found = json.loads(RESULTS.read_text(encoding="utf-8"))
    write_between(PAGE, START, END, f"\n{markdown(found)}")
    sys.stderr.write(f"wrote {PAGE}\n")


if __name__ == "__main__":
    main()
