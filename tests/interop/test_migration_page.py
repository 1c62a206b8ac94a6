"""The page for people who come from Orbax has every name that a program of theirs uses."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import dataclasses
import enum
import importlib
import inspect
import pkgutil
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import jax
import numpy as np
import orbax.checkpoint as ocp
import orbax.checkpoint.checkpoint_utils as utils
import prometheus_client
import pytest
from etils import epath
from orbax.checkpoint._src.logging.event_tracking import OperationRecorder
from orbax.checkpoint._src.logging.prometheus_monitoring import PrometheusMonitoring
from orbax.checkpoint.experimental import v1
from orbax.checkpoint.experimental.v1._src.saving import validation as v1_saving

import ckpt
import ckpt.sync
from ckpt import handlers, step_names, surgery
from tests.support.paths import ROOT

PAGE = (ROOT / "docs" / "how-to" / "migrating-from-orbax.md").read_text()


def code_of(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


# The rows of the tables: what is on the left and on the right.
ROWS = [
    line.removeprefix("| ").removesuffix(" |").split(" | ", 1)
    for line in PAGE.splitlines()
    if line.startswith("| ") and line not in {"| Orbax | here |", "| Flax | here |"}
]
LEFT = {word for left, _ in ROWS for code in code_of(left) for word in re.findall(r"\w+", code)}
RIGHT = [right for _, right in ROWS]
# What has no row: the page says that such names are the same here, or need no replacement.
NO_ROW = {
    "reload",
    *("ATOMIC_RENAME", "AUTO", "ArrayCheckpointHandler", "ArrayOptions", "AtomicityMode"),
    *("AtomicityOptions", "BasePyTreeCheckpointHandler", "COMMIT_FILE", "CheckpointLayout"),
    *("CheckpointablesOptions", "CompositeCheckpointHandler", "CompositeOptions"),
    *("DEFAULT_ITEM_NAME", "DeletionOptions", "JaxRandomKeyCheckpointHandler"),
    *("METADATA_ITEM_NAME", "METRIC_ITEM_NAME", "MemoryOptions", "ORBAX", "PathwaysOptions"),
    *("PyTreeCheckpointHandler", "PyTreeHandler", "PyTreeOptions"),
    *("RESERVED_CHECKPOINTABLE_KEYS", "RESERVED_ITEM_NAMES", "SAFETENSORS", "SafetensorsOptions"),
    *("StandardCheckpointHandler", "allow_legacy_atomic_rename", "atomicity_options"),
    *("barrier_sync_fn", "barrier_sync_key_prefix", "checkpoint_metadata_store"),
    *("cleanup_tmp_directories", "create_directories_asynchronously", "create_temporary_path"),
    *("deserialize_root_metadata", "determine_default_item_mode_from_args"),
    *("enable_per_process_directory_creation", "get_registered_args_cls"),
    *("get_registered_handler_cls", "get_snapshot_dir_from_step_dir", "get_temporary_path"),
    *("global_registry", "has_registered_args", "ignore_snapshot_errors"),
    *("is_async_checkpointer", "lightweight_initialize", "local_registry", "mode", "path_class"),
    *("prevent_write_metrics", "register_with_handler", "save_context"),
    *("serialize_root_metadata", "set_immutable", "skip_sync_file_validations", "snapshot_dir"),
    *("synchronize_next_awaitable_signal_operation_id", "temporary_path", "temporary_path_class"),
    *("use_ocdbt", "use_zarr3", "v0"),
}


def public(cls: Any) -> set[str]:
    return {name for name in dir(cls) if not name.startswith("_")}


def arguments(function: Any) -> set[str]:
    return set(inspect.signature(function).parameters) - {"self"}


# --- Every name of Orbax that programs use has a row ----------------------------------------------

# Modules of Orbax that are not walked.
NOT_WALKED = {
    "orbax.checkpoint.conftest",  # Sets up Orbax's own tests.
    "orbax.checkpoint.test_utils",  # For Orbax's own tests.
    "orbax.checkpoint.testing",  # Likewise.
    "orbax.checkpoint.version",  # One constant.
    "orbax.checkpoint.experimental.emergency",  # One feature, and one row: see below.
    "orbax.checkpoint.experimental.tiering_service",  # A server; needs gRPC. It has a row as well.
    # What Orbax is made of, which the page says in one sentence.
    *(
        f"orbax.checkpoint.{name}"
        for name in (
            *("aggregate_handlers", "arrays", "checkpoint_args", "future", "handlers", "metadata"),
            *("msgpack_utils", "multihost", "path", "pathways", "serialization", "tree"),
            *("transform_utils", "type_handlers", "utils"),
        )
    ),
    *("orbax.checkpoint._src.multihost.multihost", "orbax.checkpoint._src.path.step"),
    *(
        f"orbax.checkpoint.experimental.v1.{name}"
        for name in ("arrays", "multihost", "path", "training.pathways", "tree")
    ),
}
# A folder without `__init__`, which `pkgutil` does not see.
HIDDEN = "orbax.checkpoint.experimental.model_surgery.transformations"

# Classes whose members have no rows: users pass them on, or write one of their own.
MEMBERS_NOT_WALKED = {
    # Handlers, whose rows say that none is needed.
    *("CheckpointHandler", "AsyncCheckpointHandler", "PyTreeCheckpointHandler", "PyTreeHandler"),
    *("StandardCheckpointHandler", "BasePyTreeCheckpointHandler", "CompositeCheckpointHandler"),
    *("ArrayCheckpointHandler", "JaxRandomKeyCheckpointHandler", "JsonCheckpointHandler"),
    *("ProtoCheckpointHandler", "NumpyRandomKeyCheckpointHandler", "CompositeOptions"),
    *("JsonHandler", "ProtoHandler", "CheckpointableHandler", "CheckpointableHandlerRegistry"),
    *("CheckpointHandlerRegistry", "DefaultCheckpointHandlerRegistry"),
    # What saves and restores are recorded in.
    *("SaveStepStatistics", "RestoreStepStatistics", "EmergencyRestoreStepStatistics"),
    # What stands for their arguments, one by one the same as in the older API.
    *("Context", "ArrayOptions", "PyTreeOptions", "MemoryOptions", "SafetensorsOptions"),
    *("DeletionOptions", "PathwaysOptions", "CheckpointablesOptions"),
}


def imported(name: str) -> ModuleType:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(name)


def public_modules() -> dict[str, ModuleType]:
    """Return the public modules of Orbax, and the private ones that they hand on, by name."""
    # The package has a private module by the name of a public one, which an import replaces.
    before = dict(vars(ocp))
    todo = [ocp, imported(HIDDEN)]
    found: dict[str, ModuleType] = {}
    while todo:
        module = todo.pop()
        found[module.__name__] = module
        names = [info.name for info in pkgutil.iter_modules(getattr(module, "__path__", ()))]
        submodules = [f"{module.__name__}.{name}" for name in names if not name.startswith("_")]
        values = vars(module).items()
        if not any(getattr(value, "__module__", None) == module.__name__ for _, value in values):
            # It defines nothing, so what it imports is for users.
            submodules += [
                value.__name__
                for name, value in values
                if not name.startswith("_") and inspect.ismodule(value)
            ]
        todo += [
            imported(name)
            for name in submodules
            if name.startswith("orbax.checkpoint.") and name not in {*found, *NOT_WALKED}
        ]
    vars(ocp).update(before)
    return found


def names_of(module: ModuleType) -> dict[str, Any]:
    """Return what users may take from a module and what is Orbax's own, by name."""
    own = module.__name__ if "._src." in module.__name__ else "orbax."
    return {
        name: value
        for name, value in vars(module).items()
        if not name.startswith("_")
        and not inspect.ismodule(value)
        and not isinstance(value, TypeVar)  # For annotations.
        and (str(getattr(value, "__module__", "")).startswith(own) or name.isupper())
    }


