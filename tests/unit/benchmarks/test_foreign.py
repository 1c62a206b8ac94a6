"""The benchmark of models of others runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import foreign, pages, rounds


def test_a_smoke_run_has_a_row_for_every_figure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Ten new processes say no more about tiny sizes.
    for module in (foreign, rounds):
        monkeypatch.setattr(module, "in_new_process", lambda call, *args: call(*args))
    pages.main(["foreign", "--smoke", "--rounds", "1", "--dir", str(tmp_path)])
    text = capsys.readouterr().out
    for what in ("adopt", "onto 8 devices", "convert to zarr", "merge two", "two rows", "memory"):
        assert what in text
    assert list(tmp_path.iterdir()) == []
