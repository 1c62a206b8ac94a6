"""Kill a training run in the middle of a save, start it again, and get the same model bit by bit.

A small byte-level transformer learns the documentation that ships with Python, on eight host
devices with sharded parameters. Three runs, each in a process of its own:

1. an uninterrupted one;
2. the same in another directory, which sends itself SIGKILL while a save is under way;
3. run 2 started again: it resumes from the latest committed step and goes on to the end.

Runs 1 and 3 must end with identical bytes in every leaf of the parameters and the optimizer state.

    python docs/examples/resume_after_kill.py [--quick] [--steps N] [--every N] [--root DIR]
"""

import argparse
import asyncio
import contextlib
import hashlib
import json
import os
import pydoc_data.topics
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, Sharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import ckpt

State = dict[str, Any]
MESH_SHAPE = (2, 4)
CHILD_TIME_LIMIT_S = 90
# Weights whose columns are split over "model", and those whose rows are; the rest is replicated.
COLUMNS = {"query", "key", "value", "up", "embed", "head"}
ROWS = {"out", "down"}
OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))


# --- The model: nothing here knows about checkpoints ----------------------------------------------


@dataclass(frozen=True)
class Config:
    """Sizes of the model and of one batch."""

    width: int = 256
    layers: int = 4
    heads: int = 4
    length: int = 64
    batch: int = 8
    vocab: int = 256  # bytes


FULL, QUICK = Config(), Config(layers=1)


def corpus() -> np.ndarray:
    """Return the language reference that ships with Python, as bytes."""
    topics = pydoc_data.topics.topics
    text = "\n".join(str(topics[name]) for name in sorted(topics))
    return np.frombuffer(text.encode(), np.uint8)


def batch(text: np.ndarray, step: int, config: Config) -> np.ndarray:
    """Return the batch of one step: a function of nothing else, so a resumed run sees it again."""
    starts = np.random.default_rng(step).integers(0, len(text) - config.length - 1, config.batch)
    return text[starts[:, None] + np.arange(config.length + 1)].astype(np.int32)


def init(config: Config) -> State:
    """Return the state of step 0."""
    keys = iter(jax.random.split(jax.random.key(0), 3 + 6 * config.layers))
    width = config.width

    def matrix(rows: int, columns: int) -> jax.Array:
        return jax.random.normal(next(keys), (rows, columns)) * rows**-0.5

    def layer() -> State:
        square = {name: matrix(width, width) for name in ("query", "key", "value", "out")}
        norms = {"norm_1": jnp.ones(width), "norm_2": jnp.ones(width)}
        return square | norms | {"up": matrix(width, 4 * width), "down": matrix(4 * width, width)}

    params = {
        "embed": matrix(config.vocab, width),
        "position": matrix(config.length, width),
        "layers": [layer() for _ in range(config.layers)],
        "norm": jnp.ones(width),
        "head": matrix(width, config.vocab),
    }
    return {"params": params, "opt_state": OPTIMIZER.init(params), "step": jnp.zeros((), jnp.int32)}


