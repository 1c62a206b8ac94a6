"""Every built-in handler does what the public suite asks of handlers."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grain
import jax.numpy as jnp
import numpy as np
import pytest
from google.protobuf import struct_pb2

from ckpt.handlers import (
    BytesHandler,
    JsonHandler,
    ProtobufHandler,
    PyTreeHandler,
    RandomStateHandler,
    StatefulHandler,
)
from ckpt.testing.compare import differences
from ckpt.testing.conformance import HANDLER_CHECKS, HandlerCase
from tests.support.stateful_objects import Averages, Config, Counter, Recording, Reservoir


def same_tree(expected: Any, found: Any) -> bool:
    return not differences(expected, found)


def tree() -> dict[str, Any]:
    return {"epoch": 3, "host": np.arange(4), "name": "x", "w": jnp.arange(6.0).reshape(2, 3)}


def change_tree(state: dict[str, Any]) -> None:
    state["host"] += 1
    state["w"].delete()
    state["w"] = jnp.zeros((2, 3))


def draws(generator: Any) -> Any:
    """What a generator draws next."""
    if isinstance(generator, np.random.BitGenerator):
        return generator.random_raw(20).tolist()
    return [generator.normal(size=7).tolist(), generator.bytes(5)]


def drawn(generator: Any) -> Any:
    """The generator, somewhere in its stream."""
    draws(generator)
    return generator


def same_draws(expected: Any, found: Any) -> bool:
    return type(expected) is type(found) and draws(expected) == draws(found)


def make_iterator(dataset: Any, seen: int) -> Any:
    iterator = iter(dataset)
    for _ in range(seen):
        next(iterator)
    return iterator


def dataset() -> Any:
    mapped = grain.MapDataset.range(1000).shuffle(seed=7).map(lambda number: number * 2)
    return mapped.repeat().batch(4).to_iter_dataset()


def loader() -> Any:
    source = grain.sources.RangeDataSource(0, 100, 1)
    sampler = grain.samplers.IndexSampler(100, shuffle=True, seed=3, num_epochs=None)
    return grain.DataLoader(data_source=source, sampler=sampler, worker_count=0)


def same_stream(expected: Any, found: Any) -> bool:
    return all(np.array_equal(next(expected), next(found)) for _ in range(20))


def struct() -> struct_pb2.Struct:
    made = struct_pb2.Struct()
    made.update({"a": 1, "b": [True, None, "x"]})
    return made


def state_is(value: Any) -> Callable[[Any, Any], bool]:
    return lambda _, found: found == value


def stateful(make: Callable[[], Any], empty: Callable[[], Any], **more: Any) -> HandlerCase:
    return HandlerCase(
        StatefulHandler(),
        make,
        lambda expected, found: not differences(vars(expected), vars(found)),
        like=empty,
        **more,
    )


def cases() -> Iterator[tuple[str, HandlerCase]]:
    json, text = JsonHandler(), BytesHandler()
    yield "tree", HandlerCase(PyTreeHandler(), tree, same_tree, like=tree, change=change_tree)
    yield (
        "array",
        HandlerCase(
            PyTreeHandler(), lambda: np.arange(5), same_tree, change=lambda array: array.fill(1)
        ),
    )
    yield (
        "dict",
        HandlerCase(
            json,
            lambda: {"a": [1, 2.5, None, True, "ü"], "b": {}},
            same_tree,
            like=dict,
            change=lambda value: value["a"].append(1),
        ),
    )
    yield "list", HandlerCase(json, lambda: [1, {"x": 2**63}], same_tree)
    yield (
        "model",
        HandlerCase(
            json,
            lambda: Config(rate=0.5),
            operator.eq,
            like=lambda: Config,
            raw=lambda expected, found: found == expected.model_dump(mode="json"),
            change=lambda model: setattr(model, "rate", 7.0),
        ),
    )
    yield "str", HandlerCase(text, lambda: "text ü\n" * 100, same_tree, like=lambda: str)
    yield "empty", HandlerCase(text, lambda: "", same_tree)
    yield "bytes", HandlerCase(text, lambda: bytes(range(256)) * 9000, same_tree)
    yield (
        "bytearray",
        HandlerCase(
            text, lambda: bytearray(b"abc"), same_tree, change=lambda data: data.extend(b"x")
        ),
    )
    for name in ("MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64"):
        bits = getattr(np.random, name)
        yield (
            name,
            HandlerCase(
                RandomStateHandler(),
                lambda bits=bits: drawn(np.random.Generator(bits(5))),  # type: ignore[misc]
                same_draws,
                like=lambda bits=bits: np.random.Generator(bits(6)),  # type: ignore[misc]
                raw=same_draws,
                change=draws,
            ),
        )
    yield (
        "bit_generator",
        HandlerCase(
            RandomStateHandler(), lambda: drawn(np.random.PCG64(5)), same_draws, change=draws
        ),
    )
    yield (
        "random_state",
        HandlerCase(
            RandomStateHandler(), lambda: drawn(np.random.RandomState(5)), same_draws, change=draws
        ),
    )
    yield (
        "protobuf",
        HandlerCase(
            ProtobufHandler(),
            struct,
            operator.eq,
            like=struct_pb2.Struct,
            raw=operator.eq,
            change=lambda message: message.Clear(),
        ),
    )
    yield (
        "get_state",
        stateful(
            lambda: Counter(5),
            Counter,
            raw=state_is({"count": 5, "seen": ["a", None]}),
            change=lambda counter: setattr(counter, "count", 9),
        ),
    )
    yield "bytes_state", stateful(lambda: Reservoir(b"\0\1"), Reservoir, raw=state_is(b"\0\1"))
    yield (
        "state_dict",
        stateful(
            lambda: Averages(2.0),
            Averages,
            raw=lambda expected, found: same_tree(expected.state_dict(), found),
            change=lambda averages: averages.means.fill(9),
        ),
    )
    yield (
        "two_phases",
        stateful(
            lambda: Recording({"a": b"1", "b/c": b"", "b/d.txt": b"x" * 2_000_000}),
            Recording,
            raw=lambda expected, found: found == expected.notes,
            change=lambda recording: recording.notes.clear(),
        ),
    )
    for name, made in (("grain_dataset", dataset), ("grain_loader", loader)):
        yield (
            name,
            HandlerCase(
                StatefulHandler(),
                lambda made=made: make_iterator(made(), 5),  # type: ignore[misc]
                same_stream,
                like=lambda made=made: iter(made()),  # type: ignore[misc]
                raw=lambda _, found: isinstance(found, dict),
                change=next,
            ),
        )


CASES = dict(cases())


@pytest.mark.parametrize("check", HANDLER_CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("name", CASES)
def test_a_handler_conforms(
    name: str, check: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    check(CASES[name], tmp_path)
    assert not list((tmp_path / "tmp").iterdir()), "temporary files are left behind"
