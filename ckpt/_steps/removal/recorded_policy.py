"""The keep policy of a run, recorded in its root for people and tools that look at it.

No manager reads the record: each manager gets its policy from its program. Built-in policies are
written as data; other policies only as text, since data from a root must not become code.
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
from ckpt.keep._by_item import by_item_text
from ckpt.keep._deletion import Deletion, trash_of
from ckpt.keep._health import Healthy
from ckpt.keep._keep_policies import (
    All,
    ClosestToEvery,
    EverySeconds,
    EverySteps,
    KeepPolicyLike,
    KeepRules,
    Latest,
    Newer,
    Steps,
    check_keep_policy,
    members_of,
)
from ckpt.keep._keep_policies import Any as AnyOf
from ckpt.keep._questions import name_of
from ckpt.keep._ranking import Best, Within
from ckpt.storage._base import Storage

logger = logging.getLogger("ckpt")

_DELETION = ("keep_latest", "orbax_steps", "trash")
_NOTE = ".ckpt-run/preservation.json"
_MAX_BYTES = 1 << 16
_DEEPEST = 16
_KINDS: dict[str, type[Any]] = {
    "all": All,
    "latest_n": Latest,
    "every_n_steps": EverySteps,
    "every_n_steps_closest": ClosestToEvery,
    "every_n_seconds": EverySeconds,
    "latest_duration": Newer,
    "best_n": Best,
    "healthy": Healthy,
    "custom_steps": Steps,
    "any": AnyOf,
    "within": Within,
}
# Kind of a policy for each item; an older version treats it as an unknown policy.
_BY_ITEM = "by_item"
_NAMES = {kind: name for name, kind in _KINDS.items()}


class RecordedPolicy(Struct, frozen=True):
    """The recorded policy of a run.

    Attributes:
        policy: The policy; None if it is not one of this library.
        text: The recorded text about a policy of the user's.
        deletion: How steps are deleted; None if the record does not tell.
    """

    policy: KeepRules | None
    text: str
    deletion: Deletion | None


async def record_policy(
    storage: Storage, policy: KeepRules | None, deletion: Deletion | None
) -> None:
    """Record the policy of a run, unless the record is the same already; failures do not matter.

    A root in which everything has always been kept gets no note. None means "not given": a program
    that evaluates or adds a step need not know the policy of its run, and leaves the note as it is.
    """
    try:
        try:
            known = await storage.read("", _NOTE, _MAX_BYTES)
        except CorruptCheckpointError:
            known = b""
        data = _encoded(policy, deletion, _read_note(known or b""))
        if known == data or (known is None and data == _encoded(All(), Deletion(), {})):
            return
        await storage.put_note(_NOTE, data, replace=known is not None, durable=False)
    except Exception as error:
        logger.debug("%s: what is kept was not written down: %s", storage.location, error)


async def read_recorded_policy(storage: Storage) -> RecordedPolicy | None:
    """Return the recorded policy of a run; None if there is no record.

    Raises:
        StorageError: The root cannot be read.
    """
    try:
        encoded = await storage.read("", _NOTE, _MAX_BYTES)
    except CorruptCheckpointError:
        encoded = b""
    if encoded is None:
        return None
    found = _read_note(encoded)
    data = found.get("preservation")
    if not isinstance(data, dict):
        return RecordedPolicy(None, "", None)
    return RecordedPolicy(_preservation(data), _text(data), _deletion(found.get("deletion")))


def is_own(policy: object) -> bool:
    """Return True if a policy, or a member of it, is a user's own object."""
    # A plain function does not count: it is asked about the number of a step alone.
    return any(hasattr(each, "keep") and type(each) not in _NAMES for each in members_of(policy))


def _read_note(encoded: bytes) -> dict[str, Any]:
    """Return the content of a note; empty if it cannot be read."""
    with contextlib.suppress(ValueError, RecursionError):
        found = json.loads(encoded)
        if isinstance(found, dict):
            return found
    return {}


def _deletion(given: object) -> Deletion | None:
    """Return the recorded deletion; fields of later versions are ignored."""
    if not isinstance(given, dict) or "trash" not in given:
        return None
    known = {name: given[name] for name in _DELETION if name in given}
    try:
        return Deletion(**known)
    except (CheckpointError, TypeError):
        return None


