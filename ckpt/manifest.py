"""The manifest of a step: its models and its bytes. Imports neither jax nor tensorstore."""

from __future__ import annotations

from ckpt._format.leaf_table import LeafEntry, LeafForm, LeafTable
from ckpt._format.manifest import (
    ItemEntry,
    Manifest,
    Node,
    ShardingEntry,
    decode,
    decode_item,
    encode,
    encode_item,
)
from ckpt._format.manifest_head import (
    COMPRESSION,
    FILE_NAME,
    FOLDER,
    FORMAT_VERSION,
    HEAD_BYTES,
    MAX_BYTES,
    OWN_DISKS,
    VIRTUAL,
    FileEntry,
    Parent,
    Summary,
    flat_metrics,
    is_whole,
    peek,
    peek_files,
)
from ckpt._format.step_files import SourceFile

__all__ = [
    "COMPRESSION",
    "FILE_NAME",
    "FOLDER",
    "FORMAT_VERSION",
    "HEAD_BYTES",
    "MAX_BYTES",
    "OWN_DISKS",
    "VIRTUAL",
    "FileEntry",
    "ItemEntry",
    "LeafEntry",
    "LeafForm",
    "LeafTable",
    "Manifest",
    "Node",
    "Parent",
    "ShardingEntry",
    "SourceFile",
    "Summary",
    "decode",
    "decode_item",
    "encode",
    "encode_item",
    "flat_metrics",
    "is_whole",
    "peek",
    "peek_files",
]


def __dir__() -> list[str]:
    return __all__
