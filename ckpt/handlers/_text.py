"""The bytes handler, for texts and bytes: each is one file, of any size."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any

from ckpt._format.manifest import ItemEntry
from ckpt._plan.adapt import Adapt
from ckpt.errors import CorruptCheckpointError, TargetMismatchError, UnsupportedLeafError
from ckpt.handlers._base import Deferred, ItemReader, ItemWriter, entry_data, text_of
from ckpt.handlers._protobuf import is_message_class, message_of_text

_TEXT_FILE, _BYTES_FILE = "text.txt", "data.bin"
_BINARY = {"bytes": bytes, "bytearray": bytearray, "memoryview": memoryview}


class BytesHandler:
    """Saves a `str` as a file of UTF-8, and `bytes`, `bytearray` and `memoryview` as they are.

    Example:
        ```python
        await mgr.save(step, items={"model": state, "notes": "a warm start"})
        ```
    """

    name = "bytes"

    def accepts(self, item: Any) -> bool:
        """Return True if `item` is a text or bytes; subclasses, such as numpy's, do not count."""
        return type(item) is str or type(item) in _BINARY.values()

    async def stage(self, item: Any, writer: ItemWriter) -> Awaitable[ItemEntry]:
        """Take the text or bytes, as a copy if the caller can change them; see `Handler.stage`.

        Raises:
            UnsupportedLeafError: The item is a text with lone surrogates, or neither a text nor
                bytes.
        """
        kind = type(item).__name__
        if not self.accepts(item):
            raise UnsupportedLeafError(f"expected a text or bytes, not an object of type {kind}")
        path = _TEXT_FILE if kind == "str" else _BYTES_FILE
        data = await writer.in_thread(_frozen, item)

        async def commit() -> ItemEntry:
            await writer.write_file(path, data)
            return ItemEntry(handler=self.name, nbytes=len(data), data={"type": kind})

        return Deferred(commit)

    async def load(self, entry: ItemEntry, like: Any, adapt: Adapt, reader: ItemReader) -> Any:
        """Return the text or the bytes, in the type of `like` (or `like` itself) if there is one.

        A `memoryview` is restored as `bytes` unless `like` asks for one. With a message of protobuf
        (or its class) as `like`, the result is the message that the text describes.

        Raises:
            TargetMismatchError: `like` is a text and the item bytes, or the other way around.
            CorruptCheckpointError: The stored file is damaged.
        """
        kind = text_of(entry_data(entry, self.name), "type")
        if kind != "str" and kind not in _BINARY:
            raise CorruptCheckpointError(f"{kind!r:.40} is not a type of text or bytes")
        wanted = like if isinstance(like, type) else type(like)
        if like is not None and (
            not (wanted is str or is_message_class(wanted))
            if kind == "str"
            else wanted not in _BINARY.values()
        ):
            raise TargetMismatchError(f"the item is a {kind}, and like= is {like!r:.80}")
        if kind == "str":
            text = await reader.in_thread(_decoded, await reader.read_file(_TEXT_FILE))
            return message_of_text(wanted, text) if is_message_class(wanted) else text
        data = await reader.read_file(_BYTES_FILE)
        if like is None:
            wanted = bytearray if kind == "bytearray" else bytes
        return data if wanted is bytes else await reader.in_thread(wanted, data)


def _frozen(item: Any) -> bytes:
    """Return the bytes of `item`; a copy if the caller could change it."""
    if not isinstance(item, str):
        return item if isinstance(item, bytes) else bytes(item)
    try:
        return item.encode()
    except UnicodeEncodeError as error:
        raise UnsupportedLeafError(
            "a text with lone surrogates cannot be stored; save it as bytes"
        ) from error


def _decoded(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise CorruptCheckpointError(f"what is stored is no UTF-8: {error}") from error
