"""The calls of a contract, on Orbax and here by the rows of the page about moving from Orbax."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

import ckpt
import ckpt_orbax
from ckpt import errors
from ckpt.sync import CheckpointManager
from tests.interop.contracts.table import Call, Contract

__all__ = ["here", "on_orbax", "translated"]

_ERRORS: dict[type[Exception], str] = {
    ocp.checkpoint_manager.StepAlreadyExistsError: "exists",
    ckpt_orbax.checkpoint_manager.StepAlreadyExistsError: "exists",
    errors.StepExistsError: "exists",
    errors.ReadOnlyError: "read only",
    FileNotFoundError: "not found",
}


def state_of(number: int) -> dict[str, Any]:
    return {"n": jnp.full(4, number), "w": np.arange(3.0)}


def on_orbax(contract: Contract, root: Path, ocp: Any = ocp) -> list[Any]:
    """Return an outcome for each call, of Orbax or of a module with its names."""

    def opened(options: Mapping[str, Any]) -> Any:
        return ocp.CheckpointManager(root, options=ocp.CheckpointManagerOptions(**options))

    def made(mgr: Any, call: Call) -> Any:
        more = dict(call.more)
        match call.method:
            case "save" | "save_at_once":
                number = more.pop("state", call.step)
                args = ocp.args.StandardSave(state_of(number))
                done = mgr.save(call.step, args=args, **more)
                if call.method == "save":
                    mgr.wait_until_finished()
                return done
            case "restore":
                target = ocp.args.StandardRestore(state_of(0))
                return int(mgr.restore(call.step, args=target)["n"][0])
            case method:
                given = () if call.step is None else (call.step,)
                return getattr(mgr, method)(*given)

    return _outcomes(contract, opened, made)


def here(contract: Contract, root: Path) -> list[Any]:
    """Return an outcome for each call."""

    def opened(options: Mapping[str, Any]) -> CheckpointManager:
        return CheckpointManager(root, **translated(options))

    def made(mgr: CheckpointManager, call: Call) -> Any:
        more = dict(call.more)
        match call.method:
            case "save" | "save_at_once":
                assert call.step is not None
                commit = mgr.save(call.step, state_of(more.pop("state", call.step)), **more)
                if call.method == "save":
                    mgr.wait_until_finished()
                return bool(commit)
            case "restore":
                return int(mgr.restore(call.step, state_of(0))["n"][0])
            case method:
                given = () if call.step is None else (call.step,)
                return getattr(mgr, method)(*given)

    return _outcomes(contract, opened, made)


def translated(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a manager here that the page gives for options of Orbax."""
    given = dict(options)
    found: dict[str, Any] = {}
    when: list[Any] = []
    if "should_save_fn" in given:
        decides = given.pop("should_save_fn")

        def policy(step: int, previous: Any, context: ckpt.save_when.SaveContext) -> bool:
            saved = [*previous[-1:], *context.saving]
            return bool(decides(step, saved[-1].step if saved else None))

        found["save_when"] = policy
    elif given.keys() & {"save_interval_steps", "save_on_steps"}:
        when.append(ckpt.save_when.First())
        when.append(ckpt.save_when.EverySteps(given.pop("save_interval_steps", 1)))
        if "save_on_steps" in given:
            when.append(ckpt.save_when.Steps(given.pop("save_on_steps")))
        found["save_when"] = ckpt.save_when.Any(*when)
    if given.pop("read_only", False):
        found["mode"] = "r"
    most = given.pop("max_to_keep", None)
    best, mode = given.pop("best_fn", None), given.pop("best_mode", "max")
    without = given.pop("keep_checkpoints_without_metrics", True)
    keep: list[Any] = []
    if best is not None and most is not None:
        keep.append(ckpt.keep.Best(most, metric=best, mode=mode, keep_without_metrics=without))
    elif most is not None:
        keep.append(ckpt.keep.Latest(max(most, 1)))
    if keep and "keep_period" in given:
        keep.append(ckpt.keep.EverySteps(given.pop("keep_period")))
    if keep:
        found["keep"] = ckpt.keep.Any(*keep)
    if best is not None and most is None:
        # It ranks the steps, and keeps all.
        ranks = ckpt.keep.Best(1, metric=best, mode=mode)
        found["keep"] = ckpt.keep.Any(ckpt.keep.All(), ranks)
    return found | given


def _outcomes(
    contract: Contract, opened: Callable[[Mapping[str, Any]], Any], made: Callable[[Any, Call], Any]
) -> list[Any]:
    options = dict(contract.options)
    mgr = opened(options)
    found: list[Any] = []
    try:
        for call in contract.calls:
            if call.method == "reopen":
                mgr.close()
                options |= call.more.get("options", {})
                mgr = opened(options)
                found.append(None)
                continue
            try:
                outcome = made(mgr, call)
            except Exception as error:
                names = (name for kind, name in _ERRORS.items() if isinstance(error, kind))
                outcome = next(names, f"{type(error).__name__}: {error}")
            found.append(sorted(outcome) if call.method == "all_steps" else outcome)
    finally:
        mgr.close()
    return found