def members_of(cls: type) -> set[str]:
    """Return methods, fields and arguments of a class."""
    if issubclass(cls, enum.Enum):
        return set(cls.__members__)
    if issubclass(cls, Exception):
        return set()
    names = public(cls)
    if dataclasses.is_dataclass(cls):
        names |= {field.name for field in dataclasses.fields(cls)}
    # Of a metaclass without a signature, `inspect` says so.
    with contextlib.suppress(ValueError):
        names |= arguments(cls)
    return {name for name in names - {"args", "kwargs"} if not name.startswith("_")}


MODULES = public_modules()
NAMES = {name: names_of(module) for name, module in MODULES.items()}


def classes() -> set[type]:
    """Return the public classes whose members have rows, and those that are nested in them."""
    found: set[type] = set()
    todo = [(name, value) for names in NAMES.values() for name, value in names.items()]
    while todo:
        name, value = todo.pop()
        if not inspect.isclass(value) or not value.__module__.startswith("orbax."):
            continue
        if name in MEMBERS_NOT_WALKED or value in found:
            continue
        found.add(value)
        # Options are nested.
        todo += [(inner, getattr(value, inner)) for inner in vars(value) if inner[0] != "_"]
    return found


CLASSES = classes()


@pytest.mark.parametrize("module", sorted(MODULES))
def test_every_public_name_has_its_row(module: str) -> None:
    assert NAMES[module].keys() - LEFT - NO_ROW == set()


