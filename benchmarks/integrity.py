"""What integrity costs: saves and restores with and without digests, and how fast `verify` is.

The library has no switch for its digests, so they are taken out of it here, in this process. Both
ways take turns on the same state, and each round begins with the other one. TensorStore's zarr
driver writes and reads the same bytes with and without its `crc32c` codec, for comparison.
"""

from __future__ import annotations

import contextlib
import shutil
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
import tensorstore as ts  # noqa: TID251

import ckpt.sync
from benchmarks import workloads
from benchmarks.peers import CkptPeer
from benchmarks.results import file_system
from benchmarks.rounds import cpu_devices, drop, in_new_process, in_turn, settle, warm
from benchmarks.tables import size, table, value
from benchmarks.workloads import size_bytes
from ckpt._engine.restore.destinations import check_chunk
from ckpt._format.manifest_head import digest, new_digest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

# A restore, or a save, may take so much longer with digests.
GOAL_ON_DISK, GOAL_IN_MEMORY = 0.10, 0.30
_WITH, _WITHOUT = "with", "without"
_NO_DIGEST = "1" * 32
# The functions by which a save takes digests, and a restore takes and compares them.
_SAVING = (digest, new_digest)
_RESTORING = (check_chunk,)


@dataclass(frozen=True, slots=True)
class Cost:
    """What one call took: time on the clock, and of this process on all cores."""

    seconds: float
    processor: float


class _NoDigester:
    """Stands for a digest that is taken piece by piece."""

    def update(self, data: memoryview) -> None:
        """Takes nothing."""

    def hexdigest(self) -> str:
        return _NO_DIGEST


# The costs of one round, by what was measured and whether digests were taken.
Round = dict[tuple[str, str], Cost]
# Those of all rounds, by what was measured and then by whether digests were taken.
Samples = dict[str, dict[str, list[Cost]]]


def integrity(place: Path, *, rounds: int = 5, smoke: bool = False) -> str:
    """Returns what digests cost, on the disk and in memory."""
    rows = []
    with cpu_devices(1), tempfile.TemporaryDirectory(dir="/dev/shm", prefix="bench-") as memory:
        for folder in (place, Path(memory)):
            rows += in_new_process(_measured, folder, rounds, smoke)
    head = ("state", "on", "what", "with digests", "without", "cost", "processor", "goal")
    return table(head, rows) + (
        f"\n\nMedians of {rounds} rounds; in parentheses how far single rounds without digests lay "
        "from their median. Processor: time on all cores without digests, and what they add."
    )


def _measured(directory: Path, rounds: int, smoke: bool) -> list[list[str]]:
    """Returns the rows of the table for one directory; call it in a fresh process."""
    rows = []
    for name in ("large", "small"):
        tree = workloads.make(workloads.WORKLOADS[name].shapes(smoke))
        samples: Samples = defaultdict(lambda: defaultdict(list))
        for turn in range(rounds + 1):
            found = _one_turn(tree, directory, turn) | _tensorstore_turn(tree, directory, turn)
            told = "  ".join(f"{what} {how} {c.seconds:.3f}" for (what, how), c in found.items())
            sys.stderr.write(f"{name}, round {turn}/{rounds}: {told}\n")
            # The first round touches memory for the first time.
            for (what, how), cost in found.items() if turn else ():
                samples[what][how].append(cost)
        rows += _rows(tree, directory, samples)
    return rows


def _one_turn(tree: Any, directory: Path, turn: int) -> Round:
    place = Path(tempfile.mkdtemp(dir=directory))
    found: Round = {}
    peer = CkptPeer(place)
    try:
        target = peer.target(tree)
        # A manager's first save and its first restore warm memory for those that follow.
        peer.save(0, _copied(tree))
        jax.block_until_ready(peer.restore(0, target))
        for how, scope in _ways(turn, _SAVING):
            save = partial(peer.save, 1 if how == _WITH else 2, _copied(tree))
            with scope:
                found["save", how], _ = _clocked(save)
            del save
        step = peer.place(1)
        # In memory there is nothing beside it.
        caches = (
            {"warm": warm} if (file_system(directory) == "tmpfs") else {"warm": warm, "cold": drop}
        )
        for what, prepare in caches.items():
            for how, scope in _ways(turn, _RESTORING):
                prepare(step)
                with scope:
                    found[f"restore, {what}", how], _ = _clocked(
                        lambda: jax.block_until_ready(peer.restore(1, target))
                    )
            prepare(step)
            found[f"verify, {what}", _WITH], deep = _clocked(partial(ckpt.sync.verify, step))
            if not deep.ok:
                raise RuntimeError(str(deep))
        verify = partial(ckpt.sync.verify, step, deep=False)
        found["verify, shallow", _WITH], _ = _clocked(verify)
    finally:
        peer.close()
        shutil.rmtree(place)
    return found


def _copied(tree: Any) -> Any:
    """Returns new arrays: what a save has seen may be cheaper to save again."""
    return jax.block_until_ready(jax.tree.map(lambda leaf: leaf + 0, tree))


def _clocked(action: Callable[[], Any]) -> tuple[Cost, Any]:
    """Returns what a call cost and its value; the disk is flushed before, untimed."""
    settle()
    began, used = time.perf_counter(), time.process_time()
    value = action()
    return Cost(time.perf_counter() - began, time.process_time() - used), value


