"""What a thread has set in jax, which it may just be importing."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import anyio
import jax
import pytest

from ckpt._runtime.threads import Caller, caller, look, own_settings, serve


def test_a_call_from_before_jax_was_imported_has_the_settings_of_the_program() -> None:
    async def main() -> bool | None:
        serve(Caller())
        return caller().x64

    config: Any = jax.config
    assert anyio.run(main) is config.jax_enable_x64


def test_jax_is_not_asked_while_another_thread_imports_it(monkeypatch: pytest.MonkeyPatch) -> None:
    half, spec = ModuleType("jax"), ModuleSpec("jax", None)
    marked: Any = spec
    marked._initializing = True
    half.__spec__ = spec
    half.config = object()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "jax", half)
    with own_settings():
        assert look() == Caller()
