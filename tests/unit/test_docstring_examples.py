"""Every public call has an example in its docstring, and every example runs."""

from __future__ import annotations

import ast
import asyncio
import errno
import importlib
import inspect
import itertools
import pkgutil
import pydoc
import re
import shutil
import signal
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import prometheus_client
import pytest
import safetensors.numpy
from google.protobuf.struct_pb2 import Struct

import ckpt
from ckpt._events import Event
from tests.support.stateful_objects import Counter

# Tools for tests; the docstrings of their modules show how they are used together.
TOOLS = "ckpt.testing"
RETURNED = "is returned by calls, whose examples show it"
CALLED_BACK = "is called by the library"
WITHOUT_EXAMPLE = {
    "ckpt.types.Event": "is passed to observers",
    "ckpt.types.UnknownNode": "stands for a class that is missing, so no example can have one",
    "ckpt.handlers.Deferred": "is for those who write handlers; docs/how-to/items.md has one",
    "ckpt.handlers.Deferred.close": CALLED_BACK,
    "ckpt.save_when.SaveContext": "is passed to policies",
    "ckpt.keep.SavedStep": "is passed to policies",
    "ckpt.observers.Span": RETURNED,
    "ckpt.types.ItemInfo": RETURNED,
    "ckpt.types.LeafInfo": RETURNED,
    "ckpt.types.Pin": RETURNED,
    "ckpt.types.TrashedStep": RETURNED,
    "ckpt.types.Problem": RETURNED,
    "ckpt.orbax.NameFormat.build_name": "is called by Orbax",
    "ckpt.orbax.NameFormat.find_all": "is called by Orbax",
    "ckpt.handlers.PyTreeHandler.packs": CALLED_BACK,
    "ckpt.Adapt.dtype_for": CALLED_BACK,
    "ckpt.Adapt.resize_for": CALLED_BACK,
    "ckpt.Blosc.codec": CALLED_BACK,
    "ckpt.Zstd.codec": CALLED_BACK,
    "ckpt.StepInfo.time_of": CALLED_BACK,
}
FENCE = re.compile(r"^( *)```python\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
LIMIT_SECONDS = 120


def modules() -> Iterator[ModuleType]:
    yield ckpt
    for found in pkgutil.walk_packages(ckpt.__path__, "ckpt."):
        if "._" not in found.name:
            yield importlib.import_module(found.name)


def members(module: ModuleType) -> list[Any]:
    # Some are imported when they are first asked for.
    named = [getattr(module, name) for name in getattr(module, "__all__", ())]
    return [*vars(module).values(), *named]


MODULES = list(modules())
PROTOCOLS = [
    value
    for module in MODULES
    for value in members(module)
    if getattr(value, "_is_protocol", False) and value.__module__.startswith("ckpt.")
]


def methods(cls: type) -> dict[str, Any]:
    """The public methods that the library gives a class."""
    return {
        name: getattr(value, "__func__", value)
        for base in reversed(cls.__mro__)
        for name, value in vars(base).items()
        if base.__module__.startswith("ckpt.")
        and not name.startswith("_")
        and inspect.isfunction(getattr(value, "__func__", value))
    }


def is_implementation(cls: type, name: str) -> bool:
    """Whether the library calls this method, because the class follows a protocol."""
    wanted = [methods(protocol) for protocol in PROTOCOLS]
    return any(name in each and each.keys() <= methods(cls).keys() for each in wanted)


def public() -> dict[str, Any]:
    """Functions, classes and methods by the first name that users have for them."""
    found: dict[str, Any] = {}
    seen: set[int] = set()
    for module in MODULES:
        for name in getattr(module, "__all__", ()):
            value = getattr(module, name)
            if id(value) in seen or not (inspect.isfunction(value) or inspect.isclass(value)):
                continue
            seen.add(id(value))
            found[f"{module.__name__}.{name}"] = value
            if inspect.isclass(value):
                for method, function in methods(value).items():
                    found[f"{module.__name__}.{name}.{method}"] = function
    return found


PUBLIC = public()


def is_record(cls: type) -> bool:
    return issubclass(cls, msgspec.Struct) and cls.__module__.startswith("ckpt._format.")


def needs_example(name: str) -> bool:
    if name.startswith(TOOLS) or name in WITHOUT_EXAMPLE:
        return False
    owner = PUBLIC.get(name.rpartition(".")[0])
    value = PUBLIC[name]
    cls = value if inspect.isclass(value) else owner
    if cls is None:
        return True
    # Errors are raised by the library, records are read from manifests, protocols have no code.
    if issubclass(cls, Exception) or cls in PROTOCOLS or cls is Any or is_record(cls):
        return False
    return value is cls or not is_implementation(cls, name.rpartition(".")[2])


def examples() -> Iterator[tuple[str, str]]:
    documented = {module.__name__: module for module in MODULES} | PUBLIC
    for name, value in documented.items():
        # Dataclasses have the docstring of a protocol that they follow only by inheritance.
        for number, (_, code) in enumerate(FENCE.findall(inspect.cleandoc(value.__doc__ or ""))):
            yield f"{name}-{number}" if number else name, textwrap.dedent(code)


EXAMPLES = dict(examples())


@pytest.mark.parametrize("name", [*filter(needs_example, PUBLIC)])
def test_every_public_call_has_an_example(name: str) -> None:
    assert "Example:\n    ```python\n" in inspect.cleandoc(PUBLIC[name].__doc__ or "")


def test_every_exception_from_the_rule_is_needed() -> None:
    assert set(WITHOUT_EXAMPLE) <= set(PUBLIC)
    assert not set(WITHOUT_EXAMPLE) & set(EXAMPLES)


def test_there_is_one_form_of_examples() -> None:
    for name, value in PUBLIC.items():
        text = inspect.cleandoc(value.__doc__ or "")
        assert ">>>" not in text, name
        assert text.count("Example:\n") == text.count("Example:\n    ```python\n"), name
        # A block that is indented without a fence.
        assert not re.search(r"\n\n    (?!Example)\S", FENCE.sub("", text)), name


class TrainState(NamedTuple):
    params: dict[str, jax.Array]
    opt_state: dict[str, jax.Array]


def init_state() -> dict[str, Any]:
    return {
        "params": {"w": jnp.zeros((4, 8)), "b": jnp.zeros(8)},
        "opt_state": {"momentum": jnp.zeros((4, 8))},
    }


@jax.jit
def train_step(state: dict[str, Any]) -> dict[str, Any]:
    return jax.tree.map(lambda leaf: leaf + 1, state)


LAYER = {"query": np.ones((4, 4), np.float32), "key": np.zeros((4, 4), np.float32)}
SCANNED = {"layers": {name: np.stack([leaf, leaf]) for name, leaf in LAYER.items()}}


class Template(NamedTuple):
    folder: Path
    events: list[Event]


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Template:
    """The folder that every example starts in a copy of, and what was observed meanwhile."""
    folder = tmp_path_factory.mktemp("template")
    events: list[Event] = []
    root = folder / "runs" / "a"
    with ckpt.sync.CheckpointManager(
        root, custom_metadata={"model": "tiny"}, observers=[events.append]
    ) as mgr:
        for step in (100, 200):
            mgr.save(step, init_state(), metrics={"loss": 1 / step})
    with ckpt.sync.CheckpointManager(folder / "runs" / "b") as mgr:
        mgr.save(50, init_state())
    ckpt.sync.save(folder / "runs" / "unrolled", {"layers": {"0": LAYER, "1": LAYER}})
    ckpt.sync.save(folder / "runs" / "scanned", SCANNED)
    (folder / "config.json").write_text("{}")
    (folder / "models" / "llama").mkdir(parents=True)
    safetensors.numpy.save_file(
        {"w": np.zeros((4, 8), np.float32), "b": np.zeros(8, np.float32)},
        folder / "models" / "llama" / "model.safetensors",
    )
    return Template(folder, events)


def namespace(template: Template) -> dict[str, Any]:
    state = init_state()
    trace = ckpt.observers.Trace()
    for event in template.events:
        trace(event)
    manifest = Path("runs/a/100/ckpt.json")
    return {
        "__name__": "example",
        **{"ckpt": ckpt, "jax": jax, "jnp": jnp, "np": np, "Path": Path},
        **{"signal": signal, "time": time},
        **{"init_state": init_state, "train_step": train_step, "evaluate": lambda state: 0.5},
        **{"state": state, "params": state["params"], "scanned": SCANNED, "TrainState": TrainState},
        **{"root": "runs/a", "path": "runs/a/100", "saved": state, "step": 400, "trace": trace},
        "sharding": jax.sharding.SingleDeviceSharding(jax.devices()[0]),
        "iterator": Counter(),
        "message": Struct(),
        "read_config": lambda path: path.read_text(),
        "manifest": ckpt.manifest.decode(manifest.read_bytes(), where=str(manifest)),
    }


@pytest.fixture
def space(template: Template, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    shutil.copytree(template.folder, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    # A registry has each name once, and the one of prometheus-client lives as long as the process.
    monkeypatch.setattr(prometheus_client, "REGISTRY", prometheus_client.CollectorRegistry())
    # There is no job here to join.
    monkeypatch.setattr(jax.distributed, "initialize", lambda: None)
    monkeypatch.setattr(ckpt.coordination, "JaxDistributed", ckpt.coordination.SingleProcess)
    return namespace(template)


def tools() -> dict[str, Any]:
    """What tests of users have, in which the examples of tools for tests stand."""
    found = {
        name: getattr(module, name)
        for module in MODULES
        if module.__name__.startswith(TOOLS)
        for name in getattr(module, "__all__", ())
    }
    return found | {"errno": errno, "itertools": itertools, "pytest": pytest}


@pytest.mark.timeout(LIMIT_SECONDS)
@pytest.mark.parametrize("name", EXAMPLES)
def test_every_example_runs(name: str, space: dict[str, Any]) -> None:
    source = EXAMPLES[name]
    code = compile(source, name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    if "until=1000" in source:
        with ckpt.sync.CheckpointManager(space["root"]) as mgr:
            mgr.save(1000, space["state"])
    if name.startswith(TOOLS):
        space |= tools() | {"tmp_path": Path.cwd()}
    if code.co_flags & inspect.CO_COROUTINE:
        asyncio.run(asyncio.wait_for(run_awaiting(code, space), LIMIT_SECONDS))
        return
    with ckpt.sync.CheckpointManager(space["root"]) as mgr:
        space |= {"mgr": mgr, "commit": mgr.save(250, space["state"])}
        exec(code, space)


async def run_awaiting(code: CodeType, space: dict[str, Any]) -> None:
    async with ckpt.CheckpointManager(space["root"]) as mgr:
        space |= {"mgr": mgr, "commit": await mgr.save(250, space["state"])}
        await eval(code, space)


@pytest.mark.parametrize("name", [name for name in PUBLIC if ".sync." in name or ".Sync" in name])
def test_the_help_of_a_plain_call_stands_on_its_own(name: str) -> None:
    text = pydoc.plain(pydoc.render_doc(PUBLIC[name])).lower()
    assert "see `ckpt." not in text
    assert "await" not in text
    assert "async with" not in text
    assert "cancellation" not in text
    assert "coroutine" not in text
    assert "example:" in text
