"""The benchmark of models of others runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import foreign


def test_a_smoke_run_has_a_row_for_every_figure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Ten new processes say no more about tiny sizes.
    monkeypatch.setattr(foreign, "in_new_process", lambda call, *args: call(*args))
    page = tmp_path / "page.md"
    page.write_text(f"a\n{foreign.START}\n{foreign.END}\nb\n")
    foreign.main(["--smoke", "--rounds", "1", "--dir", str(tmp_path), "--page", str(page)])
    text = capsys.readouterr().out
    for what in ("adopt", "onto 8 devices", "convert to zarr", "merge two", "two rows", "memory"):
        assert what in text
    # Tiny sizes say nothing.
    assert page.read_text() == f"a\n{foreign.START}\n{foreign.END}\nb\n"
    assert [each.name for each in tmp_path.iterdir()] == ["page.md"]
