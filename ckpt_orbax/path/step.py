"""Names of steps, and steps by name."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import ckpt
import ckpt.sync

# End of the names of directories that Orbax has not finished.
TMP_DIR_SUFFIX = ".orbax-checkpoint-tmp"


@dataclasses.dataclass(frozen=True)
class Metadata:
    """A step and its path."""

    step: int
    path: Path


class StandardNameFormat:
    """Decimal numbers, with a prefix and zeros; see `ckpt.step_names.Standard`."""

    def __init__(self, names: Sequence[Any]) -> None:
        self._names = names

    def build_name(self, step: int) -> str:
        """Return the name of a step."""
        return str(self._names[0].name(step))

    def find_all(self, base_path: str | os.PathLike[str]) -> Iterator[Metadata]:
        """Yield the whole steps of a root, ascending."""
        root, names = os.fspath(base_path), names_of_format(self)
        with ckpt.sync.CheckpointManager(root, step_names=names, mode="r") as mgr:
            for info in mgr.steps():
                assert info.step is not None
                yield Metadata(info.step, Path(info.path))

    def find_step(self, base_path: str | os.PathLike[str], step: int) -> Metadata:
        """Return a step.

        Raises:
            ValueError: There is no such step.
        """
        for names in self._names:
            path = Path(base_path) / names.name(step)
            if path.is_dir():
                return Metadata(step, path)
        raise ValueError(f"{os.fspath(base_path)} has no step {step}")


class _OtherNames:
    """The names of an object with `build_name`, as `ckpt` asks for them."""

    def __init__(self, names: Any) -> None:
        self._names = names

    def name(self, step: int) -> str:
        return str(self._names.build_name(step))

    def step(self, name: str) -> int | None:
        numbers = map(int, re.findall(r"\d+", name))
        return next((number for number in numbers if self.name(number) == name), None)


def names_of_format(given: Any) -> Any:
    """Return the names of a format, as `ckpt` asks for them."""
    if not isinstance(given, StandardNameFormat):
        return _OtherNames(given)
    first, *others = given._names
    return ckpt.step_names.Composite(first, *others) if others else first


def standard_name_format(
    step_prefix: str | None = None, step_format_fixed_length: int | None = None, **_: Any
) -> StandardNameFormat:
    """Return names of decimal numbers, such as `ckpt_00000100`.

    Example:
        ```python
        names = ocp.path.step.standard_name_format(step_prefix="ckpt", step_format_fixed_length=8)
        ```
    """
    names = ckpt.step_names.Standard(step_prefix or "", step_format_fixed_length or 0)
    return StandardNameFormat([names])


def composite_name_format(
    write_name_format: StandardNameFormat, read_name_formats: Sequence[StandardNameFormat]
) -> StandardNameFormat:
    """Return names that are written in one way and read in several.

    Example:
        ```python
        old, new = step.standard_name_format(), step.standard_name_format(step_prefix="ckpt")
        names = ocp.path.step.composite_name_format(new, [new, old])
        ```
    """
    reads = [names for each in read_name_formats for names in each._names]
    return StandardNameFormat([*write_name_format._names, *reads])


def build_step_path(base_path: str | os.PathLike[str], name_format: Any, step: int) -> Path:
    """Return the path of a step.

    Example:
        ```python
        path = ocp.path.step.build_step_path(directory, names, 100)
        ```
    """
    return Path(base_path, name_format.build_name(step))


def get_save_directory(
    step: int,
    directory: str | os.PathLike[str],
    name: str | None = None,
    step_prefix: str | None = None,
    override_directory: str | os.PathLike[str] | None = None,
    step_format_fixed_length: int | None = None,
    step_name_format: Any = None,
) -> Path:
    """Return the path of a step, or of an item of it.

    Example:
        ```python
        path = ocp.path.step.get_save_directory(100, directory, "params")
        ```
    """
    names = step_name_format or standard_name_format(step_prefix, step_format_fixed_length)
    path = Path(override_directory or build_step_path(directory, names, step))
    return path if name is None else path / name


def is_path_temporary(path: str | os.PathLike[str], **_: Any) -> bool:
    """Return True if a path is that of a save that has not ended.

    Example:
        ```python
        assert not ocp.path.step.is_path_temporary(directory / "100")
        ```
    """
    return Path(path).is_dir() and TMP_DIR_SUFFIX in Path(path).name


def find_step_path(
    base_path: str | os.PathLike[str], name_format: Any, *, step: int, **_: Any
) -> Path:
    """Return the path of a step that exists.

    Raises:
        ValueError: There is no such step.

    Example:
        ```python
        path = ocp.path.step.find_step_path(directory, names, step=100)
        ```
    """
    return Path(name_format.find_step(base_path, step).path)


def latest_step_metadata(root_path: str | os.PathLike[str], name_format: Any) -> Metadata | None:
    """Return the latest step of a root; None if there is none.

    Example:
        ```python
        latest = ocp.path.step.latest_step_metadata(directory, names)
        ```
    """
    found = list(name_format.find_all(root_path))
    return found[-1] if found else None


def step_from_checkpoint_name(name: str) -> int:
    """Return the step of a name.

    Raises:
        ValueError: The name has no step.

    Example:
        ```python
        assert ocp.path.step.step_from_checkpoint_name("ckpt_100") == 100
        ```
    """
    digits = re.fullmatch(r"(?:.*_)?(\d+)", name)
    if digits is None:
        raise ValueError(f"{name!r} is no name of a step")
    return int(digits[1])


def checkpoint_steps(checkpoint_dir: str | os.PathLike[str], **_: Any) -> list[int]:
    """Return the steps of a root, ascending.

    Example:
        ```python
        print(ocp.path.step.checkpoint_steps(directory))
        ```
    """
    return [each.step for each in standard_name_format().find_all(checkpoint_dir)]


def is_checkpoint_finalized(path: str | os.PathLike[str]) -> bool:
    """Return True if a path is a whole checkpoint.

    Example:
        ```python
        assert ocp.path.step.is_checkpoint_finalized(directory / "100")
        ```
    """
    try:
        ckpt.sync.metadata(os.fspath(path))
    except ckpt.errors.CheckpointError:
        return False
    return True


is_path_finalized = is_checkpoint_finalized
