"""Two real processes plan the save of arrays over the devices of both."""

from __future__ import annotations

from tests.support.real_jobs import run_processes


def test_real_processes_share_out_real_arrays() -> None:
    found = [child.value for child in run_processes(2, "plan_save.py")]
    chunks = [tuple(chunk) for value in found for chunk in value["chunks"]]
    assert len(set(chunks)) == len(chunks) == found[0]["count"]
    assert all(len(value["chunks"]) > 1 for value in found)
    for value in found:
        assert value["own"] == [6, 7, 8]
        assert value["outline"] == found[0]["outline"]
        # What their parts are copied from is what the chunks cover.
        assert value["wrong"] == []
        assert len(value["refusals"]) == 6
        assert all("Call save() on all processes" in text for text in value["refusals"])
