"""The contract of a run: what it may be made of, what each step notes, and what is refused."""

from __future__ import annotations

import asyncio
import enum
import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pydantic
import pytest

import ckpt
import ckpt.sync
from ckpt.errors import ContractMismatchError, CorruptCheckpointError, InvalidArgumentError
from ckpt.extensions import Contract
from ckpt.tiers import SharedMemory, Tier
from tests.support.simulated_job import closed, managers, saved, together
from tests.support.snapshots import shared_memory

STATE = {"w": np.arange(6.0), "step": 3}
RUN = {"model": {"layers": 12, "width": 768}, "data": {"seed": 3}}
OTHER = {"model": {"layers": 24, "width": 768}, "data": {"seed": 3}}


class Kind(enum.Enum):
    CAUSAL = "causal"


@dataclass(frozen=True)
class Optimizer:
    name: str = "adam"
    betas: tuple[float, float] = (0.9, 0.999)


@dataclass
class Config:
    layers: int = 12
    optimizer: Optimizer = field(default_factory=Optimizer)
    kind: Kind = Kind.CAUSAL
    dtype: Any = jnp.bfloat16
    data: PurePosixPath = field(default_factory=lambda: PurePosixPath("/data/a"))


class Model(pydantic.BaseModel):
    width: int = 768
    rates: list[float] = [0.1, 0.5]
    optimizer: Optimizer = Optimizer()


class Keyed:
    """A configuration with keys that is no dict, as in ml_collections."""

    def keys(self) -> list[str]:
        return ["lr"]

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __getitem__(self, key: str) -> float:
        return 0.1


def manager(root: Path, run: Any, **options: Any) -> ckpt.sync.CheckpointManager:
    how = {"on_mismatch": options.pop("on_mismatch")} if "on_mismatch" in options else {}
    return ckpt.sync.CheckpointManager(root, extensions=[Contract(run, **how)], **options)


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    with manager(tmp_path / "run", RUN) as mgr:
        for step in (1, 2):
            mgr.save(step, STATE)
    return tmp_path / "run"


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (
            Config(),
            {
                "layers": 12,
                "optimizer": {"name": "adam", "betas": [0.9, 0.999]},
                "kind": "causal",
                "dtype": "bfloat16",
                "data": "/data/a",
            },
        ),
        (
            Model(),
            {
                "width": 768,
                "rates": [0.1, 0.5],
                "optimizer": {"name": "adam", "betas": [0.9, 0.999]},
            },
        ),
        (Keyed(), {"lr": 0.1}),
        ({"b": [1, (2, 3)], "a": {"c": None}}, {"b": [1, [2, 3]], "a": {"c": None}}),
        ([np.float32(0.5), np.int64(3), np.bool_(True)], [0.5, 3, True]),
        ([np.float32, np.dtype("int8"), jnp.float32], ["float32", "int8", "float32"]),
        ({"b", "a"}, ["a", "b"]),
        ("text", "text"),
        (-(2**62), -(2**62)),
    ],
)
def test_values_become_plain_json_once(value: Any, plain: Any) -> None:
    contract = Contract({"model": value})
    assert contract.run == {"model": plain}
    assert json.loads(json.dumps(contract.run)) == contract.run
    assert Contract(contract.run) == contract


def test_a_later_change_of_a_configuration_changes_no_contract() -> None:
    config = Config()
    contract = Contract({"model": config})
    config.layers = 24
    assert contract.run["model"]["layers"] == 12


