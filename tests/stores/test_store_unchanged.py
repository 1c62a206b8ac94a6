"""Promise: in a store, too, arrays that did not change are not uploaded again, each step is whole
by itself, and whatever hinders a copy costs an upload and nothing else.

By default on the fake of GCS; with CKPT_ALL_STORES (`nox -s stores`) on servers that speak S3, too.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ckpt
import ckpt.sync
from tests.stores import servers
from tests.stores.fault_proxy import FAULTS, Fault, Refusal, Seen
from tests.stores.places import Place
from tests.stores.wire import Loopback, read_head, send
from tests.support.trees import assert_same

ALL = "CKPT_ALL_STORES" in os.environ
KINDS = ["gcs", "moto", "snailmail", "seaweed"] if ALL else ["gcs"]
if not ALL:
    pytest.importorskip("obstore", reason="obstore is not installed: nox -s stores installs it")

State = dict[str, Any]
MIB = 1 << 20
UPLOADED = "arrays that do not change are uploaded with every step"


@pytest.fixture(params=KINDS)
def bucket(request: pytest.FixtureRequest, make_place: Callable[[str], Place]) -> Place:
    return make_place(request.param)


@pytest.fixture
def s3(make_place: Callable[[str], Place]) -> Place:
    """A store that checks signatures and rights."""
    if not ALL:
        pytest.skip("nox -s stores runs the tests on servers")
    return make_place("seaweed")


def values(seed: int, *shape: int) -> Any:
    return jnp.array(np.random.default_rng(seed).standard_normal(shape).astype(np.float32))


def base(count: int = 4) -> State:
    """Arrays of 1 MiB each, and small ones."""
    large = {f"k{n:02}": values(n, 512, 512) for n in range(count)}
    # In the order in which jax returns it.
    return {"bias": [values(n, 50) for n in range(20)], **large}


def again(tree: State) -> State:
    return jax.tree.map(lambda x: jnp.copy(x), tree)


def requests(place: Place) -> list[Seen]:
    assert place.proxy is not None
    return place.proxy.log


def copies(place: Place) -> list[Seen]:
    return [seen for seen in requests(place) if seen.copies]


def shared(info: Any) -> int:
    return int(info.statistics.shared_bytes)


def save(place: Place, root: Any, frozen: State, count: int = 2) -> list[int]:
    """Save some steps of a run in which `frozen` stays the same; return what each has shared."""
    found = []
    with ckpt.sync.CheckpointManager(root) as mgr:
        for step in range(count):
            state = {"base": frozen, "step": jnp.full(300, step)}
            found.append(shared(mgr.save(step, state).result()))
    check(root, frozen, count)
    return found


def check(root: Any, frozen: State, count: int) -> None:
    """Look at all steps as another program."""
    with ckpt.sync.CheckpointManager(root, mode="r") as mgr:
        assert mgr.all_steps() == list(range(count))
        for step in range(count):
            assert mgr.verify(step).ok
            assert_same(mgr.restore(step), {"base": frozen, "step": jnp.full(300, step)})


@pytest.mark.parametrize("made", [lambda tree: tree, again], ids=["the same", "equal"])
def test_what_did_not_change_is_not_uploaded(bucket: Place, made: Callable[[State], State]) -> None:
    root, frozen = bucket.root("run"), base(19)
    sent, kept = [], {}
    assert bucket.proxy is not None
    with ckpt.sync.CheckpointManager(root) as mgr:
        for step in range(4):
            bucket.proxy.forget()
            kept[step] = {"base": made(frozen), "adapter": values(100 + step, 512, 512)}
            info = mgr.save(step, kept[step]).result()
            sent.append(sum(seen.up for seen in requests(bucket)))
            objects = bucket.objects()
            manifest = json.loads(objects[f"run/{step}/ckpt.json"])
            files = {
                f"run/{step}/{manifest['folder']}/{path}": file
                for path, file in manifest["files"].items()
            }
            assert {k: len(objects[k]) for k in files} == {k: f["size"] for k, f in files.items()}
            own = {key for key in objects if key.startswith(f"run/{step}/")}
            assert own == {*files, f"run/{step}/ckpt.json"}
            if step:
                assert shared(info) > 18 * MIB
                assert shared(mgr.metadata(step).info) == shared(info)
                # One for each file, and nothing small.
                assert 0 < len(copies(bucket)) <= 20
        assert sent[0] > 20 * MIB
        assert max(sent[1:]) < 0.08 * sent[0]
        # Any step may go first.
        for step in (0, 2):
            mgr.delete(step)
        for step in (1, 3):
            assert mgr.verify(step).ok
            assert_same(mgr.restore(step), kept[step])


def test_the_first_save_after_a_restore_shares_too(bucket: Place) -> None:
    root, frozen = bucket.root(), base()
    save(bucket, root, frozen, 1)
    with ckpt.sync.CheckpointManager(root) as mgr:
        state = {**mgr.restore(), "step": jnp.full(300, 1)}
        assert shared(mgr.save(1, state).result()) >= 4 * MIB
    check(root, frozen, 2)


def test_sharing_can_be_switched_off(bucket: Place, caplog: pytest.LogCaptureFixture) -> None:
    root = bucket.root(server_side_copies=False)
    assert save(bucket, root, base()) == [0, 0]
    assert copies(bucket) == []
    assert UPLOADED not in caplog.text
    with ckpt.sync.CheckpointManager(bucket.root(server_side_copies=False)) as mgr:
        mgr.save(0, base()).result()
        # Nothing is kept in mind for a step that will not share it.
        assert mgr._service.engine.base_step is None


def test_without_obstore_it_is_said_once_what_to_install(
    bucket: Place, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    with ckpt.sync.CheckpointManager(bucket.root()) as mgr:
        for step in range(3):
            # There is nothing to share.
            mgr.save(step, {"w": values(step, 512, 512)}).result()
    assert UPLOADED not in caplog.text
    assert save(bucket, bucket.root(), base(), 4) == [0, 0, 0, 0]
    [said] = [each for each in caplog.messages if UPLOADED in each]
    assert "'ckpt-jax[copies]'" in said
    assert "server_side_copies=False" in said


@contextlib.contextmanager
def planned(place: Place, plan: Callable[[Seen], Fault | Refusal | None]) -> Iterator[None]:
    assert place.proxy is not None
    place.proxy.plan = plan
    yield
    place.proxy.forget()


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_any_copy_costs_at_most_an_upload(bucket: Place, fault: Fault) -> None:
    """Each request about copies fails: once, or from then on."""
    frozen = base(1)
    # A store that is down for a while lets uploads wait, too; one that hangs is given up.
    options: dict[str, Any] = {
        "retries": 5 if fault == "lost and down" else 1,
        "request_timeout": 1.0 if fault == "hung" else 20.0,
    }
    save(bucket, bucket.root(**options), frozen)
    count = len([seen for seen in requests(bucket) if is_about_copies(bucket, seen)])
    assert count >= 2
    for number in range(count):
        for lasts in (False, True):
            if fault == "hung" and lasts != (number == 0):
                # It takes its time.
                continue
            with planned(bucket, failing_at(bucket, number, fault, lasts=lasts)):
                save(bucket, bucket.root(**options), frozen)


def is_about_copies(place: Place, seen: Seen) -> bool:
    """Tell whether it is a request that obstore makes: a copy, or a look at one."""
    return seen.copies or (seen.method == "HEAD" and seen.path.startswith(f"/{place.bucket}/"))


def failing_at(
    place: Place, number: int, fault: Fault, *, lasts: bool
) -> Callable[[Seen], Fault | None]:
    seen_yet = 0

    def plan(seen: Seen) -> Fault | None:
        nonlocal seen_yet
        if not is_about_copies(place, seen):
            return None
        seen_yet += 1
        is_due = seen_yet > number if lasts else seen_yet == number + 1
        return fault if is_due else None

    return plan


def test_a_copy_that_hangs_is_given_up_in_time(
    bucket: Place, caplog: pytest.LogCaptureFixture
) -> None:
    frozen = base(1)
    with planned(bucket, lambda seen: "hung" if seen.copies else None):
        assert save(bucket, bucket.root(request_timeout=0.5), frozen, 3) == [0, 0, 0]
        # What comes later may go well, and is tried again.
        said = [each for each in caplog.messages if "could not be copied" in each]
        assert len(said) >= 2
        assert "no answer within" in said[0]
    assert UPLOADED not in caplog.text


@pytest.mark.parametrize("refusal", ["403", "501"])
def test_a_store_that_refuses_copies_is_asked_in_two_saves(
    bucket: Place, refusal: Refusal, caplog: pytest.LogCaptureFixture
) -> None:
    frozen = base(20)
    with planned(bucket, lambda seen: refusal if seen.copies else None):
        assert save(bucket, bucket.root(), frozen, 4) == [0, 0, 0, 0]
        # In each of them once for each of the lanes that met it at the same time.
        assert 2 <= len({seen.path for seen in copies(bucket)}) <= 8
        assert len([each for each in caplog.messages if "could not be copied" in each]) == 1
    [said] = [each for each in caplog.messages if UPLOADED in each]
    assert refusal in said
    assert servers.SECRET not in caplog.text


@pytest.mark.parametrize("harm", ["gone", "cut"])
def test_an_object_of_the_step_before_that_is_gone_or_cut_is_written_anew(
    bucket: Place, harm: str, caplog: pytest.LogCaptureFixture
) -> None:
    frozen = base(20)
    with ckpt.sync.CheckpointManager(bucket.root("run")) as mgr:
        mgr.save(0, {"base": frozen}).result()
        data = {key: data for key, data in bucket.objects().items() if "/d/" in key}
        large = sorted(key for key in data if len(data[key]) > MIB)
        bucket.drop(large[0])
        if harm == "cut":
            bucket.put(large[0], data[large[0]][:-1])
        assert 0 < shared(mgr.save(1, {"base": again(frozen)}).result()) < 20 * MIB
        assert mgr.verify(1).ok
        assert_same(mgr.restore(1), {"base": frozen})
        manifest = json.loads(bucket.objects()["run/1/ckpt.json"])
    own = [key for key in bucket.objects() if key.startswith("run/1/")]
    assert len(own) == len(manifest["files"]) + 1
    assert [each for each in caplog.records if each.levelno >= logging.WARNING] == []


def test_the_step_before_is_deleted_while_its_objects_are_copied(bucket: Place) -> None:
    frozen, root = base(20), bucket.root("run")
    is_deleted: list[int] = []

    def plan(seen: Seen) -> None:
        if seen.copies and not is_deleted:
            is_deleted.append(seen.number)
            for key in bucket.objects():
                if key.startswith("run/0/"):
                    bucket.drop(key)

    with ckpt.sync.CheckpointManager(root) as mgr:
        mgr.save(0, {"base": frozen}).result()
        with planned(bucket, plan):
            mgr.save(1, {"base": again(frozen)}).result()
            assert copies(bucket)
        assert mgr.verify(1).ok
        assert_same(mgr.restore(1), {"base": frozen})


def test_a_save_that_is_cancelled_while_it_copies_leaves_nothing(
    bucket: Place, caplog: pytest.LogCaptureFixture
) -> None:
    frozen, root = base(20), bucket.root("run", request_timeout=30.0)
    with ckpt.sync.CheckpointManager(root, timeouts=ckpt.Timeouts(lease=0.5)) as mgr:
        mgr.save(0, {"base": frozen}).result()
        is_copying = threading.Event()

        def plan(seen: Seen) -> Fault | None:
            if seen.copies:
                is_copying.set()
            return "hung" if seen.copies else None

        with planned(bucket, plan):
            commit = mgr.save(1, {"base": frozen})
            # It has not waited for a copy to end.
            assert "could not be copied" not in caplog.text
            assert is_copying.wait(60)
            commit.cancel()
            assert isinstance(commit.exception(), ckpt.errors.CommitCancelledError)
        assert mgr.all_steps() == [0]
        assert [key for key in bucket.objects() if key.startswith("run/1/")] == []
        assert shared(mgr.save(2, {"base": frozen}).result()) >= 20 * MIB
        assert mgr.verify(0).ok


def test_copies_use_the_keys_of_the_profile_and_not_of_the_environment(
    s3: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    files = {"credentials": "[train]\n", "config": "[profile train]\nregion = us-east-1\n"}
    files["credentials"] += f"aws_access_key_id={servers.KEY}\naws_secret_access_key = "
    files["credentials"] += f"{servers.SECRET}\n"
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    # These may only read; so with them each copy would be refused.
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", servers.READER[0])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", servers.READER[1])
    assert save(s3, s3.root(credentials="profile:train"), base())[1] >= 4 * MIB
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_PROFILE", "train")
    assert save(s3, s3.root(credentials="default"), base())[1] >= 4 * MIB
    assert UPLOADED not in caplog.text


def test_copies_use_the_keys_that_a_container_gives(
    s3: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    async def serve(reader: Any, writer: Any) -> None:
        while (head := await read_head(reader)) is not None:
            asked.append((head.path, head.headers.get("authorization")))
            keys = {"AccessKeyId": servers.KEY, "SecretAccessKey": servers.SECRET}
            times = {"Token": "", "Expiration": "2100-01-01T00:00:00Z"}
            body = json.dumps({**keys, **times}).encode()
            await send(writer, 200, body, Content_Type="application/json")

    with Loopback(serve) as server:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.delenv(name)
        url = f"http://127.0.0.1:{server.port}/keys"
        monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", url)
        (tmp_path / "token").write_text("let-me-in")
        token = str(tmp_path / "token")
        monkeypatch.setenv("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", token)
        assert save(s3, s3.root(credentials="ecs"), base())[1] >= 4 * MIB
    assert set(asked) == {("/keys", "let-me-in")}


def test_copies_go_to_the_endpoint_of_the_place(
    s3: Place, monkeypatch: pytest.MonkeyPatch, make_place: Callable[[str], Place]
) -> None:
    other = make_place("moto")
    for name in ("AWS_ENDPOINT", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.setenv(name, other.endpoint)
    monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")
    monkeypatch.setenv("AWS_VIRTUAL_HOSTED_STYLE_REQUEST", "true")
    assert save(s3, s3.root(), base())[1] >= 4 * MIB
    assert requests(other) == []
    # And to that of the environment, where the place has none.
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", s3.endpoint)
    assert save(s3, s3.root(endpoint=None), base())[1] >= 4 * MIB
    assert requests(other) == []
