"""Formats of other libraries that `ckpt.convert` writes. Imports neither jax nor tensorstore."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ckpt._arguments import invalid, whole_number

__all__ = ["Safetensors", "Zarr"]

_LEAST_FILE_BYTES = 1 << 20


def __dir__() -> list[str]:
    return __all__


@dataclass(frozen=True, slots=True)
class Safetensors:
    """Safetensors: one file, or several with an index.

    Attributes:
        names: Returns the name of a tensor for a leaf path, such as
            `model.layers.0.mlp.up_proj.weight`. None takes the leaf path.
        metadata: Texts to put into every file. Readers of PyTorch want `{"format": "pt"}`, which
            is the default.
        file_bytes: Most bytes of the tensors of one file, unless one tensor has more. The target is
            then a directory with the files and their index, as Hugging Face has them. None writes
            one file.

    Raises:
        InvalidArgumentError: An attribute is invalid.

    Example:
        ```python
        names = ckpt.exports.Safetensors(names=lambda path: f"model.{path}")
        await ckpt.convert("runs/a/100", "model.safetensors", format=names, at="params")
        ```
    """

    names: Callable[[str], str] | None = None
    metadata: Mapping[str, str] | None = None
    file_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.names is not None and not callable(self.names):
            raise invalid("names", self.names, "a function of leaf paths", of="Safetensors")
        given: object = self.metadata
        if given is not None and not (
            isinstance(given, Mapping)
            and all(isinstance(text, str) for pair in given.items() for text in pair)
        ):
            raise invalid("metadata", given, "a dict of texts", of="Safetensors")
        if self.file_bytes is not None:
            hint = " (1 MiB), in bytes; or None for one file"
            whole_number(
                "file_bytes", self.file_bytes, of="Safetensors", least=_LEAST_FILE_BYTES, hint=hint
            )


@dataclass(frozen=True, slots=True)
class Zarr:
    """Zarr v3: a directory of zarr arrays, below groups named by leaf path.

    Example:
        ```python
        await ckpt.convert("runs/a/100", "exports/params.zarr", format=ckpt.exports.Zarr())
        ```
    """
