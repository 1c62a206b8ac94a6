"""The synchronous API: the same calls without `await`.

It works in scripts, threads and notebooks, and inside a running event loop: every call hands its
work to the library's own thread and waits for it. Like any blocking call it blocks a running loop;
prefer the asyncio API there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckpt._api.hints import no_attribute
from ckpt._api.plain.manager import CheckpointManager

if TYPE_CHECKING:
    from ckpt._api.plain.functions import (
        adopt,
        convert,
        load,
        merge,
        metadata,
        open_array,
        save,
        verify,
        watch,
    )
else:

    def __getattr__(name: str) -> Any:
        # The calls without a manager are loaded when one is first used.
        if name not in __all__:
            raise no_attribute("module 'ckpt.sync'", name)
        from ckpt._api.plain import functions

        return getattr(functions, name)


__all__ = [
    "CheckpointManager",
    "adopt",
    "convert",
    "load",
    "merge",
    "metadata",
    "open_array",
    "save",
    "verify",
    "watch",
]


def __dir__() -> list[str]:
    return __all__