def test_no_name_has_a_row_and_none() -> None:
    assert NO_ROW.isdisjoint(LEFT)


def full_name(cls: Any) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


@pytest.mark.parametrize("cls", sorted(CLASSES, key=full_name), ids=full_name)
def test_every_member_has_its_row(cls: type) -> None:
    assert members_of(cls) - LEFT - NO_ROW == set()


def test_the_walk_has_seen_what_users_know() -> None:
    top = NAMES["orbax.checkpoint"].keys()
    assert {"CheckpointManager", "AsyncCheckpointer", "SaveArgs"} <= top
    assert {"PyTreeOptions", "MemoryOptions"} <= NAMES[v1.options.__name__].keys()
    assert {
        *(ocp.CheckpointManagerOptions, ocp.CheckpointManager, v1.training.Checkpointer),
        *(ocp.args.PyTreeRestore, ocp.AsyncOptions, ocp.SaveArgs),
    } <= CLASSES
    assert "stack" in NAMES[f"{HIDDEN}.stacking"]
    assert len(CLASSES) > 60


def calls_of(cls: type) -> set[str]:
    """Return the arguments of the methods of a class."""
    calls = [
        call
        for name, call in inspect.getmembers(cls, inspect.isfunction)
        if not name.startswith("_")
    ]
    return set().union(*map(arguments, calls)) - {"args", "kwargs"}


ARGUMENTS = {
    "managers": arguments(ocp.CheckpointManager.save)
    | arguments(ocp.CheckpointManager.restore)
    | arguments(ocp.CheckpointManager.all_steps)
    | calls_of(v1.training.Checkpointer),
    "checkpointers": calls_of(ocp.Checkpointer) | calls_of(ocp.StandardCheckpointer),
    "evaluators": arguments(utils.construct_restore_args)
    | arguments(utils.checkpoints_iterator)
    | arguments(utils.wait_for_new_checkpoint),
    "functions": set().union(
        *(
            arguments(call)
            for module in (v1, v1.partial)
            for call in names_of(module).values()
            if inspect.isfunction(call)
        )
    )
    - {"args", "kwargs"},
}


@pytest.mark.parametrize("kind", ARGUMENTS)
def test_every_argument_has_its_row(kind: str) -> None:
    assert ARGUMENTS[kind] - LEFT - NO_ROW == set()


def test_names_in_private_modules_that_users_meet_have_rows() -> None:
    reserved = {
        name
        for module in (ocp.checkpoint_manager, v1_saving)
        for name in public(module)
        if name.startswith("RESERVED")
    }
    assert reserved - LEFT - NO_ROW == set()
    assert {OperationRecorder.__name__, PrometheusMonitoring.__name__, "CloudLogger"} <= LEFT
    assert {"emergency", "tiering_service"} <= LEFT


# --- Everything that is named in the right column exists ------------------------------------------

# What the first word of a chain of attributes means in the right column.
ROOTS: dict[str, Any] = {
    "ckpt": ckpt,
    "asyncio": asyncio,
    "contextlib": contextlib,
    "jax": jax,
    "numpy": np,
    "prometheus_client": prometheus_client,
    "mgr": ckpt.CheckpointManager,
    "commit": ckpt.Commit,
    "info": ckpt.StepInfo,
    "part": ckpt.types.PartialSave,
    "writer": handlers.ItemWriter,
    **{name: getattr(ckpt, name) for name in dir(ckpt)},
    **{name: getattr(ckpt.types, name) for name in ckpt.types.__all__},
    **{name: getattr(surgery, name) for name in surgery.__all__},
}
# Libraries that not every environment of these tests has.
OPTIONAL = {"flax", "safetensors"}


