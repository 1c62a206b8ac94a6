"""The first save and the first restore of a process. A new process for every sample.

A first save pays for imports and cold memory. A first restore is measured as a resumed run feels
it: a process makes its target, and then the clock starts: it imports the library, opens it,
restores, and takes the first step, which donates the state. What a restore leaves to that step
counts too: arrays that jax cannot donate make it allocate the state again.

Each process touches memory, and frees it, before that clock starts.
"""

from __future__ import annotations

import compileall
import importlib
from contextlib import closing
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

import ckpt
from benchmarks import workloads
from benchmarks.peers import PEERS
from benchmarks.rounds import (
    Log,
    Setting,
    in_new_process,
    opened,
    timed,
    timed_save,
    touch_memory,
    warm,
)
from benchmarks.workloads import Workload, check_equal

if TYPE_CHECKING:
    from collections.abc import Mapping

    from benchmarks.results import Scenario

SAVE, RESTORE = "first_save", "first_restore"
STEP = 7
_TOUCHED_BYTES = 2 << 30

STATES: Mapping[str, Workload] = MappingProxyType(
    {
        state.name: state
        for state in (
            Workload(RESTORE, "f32 in equal large leaves", workloads.large_shapes),
            Workload("first_restore_small", "f32 leaves of 4 KiB", workloads.small_shapes),
            Workload(
                "first_restore_sharded",
                "a decoder with Adam over 8 devices",
                lambda smoke: workloads.sharded(workloads.transformer_shapes(smoke)),
                devices=8,
            ),
        )
    }
)


def run_save(setting: Setting) -> Scenario:
    """Returns what the first save of a process costs; peers take turns, process by process.

    The first round is kept apart here too: it pays for reading the libraries from disk.
    """
    log = Log(SAVE, setting.rounds)
    for turn, name, place in log.turns({n: setting.directory / n for n in setting.asynchronous}):
        log.add(turn, name, in_new_process(_first_save, name, place / str(turn), setting.smoke))
    shapes = workloads.large_shapes(setting.smoke)
    return log.result(SAVE, "f32 in equal large leaves, a new process for every save", shapes)


def _first_save(name: str, directory: Path, smoke: bool) -> dict[str, float]:
    kind = PEERS[name]
    tree = workloads.make(workloads.large_shapes(smoke))
    directory.mkdir(parents=True)
    imported, _ = timed(lambda: importlib.import_module(kind.peer.module or "benchmarks"))
    made, peer = timed(lambda: kind.open(directory))
    seconds = {"import": imported, "open": made}
    with closing(peer):
        for step, which in enumerate(("first", "second")):
            tree = workloads.advance(tree)
            seconds[f"{which}_blocked"], seconds[f"{which}_save"] = timed_save(peer, step, tree)
            peer.delete(step)
    return seconds


def run_restore(setting: Setting, name: str) -> Scenario:
    """Returns what the first restore of a process costs, with the first step after it."""
    log = Log(name, setting.rounds)
    peers = {peer: setting.directory / peer for peer in setting.peers}
    # Installed libraries have bytecode; this one may be used from its sources.
    compileall.compile_dir(Path(ckpt.__file__).parent, quiet=2)
    in_new_process(_save, setting, name)
    for turn, peer, place in log.turns(peers):
        log.add(turn, peer, in_new_process(_first_restore, name, peer, place, setting.smoke))
    shapes = in_new_process(_plain_shapes, name, setting.smoke)
    return log.result(RESTORE, f"{STATES[name].summary}, a new process for every restore", shapes)


def _plain_shapes(name: str, smoke: bool) -> Any:
    """Returns the shapes of a state without their devices, of which other processes have less."""
    shapes = STATES[name].shapes(smoke)
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), shapes)


def _save(setting: Setting, name: str) -> None:
    tree = workloads.make(STATES[name].shapes(setting.smoke))
    with opened(setting.peers, setting.directory) as running:
        for peer in running.values():
            peer.save(STEP, peer.adopt(tree))


@partial(jax.jit, donate_argnums=0)
def _step(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf * jnp.asarray(2, leaf.dtype), tree)


def _first_restore(name: str, peer: str, place: Path, smoke: bool) -> dict[str, float]:
    shapes = STATES[name].shapes(smoke)
    kind = PEERS[peer]
    # Compiled before, as by a cache of compiled programs.
    jax.block_until_ready(_step(workloads.make(shapes)))
    warm(place)
    touch_memory(_TOUCHED_BYTES)
    imported, _ = timed(lambda: importlib.import_module(kind.peer.module or "benchmarks"))
    made, running = timed(lambda: kind.open(place))
    with closing(running):
        target = running.target(shapes)
        restored, found = timed(
            lambda: jax.block_until_ready(running.as_jax(running.restore(STEP, target), shapes))
        )
        before = {_address(leaf) for leaf in jax.tree.leaves(found)}
        leaves = len(jax.tree.leaves(found))
        stepped, after = timed(lambda: jax.block_until_ready(_step(found)))
        reused = {_address(leaf) for leaf in jax.tree.leaves(after)}
        check_equal(after, _step(workloads.make(shapes)))
    first = imported + made + restored
    return {
        "import": imported,
        "open": made,
        "restore": restored,
        "first_restore": first,
        "step": stepped,
        "first_step": first + stepped,
        "reused_ratio": len(before & reused) / leaves,
    }


def _address(leaf: jax.Array) -> int:
    return int(leaf.addressable_shards[0].data.unsafe_buffer_pointer())
