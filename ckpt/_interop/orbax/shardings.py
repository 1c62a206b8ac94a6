"""`_sharding`: the layout of the arrays of an item on devices. Pure."""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from ckpt._format.manifest import ShardingEntry

SHARDING_FILE = "_sharding"
# `cpu:0`, `TFRT_CPU_0`, `TPU_0(process=0,...)`, `cuda:1`: Orbax writes devices as jax prints them.
_DEVICE = re.compile(r"^(?:TFRT_)?([A-Za-z]+)[_:](\d+)")
_PLATFORMS = {"cuda": "gpu", "rocm": "gpu"}


def parse_shardings(data: bytes | None, platform: str) -> Mapping[str, ShardingEntry]:
    """Return the shardings of arrays by their names in Orbax.

    A restore can do without the placement of arrays, so unreadable shardings are left out.

    Args:
        data: Content of the file, or None if there is none.
        platform: Platform of devices that are only numbered.
    """
    try:
        found = json.loads(data or b"{}")
        pairs = {base64.urlsafe_b64decode(key).decode(): text for key, text in found.items()}
    except (ValueError, AttributeError, TypeError, binascii.Error, RecursionError):
        return {}
    entries = {}
    for name, text in pairs.items():
        try:
            entry = _entry(json.loads(text), platform)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            continue
        if entry is not None:
            entries[name] = entry
    return entries


def _entry(about: Any, platform: str) -> ShardingEntry | None:
    kind = about.get("sharding_type")
    if kind == "SingleDeviceSharding":
        found = _DEVICE.match(about["device_str"])
        if found is None:
            return None
        name = found[1].lower()
        return ShardingEntry(
            kind="single",
            platform=_PLATFORMS.get(name, name),
            device_ids=[int(found[2])],
            text=about["device_str"],
        )
    if kind != "NamedSharding" or not about.get("device_mesh"):
        return None
    grid = np.array(about["device_mesh"]["mesh"], dtype=object)
    sizes = [int(size) for size in about["shape"]]
    types = about.get("axis_types") or ["Auto"] * len(sizes)
    return ShardingEntry(
        kind="named",
        platform=platform,
        device_ids=[int(device["id"]) for device in grid.flat],
        memory_kind=about.get("memory_kind"),
        axis_names=[str(name) for name in about["axis_names"]],
        axis_sizes=sizes,
        axis_types=[str(each).removeprefix("AxisType.") for each in types],
        spec=[
            part if part is None or isinstance(part, str) else list(part)
            for part in about["partition_spec"]
        ],
    )
