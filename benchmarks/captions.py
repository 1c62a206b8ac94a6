"""What stands below each picture: what it shows, how often it was measured, what is better."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

from benchmarks import blocked, growth, heartbeat, overlap, throughput
from benchmarks.figures import size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from benchmarks.results import Results, Scenario

# For whoever cannot see them.
ALT: Mapping[str, str] = MappingProxyType(
    {
        "overlap": "one save beside the train steps it overlaps with",
        "training": "training lost per save, steps per second, and blocked time with many leaves",
        "ratios": "save, blocked and restore times of every peer next to those of Orbax",
        "heartbeat": "lag of the caller's event loop while saving and restoring",
        "growth": "save and restore seconds against bytes and against leaves",
    }
)


def picture(run: Results, name: str, folder: str) -> str:
    """Returns the Markdown of a picture in a folder, with its caption."""
    return f"![{ALT[name]}]({folder}/{name}.png)\n\n*{_CAPTIONS[name](run)}*"


def machine(run: Results) -> str:
    """Returns the machine of a run in a few words."""
    facts = run.machine
    return f"{facts['cores_usable']} cores, {facts['memory_gib']:g} GiB and {facts['file_system']}"


def _overlap(run: Results) -> str:
    return (
        "One save of ckpt, the third of a run, beside the train loop of the next picture: a single "
        f"save, not a median, on a machine like that of the other pictures ({machine(run)}). In "
        "the hatched time `save()` blocks; in the green time train steps run while the save goes "
        "on, though slower than alone, which the next picture counts. The less is hatched, the "
        "better."
    )


def _training(run: Results) -> str:
    left = (
        f"Left and middle: a donating train loop with {_state(run, overlap.NAME)}; medians of "
        f"{_rounds(run, [overlap.NAME])}. Lost is the time that `save()` blocks and by which later "
        "steps are slower."
    )
    parts = [left]
    if run.scenario(blocked.NAME) is not None:
        parts.append(
            f"Right: `save()` of {_state(run, blocked.NAME)}; medians of "
            f"{_rounds(run, [blocked.NAME])}."
        )
    parts.append(
        "Thin lines go from the lowest to the highest round. Lost and blocked: shorter is better. "
        f"Steps per second: longer is better. Measured on {machine(run)}."
    )
    return " ".join(parts)


def _ratios(run: Results) -> str:
    names = [each.name for each in run.scenarios if each.kind == throughput.KIND]
    return (
        "Orbax's time divided by each peer's: 2x is twice as fast. Bars to the right of the orange "
        f"line are better than Orbax, those to the left worse. Medians of {_rounds(run, names)} on "
        f"{machine(run)}. The tables below say what each state and peer is."
    )


def _heartbeat(run: Results) -> str:
    return (
        "How late a beat every millisecond came while the event loop awaited ckpt or Orbax with "
        f"{_state(run, heartbeat.NAME)}. Further left is better. The two grey rows are the machine "
        "alone: a loop that nothing disturbs, and one beside another process that writes and reads "
        "as many bytes; they have no `save()`. Median and 99th percentile are medians of "
        f"{_rounds(run, [heartbeat.NAME])} on {machine(run)}."
    )


def _growth(run: Results) -> str:
    names = [each.name for each in run.scenarios if each.kind == growth.KIND]
    return (
        "Save until durable, and restore from the page cache. Filled points and whole lines are "
        "saves, hollow points and dashed lines restores. Lower is better. Medians of "
        f"{_rounds(run, names)} on {machine(run)}; Orbax stops earlier, because it would take "
        "minutes."
    )


_CAPTIONS: Mapping[str, Callable[[Results], str]] = MappingProxyType(
    {
        "overlap": _overlap,
        "training": _training,
        "ratios": _ratios,
        "heartbeat": _heartbeat,
        "growth": _growth,
    }
)


def _state(run: Results, name: str) -> str:
    scenario = run.scenario(name)
    return "a state" if scenario is None else state(scenario)


def state(scenario: Scenario) -> str:
    """Returns the size of the state of a scenario."""
    return f"{size(scenario.size_bytes)} in {scenario.leaves:,} leaves"


def _rounds(run: Results, names: Iterable[str]) -> str:
    return rounds(each for name in names if (each := run.scenario(name)) is not None)


def rounds(scenarios: Iterable[Scenario]) -> str:
    """Returns how many rounds the samples of these scenarios have."""
    found = {
        len(sample.rounds)
        for scenario in scenarios
        for measures in scenario.measures.values()
        for sample in measures.values()
    }
    few, most = min(found, default=0), max(found, default=0)
    count = f"{most}" if few == most else f"{few} to {most}"
    return f"{count} round{'' if most == 1 else 's'}"