def calls_here() -> dict[str, list[Callable[..., Any]]]:
    """Return by name what a call without its object may be."""
    calls: dict[str, list[Callable[..., Any]]] = {
        # Of policies and names of users, and of metadata.
        "refusal": [ckpt.save_when.SavePolicy.refusal],
        "keep": [ckpt.keep.KeepPolicy.keep],
        "name": [step_names.StepNames.name],
        "step": [step_names.StepNames.step],
        "target": [ckpt.StepMetadata.target],
    }
    for owner in (ckpt, ckpt.CheckpointManager):
        for name in public(owner):
            if callable(getattr(owner, name)):
                calls.setdefault(name, []).append(getattr(owner, name))
    return calls


CALLS = calls_here()
# Where a keyword without its call may belong.
KEYWORDS = set().union(
    *(arguments(call) for calls in CALLS.values() for call in calls),
    *map(arguments, (ckpt.keep.Best, ckpt.keep.EverySteps, ckpt.keep.Deletion)),
    *map(arguments, (ckpt.Staging, ckpt.extensions.VitalSigns)),
)
# What the objects have that calls return.
FIELDS = set().union(
    *(public(cls) for cls in (ckpt.Commit, ckpt.types.Event, ckpt.types.Progress, ckpt.StepInfo)),
    *(
        public(cls)
        for cls in (ckpt.StepMetadata, ckpt.types.UnknownNode, ckpt.save_when.SaveContext)
    ),
    *(public(getattr(ckpt.types, name)) for name in ckpt.types.__all__),
    *(
        public(cls)
        for cls in (ckpt.CheckpointManager, ckpt.handlers.Handler, ckpt.Adapt, ckpt.ArrayFormat)
    ),
)
# Code in the right column that names nothing of this library.
OTHER = {
    *("int", "next", "StopIteration", "*"),
    # Phases of events, and values of arguments.
    *("end", "preserve", "exchange", "pad", "truncate", "both"),
    # Methods of objects with a state, of which a handler asks.
    *("get_state", "state_dict"),
}


def trees_of(text: str) -> list[ast.AST]:
    """Return what a piece of code is: an expression, or keywords of a call that is not there."""
    text = re.sub(r"=(?=\s*[,)]|$)", "=...", text)
    for source in (text, f"_({text})"):
        with contextlib.suppress(SyntaxError):
            return list(ast.walk(ast.parse(f"async def _(): return {source}")))
    raise AssertionError(f"not an expression, nor a keyword: {text}")


def chain_of(node: ast.expr) -> list[str] | None:
    """Return the names of `a.b.c`; None if it begins with anything but a name."""
    if isinstance(node, ast.Name):
        return [node.id]
    if isinstance(node, ast.Attribute):
        names = chain_of(node.value)
        return None if names is None else [*names, node.attr]
    return None


def resolved(chain: list[str]) -> Any:
    """Return what a chain of names stands for; None for a field of what a call returns."""
    assert chain[0] in {*ROOTS, *OPTIONAL}, chain
    found = ROOTS[chain[0]] if chain[0] in ROOTS else pytest.importorskip(chain[0])
    for name in chain[1:]:
        if inspect.ismodule(found):
            with contextlib.suppress(ImportError):
                imported(f"{found.__name__}.{name}")
        if inspect.ismodule(found) or inspect.isclass(found):
            assert hasattr(found, name), chain
            found = getattr(found, name)
        else:
            assert name in FIELDS, chain
            found = None
    return found


def check_call(node: ast.Call) -> None:
    chain = chain_of(node.func)
    given = {keyword.arg for keyword in node.keywords if keyword.arg}
    if isinstance(node.func, ast.Name) and node.func.id == "_":
        known = KEYWORDS
    elif isinstance(node.func, ast.Name) and node.func.id in CALLS:
        known = set().union(*map(arguments, CALLS[node.func.id]))
    elif isinstance(node.func, ast.Attribute) and chain is None:
        known = set().union(*map(arguments, CALLS[node.func.attr]))
    else:
        assert chain is not None
        known = arguments(resolved(chain))
    assert given <= known, ast.unparse(node)


@pytest.mark.parametrize("code", sorted({code for text in RIGHT for code in code_of(text)}))
def test_what_the_right_column_names_exists(code: str) -> None:
    if code in OTHER:
        return
    if re.fullmatch(r"\w+", code) and code not in ROOTS:
        # Or a name of Orbax, to point to another row.
        assert code in FIELDS | KEYWORDS | CALLS.keys() | LEFT
        return
    inner: set[int] = set()
    for node in trees_of(code):
        if isinstance(node, ast.Call):
            check_call(node)
        if isinstance(node, ast.Attribute) and id(node) not in inner:
            chain = chain_of(node)
            if chain is None:
                assert node.attr in FIELDS | CALLS.keys(), code
            else:
                resolved(chain)
            inner.add(id(node.value))


