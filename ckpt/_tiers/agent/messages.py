"""Messages between the trainer and its agent: JSON, one message per line, over a socket pair.

Nothing is pickled. The trainer decides, by policies that are Python functions; the agent copies.
What the trainer waits for is a `Call`; all other messages are news.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from typing import Any, TypeAlias

import msgspec
from msgspec import Struct

from ckpt._tiers.drains.drain import DrainResult
from ckpt.errors import InvalidArgumentError
from ckpt.storage._local.config import Local
from ckpt.storage._object.config import GCS, S3
from ckpt.storage._resolve import PathLike, local_path

_STORES = {"Local": Local, "S3": S3, "GCS": GCS}


class SnapshotSettings(Struct, frozen=True):
    """Settings of an agent for the snapshots in memory.

    Attributes:
        folder: Folder of the snapshots.
        flush: True to write the last one to the root.
        grace_seconds: See `SharedMemory`.
        kept_seconds: See `SharedMemory`.
        process: Number of the process that takes these snapshots, and number of processes. With
            several processes, each has a part of a snapshot.
    """

    folder: str
    flush: bool
    grace_seconds: float
    kept_seconds: float
    process: tuple[int, int] = (0, 1)

    @property
    def is_of_job(self) -> bool:
        """True if these are parts of snapshots."""
        return self.process[1] > 1


class TransferLeg(Struct, frozen=True):
    """A tier, and the next place, to which its steps are copied.

    Attributes:
        source: The tier, from `place_to_json`.
        target: The next place, likewise.
        bytes_per_second: See `Tier`.
        most_waiting: See `Tier`.
        process: Number of the process that has these steps, and number of processes. With several
            processes, each has a part of a step.
    """

    source: dict[str, Any]
    target: dict[str, Any]
    bytes_per_second: float | None
    most_waiting: int
    process: tuple[int, int] = (0, 1)


class AgentSetup(Struct, frozen=True, tag="setup"):
    """The first message to an agent.

    Attributes:
        trainer: Process id of the trainer.
        root: The root, from `place_to_json`.
        signals: Signals that announce the end of the trainer's host.
        exit_seconds: Time for which it goes on copying steps after the trainer has ended.
        snapshots: The snapshots in memory, if there are any.
        legs: The tiers, the nearest first; the last one ends in the root.
    """

    trainer: int
    root: dict[str, Any]
    signals: tuple[int, ...]
    exit_seconds: float
    snapshots: SnapshotSettings | None = None
    legs: tuple[TransferLeg, ...] = ()


class FolderClaimed(Struct, frozen=True, tag="claimed"):
    """The trainer has claimed the snapshot folder: its earlier content belonged to others.

    Attributes:
        claim: Unique id of the claim; see `claim_of`.
    """

    claim: str


class StepInRoot(Struct, frozen=True, tag="saved"):
    """A step is in the root: snapshots up to this step need not be written.

    Attributes:
        step: The greatest step of the root.
    """

    step: int


class StepAtTier(Struct, frozen=True, tag="step"):
    """A step was committed at a tier.

    Attributes:
        leg: Number of the tier.
        step: The step.
        step_dir: Its directory.
        is_wanted: True if it is to be copied on in any case; otherwise it is copied on only if it
            is the newest step at the end.
        save: Its `save_id`; empty if unknown.
    """

    leg: int
    step: int
    step_dir: str
    is_wanted: bool
    save: str = ""


class CloseRequest(Struct, frozen=True, tag="close"):
    """The trainer ends, and the agent is to end, too.

    Attributes:
        flush: True to write the last snapshot first. After a signal it is written in any case.
    """

    flush: bool


class ListenRequest(Struct, frozen=True, tag="listen"):
    """Other processes of the job may read the parts of snapshots on this host.

    Attributes:
        address: The address to listen at.
        port: The port; 0 takes any free port.
        key: The key of the job.
        folders: The folders with parts, each with the number of its process; the first belongs to
            the trainer.
    """

    address: str
    port: int
    key: str
    folders: tuple[tuple[int, str], ...]


class PartFetchRequest(Struct, frozen=True, tag="fetch part"):
    """A part of a snapshot is to be copied from another host.

    Attributes:
        folder: The folder of the trainer's snapshots.
        key: The key of the job.
        part: Number of the process that has saved the part.
        step: The snapshot.
        step_dir: Its directory.
        save: Its `Manifest.save`.
        process: The process that has the part.
        host: The address at which that process listens.
        port: The port there.
        is_own: True for the trainer's own part; otherwise the part is held for another process.
        keep: Snapshots whose held copies of this part must stay.
    """

    folder: str
    key: str
    part: int
    step: int
    step_dir: str
    save: str
    process: int
    host: str
    port: int
    is_own: bool
    keep: tuple[int, ...] = ()


class PartRemovalRequest(Struct, frozen=True, tag="forget"):
    """Parts that are held for other processes are to be removed.

    Attributes:
        folder: The folder of the trainer's snapshots.
        steps: Remove the parts of these snapshots.
        after: Remove the parts of greater snapshots than this, too; None for none.
        but: Remove all parts but this one, a process and a snapshot; None for none.
    """

    folder: str
    steps: tuple[int, ...] = ()
    after: int | None = None
    but: tuple[int, int] | None = None

    def means(self, part: int, step: int) -> bool:
        """Return True if a part is to be removed."""
        return (
            step in self.steps
            or (self.after is not None and step > self.after)
            or (self.but is not None and (part, step) != self.but)
        )

    def ends(self, fetch: PartFetchRequest) -> bool:
        """Return True if a part that is being fetched is not wanted any more."""
        return not fetch.is_own and self.means(fetch.part, fetch.step)


class PeerRefused(Struct, frozen=True, tag="refused"):
    """A connection was refused, for the reason `problem`."""

    problem: str


class FlushResult(Struct, frozen=True, tag="flushed"):
    """A snapshot is in the root, or could not be written.

    Attributes:
        step: Its step.
        seconds: Duration.
        nbytes: Written bytes.
        problem: Reason why it is not in the root; empty if it is.
        passed_over: Fault of a newer snapshot; empty if there is none.
    """

    step: int
    seconds: float = 0.0
    nbytes: int = 0
    problem: str = ""
    passed_over: str = ""


class TransferResult(DrainResult, frozen=True, tag="moved", omit_defaults=True):
    """The outcome of a step that was to be copied on.

    Attributes:
        leg: Number of the tier.
    """

    leg: int = 0


class StepFetchRequest(Struct, frozen=True, tag="fetch"):
    """A step of a farther place is wanted at the nearest tier.

    Attributes:
        place: Number of the place to copy from; the nearest tier would be 0, and is never asked.
        step: The step.
        step_dir: Its directory.
    """

    place: int
    step: int
    step_dir: str


Request: TypeAlias = (
    StepFetchRequest | PartFetchRequest | PartRemovalRequest | ListenRequest | CloseRequest
)


class Call(Struct, frozen=True, tag="call"):
    """The trainer wants something done, and waits for the result.

    Attributes:
        number: Number of the call; its `CallResult` has the same.
        request: The work.
    """

    number: int
    request: Request


class CallProgress(Struct, frozen=True, tag="progress"):
    """The agent is alive: sent again and again while a call is under way."""


class CallResult(Struct, frozen=True, tag="result"):
    """The outcome of a call.

    Attributes:
        number: Number of the call.
        problem: Reason why the work was not done; empty if it was.
        errno: Number of the system's error, if it was one.
        seconds: Duration.
        nbytes: Copied bytes.
        outcome: For a `StepFetchRequest`, the outcome of the `CopiedStep`.
        address: For a `ListenRequest`, the address and port at which the agent listens.
        left: For a `CloseRequest`, the steps of tiers that were not copied on.
    """

    number: int = -1
    problem: str = ""
    errno: int | None = None
    seconds: float = 0.0
    nbytes: int = 0
    outcome: str = ""
    address: tuple[str, int] = ("", 0)
    left: tuple[int, ...] = ()


ToAgent: TypeAlias = AgentSetup | FolderClaimed | StepInRoot | StepAtTier | Call
AgentMessage: TypeAlias = FlushResult | TransferResult | PeerRefused
FromAgent: TypeAlias = AgentMessage | CallProgress | CallResult

_encode = msgspec.json.Encoder().encode
decode_to_agent: Callable[[bytes], ToAgent] = msgspec.json.Decoder(ToAgent).decode
decode_from_agent: Callable[[bytes], FromAgent] = msgspec.json.Decoder(FromAgent).decode


def encoded(message: ToAgent | FromAgent) -> bytes:
    return _encode(message) + b"\n"


def place_to_json(path: PathLike) -> dict[str, Any]:
    """Return a place as JSON, so that another process can open it.

    Raises:
        InvalidArgumentError: The place is in the memory of this process, or an object of it.
    """
    kind = type(path).__name__
    if isinstance(path, S3 | GCS):
        return {"kind": kind, **dataclasses.asdict(path)}
    if not isinstance(path, str | os.PathLike) or os.fspath(path).lower().startswith("memory://"):
        raise InvalidArgumentError(
            "tiers=: the root is in the memory of this process (memory://), or a store that was "
            "given as an object, and no other process can write to it. Use a directory, or a URL"
        )
    local = local_path(path)
    if local is None:
        return {"kind": "", "url": os.fspath(path)}
    given = path if isinstance(path, Local) else Local(local)
    return {"kind": "Local", **dataclasses.asdict(given), "path": str(local)}


def place_of_json(place: dict[str, Any]) -> PathLike:
    """Return the place that `place_to_json` has described."""
    given = dict(place)
    kind = given.pop("kind")
    if not kind:
        return str(given["url"])
    found: PathLike = _STORES[kind](**given)
    return found
