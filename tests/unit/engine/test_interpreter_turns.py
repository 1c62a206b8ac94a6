"""Computing in Python: one thread of a save at a time, however many parts there are."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

import ckpt.sync
from ckpt._engine.save.item_writer import EngineItemWriter
from ckpt._interop.orbax.sidecars import OrbaxTreeFiles


def test_no_two_threads_of_a_save_compute_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    guard = threading.Lock()
    under_way: list[str] = []
    seen: set[str] = set()
    met: list[list[str]] = []

    def watch(where: type, name: str) -> None:
        real: Callable[..., Any] = getattr(where, name)

        def watched(*args: Any) -> Any:
            with guard:
                seen.add(name)
                under_way.append(name)
                if len(under_way) > 1:
                    met.append(list(under_way))
            try:
                # Whoever may run beside it has come by then.
                time.sleep(0.2)
                return real(*args)
            finally:
                with guard:
                    under_way.remove(name)

        monkeypatch.setattr(where, name, watched)

    watch(OrbaxTreeFiles, "of_structure")
    watch(OrbaxTreeFiles, "of_places")
    watch(EngineItemWriter, "_filled")
    tree = {f"leaf_{number}": jnp.full(3, number) for number in range(20)}
    with ckpt.sync.CheckpointManager(tmp_path) as mgr:
        mgr.save(0, tree).result()
        assert seen == {"of_structure", "of_places", "_filled"}
        assert met == []
        assert mgr.restore(0)["leaf_7"].tolist() == [7, 7, 7]
