"""`RestoredState`: the arrays that a restore returned, to recognize a save of the same state."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import jax
from msgspec import Struct

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
