"""The model of a recovery: no byte appears or goes missing, and more work never takes less time."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from docs.explanation.scaling.recovery_model import (
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

HOSTS = 6
transfers = st.lists(
    st.builds(
        Transfer,
        st.integers(STORE, HOSTS - 1),
        st.integers(0, HOSTS - 1),
        st.integers(0, 1 << 40).map(float),
    ).filter(lambda each: each.source != each.target),
    max_size=20,
)
rates = st.floats(1, 1e12)
links = st.builds(Links, rates, rates, rates, rates)


@st.composite
def losses(draw: st.DrawFn) -> tuple[int, int, set[int]]:
    hosts = draw(st.integers(2, 40))
    distance = draw(st.integers(1, hosts - 1))
    return hosts, distance, draw(st.sets(st.integers(0, hosts - 1)))


@given(transfers)
def test_what_is_received_was_sent_or_read(moves: list[Transfer]) -> None:
    sent, received, store = traffic(moves, HOSTS)
    assert sum(sent) + store == sum(received) == sum(each.nbytes for each in moves)


@given(transfers, links)
def test_no_link_carries_more_than_its_bandwidth(moves: list[Transfer], given_links: Links) -> None:
    took = seconds(moves, HOSTS, given_links) * (1 + 1e-9)
    sent, received, store = traffic(moves, HOSTS)
    assert max(*sent, *received) <= took * given_links.nic
    assert store <= took * given_links.store
    for source, target, nbytes in moves:
        assert nbytes <= took * (given_links.host if source == STORE else given_links.stream)
        assert target < HOSTS


@given(transfers, transfers, links)
def test_more_bytes_never_take_less_time(
    moves: list[Transfer], more: list[Transfer], given_links: Links
) -> None:
    assert seconds(moves, HOSTS, given_links) <= seconds(moves + more, HOSTS, given_links)


@given(transfers, links, st.sampled_from(["nic", "stream", "host", "store"]))
def test_a_faster_link_never_takes_longer(moves: list[Transfer], slow: Links, faster: str) -> None:
    fast = Links(**(vars(slow) | {faster: 2 * getattr(slow, faster)}))
    assert seconds(moves, HOSTS, fast) <= seconds(moves, HOSTS, slow)


@given(losses())
def test_a_part_is_lost_if_a_host_and_its_peer_are(loss: tuple[int, int, set[int]]) -> None:
    hosts, distance, lost = loss
    pairs = [(host, (host + distance) % hosts) for host in range(hosts)]
    whole = not any(lost.issuperset(pair) for pair in pairs)
    assert (pulls(held(hosts, distance, lost)) is not None) == whole


@given(losses(), st.booleans())
def test_after_the_pulls_each_process_has_its_part(
    loss: tuple[int, int, set[int]], anew: bool
) -> None:
    memory = held(*loss)
    if anew:
        memory = numbered_anew(memory)
    moves = pulls(memory)
    if moves is None:
        return
    assert all(source != target and target in memory[source] for source, target in moves)
    lacking = [process for process, parts in enumerate(memory) if process not in parts]
    assert [target for _, target in moves] == lacking
    # No process has more than two parts to send; a part has one process that lacks it.
    assert max(Counter(source for source, _ in moves).values(), default=0) <= 2


def test_new_hosts_come_last() -> None:
    assert numbered_anew(held(4, 1, {1})) == [{0, 3}, {2, 1}, {3, 2}, set()]


def test_who_moves_up_by_one_has_the_copy_of_a_neighbour() -> None:
    moves = pulls(numbered_anew(held(8, 1, {2})))
    assert moves is not None
    assert [target for _, target in moves] == [7]


def test_processes_pull_from_those_that_send_the_least() -> None:
    moves = pulls(numbered_anew(held(64, 8, {20})))
    assert moves is not None
    assert max(Counter(source for source, _ in moves).values()) == 1


@pytest.mark.parametrize(("distance", "survives"), [(1, False), (7, False), (8, True)])
def test_a_rack_is_survived_at_the_distance_of_a_rack(distance: int, *, survives: bool) -> None:
    assert (pulls(held(64, distance, range(8))) is not None) == survives


@given(st.integers(1, 8), st.integers(1, 1 << 40))
def test_an_all_gather_brings_each_member_what_the_others_have(members: int, nbytes: int) -> None:
    sent, received, store = traffic(ring(range(members), nbytes), members)
    lacks = pytest.approx(nbytes - nbytes / members)
    assert sent == received == [lacks] * members
    assert store == 0


@pytest.mark.parametrize("hosts", range(2, 10))
def test_the_chance_of_a_loss_is_that_of_all_ways_to_lose_hosts(hosts: int) -> None:
    for distance in range(1, hosts):
        for lost in range(hosts + 1):
            ways = list(combinations(range(hosts), lost))
            bad = sum(pulls(held(hosts, distance, way)) is None for way in ways)
            assert chance_of_loss(hosts, distance, lost) == Fraction(bad, len(ways))


@given(st.integers(2, 60), st.data())
def test_more_lost_hosts_are_never_safer(hosts: int, data: st.DataObject) -> None:
    distance = data.draw(st.integers(1, hosts - 1))
    chances = [chance_of_loss(hosts, distance, lost) for lost in range(hosts + 1)]
    assert chances[0] == chances[1] == 0
    assert chances == sorted(chances)
    assert chances[-1] == 1


def test_a_host_is_not_its_own_peer() -> None:
    with pytest.raises(ValueError, match="own peers"):
        chance_of_loss(8, 8, 2)
