"""Turns recorded runs into Markdown, and keeps the tables of docs/performance.md current.

`python -m benchmarks.report` rewrites what stands between the two markers of the page, from the
recorded run alone; text around them is kept. A page that does not exist starts from
`performance.template.md`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks import results
from benchmarks.peers import PEERS

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from benchmarks.results import Results, Sample, Scenario

START, END = "<!-- bench:start -->", "<!-- bench:end -->"
BASELINE = "orbax"
RESULTS = Path("benchmarks/results/results.json")
PAGE = Path("docs/performance.md")
_TEMPLATE = Path(__file__).with_name("performance.template.md")


def markdown(run: Results) -> str:
    """Returns the tables of a run, with the facts needed to read them."""
    blocks = [_heading(run)]
    for scenario in run.scenarios:
        table = _overlap_table if scenario.kind == "overlap" else _throughput_table
        blocks += [f"### {scenario.name}: {_size(scenario)}, {scenario.summary}", table(scenario)]
    blocks.append(_promises(run))
    return "\n\n".join(blocks) + "\n"


def update_page(page: str, tables: str) -> str:
    """Returns the page with these tables between its markers.

    Raises:
        ValueError: The page does not have exactly one pair of markers, in order.
    """
    before, start, rest = page.partition(START)
    _, end, after = rest.partition(END)
    if not start or not end or START in rest or END in after:
        raise ValueError(f"the page needs one {START} and after it one {END}")
    return f"{before}{START}\n\n{tables}\n{END}{after}"


def _heading(run: Results) -> str:
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


def _size(scenario: Scenario) -> str:
    return f"{scenario.size_bytes / 2**20:,.0f} MiB in {scenario.leaves:,} leaves"


def _throughput_table(scenario: Scenario) -> str:
    head = (
        "peer", "save", "MB/s", "vs Orbax", "first save", "blocked", "vs Orbax",
        "restore", "MB/s", "vs Orbax",
    )  # fmt: skip
    rows = []
    for peer, measures in scenario.measures.items():
        save, blocked, restore = measures["save"], measures["blocked"], measures["restore"]
        rows.append(
            (
                peer,
                _spread(save),
                _rate(scenario, save),
                _ratio(scenario, "save", save),
                _time(save.first),
                _spread(blocked),
                _ratio(scenario, "blocked", blocked),
                _spread(restore),
                _rate(scenario, restore),
                _ratio(scenario, "restore", restore),
            )
        )
    return _table(head, rows)


def _overlap_table(scenario: Scenario) -> str:
    head = (
        "peer", "lost per save", "vs Orbax", "first save", "blocked", "slowdown of steps",
        "slowest step", "undisturbed step", "committed after",
    )  # fmt: skip
    rows = [
        (
            peer,
            _spread(measures["lost"]),
            _ratio(scenario, "lost", measures["lost"]),
            _time(measures["lost"].first),
            _spread(measures["blocked"]),
            _spread(measures["slowdown"]),
            _spread(measures["worst_step"]),
            _spread(measures["undisturbed_step"]),
            _spread(measures["committed"]),
        )
        for peer, measures in scenario.measures.items()
    ]
    return _table(head, rows)


def _promises(run: Results) -> str:
    peers = dict.fromkeys(peer for scenario in run.scenarios for peer in scenario.measures)
    rows = [(peer, PEERS[peer].promise) for peer in peers if peer in PEERS]
    return "What is on disk when a save is called done:\n\n" + _table(
        ("peer", "promise"), rows, align="---"
    )


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], *, align: str = "---:") -> str:
    lines = [head, ["---", *[align] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _digits(value: float) -> str:
    """Returns a number with three digits, or with all of its whole ones."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _time(seconds: float) -> str:
    return f"{_digits(seconds)} s" if abs(seconds) >= 1 else f"{_digits(seconds * 1e3)} ms"


def _spread(sample: Sample) -> str:
    unit, factor = ("s", 1.0) if abs(sample.median) >= 1 else ("ms", 1e3)
    median, low, high = (_digits(x * factor) for x in (sample.median, sample.low, sample.high))
    return f"{median} {unit} ({low} to {high})"


def _rate(scenario: Scenario, sample: Sample) -> str:
    return f"{scenario.size_bytes / sample.median / 1e6:,.0f}"


def _ratio(scenario: Scenario, measure: str, sample: Sample) -> str:
    baseline = scenario.measures.get(BASELINE)
    if baseline is None or sample.median <= 0:
        return ""
    ratio = baseline[measure].median / sample.median
    return f"{ratio:.0f}x" if ratio >= 10 else f"{ratio:.2g}x"


def main(arguments: Sequence[str] | None = None) -> None:
    """Rewrites the tables of the page from a recorded run."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=main.__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS, help="default: %(default)s")
    parser.add_argument("--page", type=Path, default=PAGE, help="default: %(default)s")
    chosen = parser.parse_args(arguments)

    run = results.read(chosen.results)
    if run.smoke:
        parser.error(f"{chosen.results} is a smoke run: its figures are not for publication")
    source = chosen.page if chosen.page.exists() else _TEMPLATE
    page = update_page(source.read_text(encoding="utf-8"), markdown(run))
    chosen.page.parent.mkdir(parents=True, exist_ok=True)
    chosen.page.write_text(page, encoding="utf-8")
    sys.stdout.write(f"wrote {chosen.page}\n")


if __name__ == "__main__":
    main()