LOOP: list[Any] = []
LOOP.append(LOOP)


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ({"act": jax.nn.relu}, "model.act is <"),
        ({"act": [lambda x: x]}, r"model\.act\.0 is <function"),
        ({"w": np.ones(3)}, r"model\.w is array"),
        ({"w": jnp.ones(3)}, r"model\.w is Array"),
        ({"lr": float("nan")}, r"model\.lr is nan"),
        ({"lr": [float("inf")]}, r"model\.lr\.0 is inf"),
        ({"n": 2**63}, r"model\.n is 9223372036854775808"),
        ({"o": object()}, r"model\.o is <object"),
        ({3: "x"}, r"model is 3, of type int: expected texts as keys"),
        ({"t": "\udc00"}, r"model\.t is "),
        ({"\udc00": 1}, r"expected texts as keys"),
        (LOOP, r"at most 50 levels"),
        (Optimizer, r"model is <class"),
        ({"z": 3j}, r"model\.z is 3j, of type complex"),
        ({"b": b"x"}, r"model\.b is b'x', of type bytes"),
    ],
)
def test_what_has_no_plain_form_is_refused_by_name(value: Any, named: str) -> None:
    with pytest.raises(InvalidArgumentError, match=named):
        Contract({"model": value})


@pytest.mark.parametrize("run", [{}, [], "run", 3, None, [RUN]])
def test_a_contract_is_of_names(run: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="a dict of what the run is"):
        Contract(run)


def test_a_contract_has_a_limit() -> None:
    with pytest.raises(InvalidArgumentError, match="Put a digest in the place of what is long"):
        Contract({"files": ["x" * 100] * 3000})


def test_another_answer_to_a_mismatch_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match=r"on_mismatch='ask'\): expected one of 'raise'"):
        Contract(RUN, on_mismatch="ask")  # type: ignore[arg-type]


