"""Open checkpoints below a directory under audit: `open_audited.py ROOT`.

What Python reports of a load, a look at the metadata and a verification is held against what they
need. Each line that is printed is something else; `done` and the number of checkpoints end it.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

import ckpt
import ckpt.sync

logging.disable()

FORBIDDEN = (
    "exec", "compile", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn",
    "os.system", "os.startfile",
    "subprocess.Popen", "pty.spawn", "socket.connect", "socket.bind",
    "socket.getaddrinfo", "socket.gethostbyname", "socket.sendto", "urllib.Request",
    "ctypes.dlopen", "marshal.load", "marshal.loads", "pickle.find_class",
    "code.__new__", "function.__new__",
    "os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.symlink", "os.link", "os.truncate",
    "os.chmod", "os.chown", "os.utime", "shutil.rmtree", "shutil.move", "shutil.copyfile",
    "tempfile.mkstemp", "tempfile.mkdtemp", "os.putenv", "sys.settrace", "cpython.run_command",
)  # fmt: skip
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC

root = Path(sys.argv[1]).absolute()
# Its own directory, and those of Python and of the library: what packages say of themselves, and
# the lines that a traceback shows.
allowed = [
    f"{root}/",
    f"{sys.prefix}/",
    f"{sys.base_prefix}/",
    f"{os.path.dirname(ckpt.__file__)}/",
    "/proc/self/",
    "/proc/meminfo",
    "/sys/fs/cgroup/",
    "/sys/devices/system/",
]
found: list[str] = []
watched = False


def audit(event: str, arguments: tuple[Any, ...]) -> None:
    if not watched:
        return
    if event == "import" and arguments[0] not in known:
        found.append(f"import {arguments[0]}")
    elif event in FORBIDDEN and not (event == "ctypes.dlopen" and arguments[0] is None):
        found.append(f"{event} {arguments!r:.200}")
    elif event == "open":
        path, _, flags = arguments
        if isinstance(path, int):
            return
        # Below a directory that is open already, a name stands for itself.
        text = os.fsdecode(path)
        inside = f"{text}/".startswith(tuple(allowed)) or os.sep not in text
        if not inside or ".." in text.split(os.sep) or (flags or 0) & WRITES:
            found.append(f"open {text!r} {flags}")


def everything(path: Path) -> None:
    like = {"w": np.zeros(3, np.float32), "any": 1}
    for call in (
        lambda: ckpt.sync.load(path),
        lambda: ckpt.sync.load(path, like=like),
        lambda: str(ckpt.sync.metadata(path)),
        lambda: ckpt.sync.verify(path),
        lambda: ckpt.sync.CheckpointManager(path.parent, mode="r").all_steps(),
    ):
        try:
            call()
        except ckpt.CheckpointError:
            continue


sys.addaudithook(audit)
paths = sorted(root.iterdir())
# What is imported when something is used for the first time is not of the checkpoint.
for sound in (path for path in paths if path.name.startswith("sound")):
    everything(sound)
known = set(sys.modules)
for path in paths:
    watched = True
    everything(path)
    watched = False
    for line in dict.fromkeys(found):
        os.write(1, f"{path.name}: {line}\n".encode())
    found.clear()
os.write(1, f"done {len(paths)}\n".encode())
