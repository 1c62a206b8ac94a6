"""Saves or restores three leaves, and counts what ran: `count_functions.py save|restore ROOT`.

Prints how many functions of the library ran, in all threads, in how many modules, and how many
modules were imported. Comprehensions, lambdas and the bodies of modules and classes do not count.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
import threading
from types import CodeType, FrameType
from typing import Any

import jax.numpy as jnp
import numpy as np

import ckpt
from ckpt.sync import CheckpointManager

what, root = sys.argv[1:]
ran: set[CodeType] = set()


def note(frame: FrameType, event: str, _: Any) -> None:
    if event == "call":
        ran.add(frame.f_code)


state = {"w": jnp.ones((4, 4)), "b": np.zeros(3), "step": 1}
threading.setprofile(note)
sys.setprofile(note)
with CheckpointManager(root) as mgr:
    if what == "save":
        mgr.save(1, state)
    else:
        mgr.restore(1)

sys.setprofile(None)
package = os.path.dirname(ckpt.__file__)
own = [
    code
    for code in ran
    if code.co_filename.startswith(package)
    and not code.co_name.startswith("<")
    and code.co_flags & inspect.CO_OPTIMIZED
]
sys.stdout.write(
    json.dumps(
        {
            "functions": len(own),
            "modules": len({code.co_filename for code in own}),
            "imported": sum(name.split(".")[0] == "ckpt" for name in sys.modules),
        }
    )
)
