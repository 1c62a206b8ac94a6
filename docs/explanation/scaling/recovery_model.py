"""A model of how a job that has lost hosts continues: what goes where, and how long. Pure.

Process `i` has part `i` of the state in the memory of its host, and process `i + distance` has a
copy of it. A part is lost if both hosts are. A recovery is a list of transfers over links of known
bandwidth; the busiest link says how long they take.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

__all__ = [
    "STORE",
    "Links",
    "Traffic",
    "Transfer",
    "chance_of_loss",
    "held",
    "numbered_anew",
    "pulls",
    "rack_of",
    "ring",
    "seconds",
    "traffic",
]

# Where the bytes of a transfer from the store come from.
STORE = -1


@dataclass(frozen=True)
class Links:
    """Bytes a second.

    Attributes:
        nic: Of the network of a host, in each direction. Hosts reach each other without a limit in
            between.
        stream: Of one connection between two hosts.
        host: Of a host from the store, all its streams together.
        store: Of the store to all hosts together.
    """

    nic: float
    stream: float
    host: float
    store: float


class Transfer(NamedTuple):
    """Bytes that go from one host, or the store, to a host."""

    source: int
    target: int
    nbytes: float


class Traffic(NamedTuple):
    """What each host sends and receives, and what the store delivers."""

    sent: list[float]
    received: list[float]
    store: float


def rack_of(hosts: int) -> int:
    """Returns how many hosts share a rack: eight, but half of a job of eight."""
    return min(8, hosts // 2)


def held(hosts: int, distance: int, lost: Collection[int]) -> list[set[int]]:
    """Returns the parts that each host has in memory after a loss; those lost are replaced."""
    return [set() if host in lost else {host, (host - distance) % hosts} for host in range(hosts)]


def numbered_anew(memory: Sequence[set[int]]) -> list[set[int]]:
    """Returns what each process has where the new hosts come last, and others move up."""
    return sorted(memory, key=lambda parts: not parts)


def pulls(memory: Sequence[set[int]]) -> list[tuple[int, int]] | None:
    """Returns which process sends a part to which; None if a part is in no memory.

    Every process that lacks its part pulls it from the one that sends the least so far.
    """
    owners: dict[int, list[int]] = {}
    for process, parts in enumerate(memory):
        for part in parts:
            owners.setdefault(part, []).append(process)
    if len(owners) < len(memory):
        return None
    sent = [0] * len(memory)
    found = []
    for process, parts in enumerate(memory):
        if process not in parts:
            source = min(owners[process], key=lambda owner: sent[owner])
            sent[source] += 1
            found.append((source, process))
    return found


def ring(members: Sequence[int], nbytes: float) -> list[Transfer]:
    """Returns what an all-gather moves, in which each member gives an equal share of `nbytes`."""
    moved = nbytes * (len(members) - 1) / len(members)
    following = [*members[1:], *members[:1]]
    return [Transfer(*pair, moved) for pair in zip(members, following, strict=True) if moved]


def traffic(transfers: Iterable[Transfer], hosts: int) -> Traffic:
    """Returns the bytes of each host, and of the store."""
    sent, received, store = [0.0] * hosts, [0.0] * hosts, 0.0
    for source, target, nbytes in transfers:
        received[target] += nbytes
        if source == STORE:
            store += nbytes
        else:
            sent[source] += nbytes
    return Traffic(sent, received, store)


def seconds(transfers: Sequence[Transfer], hosts: int, links: Links) -> float:
    """Returns how long transfers that begin together keep the busiest link busy."""
    every = traffic(transfers, hosts)
    from_store = traffic([each for each in transfers if each.source == STORE], hosts)
    between = [each.nbytes for each in transfers if each.source != STORE]
    return max(
        max(every.sent) / links.nic,
        max(every.received) / links.nic,
        max(from_store.received) / links.host,
        every.store / links.store,
        max(between, default=0.0) / links.stream,
    )


def chance_of_loss(hosts: int, distance: int, lost: int) -> Fraction:
    """Returns the chance that a part is lost with `lost` random hosts at once; exact.

    Hosts and their peers form circles: `gcd(hosts, distance)` of equal length. The memory survives
    if no two neighbours of a circle are lost. Of a circle of L, k hosts without neighbours can be
    chosen in `L / (L - k) * C(L - k, k)` ways; over all circles these are multiplied and added up.

    Raises:
        ValueError: Every host would be its own peer.
    """
    circles = math.gcd(hosts, distance)
    length = hosts // circles
    if length < 2:
        raise ValueError(f"{hosts} hosts at a distance of {distance} are their own peers")
    ways = [_apart(length, count) for count in range(lost + 1)]
    whole = [1] + [0] * lost
    for _ in range(circles):
        whole = [
            sum(whole[count] * ways[total - count] for count in range(total + 1))
            for total in range(lost + 1)
        ]
    return 1 - Fraction(whole[lost], math.comb(hosts, lost))


def _apart(length: int, count: int) -> int:
    if 2 * count > length:
        return 0
    return length * math.comb(length - count, count) // (length - count)
