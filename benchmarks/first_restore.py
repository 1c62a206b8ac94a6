"""The first restore of a process, as a resumed run feels it. A new process for every sample.

A process makes its target, and then the clock starts: it imports the library, opens it, restores,
and takes the first step, which donates the state. What a restore leaves to that step counts too:
arrays that jax cannot donate make it allocate the state again.

Memory that a virtual machine gave back to its host is five to ten times as slow to touch as memory
that was used a moment ago. So each process touches memory, and frees it, before the clock starts.
"""

from __future__ import annotations

import compileall
import importlib
import mmap
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

import ckpt
from benchmarks import pagecache, workloads
from benchmarks.peers import PEERS
from benchmarks.processes import in_new_process
from benchmarks.results import Scenario
from benchmarks.rounds import Log, Setting, in_turn, opened, timed
from benchmarks.trees import check_equal

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

KIND = "first_restore"
STEP = 7
_TOUCHED_BYTES = 2 << 30


@dataclass(frozen=True, slots=True)
class State:
    """A state that is restored.

    Attributes:
        shapes: Gives its shapes, small ones for a smoke run.
        summary: What it is, for the page.
        devices: CPU devices it needs.
    """

    shapes: Callable[[bool], Any]
    summary: str
    devices: int = 1


STATES: Mapping[str, State] = MappingProxyType(
    {
        "first_restore": State(workloads.large_shapes, "f32 in equal large leaves"),
        "first_restore_small": State(workloads.small_shapes, "f32 leaves of 4 KiB"),
        "first_restore_sharded": State(
            lambda smoke: workloads.sharded(workloads.transformer_shapes(smoke)),
            "a decoder with Adam over 8 devices",
            devices=8,
        ),
    }
)


def run(setting: Setting, name: str) -> Scenario:
    """Returns what the first restore of a process costs; peers take turns, process by process."""
    log = Log(name, setting.rounds)
    peers = {peer: setting.directory / peer for peer in setting.peers}
    # Installed libraries have bytecode; this one may be used from its sources.
    compileall.compile_dir(Path(ckpt.__file__).parent, quiet=2)
    in_new_process(_save, setting, name)
    for turn in range(setting.rounds + 1):
        for peer, _ in in_turn(peers, turn):
            found = in_new_process(_child, name, peer, setting.directory, setting.smoke)
            log.add(turn, peer, found)
    leaves, size = in_new_process(_size, name, setting.smoke)
    return Scenario(
        name=name,
        kind=KIND,
        summary=f"{STATES[name].summary}, a new process for every restore",
        leaves=leaves,
        size_bytes=size,
        measures=log.samples(),
    )


def _size(name: str, smoke: bool) -> tuple[int, int]:
    shapes = STATES[name].shapes(smoke)
    return len(jax.tree.leaves(shapes)), workloads.shapes_bytes(shapes)


def _save(setting: Setting, name: str) -> None:
    tree = workloads.make(STATES[name].shapes(setting.smoke))
    with opened(setting.peers, setting.directory) as running:
        for peer in running.values():
            peer.save(STEP, peer.adopt(tree))


@partial(jax.jit, donate_argnums=0)
def _step(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf * jnp.asarray(2, leaf.dtype), tree)


def _child(name: str, peer: str, directory: Path, smoke: bool) -> dict[str, float]:
    shapes = STATES[name].shapes(smoke)
    kind = PEERS[peer]
    # Compiled before, as by a cache of compiled programs.
    jax.block_until_ready(_step(workloads.make(shapes)))
    pagecache.warm(directory / peer)
    _touch_memory()
    imported, _ = timed(lambda: importlib.import_module(kind.module or "benchmarks"))
    made, running = timed(lambda: kind.open(directory / peer))
    with closing(running):
        target = running.target(shapes)
        restored, found = timed(
            lambda: jax.block_until_ready(running.as_jax(running.restore(STEP, target), shapes))
        )
        before = [_address(leaf) for leaf in jax.tree.leaves(found)]
        stepped, after = timed(lambda: jax.block_until_ready(_step(found)))
        reused = [_address(leaf) for leaf in jax.tree.leaves(after)]
        seconds = {
            "import": imported,
            "open": made,
            "restore": restored,
            "first_restore": imported + made + restored,
            "step": stepped,
            "first_step": imported + made + restored + stepped,
            "reused_ratio": len(set(before) & set(reused)) / len(before),
        }
        check_equal(after, _step(workloads.make(shapes)))
    return seconds


def _address(leaf: jax.Array) -> int:
    return int(leaf.addressable_shards[0].data.unsafe_buffer_pointer())


def _touch_memory() -> None:
    region = np.empty(_TOUCHED_BYTES, np.uint8)
    region[:: mmap.PAGESIZE] = 1
