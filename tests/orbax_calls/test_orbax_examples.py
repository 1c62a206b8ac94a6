"""Every example in a docstring of `ckpt_orbax` runs."""

from __future__ import annotations

import dataclasses
import inspect
import pkgutil
import re
import shutil
import textwrap
import time
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from google.protobuf.struct_pb2 import Struct

import ckpt_orbax as ocp
from ckpt_orbax import v1

FENCE = re.compile(r"^( *)```python\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)


def documented() -> Iterator[tuple[str, str]]:
    for module in pkgutil.walk_packages(ocp.__path__, "ckpt_orbax."):
        for name, value in vars(import_module(module.name)).items():
            if getattr(value, "__module__", None) != module.name or name.startswith("_"):
                continue
            yield f"{module.name}.{name}", inspect.getdoc(value) or ""
            if inspect.isclass(value):
                for method, function in vars(value).items():
                    if inspect.isfunction(function) and not method.startswith("_"):
                        yield f"{module.name}.{name}.{method}", inspect.getdoc(function) or ""


EXAMPLES = {
    name: textwrap.dedent(found[2])
    for name, text in documented()
    for found in FENCE.finditer(text)
    # That one needs a process without Orbax; test_orbax_module.py has it.
    if "install()" not in found[2]
}


class MyHandler(ocp.CheckpointHandler):
    pass


class MyV1Handler(v1.CheckpointableHandler):
    def is_handleable(self, checkpointable: Any) -> bool:
        return False

    def is_abstract_handleable(self, abstract_checkpointable: Any) -> bool | None:
        return False


@dataclasses.dataclass
class MySave(ocp.args.CheckpointArgs):
    item: Any


@pytest.fixture
def names(tmp_path: Path) -> dict[str, Any]:
    """What examples use: a root with the step 100, a checkpoint at a path, and a state."""
    state = {"params": {"w": jnp.ones((2, 2))}, "step": 100}
    abstract = jax.tree.map(ocp.tree.to_shape_dtype_struct, state)
    directory, path = tmp_path / "run", tmp_path / "checkpoint"
    with ocp.CheckpointManager(directory) as mngr:
        mngr.save(100, args=ocp.args.StandardSave(state))
    items = ocp.CheckpointManager(tmp_path / "items")
    message = Struct(fields={})
    args = ocp.args.Composite(
        state=ocp.args.StandardSave(state),
        config=ocp.args.JsonSave({"lr": 0.1}),
        mask=ocp.args.ArraySave(jnp.ones(3)),
        key=ocp.args.JaxRandomKeySave(jax.random.key(0)),
        rng=ocp.args.NumpyRandomKeySave(np.random.get_state()),
        vocabulary=ocp.args.ProtoSave(message),
    )
    items.save(100, args=args)
    found = items.restore(100)
    standard = ocp.path.step.standard_name_format()
    registry = ocp.handlers.CheckpointHandlerRegistry()
    registry.add("state", ocp.args.StandardSave)
    return {
        **{"ocp": ocp, "jax": jax, "jnp": jnp, "np": np, "dataclasses": dataclasses, "time": time},
        **{"state": state, "abstract_state": abstract, "directory": directory, "path": path},
        **{"items": items, "found": found, "message": message, "Vocabulary": Struct},
        **{"mask": jnp.ones(3), "key": jax.random.key(1), "evaluate": lambda state: None},
        **{"MyHandler": MyHandler, "MySave": MySave, "MyType": MySave, "names": standard},
        **{"step": 200, "registry": registry, "step_names": ocp.path.step, "tmp_path": tmp_path},
    }


def test_there_are_examples() -> None:
    assert len(EXAMPLES) > 60


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example(name: str, names: dict[str, Any]) -> None:
    code = EXAMPLES[name]
    is_composite = "Composite" in code or "found" in code
    names["v1"], names["print"] = v1, lambda *_: None
    names["mngr"] = names["items"] if is_composite else ocp.CheckpointManager(names["directory"])
    if "mngr.save(100" in code:
        names["mngr"] = ocp.CheckpointManager(names["tmp_path"] / "new")
    ckptr: Any = ocp.StandardCheckpointer()
    names["ckptr"] = ckptr
    if "ckptr.save(" not in code:
        ckptr.save(names["path"], names["state"])
        ckptr.wait_until_finished()
    if ".v1." in name:
        shutil.rmtree(names["path"], ignore_errors=True)
        if not any(text in code for text in ("v1.save", "v1.partial", "AsyncResponse")):
            v1.save_checkpointables(names["path"], {"model": names["state"]})
        ckptr.close()
        ckptr = names["ckptr"] = v1.training.Checkpointer(names["directory"])
        names["response"] = response = v1.save_async(names["tmp_path"] / "r", names["state"])
        response.result()
        names["registry"], names["MyV1Handler"] = v1.handlers.local_registry(), MyV1Handler
    if name.endswith(".step.composite_name_format"):
        names["step"] = ocp.path.step
    code = code.replace("/tmp/checkpoints", str(names["tmp_path"] / "erased"))
    code = re.sub(r"timeout=60", "timeout=0.1", code)
    if "registry.add" in code and ".v1." not in name:
        names["registry"] = ocp.handlers.CheckpointHandlerRegistry()
    if "# raises" in code:
        with pytest.raises(NotImplementedError):
            exec(code, names)
    else:
        exec(code, names)
    names["ckptr"].close()
    names["mngr"].close()
    names["items"].close()
