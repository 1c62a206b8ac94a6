"""Turns recorded runs into Markdown: docs/explanation/performance.md, and its tables.

`python -m benchmarks.report` rewrites what stands between the markers of the page and of the page
of tables beside it, from the recorded run alone, and draws the charts; the text around the markers
is kept.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks import captions, charts, history, results, summary, tables, targets
from benchmarks.figures import table
from benchmarks.peers import PEERS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.results import Results, Scenario

START, END = "<!-- bench:start -->", "<!-- bench:end -->"
SUMMARY_START, SUMMARY_END = "<!-- bench:summary:start -->", "<!-- bench:summary:end -->"
# On the page, and with its tables.
_FIRST, _LATER = ("overlap", "training"), ("ratios", "heartbeat", "growth")
PAGE = Path("docs/explanation/performance.md")
RESULTS = Path("docs/explanation/performance/results.json")
# It has a few of the figures, and changes with the page.
README = Path("README.md")


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
    blocks += [_promises(run), "### Targets", targets.markdown(run)]
    return "\n\n".join(blocks) + "\n"


def update_page(page: str, tables: str, start_mark: str = START, end_mark: str = END) -> str:
    """Returns the page with these tables between its markers.

    Raises:
        ValueError: The page does not have exactly one pair of markers, in order.
    """
    before, start, rest = page.partition(start_mark)
    _, end, after = rest.partition(end_mark)
    if not start or not end or start_mark in rest or end_mark in after:
        raise ValueError(f"the page needs one {start_mark} and after it one {end_mark}")
    return f"{before}{start_mark}\n\n{tables}\n{end_mark}{after}"


def publish(run: Results, page: Path) -> None:
    """Draws the charts of a run and records it in a folder beside the page; rewrites its tables."""
    folder = page.with_suffix("")
    charts.draw(run, folder)
    run.write(folder / RESULTS.name)
    history.append(run, folder / history.NAME)
    page.write_text(updated(run, page), encoding="utf-8")
    tables_of(page).write_text(updated_tables(run, page), encoding="utf-8")
    sys.stderr.write(f"wrote {page} and {tables_of(page)}\n")
    if page == PAGE:
        README.write_text(updated_readme(run, README), encoding="utf-8")


def updated_readme(run: Results, readme: Path) -> str:
    """Returns the text of the README with the short table of a run."""
    return update_page(readme.read_text(encoding="utf-8"), f"{summary.short(run)}\n")


def updated(run: Results, page: Path) -> str:
    """Returns the text of the page with the summary of a run, and the history with it."""
    folder = page.with_suffix("")
    first = f"{_pictures(run, folder, _FIRST)}\n\n{summary.markdown(run)}\n"
    text = update_page(page.read_text(encoding="utf-8"), first, SUMMARY_START, SUMMARY_END)
    trend = history.markdown(history.read(folder / history.NAME))
    return update_page(text, trend, history.START, history.END)


def tables_of(page: Path) -> Path:
    """Returns the page of tables beside a page."""
    return page.with_name(f"{page.stem}-tables.md")


def updated_tables(run: Results, page: Path) -> str:
    """Returns the text of the page of tables with those of a run."""
    folder = page.with_suffix("")
    later = f"{_pictures(run, folder, _LATER)}\n\n{_files(folder)}".strip()
    return update_page(tables_of(page).read_text(encoding="utf-8"), markdown(run, later))


def _pictures(run: Results, folder: Path, names: Sequence[str]) -> str:
    """Returns those of these pictures that a folder beside the page has, with captions."""
    return "\n\n".join(
        captions.picture(run, name, folder.name)
        for name in names
        if (folder / f"{name}.png").exists()
    )


def _files(folder: Path) -> str:
    """Returns links to what else the folder has."""
    return f"Every sample: [{RESULTS.name}]({folder.name}/{RESULTS.name})."


def heading(run: Results) -> str:
    """Returns when and on what a run was made."""
    machine = run.machine
    versions = ", ".join(
        f"{name} {version}" for name, version in machine["versions"].items() if version
    )
    smoke = "**Smoke run: sizes are tiny, the figures mean nothing.**\n\n" if run.smoke else ""
    return (
        f"{smoke}{run.date}: {machine['cores_usable']} cores ({machine['cpu']}), "
        f"{machine['memory_gib']} GiB, {machine['system']}, {machine['file_system']}, "
        f"{machine['devices']}, Python {machine['python']}, {versions}."
    )


def title(scenario: Scenario) -> str:
    """Returns what a scenario saved, with its size."""
    mib = scenario.size_bytes / 2**20
    return f"{scenario.name}: {mib:,.0f} MiB in {scenario.leaves:,} leaves, {scenario.summary}"


def _promises(run: Results) -> str:
    peers = dict.fromkeys(peer for scenario in run.scenarios for peer in scenario.measures)
    rows = [(peer, PEERS[peer].promise) for peer in peers if peer in PEERS]
    return "What is on disk when a save is called done:\n\n" + table(
        ("peer", "promise"), rows, align="---"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Rewrites the tables and charts of the page from recorded runs."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=main.__doc__)
    add = parser.add_argument
    add("--results", type=Path, nargs="+", default=[RESULTS], help="files of runs on one machine; "
        "of a scenario in two of them, the later; default: %(default)s")  # fmt: skip
    add("--page", type=Path, default=PAGE, help="default: %(default)s")
    chosen = parser.parse_args(arguments)

    run = results.merged([results.read(path) for path in chosen.results])
    if run.smoke:
        parser.error("a smoke run: its figures are not for publication")
    publish(run, chosen.page)


if __name__ == "__main__":
    main()
