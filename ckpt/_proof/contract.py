"""`Contract`: what a run is, as plain JSON values."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from enum import Enum
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from ckpt._arguments import invalid, is_config, one_of, shown
from ckpt._proof.contract_hooks import ContractHooks, check
from ckpt._proof.run_notes import CONTRACT_NOTE
from ckpt.errors import InvalidArgumentError

if TYPE_CHECKING:
    from ckpt._engine.engine import Engine
    from ckpt._format.manifest import Manifest
    from ckpt._steps.step_metadata import StepMetadata

OnMismatch = Literal["raise", "warn"]
# The note is in the head of each manifest, which lists of steps read.
_MOST_BYTES = 256 << 10
_MOST_DEPTH = 50


@dataclasses.dataclass(frozen=True, slots=True)
class Contract:
    """What a run is, noted on each step; steps of another contract are refused.

    `resume` and `restore` compare a step with the contract before they read an array of it, and a
    save does so with the newest step of its root. So neither goes on with another configuration
    unnoticed. `ckpt.load(path, contract=...)` compares one checkpoint. A step without a contract
    cannot be compared, and a warning says so.

    Attributes:
        run: What the run is: a dict by names of your choice, such as `model` and `data`, of
            dataclasses, pydantic models, configurations, dicts, lists, texts and numbers. It is
            turned into plain JSON values once; what could be changed and not be noticed, such as a
            function or an array, is refused.
        on_mismatch: What becomes of a step of another contract: `"raise"` refuses it, and `"warn"`
            takes it with a warning; the next step has the new contract.

    Raises:
        InvalidArgumentError: A value has no plain form; the error names it.

    Example:
        ```python
        model = {"layers": 12, "width": 768}
        contract = ckpt.extensions.Contract({"model": model, "data": {"seed": 3}})
        mgr = ckpt.CheckpointManager(root, extensions=[contract])
        ```
    """

    run: Mapping[str, Any]
    on_mismatch: OnMismatch = "raise"

    def __post_init__(self) -> None:
        one_of("on_mismatch", self.on_mismatch, get_args(OnMismatch), of="Contract")
        plain = _plain(self.run, "")
        if not isinstance(plain, dict) or not plain:
            what = "a dict of what the run is, such as {'model': config, 'data': ...}"
            raise invalid("run", self.run, what, of="Contract")
        size = len(json.dumps(plain).encode())
        if size > _MOST_BYTES:
            raise InvalidArgumentError(
                f"Contract: {size} bytes of JSON, and each step notes them: at most {_MOST_BYTES}. "
                "Put a digest in the place of what is long, such as a list of files"
            )
        object.__setattr__(self, "run", plain)

    def _join(self, engine: Engine) -> None:
        engine.notes = {**engine.notes, CONTRACT_NOTE: self.run}
        hooks = ContractHooks(self)
        engine.hooks = (*engine.hooks, lambda _: hooks)

    def _check(self, manifest: Manifest, where: str) -> None:
        check(self, manifest, where)

    @staticmethod
    def of(metadata: StepMetadata) -> Mapping[str, Any] | None:
        """Return the contract of a step as plain JSON values; None if it notes none.

        Example:
            ```python
            print(ckpt.extensions.Contract.of(await mgr.metadata(100)))
            ```
        """
        found: Mapping[str, Any] | None = metadata.notes.get(CONTRACT_NOTE)
        return found


def _plain(value: Any, where: str, depth: int = 0) -> Any:
    """Return a value as plain JSON values; `where` names it in errors."""
    if depth > _MOST_DEPTH:
        raise _refused(where, value, f"at most {_MOST_DEPTH} levels")
    if isinstance(value, Enum):
        return _plain(value.value, where, depth + 1)
    if isinstance(value, np.generic) and not isinstance(value, np.void):
        value = value.item()
    if isinstance(value, bool | None):
        return value
    # Subclasses become what they are made of.
    if isinstance(value, str) and _is_text(value):
        return str.__str__(value)
    if isinstance(value, int) and abs(value) < 2**63:
        return int(value)
    if isinstance(value, float) and math.isfinite(value):
        return float(value)
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, np.dtype) or _is_scalar_type(value):
        return np.dtype(value).name
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
    elif callable(getattr(type(value), "model_dump", None)):
        value = value.model_dump()
    if isinstance(value, Mapping) or is_config(value):
        named = {}
        for key in value:
            if not isinstance(key, str) or not _is_text(key):
                raise _refused(where, key, "texts as keys")
            named[key] = _plain(value[key], f"{where}.{key}" if where else key, depth + 1)
        # Sorted, so that equal contracts are the same text.
        return dict(sorted(named.items()))
    if isinstance(value, set | frozenset):
        value = sorted(value, key=repr)
    if isinstance(value, list | tuple):
        return [_plain(each, f"{where}.{n}", depth + 1) for n, each in enumerate(value)]
    raise _refused(
        where,
        value,
        "dataclasses, pydantic models, dicts, lists, texts, finite numbers, True, False or None; "
        "put a name or a digest in its place",
    )


def _is_text(value: str) -> bool:
    """Return True if UTF-8 can hold a text: half of a surrogate pair cannot be stored."""
    return value.isascii() or not any("\ud800" <= each <= "\udfff" for each in value)


def _is_scalar_type(value: Any) -> bool:
    """Return True for `np.float32`, and for `jnp.float32`, which is no class."""
    is_class = isinstance(value, type) and issubclass(value, np.generic)
    return is_class or (callable(value) and isinstance(getattr(value, "dtype", None), np.dtype))


def _refused(where: str, value: object, expected: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"Contract: {where[:200] or 'run'} is {shown(value, 80)}, of type {type(value).__name__}: "
        f"expected {expected}"
    )
