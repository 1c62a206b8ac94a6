"""`NameFormat`, for programs that read the steps of this library in a bucket with Orbax.

On a disk Orbax needs nothing: a step is a directory of Orbax. In a bucket the files of a step are
in a folder of its directory (see docs/reference/format.md), and Orbax asks a `NameFormat` where:

```text
options = ocp.CheckpointManagerOptions(step_name_format=ckpt.orbax.NameFormat())
manager = ocp.CheckpointManager("gs://models/runs/a", options=options)
```

Orbax itself is imported only when it asks.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ckpt._arguments import invalid
from ckpt._format.manifest_head import FILE_NAME, peek
from ckpt._format.step_files import SUCCESS
from ckpt.step_names import Standard, StepNames, checked

if TYPE_CHECKING:
    from orbax.checkpoint.path import step as step_lib

__all__ = ["NameFormat"]


def __dir__() -> list[str]:
    return __all__


_STORES = ("gs://", "s3://")


class NameFormat:
    """Tells Orbax where the steps of a root are: those of this library, and its own beside them.

    Pass it to Orbax as `step_name_format`. Only committed steps are found. The steps that Orbax
    saves with it have the names of `step_names`, so both libraries can take turns in one root.

    Orbax's retention (`max_to_keep`) and `delete` remove the whole directory of a step.

    Args:
        step_names: Names of the steps, as given to `CheckpointManager(step_names=...)`; by default
            decimal numbers.
        reads_from: The root, for `training.Checkpointer` of Orbax's newer interface. That class
            reads from the name that it would write to, so with `reads_from` the name of a step is
            the folder of its files. Do not let Orbax delete steps then: their manifests would stay.

    Raises:
        InvalidArgumentError: An argument is of another kind.

    Example:
        ```python
        import orbax.checkpoint as ocp

        options = ocp.CheckpointManagerOptions(step_name_format=ckpt.orbax.NameFormat())
        # The root may be gs://models/runs/a as well.
        with ocp.CheckpointManager(Path(root).resolve(), options=options) as manager:
            state = manager.restore(100)
        ```
    """

    def __init__(
        self,
        step_names: StepNames | None = None,
        *,
        reads_from: str | os.PathLike[str] | None = None,
    ) -> None:
        if reads_from is not None and not isinstance(reads_from, str | os.PathLike):
            raise invalid("reads_from", reads_from, "a path or a URL", of="NameFormat")
        self._names = Standard() if step_names is None else checked(step_names)
        self._root = None if reads_from is None else os.fspath(reads_from)

    def build_name(self, step: int) -> str:
        """Return the name of a step, relative to the root."""
        name = self._names.name(step)
        if self._root is None:
            return name
        root = _path(self._root)
        try:
            return str(self.find_step(root, step).path.relative_to(root))
        except ValueError:
            # The step is about to be saved.
            return name

    def find_all(self, base_path: str | os.PathLike[str]) -> Iterator[step_lib.Metadata]:
        """Yield the committed steps of a root, in any order."""
        from orbax.checkpoint.path import step as step_lib

        root = _path(base_path)
        if root.exists():
            yield from step_lib.build_step_metadatas(root.iterdir(), self._found)

    def find_step(self, base_path: str | os.PathLike[str], step: int) -> step_lib.Metadata:
        """Return the place of a step.

        Raises:
            ValueError: There is no such step, as Orbax expects it.

        Example:
            ```python
            folder = ckpt.orbax.NameFormat().find_step(root, 100).path
            ```
        """
        found = self._found(_path(base_path) / self._names.name(step))
        if found is None and not isinstance(self._names, Standard):
            # The step may have been saved under another of its names.
            found = next((each for each in self.find_all(base_path) if each.step == step), None)
        if found is None:
            raise ValueError(f"there is no committed step {step} in {os.fspath(base_path)}")
        return found

    def _found(self, directory: Any) -> step_lib.Metadata | None:
        """Return the committed step in a directory of the root, or None."""
        from orbax.checkpoint.path import step as step_lib

        step = self._names.step(directory.name)
        if step is None:
            return None
        try:
            summary = peek((directory / FILE_NAME).read_bytes())
        except (FileNotFoundError, NotADirectoryError):
            # A step of Orbax: on a disk it gets its name when it is committed.
            in_store = str(directory).startswith(_STORES)
            is_committed = (directory / SUCCESS).exists() if in_store else directory.is_dir()
            return step_lib.Metadata(step, directory) if is_committed else None
        # A step that was renamed does not count.
        if summary is None or summary.step not in (None, step):
            return None
        return step_lib.Metadata(step, directory / summary.folder)


def _path(path: str | os.PathLike[str]) -> Any:
    from etils import epath

    return epath.Path(os.fspath(path))
