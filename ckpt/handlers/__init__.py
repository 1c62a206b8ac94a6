"""Handlers: the kinds of objects that a step can hold, and how each becomes leaves and files.

The built-in handlers, and all that a handler of your own needs; see the page on items.
"""

from __future__ import annotations

from ckpt._format.manifest import ItemEntry
from ckpt.handlers._base import Deferred, Handler, ItemReader, ItemWriter
from ckpt.handlers._json import JsonHandler
from ckpt.handlers._leaf_types import LeafType, PackedLeaf
from ckpt.handlers._protobuf import ProtobufHandler
from ckpt.handlers._pytree import PyTreeHandler
from ckpt.handlers._random_state import RandomStateHandler
from ckpt.handlers._stateful import StatefulHandler
from ckpt.handlers._text import BytesHandler

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
