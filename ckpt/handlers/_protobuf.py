"""The protobuf handler, for messages of classes that the program has imported."""

from __future__ import annotations

import sys
from collections.abc import Awaitable
from typing import Any

from ckpt._format.manifest import ItemEntry
from ckpt._plan.adapt import Adapt
from ckpt.errors import CorruptCheckpointError, InvalidArgumentError, TargetMismatchError
from ckpt.handlers._base import Deferred, ItemReader, ItemWriter, entry_data, text_of

_FILE = "message.binpb"


class ProtobufHandler:
    """Saves a `google.protobuf` message. protobuf itself is never imported here.

    Example:
        ```python
        await mgr.save(step, items={"model": state, "settings": message}, durable=True)
        found = await mgr.restore(step, items=["settings"])
        ```
    """

    name = "protobuf"

    def accepts(self, item: Any) -> bool:
        """Return True if `item` is a message; without protobuf in the program, nothing is."""
        return is_message_class(type(item))

    async def stage(self, item: Any, writer: ItemWriter) -> Awaitable[ItemEntry]:
        """Take the message's bytes; see `Handler.stage`.

        Raises:
            InvalidArgumentError: The item is not a message, lacks required fields, or is too large.
        """
        if not self.accepts(item):
            raise InvalidArgumentError(
                f"expected a protocol buffer, not an object of type {type(item).__name__}"
            )
        message = str(item.DESCRIPTOR.full_name)
        encoded = await writer.in_thread(_encoded, item)

        async def commit() -> ItemEntry:
            await writer.write_file(_FILE, encoded)
            return ItemEntry(handler=self.name, nbytes=len(encoded), data={"message": message})

        return Deferred(commit)

    async def load(self, entry: ItemEntry, like: Any, adapt: Adapt, reader: ItemReader) -> Any:
        """Return a new message of the class `like`, or of the class of `like`.

        Without `like`, the class is looked up by the message's name among the imported classes.

        Raises:
            TargetMismatchError: `like` is another message.
            InvalidArgumentError: No imported module has the message.
            CorruptCheckpointError: The stored file is damaged.
        """
        message = text_of(entry_data(entry, self.name), "message")
        wanted: Any = like if isinstance(like, type) else type(like)
        if like is None:
            wanted = _imported_class(message)
        elif not is_message_class(wanted) or wanted.DESCRIPTOR.full_name != message:
            raise TargetMismatchError(
                f"the item is a message {message!r:.120}, and like= is {like!r:.80}"
            )
        encoded = await reader.read_file(_FILE)
        return await reader.in_thread(_parsed, wanted, encoded)


def is_message_class(kind: type) -> bool:
    """Return True if a class is a message; without protobuf in the program, none is."""
    module: Any = sys.modules.get("google.protobuf.message")
    return module is not None and issubclass(kind, module.Message)


def message_of_text(kind: Any, text: str) -> Any:
    """Return the message that a text describes, as Orbax stores messages.

    Raises:
        TargetMismatchError: The text describes no message of this class.
    """
    from google.protobuf import text_format

    try:
        return text_format.Parse(text, kind())
    except text_format.ParseError as error:
        raise TargetMismatchError(
            f"the item is a text, and describes no {kind.DESCRIPTOR.full_name}: {error!s:.200}"
        ) from error


def _encoded(item: Any) -> bytes:
    try:
        return bytes(item.SerializeToString(deterministic=True))
    except Exception as error:
        raise InvalidArgumentError(f"the message cannot be encoded: {error!s:.300}") from error


def _parsed(kind: Any, encoded: bytes) -> Any:
    try:
        return kind.FromString(encoded)
    except Exception as error:
        raise CorruptCheckpointError(
            f"the stored file is not a message {kind.DESCRIPTOR.full_name}: {error!s:.200}"
        ) from error


def _imported_class(message: str) -> Any:
    pool: Any = sys.modules.get("google.protobuf.descriptor_pool")
    factory: Any = sys.modules.get("google.protobuf.message_factory")
    try:
        if pool is not None and factory is not None:
            return factory.GetMessageClass(pool.Default().FindMessageTypeByName(message))
    except KeyError:
        pass
    raise InvalidArgumentError(
        f"no module that is imported has the message {message!r:.120}; import the one that has, or "
        "pass its class as like="
    )
