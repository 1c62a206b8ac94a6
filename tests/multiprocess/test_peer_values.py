"""What processes share through the service of `jax.distributed`, and what an operation costs."""

from __future__ import annotations

from tests.support.real_jobs import run_processes


def test_four_processes_share_values_and_end_in_peace() -> None:
    # Each has to end with code 0, though it has given up a wait.
    told = [result.value for result in run_processes(4, "check_key_values.py")]
    assert sum(each["won"] for each in told) == 1
    winner = next(each["me"] for each in told if each["won"])
    assert {each["first"] for each in told} == {str(winner)}
    assert {each["left"] for each in told} == {0}
    for each in told:
        # 20 ms on a machine at leisure.
        assert each["median"] < 0.2
        assert each["lag"] < 1.0
        # However often it was asked for, one value is one request.
        assert each["threads"] == 1