def test_a_run_goes_on_under_its_contract(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    with manager(root, {"data": {"seed": 3}, "model": {"width": 768.0, "layers": 12}}) as mgr:
        assert mgr.resume(STATE)[0] == 3
        mgr.save(3, STATE).result()
        assert Contract.of(mgr.metadata(3)) == RUN
    assert warnings_in(caplog) == []


CALLS: list[Callable[[Any], Any]] = [
    lambda mgr: mgr.resume(STATE),
    lambda mgr: mgr.restore(),
    lambda mgr: mgr.restore(1),
    lambda mgr: mgr.restore(fallback=True),
]


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("mode", ["a", "r"])
def test_a_step_of_another_contract_is_refused(root: Path, call: Any, mode: Any) -> None:
    with manager(root, OTHER, mode=mode) as mgr, pytest.raises(ContractMismatchError) as caught:
        call(mgr)
    error = caught.value
    assert error.step in (1, 2)
    assert str(error).startswith(f"step {error.step}: {root}/{error.step} is of another contract")
    assert error.problems == ("model.layers: expected 24, found 12",)
    assert error.problems[0] in str(error)
    assert "on_mismatch='warn'" in str(error)
    assert "another root" in str(error)


def test_nothing_is_read_of_a_step_that_is_refused(root: Path) -> None:
    for path in (root / "2").rglob("*"):
        if path.is_file() and path.name != "ckpt.json":
            path.write_bytes(b"")
    with manager(root, RUN) as mgr, pytest.raises(CorruptCheckpointError):
        mgr.restore(2)
    with manager(root, OTHER) as mgr, pytest.raises(ContractMismatchError):
        mgr.restore(2)


def test_a_save_does_not_follow_a_step_of_another_contract(root: Path) -> None:
    with manager(root, OTHER) as mgr:
        for _ in range(2):
            with pytest.raises(ContractMismatchError, match="step 2: "):
                mgr.save(3, STATE).result()
        assert mgr.all_steps() == [1, 2]


def test_a_warning_takes_the_change(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    with manager(root, OTHER, on_mismatch="warn") as mgr:
        assert mgr.resume(STATE)[0] == 3
        mgr.save(3, STATE).result()
    [text] = warnings_in(caplog)
    assert "model.layers: expected 24, found 12" in text
    with manager(root, OTHER) as mgr:
        assert mgr.restore()["step"] == 3
        assert Contract.of(mgr.metadata(2)) == RUN
        assert Contract.of(mgr.metadata()) == OTHER


def test_steps_without_a_contract_are_taken_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with ckpt.sync.CheckpointManager(tmp_path) as mgr:
        mgr.save(1, STATE).result()
        assert Contract.of(mgr.metadata(1)) is None
    with manager(tmp_path, RUN) as mgr:
        assert mgr.resume(STATE)[0] == 2
        assert warnings_in(caplog) == [f"{tmp_path}/1 notes no contract, so it was not compared"]
        mgr.save(2, STATE).result()
    with manager(tmp_path, OTHER) as mgr, pytest.raises(ContractMismatchError):
        mgr.restore(2)


@pytest.mark.parametrize(
    ("run", "problems"),
    [
        ({"a": 1}, ("a: expected 1, found nothing", "data: expected nothing, found ")),
        ({"model": {"layers": 12}}, ("model.width: expected nothing, found 768", "data: expected")),
        ({**RUN, "data": [1]}, ("data: expected [1], found {'seed': 3}",)),
        ({**RUN, "data": {"seed": True}}, ("data.seed: expected True, found 3",)),
        ({**RUN, "data": {"seed": None}}, ("data.seed: expected None, found 3",)),
    ],
)
def test_each_field_that_differs_is_named(root: Path, run: Any, problems: tuple[str]) -> None:
    with manager(root, run) as mgr, pytest.raises(ContractMismatchError) as caught:
        mgr.restore()
    for wanted, found in zip(problems, caught.value.problems, strict=False):
        assert found.startswith(wanted)


def test_fields_of_lists_are_named_by_their_place(tmp_path: Path) -> None:
    ckpt.sync.save(tmp_path / "a", STATE, extensions=[Contract({"rates": [1, 2, 3]})])
    with pytest.raises(ContractMismatchError) as caught:
        ckpt.sync.load(tmp_path / "a", contract=Contract({"rates": [1, 5, 3]}))
    assert caught.value.problems == ("rates.1: expected 5, found 2",)
    with pytest.raises(ContractMismatchError) as caught:
        ckpt.sync.load(tmp_path / "a", contract=Contract({"rates": [1]}))
    assert caught.value.problems == ("rates: expected [1], found [1, 2, 3]",)
    with pytest.raises(ContractMismatchError) as caught:
        ckpt.sync.load(tmp_path / "a", contract=Contract({"rates": [True, 2, 3]}))
    assert caught.value.problems == ("rates.0: expected True, found 1",)


def test_a_message_lists_some_of_many_fields(tmp_path: Path) -> None:
    ckpt.sync.save(tmp_path / "a", STATE, extensions=[Contract({f"f{n}": n for n in range(90)})])
    with pytest.raises(ContractMismatchError, match=r"(?s)90 fields differ.*and 70 more") as caught:
        ckpt.sync.load(tmp_path / "a", contract=Contract({f"f{n}": -1 - n for n in range(90)}))
    assert len(caught.value.problems) == 90


def test_one_checkpoint_is_compared_when_it_is_loaded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "a"
    ckpt.sync.save(path, STATE, extensions=[Contract(RUN)])
    assert Contract.of(ckpt.sync.metadata(path)) == RUN
    assert ckpt.sync.load(path, contract=Contract(RUN))["step"] == 3
    with pytest.raises(ContractMismatchError, match=r"model\.layers") as caught:
        ckpt.sync.load(path, contract=Contract(OTHER))
    assert caught.value.step is None
    assert warnings_in(caplog) == []
    ckpt.sync.load(path, contract=Contract(OTHER, on_mismatch="warn"))
    assert len(warnings_in(caplog)) == 1
    with pytest.raises(InvalidArgumentError, match="several checkpoints are loaded"):
        ckpt.sync.load({"w": path}, contract=Contract(RUN))


def test_the_asyncio_calls_compare_too(root: Path) -> None:
    async def run() -> None:
        with pytest.raises(ContractMismatchError):
            await ckpt.load(root / "2", contract=Contract(OTHER))
        async with ckpt.CheckpointManager(root, extensions=[Contract(OTHER)]) as mgr:
            with pytest.raises(ContractMismatchError):
                await mgr.resume(STATE)

    asyncio.run(run())


def test_a_run_may_begin_from_a_step_of_another_contract(tmp_path: Path, root: Path) -> None:
    with manager(tmp_path / "new", OTHER) as mgr:
        assert mgr.resume(STATE, source=root / "2")[0] == 0
        mgr.save(0, STATE).result()
        assert Contract.of(mgr.metadata(0)) == OTHER


def test_what_is_made_of_a_step_has_its_contract(tmp_path: Path) -> None:
    extensions: list[Any] = [Contract(RUN), ckpt.extensions.VitalSigns()]
    items = {"a": {"w": np.ones(4)}, "b": {"w": np.zeros(4)}}
    with ckpt.sync.CheckpointManager(tmp_path / "run", extensions=extensions) as mgr:
        mgr.save(1, items=items).result()
        mgr.delete(1, item="b")
        assert Contract.of(mgr.metadata(1)) == RUN
    assert Contract.of(ckpt.sync.metadata(tmp_path / "run" / "1" / "a")) == RUN
    ckpt.sync.convert(tmp_path / "run" / "1", tmp_path / "copy")
    assert Contract.of(ckpt.sync.metadata(tmp_path / "copy")) == RUN


def test_parts_of_a_step_make_one_contract(tmp_path: Path) -> None:
    with manager(tmp_path, RUN) as mgr:
        with mgr.partial(1) as part:
            part.save({"a": np.ones(3)})
            part.save({"b": np.ones(3)})
        assert Contract.of(mgr.metadata(1)) == RUN


def test_steps_of_tiers_have_the_contract_too(tmp_path: Path) -> None:
    tiers = [Tier(tmp_path / "disk")]
    with manager(tmp_path / "root", RUN, tiers=tiers) as mgr:
        mgr.save(1, STATE).in_root.result(60)
    for place in (tmp_path / "disk", tmp_path / "root"):
        with manager(place, OTHER) as mgr, pytest.raises(ContractMismatchError):
            mgr.restore()


def test_a_save_looks_at_each_place(tmp_path: Path) -> None:
    with manager(tmp_path / "disk", RUN) as mgr:
        mgr.save(1, STATE).result()
    broken = pytest.raises(ContractMismatchError, match="disk/1 is of another contract")
    with manager(tmp_path / "root", OTHER, tiers=[Tier(tmp_path / "disk")]) as mgr, broken:
        mgr.save(2, STATE).result()


def test_a_snapshot_has_the_contract_too(tmp_path: Path) -> None:
    with shared_memory() as folder:
        tiers = [SharedMemory(directory=str(folder), flush=False)]
        with manager(tmp_path, RUN, tiers=tiers) as mgr:
            mgr.snapshot(1, STATE).result()
            assert mgr.restore()["step"] == 3
            assert Contract.of(mgr.metadata(1)) == RUN


@pytest.mark.parametrize("own_disks", [False, True])
def test_a_job_has_one_contract(tmp_path: Path, own_disks: bool) -> None:
    def job(*runs: Any) -> list[Any]:
        each = [{"extensions": [Contract(run)]} for run in runs]
        return managers(tmp_path, each=each, own_disks=own_disks)

    mgrs = job(RUN, RUN)
    saved(mgrs, 1, {"a": np.arange(4)})
    found = together(*(lambda mgr=mgr: Contract.of(mgr.metadata(1)) for mgr in mgrs))
    assert found == [RUN, RUN]
    closed(mgrs)
    mgrs = job(OTHER, OTHER)
    found = together(*(mgr.restore for mgr in mgrs))
    assert [type(error) for error in found] == [ContractMismatchError] * 2
    closed(mgrs)


def test_a_stored_contract_of_another_kind_is_another_contract(tmp_path: Path) -> None:
    class Odd:
        def _join(self, engine: Any) -> None:
            engine.notes = {"contract": ["not", {"a": "dict"}]}

    ckpt.sync.save(tmp_path / "a", STATE, extensions=[Odd()])
    with pytest.raises(ContractMismatchError, match="found \\['not'"):
        ckpt.sync.load(tmp_path / "a", contract=Contract(RUN))
