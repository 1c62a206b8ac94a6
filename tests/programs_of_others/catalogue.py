"""The programs, and their table on the page; `python -m tests.programs_of_others.catalogue`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.support.paths import ROOT

__all__ = ["PAGE", "PROGRAMS", "Program", "with_table"]

PAGE = ROOT / "docs/how-to/orbax-in-one-line.md"

_REQUIREMENTS = Path(__file__).with_name("requirements.txt")
_PLACE = re.compile(r"(<!-- programs:start -->\n).*?(<!-- programs:end -->)", re.DOTALL)


@dataclass(frozen=True)
class Program:
    """A program, and what it can do, by whatever library."""

    project: str
    """Its name on the package index."""

    does: str
    """What the program does with it."""

    devices: int = 1
    """Number of those on which a killed run goes on, which began on one."""

    why_one: str = ""
    """Why it cannot change their number, if it cannot."""

    error: float = 1e-4
    """Relative error of its losses after a kill, of which some do not keep all that they need."""

    no_way_back: str = ""
    """Why Orbax cannot go on with what `ckpt_orbax` has saved for it, if it cannot."""


PROGRAMS = {
    "apax_trainer": Program(
        "apax",
        "trains a potential of molecules",
        devices=4,
        # It draws its batches anew.
        error=5e-3,
    ),
    "blaxbird_trainer": Program(
        "blaxbird",
        "trains a model of nnx with its `train_fn`; what it requires wants an older jax",
        devices=4,
    ),
    "brax_trainer": Program(
        "brax",
        "trains a policy by its `bc`",
        why_one="has no mesh",
        # It keeps no state of its optimizer.
        error=0.2,
    ),
    "evorl_trainer": Program(
        "evorl-jax",
        "trains a policy by its `PPOWorkflow`",
        why_one="has a random key for each device",
        no_way_back="no: its classes do not name their parts",
    ),
    "flaxdiff_trainer": Program(
        "flaxdiff",
        "trains a model of Flax with its `SimpleTrainer`",
        why_one="fails on several with this jax",
    ),
    "kauldron_trainer": Program(
        "kauldron", "trains a model of Flax on data of Grain with its `Trainer`", devices=4
    ),
    "keras_callback": Program("keras", "fits a model with its `OrbaxCheckpoint`", devices=4),
    "tunix_trainer": Program("google-tunix", "trains a model with its `PeftTrainer`", devices=4),
}


def _rows() -> Iterator[str]:
    versions = dict(re.findall(r"^(\S+)==(\S+)$", _REQUIREMENTS.read_text(), re.MULTILINE))
    yield "| Project | What the program does | Lines | Killed, resumed | Devices | Back to Orbax |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for each in PROGRAMS.values():
        devices = f"1: {each.why_one}" if each.devices == 1 else f"1, {each.devices}, 1"
        name = f"{each.project} {versions[each.project]}"
        yield f"| {name} | {each.does} | 1 | yes | {devices} | {each.no_way_back or 'yes'} |"


def with_table(page: str) -> str:
    """Returns the text of the page with the table as it ought to be."""
    table = "\n".join(_rows())
    return _PLACE.sub(lambda place: f"{place[1]}\n{table}\n\n{place[2]}", page)


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text("utf-8")), "utf-8")
