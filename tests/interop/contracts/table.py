"""What Orbax's manager does, as data: options, and calls in its own words.

A runner makes the calls of a row on one library and returns an outcome for each. What Orbax gives
is recorded in the same run, so the table holds only what is different here, and why.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["CONTRACTS", "Call", "Contract", "Differs", "save", "to"]


@dataclass(frozen=True)
class Call:
    """One call: `("save", 3, {"metrics": {...}})`, or `("reopen", options)`."""

    method: str
    step: int | None = None
    more: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Differs:
    """What is different here: by number of the call the outcome, and a sentence that says why."""

    why: str
    outcomes: Mapping[int, Any]


@dataclass(frozen=True)
class Contract:
    name: str
    calls: Sequence[Call]
    options: Mapping[str, Any] = field(default_factory=dict)
    differs: Differs | None = None


def save(step: int, loss: float | None = None, **more: Any) -> Call:
    metrics = {} if loss is None else {"metrics": {"loss": loss}}
    return Call("save", step, {**metrics, **more})


def saves(*steps: int) -> list[Call]:
    return [save(step) for step in steps]


def to(method: str, step: int | None = None, **more: Any) -> Call:
    return Call(method, step, more)


STEPS = to("all_steps")
LATEST = to("latest_step")
BEST = to("best_step")


def loss(metrics: Any) -> float:
    return float(metrics["loss"])


def every_third(step: int, latest: int | None) -> bool:
    return latest is None or step - latest >= 3


_LATEST_STAYS = "the latest step is never deleted"
_LOWER = "a step lower than the latest is saved like any other"

CONTRACTS = [
    # --- When a step is saved ---------------------------------------------------------------------
    Contract("every step by default", [*saves(0, 1, 2, 5), STEPS, LATEST]),
    Contract(
        "an interval, and the first step of a fresh run whatever its number",
        [to("should_save", 1), *saves(1, 2, 3, 4, 5, 6), STEPS],
        {"save_interval_steps": 3},
    ),
    Contract(
        "an interval, in a run that goes on",
        [*saves(0, 1, 2), to("reopen"), *saves(3, 4, 5), STEPS],
        {"save_interval_steps": 2},
    ),
    Contract(
        "steps by number",
        [*saves(0, 1, 2, 3, 7), STEPS],
        {"save_on_steps": [1, 7], "save_interval_steps": 5},
    ),
    Contract(
        "steps in a range",
        [*saves(0, 1, 2, 3, 4), STEPS],
        {"save_on_steps": range(1, 3), "save_interval_steps": 100},
    ),
    Contract(
        "a function that decides",
        [*saves(0, 1, 2, 3, 4, 6), STEPS],
        {"should_save_fn": every_third},
    ),
    Contract(
        "force saves what the policy turns down",
        [save(0), save(1), save(1, force=True), STEPS],
        {"save_interval_steps": 2},
    ),
    Contract(
        "the latest step again, as by a loop that saves at its top", [save(3), save(3), STEPS]
    ),
    Contract(
        "the latest step again with another state",
        [save(3), save(3, state=4), to("restore", 3)],
        differs=Differs("another state would be lost: it is an error", {1: "exists"}),
    ),
    Contract(
        "a lower step",
        [save(3), to("should_save", 2), save(2), STEPS],
        differs=Differs(_LOWER, {1: True, 2: True, 3: [2, 3]}),
    ),
    Contract(
        "a step that exists, with force",
        [save(3), save(3, force=True, state=4), to("restore", 3)],
    ),
    Contract(
        "a step that exists and is the same, with force",
        [save(3), save(3, force=True), STEPS],
        differs=Differs("it would store what is there, so it is skipped", {1: False}),
    ),
    Contract("should_save of a fresh run", [to("should_save", 0), to("should_save", 7), STEPS]),
    Contract(
        "should_save of a step that is there", [save(3), to("should_save", 3), to("should_save", 4)]
    ),
    # --- What is kept -----------------------------------------------------------------------------
    Contract("the newest steps", [*saves(0, 1, 2, 3), STEPS], {"max_to_keep": 2}),
    Contract(
        "no step at all",
        [*saves(0, 1), STEPS],
        {"max_to_keep": 0},
        Differs(_LATEST_STAYS, {2: [1]}),
    ),
    Contract(
        "every n steps beside the newest",
        [*saves(0, 1, 2, 3, 4, 5), STEPS],
        {"max_to_keep": 1, "keep_period": 2},
    ),
    Contract(
        "the best steps",
        [save(0, 3.0), save(1, 1.0), save(2, 2.0), STEPS, BEST, LATEST],
        {"max_to_keep": 2, "best_fn": loss, "best_mode": "min"},
    ),
    Contract(
        "the best steps, where the latest is none of them",
        [save(0, 1.0), save(1, 2.0), save(2, 3.0), STEPS, BEST],
        {"max_to_keep": 1, "best_fn": loss, "best_mode": "min"},
        Differs(_LATEST_STAYS, {3: [0, 2]}),
    ),
    Contract(
        "the best step is the greatest by default",
        [save(0, 1.0), save(1, 3.0), save(2, 2.0), BEST],
        {"best_fn": loss},
    ),
    Contract(
        "a ranking without a number deletes nothing",
        [save(0, 1.0), save(1, 3.0), save(2, 2.0), STEPS, BEST],
        {"best_fn": loss, "best_mode": "min"},
    ),
    Contract(
        "steps without metrics are kept beside the best",
        [save(0), save(1, 2.0), save(2, 1.0), STEPS],
        {"max_to_keep": 1, "best_fn": loss, "best_mode": "min"},
    ),
    Contract(
        "steps without metrics go, if it is said so",
        [save(0), save(1, 2.0), save(2, 1.0), STEPS],
        {
            "max_to_keep": 1,
            "best_fn": loss,
            "best_mode": "min",
            "keep_checkpoints_without_metrics": False,
        },
    ),
    Contract("the best of a run without metrics", [save(0), BEST], {"best_fn": loss}),
    Contract(
        "a limit that is set later",
        [*saves(0, 1, 2), to("reopen", options={"max_to_keep": 1}), save(3), STEPS],
    ),
    # --- What is read -----------------------------------------------------------------------------
    Contract("an empty root", [STEPS, LATEST, BEST, to("restore")]),
    Contract(
        "a step that is not there",
        [save(1), to("restore", 2), to("metrics", 2)],
        differs=Differs("a wrong number is an error", {2: "not found"}),
    ),
    Contract("the newest step without a number", [*saves(1, 2), to("restore")]),
    Contract("metrics of a step", [save(1, 0.5), to("metrics", 1)], {"best_fn": loss}),
    Contract(
        "metrics of a step without any",
        [save(1), to("metrics", 1)],
        {"best_fn": loss},
        Differs("no metrics are an empty dict", {1: {}}),
    ),
    Contract(
        "the lists of a manager that is opened later",
        [*saves(1, 2), to("reopen"), STEPS, LATEST, to("restore", 1)],
    ),
    # --- What is deleted --------------------------------------------------------------------------
    Contract("a step is deleted", [*saves(1, 2), to("delete", 1), STEPS, to("restore", 1)]),
    Contract("a step is deleted that is not there", [save(1), to("delete", 2), STEPS]),
    Contract(
        "the latest step is deleted, and saved again",
        [*saves(1, 2), to("delete", 2), LATEST, save(2, state=7), to("restore", 2)],
    ),
    # --- After a save -----------------------------------------------------------------------------
    Contract("a restore right after a save", [to("save_at_once", 1), to("restore", 1)]),
    Contract(
        "nothing is being saved after a wait",
        [to("save_at_once", 1), to("wait_until_finished"), to("is_saving_in_progress"), STEPS],
    ),
    Contract("a closed manager", [save(1), to("close"), to("close")]),
    Contract(
        "a manager that only reads",
        [
            save(1),
            to("reopen", options={"read_only": True}),
            STEPS,
            to("restore"),
            save(2),
            to("delete", 1),
            STEPS,
        ],
        differs=Differs("what writes is an error", {4: "read only", 5: "read only"}),
    ),
]
