"""What the trainer and its keeper tell each other: JSON, one message a line, over a socket pair.

Nothing is pickled. The trainer decides, by policies that are Python functions; the keeper copies.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any, TypeAlias

import msgspec
from msgspec import Struct

from ckpt.errors import InvalidArgumentError
from ckpt.storage._local.config import Local
from ckpt.storage._object.config import GCS, S3, Memory
from ckpt.storage._resolve import PathLike, local_path

_STORES = {"Local": Local, "S3": S3, "GCS": GCS}


class Setup(Struct, frozen=True, tag="setup"):
    """The first message to a keeper.

    Attributes:
        trainer: The process that it outlives.
        root: The root, as `place_to_json` gives it.
        folder: The folder with the snapshots.
        signals: Signals after which the trainer's host has `grace_seconds`.
        flush: Whether the last snapshot is written to the root.
        grace_seconds: As of `SharedMemory`.
        first: As of `SharedMemory`.
        kept_seconds: As of `SharedMemory`.
    """

    trainer: int
    root: dict[str, Any]
    folder: str
    signals: tuple[int, ...]
    flush: bool
    grace_seconds: float
    first: tuple[str, ...]
    kept_seconds: float


class Saved(Struct, frozen=True, tag="saved"):
    """A step is in the root: snapshots up to there need not be written.

    Attributes:
        step: The greatest step of the root.
        bytes_per_second: How fast it was saved, or None.
    """

    step: int
    bytes_per_second: float | None = None


class Close(Struct, frozen=True, tag="close"):
    """The trainer ends, and the keeper does, too.

    Attributes:
        flush: Whether the last snapshot is written first; also without, if a signal has come.
    """

    flush: bool


class Ready(Struct, frozen=True, tag="ready"):
    """The keeper has loaded what it needs, and watches."""


class Flushed(Struct, frozen=True, tag="flushed"):
    """A snapshot is in the root, or is not.

    Attributes:
        step: Its step.
        seconds: How long that took.
        nbytes: Bytes that were written.
        left_out: Items for which there was no time.
        problem: Why it is not there; empty if it is.
    """

    step: int
    seconds: float = 0.0
    nbytes: int = 0
    left_out: tuple[str, ...] = ()
    problem: str = ""


class Closed(Struct, frozen=True, tag="closed"):
    """All is done, and the keeper ends."""


ToKeeper: TypeAlias = Setup | Saved | Close
FromKeeper: TypeAlias = Ready | Flushed | Closed

_encode = msgspec.json.Encoder().encode
_to_keeper = msgspec.json.Decoder(Setup | Saved | Close)
_from_keeper = msgspec.json.Decoder(Ready | Flushed | Closed)


def encoded(message: ToKeeper | FromKeeper) -> bytes:
    """Return a message as a line."""
    return _encode(message) + b"\n"


def for_keeper(line: bytes) -> ToKeeper:
    """Return the message of a line to a keeper."""
    message: ToKeeper = _to_keeper.decode(line)
    return message


def from_keeper(line: bytes) -> FromKeeper:
    """Return the message of a line from a keeper."""
    message: FromKeeper = _from_keeper.decode(line)
    return message


def place_to_json(path: PathLike) -> dict[str, Any]:
    """Return a place so that another process can open it.

    Raises:
        InvalidArgumentError: Another process cannot: it is in the memory of this one.
    """
    kind = type(path).__name__
    if isinstance(path, S3 | GCS):
        return {"kind": kind, **dataclasses.asdict(path)}
    if isinstance(path, Memory) or (not isinstance(path, Local) and _scheme(path) == "memory"):
        raise InvalidArgumentError(
            "tiers=: the root is in the memory of this process (memory://), and no other process "
            "can write to it. Use a directory, or a bucket"
        )
    local = local_path(path)
    if local is None:
        return {"kind": "", "url": os.fspath(path)}
    given = path if isinstance(path, Local) else Local(local)
    return {"kind": "Local", **dataclasses.asdict(given), "path": str(local)}


def place_of_json(place: dict[str, Any]) -> PathLike:
    """Return the place of `place_to_json`."""
    given = dict(place)
    kind = given.pop("kind")
    if not kind:
        return str(given["url"])
    found: PathLike = _STORES[kind](**given)
    return found


def _scheme(path: object) -> str:
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else ""
    return text.partition("://")[0].lower() if isinstance(text, str) and "://" in text else ""
