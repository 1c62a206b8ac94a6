"""An unknown name is an error that says the right one, on both faces."""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path
from typing import Any

import pytest

import ckpt
from ckpt._api.hints import _KEYWORDS, hinted

FACES = [ckpt, ckpt.sync]
FUNCTIONS = ["save", "load", "convert"]
METHODS = ["__init__", "save", "resume", "restore"]
HINTED = [getattr(ckpt, name) for name in FUNCTIONS] + [
    getattr(ckpt.CheckpointManager, name) for name in METHODS
]


def message(call: Any, **unknown: Any) -> str:
    def run() -> None:
        # The error of a coroutine function comes when it is awaited.
        call(**unknown).send(None)

    with pytest.raises(TypeError) as caught:
        run()
    return str(caught.value)


@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize(
    ("keyword", "hint"),
    [
        ("max_to_keep", "keep=3"),
        ("save_interval_steps", "save_when=ckpt.save_when.EverySteps"),
        ("options", "save_when= and keep="),
        ("kep", "Did you mean 'keep'?"),
    ],
)
def test_an_unknown_setting_of_a_manager(
    face: Any, keyword: str, hint: str, tmp_path: Path
) -> None:
    text = message(lambda **unknown: face.CheckpointManager(tmp_path, **unknown), **{keyword: 3})
    assert f"CheckpointManager.__init__() got an unexpected keyword argument '{keyword}'" in text
    assert text.count("Did you mean") == hint.count("Did you mean")
    assert hint in text


@pytest.mark.parametrize("face", FACES)
def test_an_unknown_argument_of_a_call(face: Any, tmp_path: Path) -> None:
    manager = face.CheckpointManager(tmp_path)
    state = {"w": 1}
    assert "items={name: tree}" in message(lambda **u: manager.save(1, **u), args=state)
    assert "Did you mean 'metrics'?" in message(lambda **u: manager.save(1, state, **u), metric={})
    assert "like=" in message(lambda **u: face.load(tmp_path, **u), target=state)


@pytest.mark.parametrize("face", FACES)
def test_an_unknown_method(face: Any, tmp_path: Path) -> None:
    manager = face.CheckpointManager(tmp_path)
    for name, hint in {"load": "restore", "wait": "wait_until_finished"}.items():
        with pytest.raises(AttributeError, match=f"'CheckpointManager'.*'{name}'.*{hint}"):
            getattr(manager, name)
        assert not hasattr(manager, name)
    with pytest.raises(AttributeError, match="no attribute 'restore': say load"):
        getattr(ckpt, "restore")  # noqa: B009
    with pytest.raises(AttributeError, match=r"no attribute 'savee'$"):
        getattr(manager, "savee")  # noqa: B009


@pytest.mark.parametrize(
    ("module", "name", "hint"),
    [
        (ckpt.sync, "restore", ": say load(path, like)"),
        (ckpt.sync, "wait", ": a manager has wait_until_finished()"),
        (ckpt.sync, "lod", ". Did you mean: 'load'?"),
        (ckpt.keep, "Latets", ". Did you mean: 'Latest'?"),
        (ckpt.save_when, "EveryStep", ". Did you mean: 'EverySteps'?"),
    ],
)
def test_an_unknown_name_of_a_module(
    module: Any, name: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(AttributeError) as caught:
        getattr(module, name)
    # Python looks for a similar name when it shows an error that nobody has caught.
    sys.__excepthook__(caught.type, caught.value, None)
    shown = capsys.readouterr().err.strip()
    assert shown.endswith(f"module '{module.__name__}' has no attribute '{name}'{hint}")


@pytest.mark.parametrize(
    ("policy", "given", "hint"),
    [
        (ckpt.keep.Best, {"n": 3, "metrics": "loss", "mode": "min"}, "Did you mean 'metric'?"),
        (ckpt.keep.EverySteps, {"n": 3, "exactly": True}, "Did you mean 'exact'?"),
        (ckpt.keep.ClosestToEvery, {"n": 3, "max_keep": 1}, "Did you mean 'max_to_keep'?"),
        (ckpt.keep.EverySeconds, {"second": 3}, "Did you mean 'seconds'?"),
        (ckpt.keep.Newer, {"second": 3}, "Did you mean 'seconds'?"),
        (ckpt.keep.Steps, {"step": [3]}, "Did you mean 'steps'?"),
        (ckpt.keep.Latest, {"max_to_keep": 3}, "keep=3 keeps the latest three"),
        (ckpt.save_when.EverySteps, {"save_interval_steps": 3}, "save_when.EverySteps(100)"),
        (ckpt.save_when.EverySeconds, {"second": 3}, "Did you mean 'seconds'?"),
        (ckpt.save_when.Steps, {"step": [3]}, "Did you mean 'steps'?"),
        (ckpt.save_when.Preempted, {"signal": 15}, "Did you mean 'signals'?"),
        (ckpt.save_when.Continuously, {"minimum_interval": 3}, "'minimum_interval_seconds'?"),
        (ckpt.save_when.BoundedOverhead, {"fractions": 0.1}, "Did you mean 'fraction'?"),
    ],
)
def test_an_unknown_argument_of_a_policy(policy: Any, given: dict[str, Any], hint: str) -> None:
    with pytest.raises(
        TypeError, match=f"{policy.__name__}.__init__.. got an unexpected"
    ) as caught:
        policy(**given)
    assert str(caught.value).count(hint) == 1
    # The class is the same for everybody else.
    assert inspect.isclass(policy)
    assert "kwargs" not in inspect.signature(policy).parameters


def test_a_commit_names_how_to_wait_for_it(tmp_path: Path) -> None:
    with ckpt.sync.CheckpointManager(tmp_path) as manager:
        commit: Any = manager.save(1, {"w": 1})
        with pytest.raises(
            AttributeError, match=r"'wait': await the commit, or call its result\(\)"
        ):
            commit.wait()


def test_hints_are_true() -> None:
    parameters = {name for each in HINTED for name in inspect.signature(each).parameters}
    # `convert` alone has a target of its own.
    assert parameters & _KEYWORDS.keys() == {"target"}, "hints for names that there are"
    said = {word for hint in _KEYWORDS.values() for word in re.findall(r"\b(\w+)=", hint)}
    assert said - parameters - {"metric", "mode"} == set(), "hints at names that there are not"


def test_errors_within_a_call_stay_as_they_are() -> None:
    def inner(*, keep: int) -> None: ...

    def call(**unknown: Any) -> None:
        # The outer call is right.
        hinted(lambda max_to_keep: inner(**unknown))(max_to_keep=1)

    assert message(call, max_to_keep=1).endswith("unexpected keyword argument 'max_to_keep'")


def test_a_hinted_coroutine_function_is_one() -> None:
    for name in ("save", "load"):
        assert inspect.iscoroutinefunction(getattr(ckpt, name))
    assert inspect.iscoroutinefunction(ckpt.CheckpointManager.save)
    assert not inspect.iscoroutinefunction(ckpt.sync.save)