def test_the_right_column_is_looked_at() -> None:
    named = {name for text in RIGHT for name in re.findall(r"(?:keep|save_when)\.(\w+)", text)}
    assert {"EverySteps", "Best", "Preempted"} <= named
    used = {name for text in RIGHT for name in re.findall(r"\b(\w+)=", text)}
    assert {"like", "keep_without_metrics", "until"} <= used
    for wrong in ("ckpt.nothing", "ckpt.keep.Best(3, by=1)", "save(step, nothing=1)", "nothing=1"):
        with pytest.raises(AssertionError):
            test_what_the_right_column_names_exists(wrong)


# --- What the page says of both, done with both ---------------------------------------------------


def save(root: Path, *steps: int) -> None:
    with ckpt.sync.CheckpointManager(root) as mgr:
        for step in steps:
            mgr.save(step, {"w": np.full(2, step)})


def test_the_port_is_the_one_that_the_page_says() -> None:
    port = inspect.signature(PrometheusMonitoring).parameters["port"].default
    assert f"port {port} " in PAGE
    assert f"start_http_server({port})" in PAGE


def test_the_best_steps_are_the_same_and_the_latest_stays_besides(tmp_path: Path) -> None:
    losses = {step: abs(step - 4.25) for step in range(1, 12)}
    options = ocp.CheckpointManagerOptions(
        max_to_keep=3, keep_period=10, best_fn=lambda metrics: metrics["loss"], best_mode="min"
    )
    with ocp.CheckpointManager(tmp_path / "theirs", options=options) as theirs:
        for step, loss in losses.items():
            state = ocp.args.StandardSave({"w": np.zeros(2)})
            theirs.save(step, args=state, metrics={"loss": loss})
        theirs.wait_until_finished()
        kept = theirs.all_steps()
    keep = ckpt.keep.Any(ckpt.keep.Best(3, metric="loss", mode="min"), ckpt.keep.EverySteps(10))
    with ckpt.sync.CheckpointManager(tmp_path / "ours", keep=keep) as ours:
        for step, loss in losses.items():
            ours.save(step, {"w": np.zeros(2)}, metrics={"loss": loss})
        ours.wait_until_finished()
        assert ours.all_steps() == sorted({*kept, 11}) == [3, 4, 5, 10, 11]


def test_a_function_that_says_false_waits_on(tmp_path: Path) -> None:
    def run_of(root: Path) -> Callable[[], bool]:
        left = [0, 1, 2]

        def is_over() -> bool:
            if not left:
                return True
            save(root, left.pop(0))
            return False

        return is_over

    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    seen = utils.checkpoints_iterator(
        theirs, seconds_to_sleep=0, timeout=0, timeout_fn=run_of(theirs)
    )
    assert list(seen) == [0, 1, 2]
    seen_here = ckpt.sync.watch(ours, poll_interval=0.01, until=run_of(ours))
    assert [info.step for info in seen_here] == [0, 1, 2]
    # What the page warns of.
    assert list(ckpt.sync.watch(tmp_path / "none", timeout=0, until=lambda: False)) == []


@pytest.mark.parametrize("until_step", [None, 1, 2, 3, 4])
def test_the_step_that_is_waited_for_is_the_same(tmp_path: Path, until_step: int | None) -> None:
    save(tmp_path, 1, 3)
    with utils.wait_for_new_checkpoint(
        epath.Path(tmp_path), until_step=until_step, timeout=0, seconds_to_sleep=0
    ) as step:
        found = step
    after = None if until_step is None else until_step - 1
    with ckpt.sync.watch(tmp_path, after=after, only_latest=True, timeout=0) as steps:
        info = next(steps, None)
        assert (-1 if info is None else info.step) == found
        with ckpt.sync.CheckpointManager(tmp_path, mode="r") as mgr:
            assert list(mgr.pins()) == ([] if info is None else [found])


@pytest.mark.parametrize("args", [None, ocp.args.StandardRestore({"w": np.zeros(2, int)})])
def test_a_v0_manager_restores_an_unnamed_state_as_one_of_its_own(
    tmp_path: Path, args: Any
) -> None:
    save(tmp_path, 1)
    with ocp.CheckpointManager(tmp_path) as theirs:
        assert theirs.restore(1, args=args)["w"].tolist() == [1, 1]