def normalize(x: jax.Array, scale: jax.Array) -> jax.Array:
    """RMS norm."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * scale


def attend(layer: State, x: jax.Array, heads: int) -> jax.Array:
    """Causal self-attention."""
    split = (*x.shape[:-1], heads, x.shape[-1] // heads)
    query, key, value = ((x @ layer[name]).reshape(split) for name in ("query", "key", "value"))
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) * split[-1] ** -0.5
    causal = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    weights = jax.nn.softmax(jnp.where(causal, scores, -1e9))
    return jnp.einsum("bhqk,bkhd->bqhd", weights, value).reshape(x.shape) @ layer["out"]


def loss_of(params: State, tokens: jax.Array, config: Config) -> jax.Array:
    """Return the mean cross entropy of the next byte."""
    x = params["embed"][tokens[:, :-1]] + params["position"]
    for layer in params["layers"]:
        x = x + attend(layer, normalize(x, layer["norm_1"]), config.heads)
        x = x + jax.nn.gelu(normalize(x, layer["norm_2"]) @ layer["up"]) @ layer["down"]
    logits = normalize(x, params["norm"]) @ params["head"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def advance(state: State, tokens: jax.Array, config: Config) -> tuple[State, jax.Array]:
    """One train step."""
    loss, grads = jax.value_and_grad(loss_of)(state["params"], tokens, config)
    updates, opt_state = OPTIMIZER.update(grads, state["opt_state"], state["params"])
    params = optax.apply_updates(state["params"], updates)
    return {"params": params, "opt_state": opt_state, "step": state["step"] + 1}, loss


def abstract_state(config: Config, mesh: Mesh | None) -> State:
    """Return shapes, dtypes and shardings of the state, computing and allocating nothing.

    Args:
        config: Sizes of the model.
        mesh: What to shard over; None places every leaf whole on the first device.

    Returns:
        A tree like the state with a `jax.ShapeDtypeStruct` for each leaf.
    """

    def place(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        sharding: Sharding = SingleDeviceSharding(jax.devices()[0])
        if mesh is not None:
            # Adam's moments are trees like the parameters: the same names, the same shardings.
            name = getattr(path[-1], "key", None)
            spec = P(None, "model") if name in COLUMNS else P("model") if name in ROWS else P()
            sharding = NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree_util.tree_map_with_path(place, jax.eval_shape(lambda: init(config)))


# --- A run: the part to copy ----------------------------------------------------------------------


async def train(args: argparse.Namespace, config: Config) -> dict[str, Any]:
    """Train to the last step, resuming from whatever is committed; return what to report."""
    mesh = Mesh(np.array(jax.devices()).reshape(MESH_SHAPE), ("data", "model"))
    target = abstract_state(config, mesh)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, target)
    by_data = NamedSharding(mesh, P("data"))
    train_step = jax.jit(
        lambda state, tokens: advance(state, tokens, config),
        in_shardings=(shardings, by_data),
        out_shardings=(shardings, NamedSharding(mesh, P())),
        donate_argnums=0,
    )
    text, clock, losses = corpus(), Clock(), []
    async with ckpt.CheckpointManager(args.root, keep=3) as mgr:
        fresh = jax.jit(lambda: init(config), out_shardings=shardings)
        start, state = await mgr.resume(lambda: fresh(), like=target)
        start = max(start, 1)  # this run counts its steps from 1
        for step in range(start, args.steps + 1):
            with clock.step():
                tokens = jax.device_put(batch(text, step, config), by_data)
                state, loss = train_step(state, tokens)
                losses.append(float(loss))  # waits for the step
            if step % args.every == 0 or step == args.steps:
                save = Save(step, called=time.perf_counter())
                commit = await mgr.save(step, state, metrics={"loss": losses[-1]})
                clock.saved(save, commit)
                if args.kill_at is not None and step >= args.kill_at and not commit.done():
                    die(step, commit, durable=clock.durable_step())
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    ends = {"loss": (losses[0], losses[-1]), "bytes": size, "sha256": digest(state)}
    return clock.summary() | {"start": start - 1} | ends


def die(step: int, commit: "ckpt.Commit", durable: int) -> NoReturn:
    """Say how far the save is, then die as a lost machine does: no cleanup, no goodbye."""
    how_far = f"stage {commit.stage}, progress {commit.progress}"
    print(f"  killed in the save of step {step} ({how_far}); durable: {durable}", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("unreachable")


def digest(state: State) -> str:
    """Return one SHA-256 over the bytes of all leaves."""
    whole = hashlib.sha256()
    for leaf in jax.tree.leaves(state):
        whole.update(np.asarray(leaf).tobytes())
    return whole.hexdigest()


@dataclass
class Save:
    """When one save was called, returned and became durable."""

    step: int
    called: float
    returned: float = 0.0
    durable: float = 0.0


class Clock:
    """When steps ran and saves were under way."""

    def __init__(self) -> None:
        """Start with nothing measured."""
        self.steps: list[tuple[float, float]] = []
        self.saves: list[Save] = []

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Measure one train step."""
        began = time.perf_counter()
        yield
        self.steps.append((began, time.perf_counter()))

    def saved(self, save: Save, commit: "ckpt.Commit") -> None:
        """Note that `save()` returned just now, and have the commit note when it is durable."""
        save.returned = time.perf_counter()
        self.saves.append(save)
        commit.add_done_callback(lambda _: setattr(save, "durable", time.perf_counter()))

    def durable_step(self) -> int:
        """Return the latest step known to be durable, 0 if none is."""
        return max((save.step for save in self.saves if save.durable), default=0)

    def summary(self) -> dict[str, Any]:
        """Return durations in seconds."""
        steps = self.steps[1:]  # the first one compiles
        beside = [[s for s in steps if s[0] < v.durable and s[1] > v.called] for v in self.saves]
        disturbed = {step for group in beside for step in group}
        # On a disk so slow that a save is always under way there is nothing better than all steps.
        calm = [step for step in steps if step not in disturbed] or steps
        usual = statistics.median(t1 - t0 for t0, t1 in calm)
        blocked = [save.returned - save.called for save in self.saves]
        slowdown = [sum(t1 - t0 - usual for t0, t1 in group) for group in beside]
        return {
            "steps": len(self.steps),
            "usual": usual,
            "blocked": blocked,
            # No step follows the last save, so it has no slowdown to count.
            "lost": [b + s for b, s in zip(blocked, slowdown, strict=True)][:-1],
            "durable": [save.durable - save.called for save in self.saves],
        }