def _encoded(policy: KeepRules | None, deletion: Deletion | None, noted: dict[str, Any]) -> bytes:
    """Return the note of a policy and a deletion; an argument that is None keeps what is noted."""
    kept, how = noted.get("preservation"), noted.get("deletion")
    if policy is not None or not isinstance(kept, dict):
        kept = _data(All() if policy is None else policy)
    if deletion is not None or _deletion(how) is None:
        how = _deletion_data(Deletion() if deletion is None else deletion)
    data = json.dumps({"preservation": kept, "deletion": how}).encode()
    if len(data) <= _MAX_BYTES:
        return data
    short = {"kind": "custom", "text": _text(kept)} if policy is None else _custom(policy)
    return json.dumps({"preservation": short, "deletion": how}).encode()


def _deletion_data(deletion: Deletion) -> dict[str, Any]:
    return {
        "keep_latest": deletion.keep_latest,
        "orbax_steps": deletion.orbax_steps,
        "trash": trash_of(deletion),
    }


def _data(policy: object) -> dict[str, Any]:
    """Return a policy, or a mapping of policies by item, as data."""
    if isinstance(policy, Mapping):
        data = {"kind": _BY_ITEM, "items": {name: _data(each) for name, each in policy.items()}}
        return data | {"text": by_item_text(policy)}
    kind = _NAMES.get(type(policy))
    if kind is None or (isinstance(policy, Best) and not isinstance(policy.metric, str)):
        return _custom(policy)
    if isinstance(policy, AnyOf):
        size = {"size": policy.nbytes} if isinstance(policy, Within) else {}
        return {"kind": kind, **size, "policies": [_data(each) for each in policy.policies]}
    if isinstance(policy, Steps):
        return {"kind": kind, "steps": sorted(policy.steps)}
    if isinstance(policy, EverySeconds | Newer):
        return {"kind": kind, "seconds": float(policy.seconds)}
    assert dataclasses.is_dataclass(policy)
    return {"kind": kind} | {
        each.name: getattr(policy, each.name) for each in dataclasses.fields(policy)
    }


def _custom(policy: object) -> dict[str, Any]:
    if isinstance(policy, Mapping):
        return {"kind": "custom", "text": by_item_text(policy)}
    text = name_of(policy) if callable(policy) else shown(policy)
    # Leave out an address, which would be different in every run.
    return {"kind": "custom", "text": type(policy).__qualname__ if " at 0x" in text else text}


def _preservation(data: dict[str, Any]) -> KeepRules | None:
    """Return the policy that the data describe, possibly one for each item; None if unknown."""
    items = data.get("items")
    if data.get("kind") != _BY_ITEM or not isinstance(items, dict):
        return _policy(data)
    found = {pattern: _policy(each) for pattern, each in items.items()}
    known = {pattern: policy for pattern, policy in found.items() if policy is not None}
    with contextlib.suppress(CheckpointError):
        check_keep_policy(known)
        return known if len(known) == len(found) else None
    return None


def _policy(data: object, depth: int = 0) -> KeepPolicyLike | None:
    """Return the policy that the data describe; None if it is not one of this library."""
    kind = data.get("kind") if isinstance(data, dict) else None
    made = _KINDS.get(kind) if isinstance(kind, str) else None
    if made is None or not isinstance(data, dict) or depth > _DEEPEST:
        return None
    try:
        if issubclass(made, AnyOf):
            members = [_policy(each, depth + 1) for each in data["policies"]]
            known = [each for each in members if each is not None]
            size = (data["size"],) if made is Within else ()
            return made(*size, *known) if len(known) == len(members) else None
        policy: KeepPolicyLike = made(
            **{name: value for name, value in data.items() if name != "kind"}
        )
    except (CheckpointError, TypeError, KeyError):
        return None
    return policy


def _text(data: object) -> str:
    text = data.get("text") if isinstance(data, dict) else None
    return f"{text:.200}" if isinstance(text, str) else "a policy of its own"
