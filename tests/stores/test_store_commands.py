"""The command `ckpt` on runs in stores: what looks, what tidies up, and what copies."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckpt
from ckpt._runtime.loop import call_once
from ckpt._steps.pins import hold
from ckpt.storage._resolve import open_root
from tests.stores.places import Place
from tests.support.command import Ran, in_this_process

STEPS = (1, 2, 3)


def state(step: int) -> dict[str, Any]:
    return {"params": {"w": np.arange(50_000.0) + step, "b": np.ones(3)}, "epoch": step}


@pytest.fixture
def url(place: Place, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of a run of three steps, as a user types it."""
    if place.is_s3:
        monkeypatch.setenv("AWS_ENDPOINT_URL", place.endpoint)
        monkeypatch.setenv("AWS_REGION", "us-east-1")
    with ckpt.sync.CheckpointManager(place.root("run")) as mgr:
        for step in STEPS:
            mgr.save(step, state(step), metrics={"loss": 1 / step}, custom_metadata={"seen": step})
    scheme = "s3" if place.is_s3 else {"gcs": "gs"}.get(place.kind, place.kind)
    return f"{scheme}://{place.bucket}/run"


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    def call(*arguments: object) -> Ran:
        ran = in_this_process(capsys, *arguments)
        assert "Traceback" not in ran.err
        return ran

    return call


def steps_of(run: Callable[..., Ran], url: str) -> list[int]:
    return [each["step"] for each in run("ls", url, "--json").json["steps"]]


def test_looking_at_a_run(url: str, run: Callable[..., Ran]) -> None:
    ran = run("ls", url)
    assert ran.status == 0
    assert steps_of(run, url) == [1, 2, 3]
    for name, words in (
        ("show", "metrics     loss=0.5"),
        ("show", "params.w  float64[50000] (numpy)"),
        ("ls --by-size", "391 KiB"),
        ("verify", "is whole"),
    ):
        ran = run(*name.split(), f"{url}/2")
        assert (ran.status, ran.err) == (0, ""), (name, ran)
        assert words in ran.out, (name, ran)
    ran = run("show", f"{url}/2", "params.w[3:5]")
    assert ran.status == 0
    assert "[5., 6.]" in ran.out
    for name in ("show", "ls --by-size", "ls --long", "verify"):
        ran = run(*name.split(), url)
        assert (ran.status, ran.err) == (0, ""), (name, ran)
        assert run(*name.split(), url, "--json").json
    assert run("verify", url, "--shallow").status == 0


def test_differences_of_steps(url: str, run: Callable[..., Ran]) -> None:
    ran = run("diff", f"{url}/1", f"{url}/2", "--json")
    assert ran.status == 1
    assert [each["leaf"]["path"] for each in ran.json["contents"]] == ["params.w"]
    assert run("diff", f"{url}/1", f"{url}/1").status == 0
    ran = run("diff", f"{url}/1", f"{url}/2", "--values")
    assert ran.status == 1
    assert "params.w" in ran.out


def test_where_two_runs_part(url: str, run: Callable[..., Ran]) -> None:
    ran = run("bisect", url, url, "--json")
    assert (ran.status, ran.json["is_same"], ran.json["last_same"]) == (0, True, 3)


def test_a_damaged_step_is_found(place: Place, url: str, run: Callable[..., Ran]) -> None:
    if place.kind == "memory":
        pytest.skip("nobody else can change it")
    objects = place.objects()
    key = max(
        (key for key in objects if key.startswith("run/2/")), key=lambda key: len(objects[key])
    )
    place.put(key, b"x" * len(objects[key]))
    ran = run("verify", url)
    assert ran.status == 1
    assert "params.w" in ran.out
    assert run("verify", f"{url}/1").status == 0


def test_pins(url: str, run: Callable[..., Ran]) -> None:
    assert run("pin", f"{url}/2", "paper").status == 0
    assert "paper" in run("ls", url).out
    ran = run("rm", f"{url}/2")
    assert ran.status == 2
    assert "pinned by 'paper'" in ran.err
    assert steps_of(run, url) == [1, 2, 3]
    assert run("pin", f"{url}/2", "paper", "--remove").status == 0
    assert run("pin", f"{url}/2", "paper", "--remove").status != 0
    assert run("rm", f"{url}/2").status == 0
    assert steps_of(run, url) == [1, 3]