# --- The three runs and the verdict ---------------------------------------------------------------


def launch(root: Path, args: argparse.Namespace, *extra: str) -> subprocess.CompletedProcess[str]:
    """Run one training process with its checkpoints in `root` to its end, within a time limit."""
    # The device count is read when jax starts: it has to be there before the process does.
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags.strip()}
    command = [sys.executable, __file__, "--child", "--root", str(root), *extra]
    command += ["--steps", str(args.steps), "--every", str(args.every)]
    command += ["--quick"] if args.quick else []
    limit = CHILD_TIME_LIMIT_S
    child = subprocess.run(  # its errors go to our stderr as they come
        command, env=env, timeout=limit, stdout=subprocess.PIPE, text=True, check=False
    )
    print(child.stdout, end="", flush=True)
    return child


def finish(root: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Run to the last step and return the report."""
    code = launch(root, args).returncode
    if code != 0:
        fail(f"the run in {root} ended with return code {code}")
    return json.loads(root.with_suffix(".json").read_text())


def kill(root: Path, args: argparse.Namespace) -> tuple[int, list[int]]:
    """Run until it kills itself in a save; return that save's step and the committed ones."""
    middle = args.steps // args.every // 2 * args.every
    child = launch(root, args, "--kill-at", str(middle))
    if child.returncode != -signal.SIGKILL:
        fail(f"run 2 should have died of SIGKILL in a save, not with {child.returncode}")
    killed, durable = map(int, re.findall(r"step (\d+) .*durable: (\d+)", child.stdout)[0])
    with ckpt.sync.CheckpointManager(root, mode="r") as mgr:
        committed = list(mgr.all_steps())
    if killed in committed:
        fail(f"step {killed} is listed as committed, but its save was cut short")
    if durable not in committed:
        fail(f"step {durable} was durable before the kill, but only {committed} are listed")
    return killed, committed


def fail(message: str) -> NoReturn:
    """End the demo: something it promises did not happen."""
    raise SystemExit(f"FAILED: {message}")


def differing_leaves(first: Path, second: Path, target: State) -> list[str]:
    """Return the paths of leaves whose bytes differ between two checkpoints."""
    left = jax.tree.leaves_with_path(ckpt.sync.load(first, like=target))
    right = jax.tree.leaves(ckpt.sync.load(second, like=target))
    return [
        jax.tree_util.keystr(path)
        for (path, a), b in zip(left, right, strict=True)
        if a.dtype != b.dtype or np.asarray(a).tobytes() != np.asarray(b).tobytes()
    ]


def print_table(reports: list[dict[str, Any]]) -> None:
    """Print what saving cost the uninterrupted and the resumed run."""

    def ms(seconds: list[float]) -> str:
        shown = (statistics.median(seconds), seconds[0], max(seconds)) if seconds else ()
        return " / ".join(f"{1e3 * value:.1f}" for value in shown)

    def rate(report: dict[str, Any]) -> float:
        return report["bytes"] / statistics.median(report["durable"]) / 1e9

    rows: dict[str, Callable[[dict[str, Any]], str]] = {
        "steps trained": lambda r: f"{r['start'] + 1} to {r['start'] + r['steps']}",
        "loss, first and last step": lambda r: "{:.3f} / {:.3f}".format(*r["loss"]),
        "step with no save under way, ms": lambda r: f"{1e3 * r['usual']:.1f}",
        "commits": lambda r: str(len(r["durable"])),
        "bytes per checkpoint": lambda r: f"{r['bytes']:,}",
        "blocked per save, ms (median / first / max)": lambda r: ms(r["blocked"]),
        "training lost per save, ms (same)": lambda r: ms(r["lost"]),
        "call to commit, ms (same)": lambda r: ms(r["durable"]),
        "durable GB/s (median)": lambda r: f"{rate(r):.2f}",
    }
    print(f"\n{'':44}{'uninterrupted':>24}{'resumed':>24}")
    for name, cell in rows.items():
        print(f"{name:44}" + "".join(f"{cell(report):>24}" for report in reports))


def demonstrate(args: argparse.Namespace, config: Config, base: Path) -> None:
    """Do the three runs below `base` and compare their ends."""
    whole, cut = base / "uninterrupted", base / "interrupted"
    if whole.exists() or cut.exists():
        fail(f"{base} holds the runs of an earlier demo; give another --root")
    print(f"run 1: {args.steps} steps, a save every {args.every}", flush=True)
    first = finish(whole, args)
    print("run 2: the same, until it dies", flush=True)
    killed, committed = kill(cut, args)
    print(f"run 3: run 2 again; its committed steps: {committed}", flush=True)
    resumed = finish(cut, args)
    print_table([first, resumed])
    print(f"\nkilled in the save of step {killed}, resumed from step {resumed['start']}")
    if resumed["start"] != max(committed):
        fail(f"the latest committed step was {max(committed)}")
    # One device is enough to compare, though eight wrote the checkpoints.
    target = abstract_state(config, mesh=None)
    last = str(args.steps)
    differing = differing_leaves(whole / last, cut / last, target)
    same = not differing and first["sha256"] == resumed["sha256"]
    print(f"parameters and optimizer state bit-identical: {'yes' if same else 'NO'}")
    if differing:
        fail(f"{len(differing)} leaves differ in the checkpoints of step {last}: {differing[:8]}")
    if not same:
        fail("the checkpoints agree, but the states in memory at the end did not")


def parse() -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, help="train steps (default 100; quick: 16)")
    parser.add_argument("--every", type=int, help="steps between saves (default 10; quick: 4)")
    parser.add_argument("--root", type=Path, help="keep the checkpoints here (default: do not)")
    parser.add_argument("--quick", action="store_true", help="a smaller model, fewer steps")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--kill-at", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.steps = args.steps or (16 if args.quick else 100)
    args.every = args.every or (4 if args.quick else 10)
    if args.every < 1 or args.steps < 4 * args.every:
        parser.error("a run should hold at least four saves: --steps >= 4 * --every")
    return args


def main() -> None:
    """Be the parent, or one of its children."""
    args = parse()
    config = QUICK if args.quick else FULL
    if args.child:
        report = asyncio.run(train(args, config))
        args.root.with_suffix(".json").write_text(json.dumps(report))
        return
    jax.config.update("jax_platforms", "cpu")
    base = args.root or Path(tempfile.mkdtemp(prefix="resume-after-kill-"))
    try:
        demonstrate(args, config, base)
    finally:
        if args.root is None:
            shutil.rmtree(base, ignore_errors=True)


if __name__ == "__main__":
    main()
