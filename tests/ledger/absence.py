"""Takes one thing away that users can see, for the rest of a process.

The library itself still has it, so that only its users miss it: names and members are gone for
callers outside `ckpt`, a module cannot be imported there, a parameter and a field with a default
are ignored, an error is raised as the one it is derived from, a command and an option are unknown,
events and metrics are not given.
"""

from __future__ import annotations

import builtins
import functools
import inspect
import subprocess
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

import jax.monitoring
import pytest

import ckpt
from ckpt import _events, sync
from ckpt.cli import app
from ckpt.types import PartialSave, SyncPartialSave, SyncTrash, SyncWatch, Trash, Watch
from tests.ledger.surface import Feature
from tests.support.paths import ROOT

__all__ = ["can_take_away", "take_away"]

_TWINS: dict[Any, Any] = {
    ckpt.CheckpointManager: sync.CheckpointManager,
    PartialSave: SyncPartialSave,
    Trash: SyncTrash,
    Watch: SyncWatch,
    ckpt: sync,
}
_UNKNOWN = 2
_TESTS = str(ROOT / "tests")


def can_take_away(feature: Feature) -> bool:
    """True if there is a way; not so for files, and for what users implement."""
    if feature.kind == "file":
        return False
    return not (inspect.isclass(feature.owner) and getattr(feature.owner, "_is_protocol", False))


def take_away(feature: Feature, *, wholly: bool = False) -> None:
    """Take it away; `wholly`, also from the library, and without a default in its place."""
    match feature.kind:
        case "name":
            _without_name(feature)
        case "error":
            _without_error(feature)
        case "member":
            _without_member(feature, wholly)
        case "parameter":
            _without_parameter(feature, wholly)
        case "command" | "option":
            _without_command(feature)
        case "event":
            _without_event(feature)
        case "metric":
            _without_metric(feature)


def _is_outside(depth: int = 2) -> bool:
    name = sys._getframe(depth).f_globals.get("__name__", "")
    return name != "ckpt" and not name.startswith("ckpt.")


class _WithoutName(types.ModuleType):
    gone: str

    def __getattribute__(self, name: str) -> Any:
        if name == object.__getattribute__(self, "__dict__").get("gone") and _is_outside():
            raise AttributeError(f"{name} is gone")
        return super().__getattribute__(name)


def _without_name(feature: Feature) -> None:
    if inspect.ismodule(getattr(feature.owner, feature.attribute, None)) or not feature.owner:
        _without_imports(feature.name)
    module = feature.owner or ckpt
    value = getattr(module, feature.attribute, None)
    if value is not None:
        _replace(value, None, also_inside=False)
    module.__dict__["gone"] = feature.attribute
    module.__class__ = _WithoutName


def _without_imports(gone: str) -> None:
    """Refuse to import a module, or what is below it; those that are imported stay."""
    own = builtins.__import__

    def other(
        name: str, globals: Any = None, locals: Any = None, names: Any = (), level: int = 0
    ) -> Any:
        wanted = (name, *(f"{name}.{each}" for each in names or ()))
        if _is_outside() and any(f"{each}.".startswith(f"{gone}.") for each in wanted):
            raise ModuleNotFoundError(f"{gone} is gone")
        return own(name, globals, locals, names, level)

    pytest.MonkeyPatch().setattr(builtins, "__import__", other)


def _without_error(feature: Feature) -> None:
    cls = getattr(feature.owner, feature.attribute)

    def parent(_: type, *args: Any, **options: Any) -> Any:
        made = cls.__bases__[0](*args, **options)
        return made

    if cls is ckpt.CheckpointError:
        _without_name(feature)
    else:
        cls.__new__ = staticmethod(parent)


class _Member:
    """Stands for a member of a class; callers outside the library do not find it."""

    def __init__(self, cls: type, name: str, default: Any, wholly: bool) -> None:
        self.name, self.default, self.wholly = name, default, wholly
        self.own = inspect.getattr_static(cls, name, inspect.Parameter.empty)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if self.default is not inspect.Parameter.empty and not self.wholly:
            return self if instance is None else self.default
        if self.wholly or _is_outside():
            raise AttributeError(f"{self.name} is gone")
        if hasattr(type(self.own), "__get__"):
            return self.own.__get__(instance, owner)
        if instance is not None and self.name in getattr(instance, "__dict__", ()):
            return instance.__dict__[self.name]
        return self.own

    def __set__(self, instance: Any, value: Any) -> None:
        if hasattr(type(self.own), "__set__"):
            self.own.__set__(instance, value)
        else:
            instance.__dict__[self.name] = value


