"""What a run keeps, written down in its root for people and tools that look at it.

No manager reads it: each is told its policy by its program. Built-in policies are written as data;
of any other only a text is, since data from a root must not become code.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from ckpt._arguments import shown
from ckpt.errors import CheckpointError, CorruptCheckpointError
from ckpt.policies._answers import name_of
from ckpt.policies._by_item import Preservation, by_item_text
from ckpt.policies._deletion import Deletion, trash_of
from ckpt.policies._health import Healthy
from ckpt.policies._intervals import EveryNSeconds, EveryNSteps, EveryNStepsClosest, LatestDuration
from ckpt.policies._preservation import (
    AnyPreservation,
    CustomSteps,
    LatestN,
    PreservationPolicyLike,
    PreserveAll,
    check_preservation,
)
from ckpt.policies._ranking import BestN
from ckpt.storage._base import Storage

logger = logging.getLogger("ckpt")

_DELETION = ("keep_latest", "orbax_steps", "trash")
_NOTE = ".ckpt-run/preservation.json"
_MAX_BYTES = 1 << 16
_DEEPEST = 16
_KINDS: dict[str, type[Any]] = {
    "all": PreserveAll,
    "latest_n": LatestN,
    "every_n_steps": EveryNSteps,
    "every_n_steps_closest": EveryNStepsClosest,
    "every_n_seconds": EveryNSeconds,
    "latest_duration": LatestDuration,
    "best_n": BestN,
    "healthy": Healthy,
    "custom_steps": CustomSteps,
    "any": AnyPreservation,
}
# A policy for each item; an older version takes it for a policy that it does not know.
_BY_ITEM = "by_item"
_NAMES = {kind: name for name, kind in _KINDS.items()}


class NotedPolicy(Struct, frozen=True):
    """What is written down of the policy of a run.

    Attributes:
        policy: The policy; None if it is not one of this library.
        text: What was said of such a policy.
        deletion: How steps are deleted; None if that cannot be learnt.
    """

    policy: Preservation | None
    text: str
    deletion: Deletion | None


async def note_policy(
    storage: Storage, policy: Preservation | None, deletion: Deletion | None
) -> None:
    """Write down what a run keeps, unless that is known already; failures are of no matter.

    A root in which everything is kept, as always, gets no note. None was not given: a program
    that evaluates or adds a step need not know what its run keeps, and leaves the note as it is.
    """
    if policy is None and deletion is None:
        return
    try:
        try:
            known = await storage.read_note(_NOTE, _MAX_BYTES)
        except CorruptCheckpointError:
            known = b""
        data = _encoded(policy, deletion, _parts(known or b""))
        if known == data or (known is None and data == _encoded(PreserveAll(), Deletion(), {})):
            return
        await storage.put_note(_NOTE, data, replace=known is not None, durable=False)
    except Exception as error:
        logger.debug("%s: what is kept was not written down: %s", storage.location, error)


async def noted_policy(storage: Storage) -> NotedPolicy | None:
    """Return what is written down of the policy of a run; None if nothing that can be read is.

    Raises:
        StorageError: The root cannot be read.
    """
    try:
        encoded = await storage.read_note(_NOTE, _MAX_BYTES)
    except CorruptCheckpointError:
        encoded = b""
    if encoded is None:
        return None
    found = _parts(encoded)
    data = found.get("preservation")
    if not isinstance(data, dict):
        return NotedPolicy(None, "", None)
    return NotedPolicy(_preservation(data), _text(data), _deletion(found.get("deletion")))


def _parts(encoded: bytes) -> dict[str, Any]:
    """Return what a note says; nothing if it cannot be read."""
    with contextlib.suppress(ValueError, RecursionError):
        found = json.loads(encoded)
        if isinstance(found, dict):
            return found
    return {}


def _deletion(given: object) -> Deletion | None:
    """Return how steps are deleted; what a later version may have added is ignored."""
    if not isinstance(given, dict) or "trash" not in given:
        return None
    known = {name: given[name] for name in _DELETION if name in given}
    try:
        return Deletion(**known)
    except (CheckpointError, TypeError):
        return None


def _encoded(
    policy: Preservation | None, deletion: Deletion | None, noted: dict[str, Any]
) -> bytes:
    """Return the note of a policy and a deletion; for what is None, that which is noted."""
    kept, how = noted.get("preservation"), noted.get("deletion")
    if policy is not None or not isinstance(kept, dict):
        kept = _data(PreserveAll() if policy is None else policy)
    if deletion is not None or _deletion(how) is None:
        how = _how(Deletion() if deletion is None else deletion)
    data = json.dumps({"preservation": kept, "deletion": how}).encode()
    if len(data) <= _MAX_BYTES:
        return data
    short = {"kind": "custom", "text": _text(kept)} if policy is None else _custom(policy)
    return json.dumps({"preservation": short, "deletion": how}).encode()


def _how(deletion: Deletion) -> dict[str, Any]:
    """Return a deletion as data."""
    return {
        "keep_latest": deletion.keep_latest,
        "orbax_steps": deletion.orbax_steps,
        "trash": trash_of(deletion),
    }


def _data(policy: object) -> dict[str, Any]:
    """Return a policy, or those of the items, as data."""
    if isinstance(policy, Mapping):
        data = {"kind": _BY_ITEM, "items": {name: _data(each) for name, each in policy.items()}}
        return data | {"text": by_item_text(policy)}
    kind = _NAMES.get(type(policy))
    if kind is None or (isinstance(policy, BestN) and not isinstance(policy.metric, str)):
        return _custom(policy)
    if isinstance(policy, AnyPreservation):
        return {"kind": kind, "policies": [_data(each) for each in policy.policies]}
    if isinstance(policy, CustomSteps):
        return {"kind": kind, "steps": sorted(policy.steps)}
    if isinstance(policy, EveryNSeconds | LatestDuration):
        return {"kind": kind, "seconds": float(policy.seconds)}
    assert dataclasses.is_dataclass(policy)
    return {"kind": kind} | {
        each.name: getattr(policy, each.name) for each in dataclasses.fields(policy)
    }


def _custom(policy: object) -> dict[str, Any]:
    if isinstance(policy, Mapping):
        return {"kind": "custom", "text": by_item_text(policy)}
    text = name_of(policy) if callable(policy) else shown(policy)
    # An address would be another one in every run.
    return {"kind": "custom", "text": type(policy).__qualname__ if " at 0x" in text else text}


def _preservation(data: dict[str, Any]) -> Preservation | None:
    """Return the policy, or those of the items, that data describe; None for unknown ones."""
    items = data.get("items")
    if data.get("kind") != _BY_ITEM or not isinstance(items, dict):
        return _policy(data)
    found = {pattern: _policy(each) for pattern, each in items.items()}
    known = {pattern: policy for pattern, policy in found.items() if policy is not None}
    with contextlib.suppress(CheckpointError):
        check_preservation(known)
        return known if len(known) == len(found) else None
    return None


def _policy(data: object, depth: int = 0) -> PreservationPolicyLike | None:
    """Return the policy that data describe; None if they describe none of this library."""
    kind = data.get("kind") if isinstance(data, dict) else None
    made = _KINDS.get(kind) if isinstance(kind, str) else None
    if made is None or not isinstance(data, dict) or depth > _DEEPEST:
        return None
    try:
        if made is AnyPreservation:
            members = [_policy(each, depth + 1) for each in data["policies"]]
            known = [each for each in members if each is not None]
            return AnyPreservation(*known) if len(known) == len(members) else None
        policy: PreservationPolicyLike = made(
            **{name: value for name, value in data.items() if name != "kind"}
        )
    except (CheckpointError, TypeError, KeyError):
        return None
    return policy


def _text(data: object) -> str:
    text = data.get("text") if isinstance(data, dict) else None
    return f"{text:.200}" if isinstance(text, str) else "a policy of its own"
