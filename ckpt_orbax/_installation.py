"""`install`: programs that import Orbax get this module."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import ckpt_orbax

_NAME = "orbax.checkpoint"
# Modules by the names that programs import, relative to `orbax.checkpoint`.
_SAME = (
    *("args", "checkpoint_manager", "checkpoint_utils", "checkpointers", "handlers", "metadata"),
    "multihost",
    *("options", "path", "path.step", "test_utils", "transform_utils", "tree", "type_handlers"),
    *("utils", "v1", "v1.errors", "v1.handlers", "v1.partial", "v1.training"),
)
_OTHERS = {
    "checkpoint_args": "args",
    "checkpoint_managers": "policies",
    "experimental.v1": "v1",
    "v1.options": "v1.context",
}


def install() -> None:
    """Let `import orbax.checkpoint`, and its public submodules, give this module.

    Call it before the first import of Orbax, also by other libraries. It may be called again.

    Raises:
        RuntimeError: Orbax is imported already.

    Example:
        ```python
        import ckpt_orbax

        ckpt_orbax.install()
        import orbax.checkpoint as ocp

        assert ocp.CheckpointManager is ckpt_orbax.CheckpointManager
        ```
    """
    found = sys.modules.get(_NAME)
    if getattr(found, "is_ckpt_orbax", False):
        return
    if found is not None:
        raise RuntimeError(
            "ckpt_orbax.install(): orbax.checkpoint is imported already. Call it first, before the "
            "imports of libraries that use Orbax, such as flax.training"
        )
    try:
        orbax = importlib.import_module("orbax")
    except ModuleNotFoundError:
        orbax = sys.modules["orbax"] = ModuleType("orbax")
        orbax.__path__ = []
    # A module of its own, whose path is empty: no file is imported under a second name.
    module: Any = ModuleType(_NAME, ckpt_orbax.__doc__)
    module.__path__ = []
    module.__dict__.update(
        {name: value for name, value in vars(ckpt_orbax).items() if not name.startswith("__")}
    )
    module.is_ckpt_orbax = True
    sys.modules[_NAME] = orbax.checkpoint = module  # type: ignore[attr-defined]
    experimental: Any = ModuleType(f"{_NAME}.experimental")
    sys.modules[f"{_NAME}.experimental"] = experimental
    experimental.__path__ = []
    module.experimental = experimental
    experimental.v1 = ckpt_orbax.v1
    for name, ours in (dict(zip(_SAME, _SAME, strict=True)) | _OTHERS).items():
        sys.modules[f"{_NAME}.{name}"] = importlib.import_module(f"ckpt_orbax.{ours}")
    sys.meta_path.insert(0, _Unknown())


class _Unknown:
    """Says what is missing when a program imports another module of Orbax."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: Any = None
    ) -> ModuleSpec | None:
        if name.startswith(f"{_NAME}."):
            raise ModuleNotFoundError(
                f"{name}: ckpt_orbax has no such module. It has the public modules of Orbax: "
                f"{', '.join(sorted((*_SAME, *_OTHERS)))}",
                name=name,
            )
        return None
