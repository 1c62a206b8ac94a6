"""The plain and the asyncio calls are the same calls."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

import ckpt
import ckpt.sync
from ckpt import types

PAIRS = {
    "manager": (ckpt.CheckpointManager, ckpt.sync.CheckpointManager),
    "partial save": (types.PartialSave, types.SyncPartialSave),
    "watch": (types.Watch, types.SyncWatch),
    "trash": (types.Trash, types.SyncTrash),
}
# What a class has of its own kind of code.
OTHERWISE_CALLED = {
    "__aenter__": "__enter__",
    "__aexit__": "__exit__",
    "__aiter__": "__iter__",
    "__anext__": "__next__",
    "aclose": "close",
}
FUNCTIONS = ["save", "load", "metadata", "open_array", "verify", "watch"]


def surface(cls: type) -> dict[str, Any]:
    """The calls of a class by name, each by its plain name; those of its base included."""
    members = {
        name: value for base in reversed(cls.__mro__[:-1]) for name, value in vars(base).items()
    }
    # What only says that the other class has it is no call of this one.
    own = {
        name: value
        for name, value in members.items()
        if callable(value) and getattr(value, "__name__", "") != "refuse"
    }
    own |= {name: value.fget for name, value in members.items() if isinstance(value, property)}
    return {
        OTHERWISE_CALLED.get(name, name): value
        for name, value in own.items()
        if not name.startswith("_") or name in OTHERWISE_CALLED or name == "__init__"
    } | {name: own[name] for name in OTHERWISE_CALLED.values() if name in own}


def parameters(function: Any) -> list[tuple[str, Any, Any, str]]:
    """Names, kinds, defaults and types; types of the other kind of code by their plain names."""
    signature = inspect.signature(function)
    return [
        (each.name, each.kind, each.default, str(each.annotation))
        for each in signature.parameters.values()
    ]


@pytest.mark.parametrize("pair", PAIRS)
def test_both_classes_have_the_same_calls_with_the_same_arguments(pair: str) -> None:
    asynchronous, plain = (surface(cls) for cls in PAIRS[pair])
    assert asynchronous.keys() == plain.keys()
    for name in asynchronous:
        if pair == "manager" or name != "__init__":
            assert parameters(asynchronous[name]) == parameters(plain[name]), name


def test_the_manager_has_every_call_of_the_contract() -> None:
    calls = surface(ckpt.CheckpointManager)
    assert set(calls) >= {
        *("save", "restore", "all_steps", "latest_step", "best_step", "metadata", "metrics"),
        *("delete", "should_save", "reached_preemption", "is_saving_in_progress"),
        *("wait_until_finished", "reload", "close", "verify", "pin", "unpin", "pins"),
        *("partial", "root_metadata", "resume", "watch"),
    }


@pytest.mark.parametrize("name", FUNCTIONS)
def test_both_modules_have_the_same_functions(name: str) -> None:
    assert parameters(getattr(ckpt, name)) == parameters(getattr(ckpt.sync, name))
    assert name in ckpt.__all__
    assert name in ckpt.sync.__all__


def test_every_call_is_documented() -> None:
    for pair in PAIRS.values():
        for cls in pair:
            for name, value in surface(cls).items():
                assert name.startswith("__") or inspect.getdoc(value), (cls, name)


@pytest.mark.parametrize("pair", PAIRS)
def test_only_what_does_not_wait_is_no_coroutine(pair: str) -> None:
    at_once = {
        *(
            "__init__",
            "directory",
            "is_saving_in_progress",
            "mark",
            "reached_preemption",
            "partial",
            "watch",
        ),
        *("steps_in_progress", "trash"),
        *("step", "info", "__iter__"),
    }
    for name, value in surface(PAIRS[pair][0]).items():
        assert inspect.iscoroutinefunction(value) == (name not in at_once), name
    for name, value in surface(PAIRS[pair][1]).items():
        assert not inspect.iscoroutinefunction(value), name
