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


class Snapshots(Struct, frozen=True):
    """What a keeper does with the snapshots in memory.

    Attributes:
        folder: The folder with them.
        flush: Whether the last one is written to the root.
        first: As of `SharedMemory`.
        grace_seconds: As of `SharedMemory`.
        kept_seconds: As of `SharedMemory`.
        process: Number of the process whose snapshots these are, and how many there are. Of
            several, each has a part of a snapshot.
    """

    folder: str
    flush: bool
    grace_seconds: float
    first: tuple[str, ...]
    kept_seconds: float
    process: tuple[int, int] = (0, 1)

    @property
    def is_of_job(self) -> bool:
        """Whether these are parts of snapshots."""
        return self.process[1] > 1


class Link(Struct, frozen=True):
    """A tier, and the next place, to which its steps are copied.

    Attributes:
        source: The tier, as `place_to_json` gives it.
        target: The next place, likewise.
        bytes_per_second: As of `Tier`.
        most_waiting: As of `Tier`.
        process: Number of the process whose steps these are, and how many there are. Of several,
            each has a part of a step.
    """

    source: dict[str, Any]
    target: dict[str, Any]
    bytes_per_second: float | None
    most_waiting: int
    process: tuple[int, int] = (0, 1)


class Setup(Struct, frozen=True, tag="setup"):
    """The first message to a keeper.

    Attributes:
        trainer: The process that it outlives.
        root: The root, as `place_to_json` gives it.
        signals: Signals that announce the end of the trainer's host.
        exit_seconds: How long it goes on copying steps when the trainer has ended.
        snapshots: The snapshots in memory, if there are any.
        links: The tiers, the nearest first; the last one ends in the root.
    """

    trainer: int
    root: dict[str, Any]
    signals: tuple[int, ...]
    exit_seconds: float
    snapshots: Snapshots | None = None
    links: tuple[Link, ...] = ()


class Claimed(Struct, frozen=True, tag="claimed"):
    """The folder with the snapshots belongs to the trainer: before, what is in it is of others.

    Attributes:
        claim: What tells this claim from those of others; see `claim_of`.
    """

    claim: str


class Saved(Struct, frozen=True, tag="saved"):
    """A step is in the root: snapshots up to there need not be written.

    Attributes:
        step: The greatest step of the root.
        bytes_per_second: How fast it was saved, or None.
    """

    step: int
    bytes_per_second: float | None = None


class Step(Struct, frozen=True, tag="step"):
    """A step was committed at a tier.

    Attributes:
        link: Number of the tier.
        step: The step.
        step_dir: Its directory.
        is_wanted: Whether it is to be copied on; otherwise only if it is the newest in the end.
        save: The save that it is of; empty if that is not known.
    """

    link: int
    step: int
    step_dir: str
    is_wanted: bool
    save: str = ""


class Close(Struct, frozen=True, tag="close"):
    """The trainer ends, and the keeper does, too.

    Attributes:
        flush: Whether the last snapshot is written first; also without, if a signal has come.
    """

    flush: bool


class Listen(Struct, frozen=True, tag="listen"):
    """Other processes of the job may read the parts of snapshots on this host.

    Attributes:
        address: The address to listen at.
        port: The port; 0 takes any.
        key: The key of the job.
        folders: The folders with parts, each with the process that it is of; the first is that of
            the trainer.
    """

    address: str
    port: int
    key: str
    folders: tuple[tuple[int, str], ...]


class FetchPart(Struct, frozen=True, tag="fetch part"):
    """A part of a snapshot is to be copied from another host.

    Attributes:
        number: Of this message; the answer, `PartDone`, has the same.
        part: Number of the process that has saved it.
        step: The snapshot.
        step_dir: Its directory.
        save: `Manifest.save` of it.
        process: The process that has it.
        host: Where that listens.
        port: The port there.
        is_own: Whether it is the trainer's own part; otherwise it is held for another process.
        keep: Of the parts that are held for it, the snapshots that stay.
    """

    number: int
    part: int
    step: int
    step_dir: str
    save: str
    process: int
    host: str
    port: int
    is_own: bool
    keep: tuple[int, ...] = ()


class Forget(Struct, frozen=True, tag="forget"):
    """Parts that are held for others are removed.

    Attributes:
        number: As of `FetchPart`.
        steps: Those of these snapshots.
        after: And those of greater ones than this; None for none.
        but: And all but this one, which is a process and a snapshot; None for none.
    """

    number: int
    steps: tuple[int, ...] = ()
    after: int | None = None
    but: tuple[int, int] | None = None

    def means(self, part: int, step: int) -> bool:
        """Tell whether a part is to be removed."""
        return (
            step in self.steps
            or (self.after is not None and step > self.after)
            or (self.but is not None and (part, step) != self.but)
        )


