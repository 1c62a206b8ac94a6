"""The example programs, killed and started again, end exactly as if they were not.

A run to be killed is told to make more steps than it ever could. It is killed once a step after its
first one is committed, wherever it is then. How many steps both runs are to make is chosen after
that, so nothing here depends on how fast a program is.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import jax
import nbclient
import nbformat
import numpy as np
import optax
import pytest
from jupyter_client.provisioning.local_provisioner import LocalProvisioner

import ckpt
import ckpt.manifest
import ckpt.sync
from ckpt.testing.compare import differences
from tests.support.damage import FlipBit
from tests.support.paths import ROOT
from tests.support.ports import free_port
from tests.support.snapshots import shared_memory

# Each test starts several programs, which takes its time on a machine that does other things.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

EXAMPLES = ROOT / "docs" / "examples"
PATIENCE_S = 120
NEVER = 1_000_000_000  # steps that no run ever makes
MORE = 60  # steps after the kill: more than one save


# Little of what a program computes is worth optimising.
COMPILE_FAST = "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"


@pytest.fixture(scope="module", autouse=True)
def _compiled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Programs share what XLA has compiled."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path_factory.mktemp("compiled")))
        patch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
        yield


# --- Programs and what they leave -----------------------------------------------------------------


@contextlib.contextmanager
def started(name: str, *options: object, devices: int = 1) -> Iterator[Any]:
    """A program, that is ended whatever happens."""
    flags = f"{COMPILE_FAST} --xla_force_host_platform_device_count={devices}"
    child = subprocess.Popen(
        [sys.executable, str(EXAMPLES / f"{name}.py"), *map(str, options)],
        # Not what XLA says of its own cache.
        env=os.environ | {"XLA_FLAGS": flags, "PYTHONUNBUFFERED": "1", "TF_CPP_MIN_LOG_LEVEL": "3"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    watchdog = threading.Timer(PATIENCE_S, child.kill)
    watchdog.start()
    with child:
        try:
            yield child
        finally:
            watchdog.cancel()
            child.kill()


def ended(child: Any) -> list[str]:
    """The lines of a program that ends well."""
    printed, _ = child.communicate(timeout=PATIENCE_S)
    assert child.returncode == 0, printed
    return str(printed).splitlines()


def read_to(child: Any, start: str) -> str:
    """The next line of a program that begins like this."""
    before = []
    for line in child.stdout:
        before.append(line)
        if line.startswith(start):
            return str(line).rstrip()
    raise AssertionError(f"no line {start!r}: {''.join(before)}")


def wait_for_commit(root: Path, child: Any = None, after: int = 0) -> None:
    """Return when a step after this one is committed."""
    gone = None if child is None else (lambda: child.poll() is not None)
    with ckpt.sync.watch(
        root, after=after, poll_interval=0.02, pin=False, until=gone, timeout=PATIENCE_S
    ) as steps:
        assert next(steps, None) is not None, "no step was committed"


def newest(root: Path) -> int:
    with ckpt.sync.CheckpointManager(root, mode="r") as mgr:
        step = mgr.latest_step()
        assert step is not None
        return step


def killed(
    name: str,
    root: Path,
    *options: object,
    devices: int = 1,
    after: int = 0,
    said: str = "a new run",
) -> int:
    """Kill a run once it has committed a step after this one; return the newest it has then."""
    with started(name, "--root", root, "--steps", NEVER, *options, devices=devices) as child:
        wait_for_commit(root, child, after)
        child.kill()
        printed, _ = child.communicate(timeout=PATIENCE_S)
        assert child.returncode == -signal.SIGKILL, printed
        assert printed.startswith(said), printed
    return newest(root)


def stored(step: Path) -> dict[str, Any]:
    """Every value in a step: arrays and files by the digests of their bytes, scalars as text."""
    manifest = ckpt.manifest.decode((step / "ckpt.json").read_bytes(), where=str(step))
    found: dict[str, Any] = {}
    for name, item in manifest.items.items():
        leaves = [
            (leaf.name, leaf.kind, leaf.dtype, leaf.shape, leaf.digests, leaf.value)
            for leaf in item.leaves
        ]
        # Of other items, the files.
        files = {} if leaves else dict(manifest.files)
        kept = [(f, files[f].digest) for f in sorted(files) if f.startswith(f"{name}/")]
        found[name] = (item.handler, leaves, kept, item.data)
        assert leaves or kept or item.data, f"nothing to compare in item {name}"
    return found


def damage(step: Path, branch: str) -> None:
    """Flip a bit in every array whose path begins like this."""
    manifest = ckpt.manifest.decode((step / "ckpt.json").read_bytes(), where=str(step))
    item = manifest.items["default"]
    leaves = [leaf for leaf in item.leaves if leaf.name.startswith(branch) and leaf.digests]
    assert leaves
    for leaf in leaves:
        file = item.data_files[leaf.files[0] if leaf.files else 0]
        FlipBit(f"default/{file}", leaf.offsets[0] * 8).apply(step)
    with pytest.raises(ckpt.errors.CorruptCheckpointError):
        ckpt.sync.load(step, adapt=ckpt.Adapt(select=branch))


@dataclass(frozen=True, slots=True)
class Runs:
    """A run that was killed and resumed, and one that was not."""

    resumed: list[str]
    whole: list[str]
    resumed_step: Path
    whole_step: Path
    steps: int

    def end_alike(self) -> None:
        """Both did what they had to, and nothing tells their ends apart."""
        assert self.whole[0].startswith("a new run")
        assert re.fullmatch(r"done: step \d+, loss \d+\.\d+(e-\d+)?", self.whole[-1]), self.whole
        assert self.resumed[-1] == self.whole[-1]
        assert stored(self.resumed_step) == stored(self.whole_step)


def both(name: str, tmp_path: Path, *options: object, resumed: str = "resumed at step {}") -> Runs:
    """Kill a run and resume it, beside one that is left alone."""
    first, second = tmp_path / "killed" / "run", tmp_path / "whole" / "run"
    at = killed(name, first, *options)
    return resume_both(name, at, first, second, *options, resumed=resumed.format(at + 1))


def resume_both(
    name: str, at: int, first: Path, second: Path, *options: object, resumed: str
) -> Runs:
    steps = at + MORE
    with (
        started(name, "--root", first, "--steps", steps, *options) as one,
        started(name, "--root", second, "--steps", steps, *options) as other,
    ):
        lines, whole = ended(one), ended(other)
    assert lines[0].startswith(resumed), lines
    last = int(whole[-1].split()[2].rstrip(","))
    return Runs(lines, whole, first / str(last), second / str(last), steps)


# --- The programs ---------------------------------------------------------------------------------


def test_nnx_async_and_an_evaluator_beside_it(tmp_path: Path) -> None:
    first, second = tmp_path / "killed", tmp_path / "whole"
    at = killed("nnx_async", first)
    options = ("--root", first, "--steps", at + MORE)
    with started("nnx_async", *options, "--evaluate") as evaluator:
        runs = resume_both("nnx_async", at, first, second, resumed=f"resumed at step {at + 1}")
        evaluated = ended(evaluator)
    runs.end_alike()
    steps = [int(line.split()[1].rstrip(":")) for line in evaluated]
    assert steps == sorted(set(steps))
    assert steps[-1] == at + MORE - 1
    assert evaluated[-1].split("loss ")[1] == runs.whole[-1].split("loss ")[1]


def test_linen_train_state_and_its_best_step(tmp_path: Path) -> None:
    first, second = tmp_path / "killed", tmp_path / "whole"
    at = killed("linen_train_state", first)
    resumed = f"resumed after step {at}"
    runs = resume_both("linen_train_state", at, first, second, resumed=resumed)
    runs.end_alike()
    with ckpt.sync.CheckpointManager(first, mode="r") as mgr:
        metrics = {step: mgr.metadata(step).info.metrics for step in mgr.all_steps()}
    losses = {step: found["loss"] for step, found in metrics.items() if found}
    best = min(losses, key=losses.__getitem__)
    layers = ckpt.sync.load(first / str(best), at="params")
    damage(first / str(best), "opt_state")
    with started("linen_train_state", "--root", first, "--best") as child:
        (line,) = ended(child)
    assert line.startswith(f"best: step {best}, loss ")
    x = jax.random.normal(jax.random.fold_in(jax.random.key(1), 2**31 - 1), (32, 8))
    hidden, out = (layers[name] for name in ("Dense_1", "Dense_0"))
    y = jax.nn.relu(x @ hidden["kernel"] + hidden["bias"]) @ out["kernel"] + out["bias"]
    loss = float(np.mean((y[:, 0] - np.sin(x.sum(-1))) ** 2))
    assert float(line.split()[-1]) == pytest.approx(loss, rel=1e-5)


def test_equinox_module(tmp_path: Path) -> None:
    both("equinox_module", tmp_path).end_alike()


def test_plain_loop_preemption(tmp_path: Path) -> None:
    first, second = tmp_path / "killed", tmp_path / "whole"
    with started("plain_loop_preemption", "--root", first, "--steps", NEVER) as child:
        read_to(child, "step 0")
        child.send_signal(signal.SIGTERM)
        *_, last = ended(child)
    at = newest(first)
    assert last == f"preempted: saving step {at}"
    assert at > 0
    resumed = f"resumed at step {at + 1}"
    resume_both("plain_loop_preemption", at, first, second, resumed=resumed).end_alike()


def test_job_with_peers_that_loses_a_host_with_its_memory(tmp_path: Path) -> None:
    options = ("--steps", 500, "--save-every", 200)
    with (
        shared_memory() as memory,
        started(
            "job_with_peers", "--root", tmp_path / "killed", *options, "--hosts", memory
        ) as one,
        started("job_with_peers", "--root", tmp_path / "whole", *options) as other,
    ):
        processes = list(map(int, read_to(one, "processes").split()[1:]))
        read_to(one, "step 299")
        os.kill(processes[1], signal.SIGKILL)
        shutil.rmtree(memory / "host-1")
        # The root has step 199.
        assert int(read_to(one, "resumed at step ").split()[-1]) > 200
        lines, whole = ended(one), ended(other)
        assert re.fullmatch(r"done: step 499, loss 0\.\d+", whole[-1])
        assert lines[-1] == whole[-1]
        assert [list(each.iterdir()) for each in memory.iterdir()] == [[], [], []]
    assert stored(tmp_path / "killed" / "499") == stored(tmp_path / "whole" / "499")


def test_lora_shares_its_base_model_with_every_step(tmp_path: Path) -> None:
    first, second = tmp_path / "killed" / "run", tmp_path / "whole" / "run"
    at = killed("lora", first)
    base = first.with_name("run-base")
    assert set(ckpt.sync.metadata(base).tree["params"]) == {"embed", "hidden", "out"}
    # A new run reads the parameters alone; one that goes on needs nothing of it but signs.
    damage(base, "opt_state")
    second.parent.mkdir()
    shutil.copytree(base, second.with_name("run-base"))
    damage(base, "params")
    runs = resume_both("lora", at, first, second, resumed=f"resumed at step {at + 1}")
    runs.end_alike()
    assert runs.resumed[-2] == runs.whole[-2] == "the base is what it was: True"
    # Also the first save after a resume shares it.
    hidden = 512 * 512 * 4
    kept, whole = written(runs.resumed), written(runs.whole)
    assert all(shared == hidden and rest < hidden // 10 for rest, shared in kept)
    assert len(kept) >= 2
    assert whole[0][1] == 0
    assert all(shared == hidden and rest < hidden // 10 for rest, shared in whole[1:])
    for root in (first, second):
        with ckpt.sync.CheckpointManager(root, mode="r") as mgr:
            assert mgr.latest_step() == runs.steps - 1
            assert mgr.verify().ok
            assert ckpt.extensions.VitalSigns.of(mgr.metadata().tree["adapter"]["up"]) is not None


def written(lines: list[str]) -> list[tuple[int, int]]:
    """How many bytes each save wrote and shared, as the program printed them."""
    found = re.findall(r"step \d+: (\d+) bytes written, (\d+) shared", "\n".join(lines))
    return [(int(rest), int(shared)) for rest, shared in found]


def test_grain_items(tmp_path: Path) -> None:
    first, second = tmp_path / "killed", tmp_path / "whole"
    at = killed("grain_items", first, "--rate", 0.02)
    steps = at + MORE
    with (
        # The rate of the first start is kept.
        started("grain_items", "--root", first, "--steps", steps, "--rate", 0.5) as one,
        started("grain_items", "--root", second, "--steps", steps, "--rate", 0.02) as other,
    ):
        lines, whole = ended(one), ended(other)
    assert lines[0] == f"resumed at step {at + 1} Config(rate=0.02, noise=0.01)"
    last = str(steps - 1)
    assert set(stored(first / last)) == {"model", "data", "config", "key"}
    Runs(lines, whole, first / last, second / last, steps).end_alike()


def test_another_mesh(tmp_path: Path) -> None:
    first, second = tmp_path / "killed", tmp_path / "whole"
    at = killed("another_mesh", first, "--mesh", "4x2", devices=8)
    steps = at + MORE
    with (
        started(
            "another_mesh", "--root", first, "--steps", steps, "--mesh", "2x2", devices=8
        ) as one,
        started("another_mesh", "--root", second, "--steps", steps, devices=8) as other,
    ):
        lines, whole = ended(one), ended(other)
    assert lines[0] == f"resumed at step {at + 1}"
    for found, shape in ((lines[1], "'x': 2, 'y': 2"), (whole[1], "'x': 4, 'y': 2")):
        assert found.startswith(f"NamedSharding(mesh=Mesh({shape}")
        assert "spec=P('x', 'y')" in found
    assert lines[-1] == whole[-1]
    resumed = ckpt.sync.load(first / str(steps - 1))  # on the mesh that it was saved from
    moments, _ = resumed["opt_state"]
    assert isinstance(moments, optax.ScaleByAdamState)
    for array in (resumed["params"]["hidden"], moments.mu["hidden"], moments.nu["hidden"]):
        assert array.sharding.shard_shape(array.shape) == (4, 32)
    # The chunks and the places differ, as the meshes do; the values do not.
    loaded = [ckpt.sync.load(root / str(steps - 1)) for root in (first, second)]
    values = [[np.asarray(leaf) for leaf in jax.tree.leaves(each)] for each in loaded]
    assert differences(*values) == []


def test_moved_from_orbax(tmp_path: Path) -> None:
    first, second = tmp_path / "killed", tmp_path / "whole"
    name = "moved_from_orbax"
    with started(name, "--orbax", "--root", first, "--steps", 70) as child:
        assert ended(child)[0] == "a new run"
    left = sorted(file for file in first.rglob("*") if file.is_file())
    at = killed(name, first, after=50, said="resumed at step 51\n")
    steps = at + MORE
    with (
        started(name, "--root", first, "--steps", steps) as one,
        # The old trainer, had it not been moved.
        started(name, "--orbax", "--root", second, "--steps", steps) as other,
    ):
        lines, whole = ended(one), ended(other)
    assert f"resumed at step {at + 1}" in lines
    assert whole[0] == "a new run"
    assert lines[-1] == whole[-1]
    assert set(left) <= set(first.rglob("*"))
    with ckpt.sync.CheckpointManager(first, mode="r") as mgr:
        assert {0, 50, steps - 1} <= set(mgr.all_steps())
        best = mgr.best_step("loss", "min")
    assert f"best: step {best}" in lines
    with started(name, "--orbax", "--root", first, "--steps", steps + 20) as back:
        assert ended(back)[0] == f"resumed at step {steps}"


def test_fastapi_service(tmp_path: Path) -> None:
    first, second = tmp_path / "killed", tmp_path / "whole"
    port = free_port()
    with (
        started("fastapi_service", "--root", first, "--serve", port) as service,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE_S) as client,
    ):
        read_to(service, "INFO:     Uvicorn running")
        assert client.get("/step").status_code == 503
        at = killed("fastapi_service", first)
        resumed = f"resumed at step {at + 1}"
        runs = resume_both("fastapi_service", at, first, second, resumed=resumed)
        runs.end_alike()
        last = runs.steps - 1
        read_to(service, f"serving step {last}")
        found = client.get("/step").json()
        assert (found["step"], found["path"]) == (last, str(first / str(last)))
        params = ckpt.sync.load(first / str(last), at="params")
        hidden, out = (np.asarray(params[name]) for name in ("hidden", "out"))
        answer = client.get("/predict", params={"x": 0.5}).json()
        assert answer == {"step": last, "y": pytest.approx(np.tanh(0.5 * hidden) @ out, rel=1e-5)}
        service.send_signal(signal.SIGTERM)
        service.communicate(timeout=PATIENCE_S)
    with ckpt.sync.CheckpointManager(first, mode="r") as mgr:
        assert mgr.pins() == {}


def test_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # No settings of the user's, neither read nor written.
    for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    first, second = tmp_path / "killed", tmp_path / "whole"
    root = first / "runs" / "notebook"
    with ThreadPoolExecutor(2) as two:
        client = notebook(first, NEVER)
        session = two.submit(execute, client)
        wait_for_commit(root)
        assert client.km is not None
        kernel = client.km.provisioner
        assert isinstance(kernel, LocalProvisioner)
        assert kernel.pid is not None
        os.kill(kernel.pid, signal.SIGKILL)
        with pytest.raises(nbclient.exceptions.DeadKernelError):
            session.result()
        at = newest(root)
        clients = [notebook(folder, at + MORE) for folder in (first, second)]
        resumed, whole = (printed(found) for found in two.map(execute, clients))
    assert resumed["open"] == f"resumed at step {at + 1}\n"
    assert whole["open"] == "a new run\n"
    last = at + MORE - 1
    assert resumed["done"].startswith(f"done: step {last}, loss ")
    assert resumed["done"] == whole["done"]
    assert "; the same: True" in resumed["export"]
    assert stored(root / str(last)) == stored(second / "runs" / "notebook" / str(last))


def test_the_notebook_holds_no_outputs() -> None:
    cells = json.loads((EXAMPLES / "notebook.ipynb").read_text())["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)


def notebook(folder: Path, steps: int) -> nbclient.NotebookClient:
    """A session that runs the notebook in this folder, with another number of steps."""
    folder.mkdir(exist_ok=True)
    cells: Any = nbformat.read(EXAMPLES / "notebook.ipynb", as_version=4)
    (cell,) = [cell for cell in cells.cells if "steps = 1000" in cell.source]
    cell.source = cell.source.replace("steps = 1000", f"steps = {steps}")
    return nbclient.NotebookClient(
        cells,
        timeout=PATIENCE_S,
        kernel_name="python3",
        resources={"metadata": {"path": str(folder)}},
    )


def execute(client: nbclient.NotebookClient) -> Any:
    """Run a session in a thread, which has no event loop yet."""
    return asyncio.run(client.async_execute())


def printed(ran: Any) -> dict[str, str]:
    """What each cell printed."""
    return {
        cell.id: "".join(out.text for out in cell.outputs if out.output_type == "stream")
        for cell in ran.cells
        if cell.cell_type == "code"
    }


def test_every_program_is_in_the_table() -> None:
    page = (ROOT / "docs" / "how-to" / "programs.md").read_text()
    named = set(re.findall(r"`docs/examples/([a-z_]+\.(?:py|ipynb))`", page))
    assert named == {file.name for file in EXAMPLES.iterdir() if file.is_file()}
