"""Other names for leaves during a restore."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any


@dataclasses.dataclass
class Transform:
    """Where a leaf of the target comes from.

    Attributes:
        original_key: Its path in the checkpoint, with `/` between keys, or as a tuple of keys; None
            if it is that of the target.
        use_fallback: True to leave the leaf of the target as it is.
        value_fn: Refused: compute with jax after the restore.
        multi_value_fn: Refused.
    """

    original_key: str | tuple[str, ...] | None = None
    use_fallback: bool = False
    value_fn: Callable[..., Any] | None = None
    multi_value_fn: Callable[..., Any] | None = None


@dataclasses.dataclass
class RestoreTransform(Transform):
    """As `Transform`.

    Attributes:
        multi_value_fn_input_args: Refused.
    """

    multi_value_fn_input_args: dict[str, Any] | None = None


def renames_of(
    transforms: Any, stored: Iterable[str], *, keeps_others: bool = False
) -> tuple[dict[str, str], bool]:
    """Return new paths of stored leaves, and True if leaves that are not stored keep their values.

    Args:
        transforms: The transforms.
        stored: Leaf paths of the checkpoint.
        keeps_others: True if leaves without a transform stay as they are in the target.

    Raises:
        NotImplementedError: A transform has a function of values, or a pattern.
    """
    given = list(_flat(transforms, ()))
    # A leaf under a name that the target does not have leaves the target its own.
    unused = {path: f"{path}.unused" for path in stored}
    renames = dict(unused) if keeps_others else {}
    for keys, each in given:
        path = ".".join(keys)
        if not isinstance(each, Transform):
            raise TypeError(f"transforms: {path} is {each!r:.80}; expected a Transform")
        if each.value_fn or each.multi_value_fn or getattr(each, "multi_value_fn_input_args", None):
            raise NotImplementedError(
                f"transforms: {path}: functions of values are not supported. Restore what is "
                "stored, and compute with jax afterwards; ckpt.surgery stacks and concatenates"
            )
        if any(set(key) & set("*+?[(\\") for key in keys):
            raise NotImplementedError(
                f"transforms: {path}: patterns are not supported. Use ckpt.load(path, like=target, "
                "adapt=ckpt.Adapt(rename={'old.*': 'new.*'}))"
            )
        if each.use_fallback and path in unused:
            renames[path] = unused[path]
        elif each.original_key is None:
            renames.pop(path, None)
        elif not each.use_fallback:
            original = each.original_key
            keys = tuple(original.split("/")) if isinstance(original, str) else tuple(original)
            renames[".".join(map(str, keys))] = path
    return renames, keeps_others or not given or any(each.use_fallback for _, each in given)


def _flat(tree: Any, keys: tuple[str, ...]) -> Any:
    if isinstance(tree, Mapping):
        for key, below in tree.items():
            yield from _flat(below, (*keys, *str(key).split("/")))
    else:
        yield keys, tree
