"""New interpreters, so that first saves are first saves and nothing inherits used memory."""

from __future__ import annotations

import os
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from typing import TYPE_CHECKING, ParamSpec, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ParamsT = ParamSpec("ParamsT")
ValueT = TypeVar("ValueT")

_DEVICES_FLAG = "--xla_force_host_platform_device_count"


def in_new_process(
    function: Callable[ParamsT, ValueT], *args: ParamsT.args, **kwargs: ParamsT.kwargs
) -> ValueT:
    """Returns what a function of this package gives in a new interpreter."""
    with ProcessPoolExecutor(max_workers=1, mp_context=get_context("spawn")) as executor:
        return executor.submit(function, *args, **kwargs).result()


@contextmanager
def cpu_devices(count: int) -> Iterator[None]:
    """Gives new processes this many CPU devices, whatever the caller's environment says."""
    before = os.environ.get("XLA_FLAGS")
    kept = [flag for flag in (before or "").split() if not flag.startswith(_DEVICES_FLAG)]
    os.environ["XLA_FLAGS"] = " ".join([*kept, f"{_DEVICES_FLAG}={count}"])
    try:
        yield
    finally:
        if before is None:
            del os.environ["XLA_FLAGS"]
        else:
            os.environ["XLA_FLAGS"] = before
