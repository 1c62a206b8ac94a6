"""Who the job is, what is shared, what is said on versions of jax that lack something."""

from __future__ import annotations

import json
import os
from types import SimpleNamespace
from typing import Any

import anyio
import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ckpt
from ckpt._job.agreement.failures import unpack_error
from ckpt._runtime import jax_internals
from ckpt.coordination import _jax_service as jax_service
from ckpt.coordination._base import Coordinator, KeyValues
from ckpt.coordination._jax_service import PART_BYTES, JaxDistributed, join, split
from ckpt.coordination._jobs import MemoryKeyValues, SingleProcess, default_coordinator
from ckpt.errors import CheckpointError, CoordinationError, InvalidArgumentError
from tests.unit.coordination.key_value_suite import check_key_values


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_memory_shares_values(backend: str) -> None:
    anyio.run(check_key_values, MemoryKeyValues(), "folder", backend=backend)


def test_a_program_of_its_own_is_a_job_of_one() -> None:
    job = default_coordinator()
    assert isinstance(job, SingleProcess)
    assert isinstance(job, Coordinator)
    assert (job.process_index, job.process_count) == (0, 1)
    assert isinstance(job.key_values(), KeyValues)
    jax.devices()
    assert isinstance(default_coordinator(), SingleProcess)


def test_jax_that_is_not_initialized_is_an_error_that_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(CoordinationError, match=r"call jax\.distributed\.initialize\(\) first"):
        JaxDistributed()
    # Devices of others are in sight, and nothing to talk through: some clusters do that.
    jax.devices()
    monkeypatch.setattr(jax, "process_count", lambda: 4)
    with pytest.raises(
        CoordinationError, match=r"jax has 4 processes, but jax\.distributed is not"
    ):
        default_coordinator()


def test_a_process_has_the_number_that_jax_has_given_it(monkeypatch: pytest.MonkeyPatch) -> None:
    client = SimpleNamespace(**dict.fromkeys(jax_service._CALLS))
    state = SimpleNamespace(client=client, process_id=1, num_processes=3)
    monkeypatch.setattr(jax_internals, "distributed_state", lambda: state)
    job = JaxDistributed()
    assert (job.process_index, job.process_count) == (1, 3)


def test_a_version_of_jax_that_lacks_something_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    client = SimpleNamespace(**dict.fromkeys(jax_service._CALLS[1:], None))
    state = SimpleNamespace(client=client, process_id=0, num_processes=2)
    monkeypatch.setattr(jax_internals, "distributed_state", lambda: state)
    with pytest.raises(CoordinationError, match=r"has no blocking_key_value_get_bytes") as caught:
        default_coordinator()
    assert jax.__version__ in str(caught.value)
    assert "0.10 to 0.12" in str(caught.value)
    assert "coordinator=" in str(caught.value)


def test_jax_without_its_private_state_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from jax._src import distributed

    monkeypatch.delattr(distributed, "global_state")
    with pytest.raises(CoordinationError, match=r"has no distributed\.global_state"):
        default_coordinator()


class Client:
    """A client every request of which fails."""

    def __init__(self, said: str) -> None:
        self._said = said

    def __getattr__(self, name: str) -> Any:
        def request(*_: Any, **__: Any) -> Any:
            raise jax.errors.JaxRuntimeError(self._said)

        return request


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("UNAVAILABLE: recvmsg:Connection reset by peer\nmore", "cannot be reached"),
        ("INTERNAL: heartbeat timeout", "refused a request (INTERNAL: heartbeat timeout)"),
        ("FAILED_PRECONDITION: agent is shut down", "refused a request"),
    ],
)
def test_errors_of_the_service_are_ours(
    monkeypatch: pytest.MonkeyPatch, said: str, expected: str
) -> None:
    state = SimpleNamespace(
        client=Client(said), process_id=1, num_processes=2, coordinator_address="10.0.0.1:1234"
    )
    monkeypatch.setattr(jax_internals, "distributed_state", lambda: state)
    values = JaxDistributed().key_values()

    async def main() -> None:
        for request in (
            values.put("a", b""),
            values.wait("a", 0),
            values.wait("a", 10),
            values.list("a"),
            values.add("a"),
            values.drop("a"),
            values.touch("a", b""),
        ):
            with pytest.raises(CoordinationError) as caught:
                await request
            assert isinstance(caught.value.__cause__, jax.errors.JaxRuntimeError)
            assert expected in str(caught.value)
            assert "process 0 at 10.0.0.1:1234" in str(caught.value)
            assert "more" not in str(caught.value)

    anyio.run(main)


@given(st.binary(max_size=2000) | st.sampled_from([PART_BYTES - 1, PART_BYTES, 3 * PART_BYTES]))
def test_values_of_any_length_come_back(value: bytes | int) -> None:
    data = value if isinstance(value, bytes) else os.urandom(value)
    head, parts = split(data)
    assert len(head) <= PART_BYTES
    assert all(len(part) <= PART_BYTES for _, part in parts)
    assert join(head, dict(parts).__getitem__) == data


@given(st.binary(max_size=50))
def test_a_head_that_is_none_is_an_error(head: bytes) -> None:
    try:
        join(head, lambda _: b"")
    except CoordinationError:
        pass
    else:
        assert head[:1] in (b"p", b"n")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=5,
)
FIELDS = ("kind", "who", "message", "step", "item", "leaf", "errno", "missing", "problems")


@given(
    st.binary(max_size=40)
    | st.fixed_dictionaries(
        {name: JSON for name in FIELDS if name != "kind"}
        | {"kind": JSON | st.sampled_from(ckpt.errors.__all__) | st.just("located")}
    ).map(lambda said: json.dumps(said).encode())
)
def test_whatever_another_process_says_is_an_error_of_ours(data: bytes) -> None:
    assert isinstance(unpack_error(data), CheckpointError)
    str(unpack_error(data))


@pytest.mark.parametrize("seconds", [0, -1, True, "60", None, float("nan"), 86401, 1 << 4000])
def test_a_limit_that_is_none_is_refused(seconds: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=r"Timeouts\(coordination=.*up to 86400"):
        ckpt.Timeouts(coordination=seconds)


def test_limits_up_to_a_day_are_taken() -> None:
    assert ckpt.Timeouts().coordination == 60
    assert ckpt.Timeouts(coordination=86400).coordination == 86400
    assert ckpt.Timeouts(coordination=0.5).coordination == 0.5