def _ways(
    turn: int, functions: Sequence[Callable[..., Any]]
) -> list[tuple[str, contextlib.AbstractContextManager[None]]]:
    """Returns both ways, the one that was second in the last round first."""
    return in_turn({_WITH: contextlib.nullcontext(), _WITHOUT: _replaced(functions)}, turn)


@contextlib.contextmanager
def _replaced(functions: Sequence[Callable[..., Any]]) -> Iterator[None]:
    """Takes functions out of every module of the engine that imports them, for the body.

    Nothing is digested or compared meanwhile, so what is saved is no checkpoint to restore.

    Raises:
        RuntimeError: No module of the engine imports one of them: the engine has changed, and this
            would measure digests against digests.
    """
    engine = [module for name, module in sys.modules.items() if name.startswith("ckpt._engine.")]
    kept = []
    for function in functions:
        name = function.__name__
        found = [module for module in engine if vars(module).get(name) is function]
        if not found:
            raise RuntimeError(
                f"no module of ckpt._engine imports {name}: mend benchmarks.integrity"
            )
        kept += [(module, name, function) for module in found]
    results = {digest: _NO_DIGEST, new_digest: _NoDigester()}
    try:
        for module, name, function in kept:
            result = results.get(function)
            setattr(module, name, lambda *_, result=result: result)
        yield
    finally:
        for module, name, function in kept:
            setattr(module, name, function)


def _tensorstore_turn(tree: Any, directory: Path, turn: int) -> Round:
    arrays = {
        "/".join(str(key.key) for key in path): np.asarray(leaf)
        for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]
    }
    found: Round = {}
    for how in (_WITH, _WITHOUT) if turn % 2 else (_WITHOUT, _WITH):
        place = Path(tempfile.mkdtemp(dir=directory))
        checksum = how == _WITH
        try:
            found["TensorStore write", how], _ = _clocked(partial(_write, arrays, place, checksum))
            warm(place)
            found["TensorStore read, warm", how], read = _clocked(
                partial(_read, arrays, place, checksum)
            )
            if not turn:
                for name, array in arrays.items():
                    np.testing.assert_array_equal(read[name], array)
            del read
        finally:
            shutil.rmtree(place)
    return found


def _opened(
    arrays: dict[str, np.ndarray], place: Path, checksum: bool, **options: Any
) -> dict[str, ts.TensorStore]:
    """Opens one zarr array of one chunk for each array, in a database as Orbax has it."""
    context = ts.Context({"cache_pool": {"total_bytes_limit": 0}})
    codecs = [{"name": "bytes", "configuration": {"endian": "little"}}]
    codecs += [{"name": "crc32c"}] if checksum else []
    futures = {}
    for name, array in arrays.items():
        chunks = {"name": "regular", "configuration": {"chunk_shape": list(array.shape)}}
        spec = {
            "driver": "zarr3",
            "kvstore": {"driver": "ocdbt", "base": place.as_uri() + "/", "path": f"{name}/"},
            "metadata": {
                "shape": list(array.shape),
                "data_type": array.dtype.name,
                "chunk_grid": chunks,
                "codecs": codecs,
            },
        }
        futures[name] = ts.open(spec, context=context, **options)
    return {name: future.result() for name, future in futures.items()}


def _write(arrays: dict[str, np.ndarray], place: Path, checksum: bool) -> None:
    with ts.Transaction() as transaction:
        stores = _opened(arrays, place, checksum, create=True)
        futures = [
            store.with_transaction(transaction).write(arrays[name])
            for name, store in stores.items()
        ]
        for future in futures:
            future.result()


def _read(arrays: dict[str, np.ndarray], place: Path, checksum: bool) -> dict[str, np.ndarray]:
    stores = _opened(arrays, place, checksum, open=True, assume_metadata=True)
    futures = {name: store.read() for name, store in stores.items()}
    return {name: future.result() for name, future in futures.items()}


def _rows(tree: Any, directory: Path, samples: Samples) -> list[list[str]]:
    nbytes = size_bytes(tree)
    in_memory = file_system(directory) == "tmpfs"
    goal = GOAL_IN_MEMORY if in_memory else GOAL_ON_DISK
    head = [f"{size(nbytes)} in {len(jax.tree.leaves(tree)):,} leaves"]
    head.append("memory" if in_memory else "disk")
    rows = []
    for what, by in samples.items():
        clock = {how: _median(costs, "seconds") for how, costs in by.items()}
        work = {how: _median(costs, "processor") for how, costs in by.items()}
        cost, more, met = "", value(work[_WITH]), ""
        if _WITHOUT in clock:
            share = clock[_WITH] / clock[_WITHOUT] - 1
            cost = f"{share:+.0%} ({_spread(by[_WITHOUT])})"
            more = f"{value(work[_WITHOUT])} {work[_WITH] / work[_WITHOUT] - 1:+.0%}"
            if not what.startswith("TensorStore"):
                met = f"{goal:.0%}: {'met' if share <= goal else 'missed'}"
        elif "shallow" not in what:
            cost = f"{nbytes / clock[_WITH] / 1e9:.2f} GB/s"
        without = value(clock.get(_WITHOUT))
        rows.append([*head, what, value(clock[_WITH]), without, cost, more, met])
    return rows


def _median(costs: Sequence[Cost], which: str) -> float:
    return statistics.median(getattr(cost, which) for cost in costs)


def _spread(costs: Sequence[Cost]) -> str:
    """Returns how far single rounds lie from their median, as a share of it."""
    median = _median(costs, "seconds")
    return f"±{max(abs(cost.seconds - median) for cost in costs) / median:.0%}"