class Listening(Struct, frozen=True, tag="listening"):
    """The keeper listens, or cannot.

    Attributes:
        host: Where.
        port: The port there.
        problem: Why it does not; empty if it does.
    """

    host: str = ""
    port: int = 0
    problem: str = ""


class FetchingPart(Struct, frozen=True, tag="fetching part"):
    """The keeper lives: it says so again and again for as long as a `FetchPart` is under way."""


class PartDone(Struct, frozen=True, tag="part done"):
    """What has become of a `FetchPart` or a `Forget`.

    Attributes:
        number: As of that message.
        nbytes: Bytes that were copied.
        seconds: How long that took.
        problem: Why it could not be done; empty if it is done.
    """

    number: int
    nbytes: int = 0
    seconds: float = 0.0
    problem: str = ""


class Refused(Struct, frozen=True, tag="refused"):
    """A connection was refused.

    Attributes:
        problem: What was wrong with it.
    """

    problem: str


class Gone(Struct, frozen=True, tag="gone"):
    """The keeper has ended. It does not say so itself: its trainer finds out."""


class Flushed(Struct, frozen=True, tag="flushed"):
    """A snapshot is in the root, or is not.

    Attributes:
        step: Its step.
        seconds: How long that took.
        nbytes: Bytes that were written.
        problem: Why it is not there; empty if it is.
        passed_over: What is wrong with a newer one; empty if nothing is.
    """

    step: int
    seconds: float = 0.0
    nbytes: int = 0
    problem: str = ""
    passed_over: str = ""


class Closing(Struct, frozen=True, tag="closing"):
    """The answer to `Close`, at once.

    Attributes:
        writes: Whether a snapshot is written before the keeper ends.
    """

    writes: bool


class Held(Struct, frozen=True, tag="held"):
    """A step of a tier is kept from being deleted until it was copied on.

    Attributes:
        link: Number of the tier.
        step: The step.
    """

    link: int
    step: int


class Moved(Struct, frozen=True, tag="moved"):
    """What has become of a step that was to be copied on.

    Attributes:
        link: Number of the tier.
        step: The step.
        step_dir: Its directory.
        nbytes: Bytes that were copied.
        seconds: How long that took.
        problem: Why it is not there; empty if it is.
        is_damaged: Whether that is because the tier has it damaged.
        is_gone: Whether that is because it was deleted.
    """

    link: int
    step: int
    step_dir: str
    nbytes: int = 0
    seconds: float = 0.0
    problem: str = ""
    is_damaged: bool = False
    is_gone: bool = False


class Fetch(Struct, frozen=True, tag="fetch"):
    """A step of a farther place is wanted at the nearest tier.

    Attributes:
        place: Number of the place; the nearest tier is 0, and has none.
        step: The step.
        step_dir: Its directory.
    """

    place: int
    step: int
    step_dir: str


class Fetching(Struct, frozen=True, tag="fetching"):
    """A step is being copied to the nearest tier; said every few seconds."""


class Fetched(Struct, frozen=True, tag="fetched"):
    """What has become of a step that was wanted at the nearest tier.

    Attributes:
        fetch: What was asked for.
        outcome: As of a `CopiedStep`, or `refused` by a storage.
        nbytes: Bytes that were copied.
        seconds: How long that took.
        problem: Why it is not there; empty if it is.
        errno: The number of the error, if it was one of a system.
    """

    fetch: Fetch
    outcome: str
    nbytes: int = 0
    seconds: float = 0.0
    problem: str = ""
    errno: int | None = None


class Closed(Struct, frozen=True, tag="closed"):
    """All is done, or the time is over, and the keeper ends.

    Attributes:
        left: Steps of tiers that were not copied on.
    """

    left: tuple[int, ...] = ()


ToKeeper: TypeAlias = Setup | Claimed | Saved | Step | Fetch | Close | Listen | FetchPart | Forget
FromKeeper: TypeAlias = (
    Flushed
    | Held
    | Moved
    | Fetching
    | Fetched
    | Closing
    | Closed
    | Listening
    | FetchingPart
    | PartDone
    | Refused
)
Told: TypeAlias = FromKeeper | Gone

_encode = msgspec.json.Encoder().encode
_to_keeper = msgspec.json.Decoder(ToKeeper)
_from_keeper = msgspec.json.Decoder(FromKeeper)


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
