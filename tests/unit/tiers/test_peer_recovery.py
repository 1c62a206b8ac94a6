"""What a job makes of the parts that its hosts have, whatever they are."""

from __future__ import annotations

from collections import Counter

from hypothesis import assume, given
from hypothesis import strategies as st

from ckpt._tiers.peers.parts import (
    Inventory,
    Recovery,
    SnapshotPart,
    distance_between,
    recovery_of,
    why_not,
)

Key = tuple[int, str]


@st.composite
def inventories(draw: st.DrawFn) -> list[Inventory]:
    """Any parts on any hosts: of some saves, at home or not, also more than once."""
    count = draw(st.integers(1, 6))
    parts = st.builds(
        SnapshotPart,
        part=st.integers(0, count),
        step=st.integers(0, 3),
        save=st.sampled_from(["a", "b"]),
        is_own=st.booleans(),
    )
    found = [draw(st.lists(parts, max_size=12)) for _ in range(count)]
    # Most parts of a snapshot are there, as a rule.
    for step in draw(st.sets(st.integers(0, 3))):
        for part in range(count):
            where = draw(st.integers(0, count - 1))
            at_home = where == part and draw(st.booleans())
            found[where].append(SnapshotPart(part, step, "a", at_home))
    return [Inventory(f"m{n}", "10.0.0.1", "", tuple(each)) for n, each in enumerate(found)]


def whole(found: list[Inventory]) -> set[Key]:
    """The snapshots of which every part is on some host."""
    keys = {(each.step, each.save) for inventory in found for each in inventory.parts}
    return {
        key
        for key in keys
        if all(
            any((e.part, e.step, e.save) == (part, *key) for i in found for e in i.parts)
            for part in range(len(found))
        )
    }


def has(inventory: Inventory, part: int, key: Key) -> bool:
    return any((e.part, e.step, e.save) == (part, *key) for e in inventory.parts)


@given(inventories())
def test_the_newest_whole_snapshot_is_chosen(found: list[Inventory]) -> None:
    recovery, there = recovery_of(found), whole(found)
    if not there:
        assert recovery == Recovery(-1, "", {})
        return
    assert (recovery.step, recovery.save) in there
    assert recovery.step == max(step for step, _ in there)


@given(inventories())
def test_every_process_has_its_part_afterwards(found: list[Inventory]) -> None:
    """Where it was, or from a host that really has it; from its own where that does."""
    recovery = recovery_of(found)
    assume(recovery.step >= 0)
    key = recovery.step, recovery.save
    for process, inventory in enumerate(found):
        at_home = any(
            each.is_own and each.part == process and (each.step, each.save) == key
            for each in inventory.parts
        )
        assert (process in recovery.fetches) is not at_home
        if not at_home:
            source = recovery.fetches[process]
            assert has(found[source], process, key)
            assert source == process or not has(inventory, process, key)


@given(st.integers(2, 8), st.integers(1, 8))
def test_the_load_is_spread(count: int, lost: int) -> None:
    """All survivors have all parts of those that are lost: none gives two more than another."""
    lost = min(lost, count - 1)
    every = [SnapshotPart(part, 5, "a", is_own=False) for part in range(count)]
    found = [Inventory("m", "a")] * lost + [
        Inventory("m", "a", "", (*every, SnapshotPart(process, 5, "a", is_own=True)))
        for process in range(lost, count)
    ]
    recovery = recovery_of(found)
    assert set(recovery.fetches) == set(range(lost))
    given_by = Counter(recovery.fetches.values())
    loads = [given_by[process] for process in range(lost, count)]
    assert max(loads) - min(loads) <= 1


@given(
    st.integers(2, 8), st.integers(1, 20), st.integers(0, 7), st.permutations(range(8)), st.data()
)
def test_one_lost_host_is_made_good(
    count: int, distance: int, lost: int, order: list[int], data: st.DataObject
) -> None:
    """As the copies are made: part i is at process i + distance. They come back in any order."""
    assume(distance % count)
    lost %= count
    numbers = [number for number in order if number < count]
    hosts: list[tuple[SnapshotPart, ...]] = [
        (
            SnapshotPart(i, 7, "a", is_own=True),
            SnapshotPart((i - distance) % count, 7, "a", is_own=False),
        )
        for i in range(count)
    ]
    hosts[lost] = ()
    found = []
    for process, host in enumerate(numbers):
        # As `_parts_in` has it: only what a process of the same number has left is at home.
        parts = tuple(
            SnapshotPart(e.part, e.step, e.save, e.is_own and host == process) for e in hosts[host]
        )
        found.append(Inventory(f"m{host}", "10.0.0.1", "", parts))
    recovery = recovery_of(found)
    assert (recovery.step, recovery.save) == (7, "a")
    assert all(has(found[source], p, (7, "a")) for p, source in recovery.fetches.items())


@given(st.lists(st.sampled_from("abcde"), min_size=2, max_size=14))
def test_the_least_distance_with_most_copies_elsewhere(machines: list[str]) -> None:
    count = len(machines)

    def elsewhere(distance: int) -> int:
        return sum(machines[i] != machines[(i + distance) % count] for i in range(count))

    found = distance_between(machines)
    best = max(map(elsewhere, range(1, count)))
    assert found == next(d for d in range(1, count) if elsewhere(d) == best)


@given(st.lists(st.integers(1, 4), min_size=2, max_size=5))
def test_neighbours_on_machines_have_all_copies_elsewhere(sizes: list[int]) -> None:
    """Where that is possible: no machine has more than half of the processes."""
    machines = [f"m{number}" for number, size in enumerate(sizes) for _ in range(size)]
    assume(2 * max(sizes) <= len(machines))
    distance = distance_between(machines)
    count = len(machines)
    assert all(machines[i] != machines[(i + distance) % count] for i in range(count))


@given(
    st.lists(
        st.tuples(st.sampled_from(["m", "n"]), st.booleans(), st.sampled_from(["", "port taken"])),
        min_size=2,
        max_size=6,
    )
)
def test_a_job_says_why_it_cannot_hold_copies(processes: list[tuple[str, bool, str]]) -> None:
    found = [Inventory(machine, f"addr-{n}", why) for n, (machine, _, why) in enumerate(processes)]
    why = why_not(found, [loopback for _, loopback, _ in processes])
    broken = [n for n, each in enumerate(found) if each.problem]
    alone = [n for n, (_, loopback, _) in enumerate(processes) if loopback]
    if broken:
        assert why == f"process {broken[0]}: port taken"
    elif len({each.machine for each in found}) > 1 and alone:
        assert f"process {alone[0]} listens at addr-{alone[0]}" in why
        assert "PeerCopies(address=...)" in why
    else:
        assert why == ""
