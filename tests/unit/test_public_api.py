"""The public surface: what is exported, and that it stays small and typed."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import ckpt
from ckpt import errors


def test_the_root_is_small_sorted_and_resolves() -> None:
    assert len(ckpt.__all__) <= 36
    assert ckpt.__all__ == sorted(ckpt.__all__, key=lambda name: (name.islower(), name))
    for name in ckpt.__all__:
        assert getattr(ckpt, name) is not None
    assert set(ckpt.__all__) < set(dir(ckpt))


@pytest.mark.parametrize("name", ["coordination", "step_names", "storage", "testing"])
def test_modules_need_no_import_of_their_own(name: str) -> None:
    program = f"import ckpt; assert {name!r} in dir(ckpt); print(ckpt.{name}.__name__)"
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True
    )
    assert ended.stdout == f"ckpt.{name}\n"


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="nothing_like_this"):
        _ = ckpt.nothing_like_this


@pytest.mark.parametrize("module", ["ckpt.sync", "ckpt.handlers"])
def test_names_that_are_loaded_at_first_use_are_names_like_all_others(module: str) -> None:
    program = (
        f"import importlib, sys; module = importlib.import_module({module!r})\n"
        "assert dir(module) == sorted(module.__all__)\n"
        "try: module.nothing_like_this\n"
        "except AttributeError as error: print(error)\n"
        f"from {module} import *\n"
        "print([name for name in module.__all__ if globals()[name] is not getattr(module, name)])"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True
    )
    assert ended.stdout == f"module {module!r} has no attribute 'nothing_like_this'\n[]\n"


def test_names_survive_the_import_of_modules() -> None:
    for module in ("ckpt._api.functions", "ckpt._api.watch", "ckpt.sync", "ckpt._commit"):
        importlib.import_module(module)
    for name in ("save", "load", "metadata"):
        assert inspect.iscoroutinefunction(getattr(ckpt, name))
        assert not inspect.iscoroutinefunction(getattr(ckpt.sync, name))


def test_the_package_is_typed() -> None:
    assert Path(inspect.getfile(ckpt)).with_name("py.typed").exists()


def test_every_error_is_a_checkpoint_error() -> None:
    classes = [value for name in errors.__all__ if inspect.isclass(value := getattr(errors, name))]
    assert len(classes) > 10
    assert all(issubclass(each, errors.CheckpointError) for each in classes)


BUILT_INS = {
    errors.InvalidArgumentError: ValueError,
    errors.UnsupportedLeafError: TypeError,
    errors.TargetMismatchError: ValueError,
    errors.StepNotFoundError: FileNotFoundError,
    errors.NotACheckpointError: FileNotFoundError,
    errors.StepExistsError: FileExistsError,
    errors.StorageError: OSError,
    errors.ClosedError: RuntimeError,
    errors.ForkedProcessError: RuntimeError,
    errors.CommitTimeoutError: TimeoutError,
}


@pytest.mark.parametrize(("error", "built_in"), BUILT_INS.items())
def test_errors_are_also_the_built_in_that_callers_know(
    error: type[errors.CheckpointError], built_in: type[Exception]
) -> None:
    made = error("what happened", step=3, item="state", leaf="params.w")
    assert isinstance(made, built_in)
    assert str(made) == "step 3, item 'state', leaf 'params.w': what happened"
    assert (made.step, made.item, made.leaf) == (3, "state", "params.w")


def test_a_group_becomes_its_first_error_and_keeps_the_others() -> None:
    group = ExceptionGroup(
        "both", [OSError("disk"), ExceptionGroup("in", [errors.StorageError("full", leaf="w")])]
    )
    full = pytest.raises(errors.StorageError, match="step 7, leaf 'w': full")
    with full as caught, errors.located(step=7):
        raise group
    assert any("disk" in note for note in caught.value.__notes__)
    assert caught.value.__cause__ is group
