"""Handlers: the kinds of objects that a step can hold, and how each becomes leaves and files.

The built-in handlers, and all that a handler of your own needs; see the page on items.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckpt._format.manifest import ItemEntry
from ckpt.handlers._base import Deferred, Handler, ItemReader, ItemWriter
from ckpt.handlers._pytree import LeafType, PackedLeaf, PyTreeHandler

if TYPE_CHECKING:
    from ckpt.handlers._json import JsonHandler
    from ckpt.handlers._protobuf import ProtobufHandler
    from ckpt.handlers._random_state import RandomStateHandler
    from ckpt.handlers._stateful import StatefulHandler
    from ckpt.handlers._text import BytesHandler
else:

    def __getattr__(name: str) -> Any:
        # The other handlers are loaded when one is first used; most steps hold nothing but trees.
        from ckpt.handlers._registry import built_in

        for handler in built_in() if name in __all__ else ():
            if type(handler).__name__ == name:
                return type(handler)
        raise AttributeError(f"module 'ckpt.handlers' has no attribute {name!r}")


__all__ = [
    "BytesHandler",
    "Deferred",
    "Handler",
    "ItemEntry",
    "ItemReader",
    "ItemWriter",
    "JsonHandler",
    "LeafType",
    "PackedLeaf",
    "ProtobufHandler",
    "PyTreeHandler",
    "RandomStateHandler",
    "StatefulHandler",
]


def __dir__() -> list[str]:
    return __all__
