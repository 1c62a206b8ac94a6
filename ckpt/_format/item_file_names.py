"""Names of item files: what a handler may call the files of its item. Pure."""

from __future__ import annotations

__all__ = ["check_file_path"]

# Names that this library and its Orbax view use in an item's directory.
_RESERVED = frozenset(
    {
        "_METADATA",
        "_sharding",
        "_strings.json",
        "array_metadatas",
        "commit_success.txt",
        "d",
        "manifest.ocdbt",
    }
)
# Every file system takes names of this many bytes, and paths of four times as many below a step.
_MOST_NAME_BYTES = 255
_MOST_BYTES = 1000


def check_file_path(path: object) -> str:
    """Return `path` if it may name a file of an item, relative to the item's directory.

    Raises:
        ValueError: It could lead out of the directory, is not portable, or is reserved.
    """
    if not isinstance(path, str):
        raise ValueError(f"{path!r:.120} is not a text")
    names = path.split("/")
    if not all(map(_is_name, names)) or len(path.encode()) > _MOST_BYTES:
        raise ValueError(
            f"{path!r:.120} is not a relative path of plain names with '/' between them"
        )
    if names[0] in _RESERVED or names[0].startswith("ocdbt.process_"):
        raise ValueError(f"{path!r:.120} is the name of a file of the format itself")
    return path


def _is_name(name: str) -> bool:
    return (
        name not in ("", ".", "..")
        and name.isprintable()
        and "\\" not in name
        # Orbax takes a file with this in its name for unfinished.
        and ".orbax-checkpoint-tmp" not in name
        and len(name.encode()) <= _MOST_NAME_BYTES
    )
