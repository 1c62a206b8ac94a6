"""Facts about the machine that a figure needs to be read; no host names and no paths."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

# uvloop is here because Orbax runs on it where it is installed.
_DISTRIBUTIONS = (
    "ckpt-jax",
    "jax",
    "jaxlib",
    "numpy",
    "tensorstore",
    "orbax-checkpoint",
    "safetensors",
    "torch",
    "uvloop",
)


def facts(directory: Path) -> dict[str, Any]:
    """Returns cores, memory, devices, versions, and the file system that `directory` is on."""
    devices = jax.devices()
    return {
        "cores": os.cpu_count(),
        "cores_usable": len(os.sched_getaffinity(0)),
        "cpu": _cpu_model(),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "system": f"{platform.system()} {platform.machine()}",
        "file_system": file_system(directory),
        "devices": f"{len(devices)} x {devices[0].device_kind}",
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in _DISTRIBUTIONS},
    }


def file_system(directory: Path) -> str:
    """Returns the type of the file system of a directory, such as ext4 or tmpfs."""
    try:
        mounts = Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines()
    except OSError:
        return "unknown"
    target = directory.resolve()
    found, depth = "unknown", -1
    for mount in mounts:
        _, point, kind, *_ = mount.split(" ")
        place = Path(point.replace("\\040", " "))
        if target.is_relative_to(place) and len(place.parts) >= depth:
            found, depth = kind, len(place.parts)
    return found


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or "unknown"
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else "unknown"


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
