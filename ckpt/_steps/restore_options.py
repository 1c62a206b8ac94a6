"""What a restore is asked for, and what it returned: the arrays, known again, and the origin."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, get_args

import jax
from msgspec import Struct

from ckpt._arguments import one_of, true_or_false, whole_number
from ckpt._settings import ArrayMemory
from ckpt.keep._questions import Requirement

if TYPE_CHECKING:
    from ckpt._format.manifest_head import Parent
    from ckpt._plan.adapt import Adapt

# A smaller budget would need too many rounds of exchange.
_LEAST_BROADCAST_BYTES = 1 << 20


class RestoreOptions(Struct, frozen=True):
    """What is read of a checkpoint, and how.

    Attributes:
        like: The target; None for everything as it was saved.
        items: The items to load, or a target for each; None for all.
        at: Leaf path of the only branch to load.
        adapt: The allowed differences between checkpoint and target.
        memory: Kind of memory of the restored arrays.
        checks_devices: True to compare the arrays on devices with what was noted of them.
        broadcast_bytes: Memory in which processes share what they read; None if each reads alone.
        fallback: True to pass over steps that are damaged or lack a wanted item.
        wanted: What is required of the step; None for any step.
    """

    like: Any = None
    items: Mapping[str, Any] | Iterable[str] | None = None
    at: str | None = None
    adapt: Adapt | Mapping[str, Adapt] | None = None
    memory: ArrayMemory = "jax"
    checks_devices: bool = False
    broadcast_bytes: int | None = None
    fallback: bool = False
    wanted: Requirement | None = None

    @property
    def are_for_everything(self) -> bool:
        return self.like is None and self.items is None and self.at is None


def restore_options(
    like: Any,
    items: Mapping[str, Any] | Iterable[str] | None,
    at: str | None,
    adapt: Adapt | Mapping[str, Adapt] | None,
    memory: ArrayMemory = "jax",
    check_devices: bool = False,
    broadcast_bytes: int | None = None,
    fallback: bool = False,
    wanted: Requirement | None = None,
) -> RestoreOptions:
    """Return the options of a call; they can be used more than once.

    Raises:
        InvalidArgumentError: `memory` or a flag is invalid. The rest depends on the checkpoint.
    """
    one_of("memory", memory, get_args(ArrayMemory))
    true_or_false("check_devices", check_devices)
    true_or_false("fallback", fallback)
    items = list(items) if isinstance(items, Iterator) else items
    how = memory, check_devices, broadcast_bytes, fallback, wanted
    return RestoreOptions(like, items, at, adapt, *how)


def options_onto(
    target: Any,
    items: Mapping[str, Any] | None,
    adapt: Adapt | Mapping[str, Adapt] | None,
    fallback: bool,
    wanted: Requirement | None,
) -> RestoreOptions:
    """Return the options that restore onto a target, or with `items` onto one for each item."""
    like, each = (target, None) if items is None else (None, target)
    return restore_options(like, each, None, adapt, fallback=fallback, wanted=wanted)


def check_broadcast(nbytes: object) -> None:
    """Check the memory budget with which processes may exchange what they read.

    Raises:
        InvalidArgumentError: The budget is no number of bytes.
    """
    if nbytes is None:
        return
    hint = " (1 MiB), in bytes; or None for every process to read what it needs"
    whole_number("broadcast_bytes", nbytes, least=_LEAST_BROADCAST_BYTES, hint=hint)


# Types that cannot change in place; their leaves are compared by value.
_VALUES = (bool, int, float, complex, str, bytes)


class RestoredState(Struct, frozen=True, eq=False):
    """The state that a restore of a whole step returned. It keeps no array alive.

    Attributes:
        attempt: The attempt that wrote the step.
        is_foreign: True if another library wrote the step.
        leaves: The leaves of each item: weak references for jax arrays, the values of immutable
            leaves, and None for leaves that may change in place.
    """

    attempt: str
    is_foreign: bool
    leaves: Mapping[str, list[weakref.ref[Any] | object]]

    @classmethod
    def of(cls, attempt: str, items: Mapping[str, Any], *, is_foreign: bool) -> RestoredState:
        leaves = {
            name: [_remember_leaf(leaf) for leaf in jax.tree.leaves(it)]
            for name, it in items.items()
        }
        return cls(attempt, is_foreign, leaves)

    def is_in(self, items: Mapping[str, Any]) -> bool:
        """Return True if these items hold the very arrays that came from the step, and no others.

        A leaf that may change in place may have changed. One such leaf makes the answer False,
        unless another library wrote the step: its files have no digests that would tell later.
        """
        if len(items) == len(self.leaves) == 1:
            # The name of an unnamed item does not matter.
            pairs = [*zip(self.leaves.values(), items.values(), strict=True)]
        elif items.keys() == self.leaves.keys():
            pairs = [(self.leaves[name], items[name]) for name in items]
        else:
            return False
        arrays = 0
        for known, item in pairs:
            leaves = jax.tree.leaves(item)
            if len(known) != len(leaves):
                return False
            for before, leaf in zip(known, leaves, strict=True):
                if isinstance(before, weakref.ref):
                    if before() is not leaf:
                        return False
                    arrays += 1
                elif before is None:
                    if isinstance(leaf, (jax.Array, *_VALUES)) or not self.is_foreign:
                        return False
                elif type(before) is not type(leaf) or before != leaf:
                    return False
        return arrays > 0


def _remember_leaf(leaf: object) -> weakref.ref[Any] | object:
    if isinstance(leaf, jax.Array):
        return weakref.ref(leaf)
    return leaf if isinstance(leaf, _VALUES) else None


class RunOrigin(Struct):
    """What a run goes on from; the same for all its places. Used on the engine's loop.

    Attributes:
        parent: The checkpoint that the run began from, which its steps name; None for a run that
            began from scratch.
        restored: The step that was restored last, where the run went on or went back to.
        state: The state that this restore returned, if it was the whole step.
    """

    parent: Parent | None = None
    restored: int | None = None
    state: RestoredState | None = None

    def begin_from(
        self, parent: Parent | None, restored: int | None, state: RestoredState | None
    ) -> None:
        """Record the checkpoint that the run began from, and its own step that was restored."""
        self.parent = parent or self.parent
        self.restored, self.state = restored, state
