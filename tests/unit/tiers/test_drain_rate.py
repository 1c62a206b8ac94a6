"""A limit of bytes a second, on a clock that is given."""

from __future__ import annotations

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt._tiers.drains.drainer import ByteRate, paced
from ckpt.errors import InvalidArgumentError
from tests.support.virtual_time import in_made_up_time

PIECE = 1 << 24
# How long after the one before a piece is asked for, and how large it is.
ASKED = st.lists(st.tuples(st.floats(0, 100), st.integers(0, PIECE)), min_size=1, max_size=40)


def beginnings(rate: float, asked: list[tuple[float, int]]) -> list[tuple[float, int]]:
    limit, now, begun = ByteRate(rate), 0.0, []
    for pause, nbytes in asked:
        now += pause
        wait = limit.wait_for(nbytes, now)
        assert wait >= 0
        begun.append((now + wait, nbytes))
    return begun


@given(st.floats(1.0, 1e9), ASKED)
def test_no_time_has_more_than_the_rate_and_one_piece(
    rate: float, asked: list[tuple[float, int]]
) -> None:
    begun = beginnings(rate, asked)
    for first, (start, _) in enumerate(begun):
        nbytes = 0
        for end, each in begun[first:]:
            # Those before the last one are paid for.
            assert nbytes <= rate * (end - start) * (1 + 1e-9) + 1e-3
            nbytes += each


@given(st.floats(1.0, 1e9), ASKED)
def test_no_piece_waits_for_longer_than_those_before_it_cost(
    rate: float, asked: list[tuple[float, int]]
) -> None:
    now = before = 0.0
    for (start, _), (pause, nbytes) in zip(beginnings(rate, asked), asked, strict=True):
        now += pause
        assert start - now <= before / rate * (1 + 1e-9) + 1e-3
        before += nbytes


@given(st.floats(1.0, 1e9), st.integers(1, PIECE))
def test_what_comes_late_enough_never_waits(rate: float, nbytes: int) -> None:
    limit = ByteRate(rate)
    assert limit.wait_for(nbytes, 5.0) == 0
    later = 5.0 + nbytes / rate
    assert limit.wait_for(nbytes, later) == 0
    assert limit.wait_for(nbytes, later) > 0


def test_a_pace_waits_on_the_clock_of_its_loop() -> None:
    async def times(bytes_per_second: float | None) -> list[float]:
        pace, found = paced(bytes_per_second), []
        began = anyio.current_time()
        for nbytes in (100, 300, 50):
            await pace(nbytes)
            found.append(round(anyio.current_time() - began, 6))
        return found

    assert in_made_up_time(lambda: times(100.0)) == [0, 1, 4]
    assert in_made_up_time(lambda: times(None)) == [0, 0, 0]


@pytest.mark.parametrize("wrong", [0, -1, float("inf"), float("nan"), True, "1 MB"])
def test_a_limit_is_a_number_above_0(wrong: float) -> None:
    with pytest.raises(InvalidArgumentError, match=r"bytes per second .*: expected a number above"):
        paced(wrong)
