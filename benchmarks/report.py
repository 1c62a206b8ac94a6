"""Turns recorded runs into Markdown: docs/explanation/performance.md, and its tables.

`python -m benchmarks.report` rewrites what stands between the markers of the page, of the page of
tables beside it and of the README, from the recorded run alone, and draws the charts; the text
around the markers is kept.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from benchmarks import overlap, results, tables
from benchmarks.pages import updated
from benchmarks.peers import PEERS
from benchmarks.results import BASELINE, HISTORY, OURS
from benchmarks.tables import label, state, table, times, value

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from benchmarks.results import Results, Scenario

# On the page, and with its tables.
_FIRST, _LATER = ("overlap", "training"), ("ratios", "heartbeat", "growth")
PAGE = Path("docs/explanation/performance.md")
RESULTS = Path("docs/explanation/performance/results.json")
# It has a few of the figures, and changes with the page.
README = Path("README.md")
# Runs that the history shows.
_SHOWN = 8


def markdown(run: Results, pictures: str = "") -> str:
    """Returns the tables of a run, with the facts needed to read them.

    Args:
        run: The run.
        pictures: Markdown that is shown before the tables.
    """
    blocks = [heading(run)]
    blocks += [pictures] if pictures else []
    for scenario in run.scenarios:
        blocks += [f"### {title(scenario)}", tables.of(scenario)]
    blocks += [_promises(run), "### Targets", tables.targets(run)]
    return "\n\n".join(blocks) + "\n"


def publish(run: Results, page: Path) -> None:
    """Draws the charts of a run and records it in a folder beside the page; rewrites its tables."""
    # Only here: it needs matplotlib.
    from benchmarks import pictures

    folder = page.with_suffix("")
    pictures.draw(run, folder)
    run.write(folder / RESULTS.name)
    results.append_history(run, folder / HISTORY)
    for path, text in updated_pages(run, page).items():
        path.write_text(text, encoding="utf-8")
        sys.stderr.write(f"wrote {path}\n")


def updated_pages(run: Results, page: Path) -> dict[Path, str]:
    """Returns the texts of the page, of that of its tables, and of the README, from a run.

    Another page than that of the project has no README.
    """
    folder = page.with_suffix("")
    later = f"{_pictures(run, folder, _LATER)}\n\nEvery sample: [{RESULTS.name}]"
    later = f"{later}({folder.name}/{RESULTS.name}).".strip()
    found = {
        page: {
            "bench:summary": f"{_pictures(run, folder, _FIRST)}\n\n{summary(run)}",
            "bench:history": history(results.read_history(folder / HISTORY)),
        }
    }
    found[tables_of(page)] = {"bench": markdown(run, later)}
    if page == PAGE:
        found[README] = {"bench": short(run)}
    texts = {}
    for path, parts in found.items():
        texts[path] = path.read_text(encoding="utf-8")
        for name, part in parts.items():
            texts[path] = updated(texts[path], name, part)
    return texts


def tables_of(page: Path) -> Path:
    """Returns the page of tables beside a page."""
    return page.with_name(f"{page.stem}-tables.md")


def _pictures(run: Results, folder: Path, names: Sequence[str]) -> str:
    """Returns those of these pictures that a folder beside the page has, with captions."""
    return "\n\n".join(
        picture(run, name, folder.name) for name in names if (folder / f"{name}.png").exists()
    )


def heading(run: Results) -> str:
    """Returns when and on what a run was made."""
    facts = run.machine
    versions = ", ".join(
        f"{name} {version}" for name, version in facts["versions"].items() if version
    )
    smoke = "**Smoke run: sizes are tiny, the figures mean nothing.**\n\n" if run.smoke else ""
    return (
        f"{smoke}{run.date}: {facts['cores_usable']} cores ({facts['cpu']}), "
        f"{facts['memory_gib']} GiB, {facts['system']}, {facts['file_system']}, "
        f"{facts['devices']}, Python {facts['python']}, {versions}."
    )


def title(scenario: Scenario) -> str:
    """Returns what a scenario saved, with its size."""
    mib = scenario.size_bytes / 2**20
    return f"{scenario.name}: {mib:,.0f} MiB in {scenario.leaves:,} leaves, {scenario.summary}"


def _promises(run: Results) -> str:
    peers = dict.fromkeys(peer for scenario in run.scenarios for peer in scenario.measures)
    rows = [(peer, PEERS[peer].peer.promise) for peer in peers if peer in PEERS]
    return "What is on disk when a save is called done:\n\n" + table(
        ("peer", "promise"), rows, align="---"
    )


# A decoder with its optimizer, as most people train one.
_RESTORED = "transformer"
# Who is in the short table, and what it compares: a scenario, a measure and its name there.
_SHORT_PEERS = (OURS, BASELINE, "safetensors")
_SHORT_ROWS = (
    (overlap.NAME, "lost", "training loses per save, {state}"),
    (overlap.NAME, "blocked", "`save()` blocks for, in that loop"),
    (_RESTORED, "save", "a save until it is done, {state}"),
    (_RESTORED, "restore", "a restore of the same"),
    ("small", "save", "a save until it is done, {state}"),
    ("small", "restore", "a restore of the same"),
    ("first_restore", "first_restore", "the first restore of a process, {state}"),
)


_SUMMARY = {
    overlap.NAME: "Saves, while training",
    _RESTORED: "Restores, cached",
}
# The three about saves come from the train loop that the pictures beside them show.
_SUMMARY_ROWS = (
    (overlap.NAME, "blocked", "`save()` blocks for", ("median",)),
    (overlap.NAME, "committed", "the save is durable after", ("median",)),
    (overlap.NAME, "lost", "training loses, in all", ("median",)),
    (_RESTORED, "restore", "a restore takes, the first / a later one", ("first", "median")),
)


def summary(run: Results) -> str:
    """Returns a table of four lines, and what it is about; nothing without such scenarios."""
    rows = []
    for name, measure, text, parts in _SUMMARY_ROWS:
        scenario = run.scenario(name)
        ours, theirs = (scenario and scenario.sample(row, measure) for row in (OURS, BASELINE))
        if ours and theirs:
            figures = [(getattr(ours, part), getattr(theirs, part)) for part in parts]
            cells = [(value(own), value(other), times(other / own)) for own, other in figures]
            rows.append((text, *map(" / ".join, zip(*cells, strict=True))))
    head = ("", OURS, label(BASELINE), f"times as fast as {label(BASELINE)}")
    about = [
        f"{what}: {state(each)}, medians of {rounds([each])}"
        for name, what in _SUMMARY.items()
        if (each := run.scenario(name)) is not None
    ]
    return f"{table(head, rows)}\n\n{'. '.join(about)}. Measured on {machine(run)}."


def short(run: Results) -> str:
    """Returns the table of the README: a few figures of several libraries, and their date."""
    rows = []
    for name, measure, text in _SHORT_ROWS:
        scenario = run.scenario(name)
        if scenario is None:
            continue
        samples = (scenario.sample(peer, measure) for peer in _SHORT_PEERS)
        cells = ["-" if each is None else value(each.median) for each in samples]
        rows.append((text.format(state=state(scenario)), *cells))
    head = ("less is better", *(label(peer) for peer in _SHORT_PEERS))
    return f"{table(head, rows)}\n\nMedians of {run.date}, measured on {machine(run)}."


def history(records: Sequence[dict[str, Any]]) -> str:
    """Returns the table of the runs over time: a row for each figure that readers want first.

    It has ratios and not times, since machines differ: `times as fast as Orbax` in the same run.
    """
    shown = records[-_SHOWN:]
    rows = []
    for scenario, measure, text in _SHORT_ROWS:
        ratios = [_ratio(each["medians"].get(scenario, {}), measure) for each in shown]
        if any(ratio is not None for ratio in ratios):
            name = f"{text.partition(', ')[0].removesuffix(' of the same')} ({scenario})"
            cells = ("-" if ratio is None else times(ratio) for ratio in ratios)
            rows.append((name, *cells))
    versions = [each["versions"]["orbax-checkpoint"] or "-" for each in shown]
    rows.append((f"{label(BASELINE)}", *versions))
    head = (f"times as fast as {label(BASELINE)}", *(each["date"] for each in shown))
    return table(head, rows)


def _ratio(medians: dict[str, dict[str, float]], measure: str) -> float | None:
    ours, theirs = (medians.get(row, {}).get(measure) for row in (OURS, BASELINE))
    return None if not ours or theirs is None else theirs / ours


# What pictures are called for those who cannot see them.
ALT: Mapping[str, str] = MappingProxyType(
    {
        "overlap": "one save beside the train steps it overlaps with",
        "training": "training lost per save, steps per second, and blocked time with many leaves",
        "ratios": "save, blocked and restore times of every peer next to those of Orbax",
        "heartbeat": "lag of the caller's event loop while saving and restoring",
        "growth": "save and restore seconds against bytes and against leaves",
    }
)
# What stands below them: what they show, how often it was measured, what is better.
_CAPTIONS: Mapping[str, str] = MappingProxyType(
    {
        "overlap": (
            "One save of ckpt, the third of a run, beside the train loop of the next picture: a "
            "single save, not a median, on a machine like that of the other pictures ({machine}). "
            "In the hatched time `save()` blocks; in the green time train steps run while the "
            "save goes on, though slower than alone, which the next picture counts. The less is "
            "hatched, the better."
        ),
        "training": (
            "Left and middle: a donating train loop with {overlap}; medians of {overlap_rounds}. "
            "Lost is the time that `save()` blocks and by which later steps are slower. Right: "
            "`save()` of {blocked}; medians of {blocked_rounds}. Thin lines go from the lowest to "
            "the highest round. Lost and blocked: shorter is better. Steps per second: longer is "
            "better. Measured on {machine}."
        ),
        "ratios": (
            "Orbax's time divided by each peer's: 2x is twice as fast. Bars to the right of the "
            "orange line are better than Orbax, those to the left worse. Medians of "
            "{throughput_rounds} on {machine}. The tables below say what each state and peer is."
        ),
        "heartbeat": (
            "How late a beat every millisecond came while the event loop awaited ckpt or Orbax "
            "with {heartbeat}. Further left is better. The two grey rows are the machine alone: a "
            "loop that nothing disturbs, and one beside another process that writes and reads as "
            "many bytes; they have no `save()`. Median and 99th percentile are medians of "
            "{heartbeat_rounds} on {machine}."
        ),
        "growth": (
            "Save until durable, and restore from the page cache. Filled points and whole lines "
            "are saves, hollow points and dashed lines restores. Lower is better. Medians of "
            "{growth_rounds} on {machine}; Orbax stops earlier, because it would take minutes."
        ),
    }
)


def picture(run: Results, name: str, folder: str) -> str:
    """Returns the Markdown of a picture in a folder, with its caption."""
    fields = defaultdict(lambda: "something", machine=machine(run))
    for kind in {each.kind for each in run.scenarios}:
        found = [each for each in run.scenarios if each.kind == kind]
        fields[kind], fields[f"{kind}_rounds"] = state(found[0]), rounds(found)
    return f"![{ALT[name]}]({folder}/{name}.png)\n\n*{_CAPTIONS[name].format_map(fields)}*"


def machine(run: Results) -> str:
    """Returns the machine of a run in a few words."""
    facts = run.machine
    return f"{facts['cores_usable']} cores, {facts['memory_gib']:g} GiB and {facts['file_system']}"


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


def main(arguments: Sequence[str] | None = None) -> None:
    """Rewrites the tables and charts of the page from recorded runs."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=main.__doc__)
    add = parser.add_argument
    add("--results", type=Path, nargs="+", default=[RESULTS], help="files of runs on one machine; "
        "of a scenario in two of them, the later; default: %(default)s")  # fmt: skip
    chosen = parser.parse_args(arguments)

    run = results.merged([results.read(path) for path in chosen.results])
    if run.smoke:
        parser.error("a smoke run: its figures are not for publication")
    publish(run, PAGE)


if __name__ == "__main__":
    main()