def test_deleting_and_taking_back(place: Place, url: str, run: Callable[..., Ran]) -> None:
    assert run("rm", f"{url}/1", "--dry-run").status == 0
    assert steps_of(run, url) == [1, 2, 3]
    assert run("rm", f"{url}/1").status == 0
    ran = run("rm", f"{url}/2", "--trash", "trash")
    assert (ran.status, steps_of(run, url)) == (0, [3])
    assert "2" in run("trash", url).out
    assert run("trash", url, "--restore", "2").status == 0
    assert steps_of(run, url) == [2, 3]
    assert run("verify", f"{url}/2").status == 0
    ran = run("rm", f"{url}/9")
    assert ran.status == 2
    assert len(ran.err.splitlines()) == 1
    if place.kind != "memory":
        # Nothing of the step is left that was deleted.
        assert not [key for key in place.objects() if key.startswith("run/1/")]


def test_policies_and_tidying(url: str, run: Callable[..., Ran]) -> None:
    assert run("rm", url, "--keep-last", 1, "--dry-run").status == 0
    assert steps_of(run, url) == [1, 2, 3]
    assert run("rm", url, "--keep-last", 1, "--keep-best", "loss:max:1").status == 0
    assert steps_of(run, url) == [1, 3]
    for arguments in (("--dry-run",), ()):
        ran = run("gc", url, *arguments)
        assert (ran.status, ran.err) == (0, "")
    assert steps_of(run, url) == [1, 3]


def test_what_dead_processes_left(place: Place, url: str, run: Callable[..., Ran]) -> None:
    async def die() -> None:
        storage = open_root(place.root("run"), ckpt.Timeouts(lease=1.0))
        attempt = await storage.begin("9")
        await storage.write(attempt, "x", b"some bytes")
        held = await hold(storage, 2, lambda: storage.exists("2"))
        assert held is not None

    call_once(die)
    # A process that has just begun cannot know that they are dead.
    ran = run("rm", f"{url}/2")
    assert ran.status == 2
    assert "or wait until it has been read" in ran.err
    ran = run("gc", url, "--wait", "8s", "--json")
    assert ran.status == 0
    kinds = [(each["name"], each["kind"], each["removed"]) for each in ran.json["found"]]
    assert kinds == [("9", "attempt", True), ("2", "lease", True)]
    assert run("rm", f"{url}/2").status == 0
    assert steps_of(run, url) == [1, 3]


def test_copying_and_converting(url: str, tmp_path: Path, run: Callable[..., Ran]) -> None:
    other = url.removesuffix("run") + "other"
    assert run("cp", url, other).status == 0
    assert run("cp", url, other).out.count("already there") == 4
    assert run("cp", url, other, "--verify").status == 0
    assert run("cp", f"{url}/1", tmp_path / "one").status == 0
    assert run("cp", url, tmp_path / "part", "--select", "params.b").status == 0
    assert list(ckpt.sync.load(tmp_path / "part" / "3")["params"]) == ["b"]
    assert run("cp", tmp_path / "part", f"{other}2").status == 0
    assert run("verify", f"{other}2").status == 0
    assert run("convert", f"{url}/1", f"{other}3").status == 0
    assert run("verify", f"{other}3").status == 0


@pytest.mark.parametrize(
    "arguments",
    [
        ("ls",),
        ("verify",),
        ("show",),
        ("gc",),
        ("rm", "--keep-last", "1"),
    ],
    ids=lambda arguments: arguments[0],
)
def test_nothing_is_there(arguments: tuple[str, ...], url: str, run: Callable[..., Ran]) -> None:
    nothing = url.removesuffix("run") + "nothing"
    ran = run(arguments[0], nothing, *arguments[1:])
    assert ran.status == 2, ran
    assert ran.out == ""
    assert len(ran.err.splitlines()) == 1
    assert nothing in ran.err