def _without_member(feature: Feature, wholly: bool) -> None:
    for cls in _both(feature.owner):
        default = _default_of_field(cls, feature.attribute)
        setattr(cls, feature.attribute, _Member(cls, feature.attribute, default, wholly))


def _default_of_field(cls: type, name: str) -> Any:
    fields: Any = getattr(cls, "__dataclass_fields__", None) or ()
    if name in fields or name in getattr(cls, "__struct_fields__", ()):
        parameter = inspect.signature(cls).parameters.get(name)
        if parameter is not None:
            return parameter.default
    return inspect.Parameter.empty


def _both(owner: Any) -> list[Any]:
    return [owner, _TWINS[owner]] if owner in _TWINS else [owner]


def _without_parameter(feature: Feature, wholly: bool) -> None:
    name = feature.name.partition("(")[2].rstrip(")")
    for owner in _both(feature.owner):
        own = inspect.getattr_static(owner, feature.attribute, None)
        if own is None and inspect.ismodule(owner):
            own = getattr(owner, feature.attribute, None)
        if own is None:
            continue
        kind = type(own) if isinstance(own, (staticmethod, classmethod)) else None
        function = own.__func__ if isinstance(own, (staticmethod, classmethod)) else own
        changed: Any = _ignoring(function, name, wholly)
        setattr(owner, feature.attribute, kind(changed) if kind else changed)
        if inspect.ismodule(owner):
            _replace(function, changed, also_inside=False)


def _ignoring(function: Callable[..., Any], name: str, wholly: bool) -> Callable[..., Any]:
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        if not wholly and not _is_outside():
            return function(*args, **options)
        bound = signature.bind(*args, **options)
        if name in bound.arguments and wholly:
            raise TypeError(f"{name} is gone")
        bound.arguments.pop(name, None)
        return function(*bound.args, **bound.kwargs)

    return call


def _without_command(feature: Feature) -> None:
    """Let calls with this command, or this option of it, end as those with unknown ones do."""
    _, name, *option = feature.name.split()

    def is_gone(arguments: Any) -> bool:
        if not isinstance(arguments, Sequence) or isinstance(arguments, str):
            return False
        words = [str(each).partition("=")[0] for each in arguments]
        given = words[words.index("ckpt") + 1 :] if "ckpt" in words else words
        return given[:1] == [name] and set(option) <= set(given)

    run, popen, in_process = subprocess.run, subprocess.Popen, app.run

    def other_run(arguments: Any, **options: Any) -> Any:
        if is_gone(arguments):
            return subprocess.CompletedProcess(arguments, _UNKNOWN, "", "unknown")
        return run(arguments, **options)

    class OtherPopen(popen):  # type: ignore[misc, valid-type]
        def __init__(self, arguments: Any, **options: Any) -> None:
            unknown = [sys.executable, "-c", f"raise SystemExit({_UNKNOWN})"]
            super().__init__(unknown if is_gone(arguments) else arguments, **options)

    def other_run_here(arguments: Sequence[str]) -> int:
        return _UNKNOWN if is_gone(arguments) else in_process(arguments)

    patch = pytest.MonkeyPatch()
    patch.setattr(subprocess, "run", other_run)
    patch.setattr(subprocess, "Popen", OtherPopen)
    _replace(in_process, other_run_here)


def _without_event(feature: Feature) -> None:
    gone = tuple(feature.name.split())
    emit = _events.emit

    def emit_others(observers: Any, event: Any) -> None:
        if (event.operation, event.phase) != gone:
            emit(observers, event)

    _replace(emit, emit_others)


def _without_metric(feature: Feature) -> None:
    if feature.name.startswith("jax "):
        for name in ("record_event", "record_event_duration_secs", "record_scalar"):
            setattr(jax.monitoring, name, _recorder(getattr(jax.monitoring, name), feature))
    else:
        feature.owner.pop(feature.attribute)


def _recorder(own: Callable[..., None], feature: Feature) -> Callable[..., None]:
    def others(event: str, *args: Any, **options: Any) -> None:
        if not event.endswith(f"/{feature.attribute}"):
            own(event, *args, **options)

    return others


def _replace(old: Any, new: Any, *, also_inside: bool = True) -> None:
    """Replace an object in all modules, or remove it from them if there is no new one."""
    for module in list(sys.modules.values()):
        own = str(getattr(module, "__file__", None))
        if module.__name__.startswith("tests.ledger."):
            # It goes on, and has numbers of its own that are the same objects.
            continue
        if own.startswith(_TESTS) or (also_inside and module.__name__.startswith("ckpt.")):
            for name, held in list(vars(module).items()):
                if held is old:
                    if new is None:
                        delattr(module, name)
                    else:
                        setattr(module, name, new)
