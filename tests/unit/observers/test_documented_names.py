"""The documentation has the names that the code uses, no more and no fewer."""

from __future__ import annotations

import re

import pytest

from ckpt.observers._names import BYTES, JAX, OPENTELEMETRY, PHASES, PROMETHEUS, MetricName
from tests.support.paths import ROOT

PAGE = ROOT / "docs" / "how-to" / "observing.md"


def table_after(heading: str) -> list[list[str]]:
    """Return the rows of the first table after a heading, without its head."""
    _, found, rest = PAGE.read_text(encoding="utf-8").partition(f"\n{heading}\n")
    assert found, heading
    rows: list[list[str]] = []
    for line in rest.splitlines():
        if line.startswith("|"):
            rows.append([cell.strip() for cell in line.strip("|").split("|")])
        elif rows:
            break
    return rows[2:]


def code(text: str) -> str:
    return f"`{text}`"


@pytest.mark.parametrize(
    ("heading", "names", "prefix"),
    [
        ("## Prometheus", PROMETHEUS, "ckpt_"),
        ("## OpenTelemetry", OPENTELEMETRY, ""),
    ],
)
def test_the_page_has_every_name_with_its_kind_and_meaning(
    heading: str, names: dict[str, MetricName], prefix: str
) -> None:
    expected = [
        [
            code(f"{prefix}{name}"),
            known.kind,
            ", ".join(map(code, known.labels)),
            known.meaning,
        ]
        for name, known in names.items()
    ]
    assert table_after(heading) == expected


def test_the_page_has_every_name_of_jax_monitoring() -> None:
    sentence = re.search(r"an operation is (.*?)\.", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert sentence
    operations = re.findall(r"`(\w+)`", sentence[1])
    phases = [(row[0].strip("`"), row[1].strip("`")) for row in table_after("## Phases")]
    found = {}
    for names, kind, _ in table_after("## jax.monitoring"):
        for name in re.findall(r"`/ckpt/([^`]+)`", names):
            for operation in operations:
                named = name.replace("<operation>", operation)
                if "<phase>" in named:
                    for of, phase in phases:
                        if of == operation:
                            found[named.replace("<phase>", phase)] = kind
                else:
                    found[named] = kind
    assert found == JAX


def test_the_page_has_every_phase() -> None:
    expected = [
        [code(operation), code(phase), meaning]
        for operation, phases in PHASES.items()
        for phase, meaning in phases.items()
    ]
    rows = table_after("## Phases")
    assert [row for row in rows if row[1] != "`end`"] == expected
    assert [row[0] for row in rows if row[1] == "`end`"] == ["all"]


def test_bytes_are_told_of_phases_that_there_are() -> None:
    assert all(phase in PHASES[operation] for operation, phase in BYTES)
    assert len(set(JAX)) == len(JAX)
