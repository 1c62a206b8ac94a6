"""Classes that a process may have imported or not."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax

__all__ = ["Lent", "Named", "Struct", "Twin"]


class Named(NamedTuple):
    mean: Any
    count: Any


@functools.partial(jax.tree_util.register_dataclass, data_fields=["w"], meta_fields=["kind"])
@dataclasses.dataclass
class Struct:
    w: Any
    kind: str


@jax.tree_util.register_pytree_node_class
class Lent:
    def __init__(self, *children: Any, name: str) -> None:
        self.children, self.name = children, name

    def tree_flatten(self) -> Any:
        return self.children, self.name

    @classmethod
    def tree_unflatten(cls, name: str, children: Any) -> Lent:
        return cls(*children, name=name)


class Twin(NamedTuple):
    """Stands for a class of the same name in another script."""

    mean: Any
    count: Any
