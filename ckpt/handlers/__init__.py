"""Handlers: what kinds of object a step can hold, and how each becomes leaves and files.

The built-in ones, and what a handler of your own needs; see the page on items.
"""

from __future__ import annotations

from ckpt.handlers.base import Deferred, Handler, ItemReader, ItemWriter
from ckpt.handlers.json import JsonHandler
from ckpt.handlers.protobuf import ProtobufHandler
from ckpt.handlers.pytree import PyTreeHandler
from ckpt.handlers.random_state import RandomStateHandler
from ckpt.handlers.stateful import StatefulHandler
from ckpt.handlers.text import BytesHandler
from ckpt.manifest import ItemEntry

__all__ = [
    "BytesHandler",
    "Deferred",
    "Handler",
    "ItemEntry",
    "ItemReader",
    "ItemWriter",
    "JsonHandler",
    "ProtobufHandler",
    "PyTreeHandler",
    "RandomStateHandler",
    "StatefulHandler",
]
