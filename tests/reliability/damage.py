"""Checkpoints are damaged: a load is right bit by bit or says so, and `verify` always tells."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ckpt
import ckpt.sync
from ckpt._format.array_format import parse_dtype
from ckpt.errors import (
    CheckpointError,
    CorruptCheckpointError,
    InvalidArgumentError,
    NotACheckpointError,
)
from tests.reliability.specimens import Specimen, specimens
from tests.reliability.tally import Tally
from tests.support.damage import Damage, FlipBit, Replace, damaged, sampled_damages
from tests.support.manifests import document_of, leaf_rows

__all__ = ["Place", "damage", "flips", "places_of"]

MANIFEST = "ckpt.json"


def damage(directory: Path, count: int, seed: int = 0) -> Tally:
    """Damage every file of every kind of checkpoint in every way, `count` times in all."""
    return _campaign(directory, count, seed, only_flips=False)


def flips(directory: Path, count: int, seed: int = 0) -> Tally:
    """Flip `count` single bits, spread over all files of every kind of checkpoint."""
    return _campaign(directory, count, seed, only_flips=True)


def _campaign(directory: Path, count: int, seed: int, *, only_flips: bool) -> Tally:
    total = Tally()
    made = list(specimens(directory))
    for number, specimen in enumerate(made):
        share = count * (number + 1) // len(made) - count * number // len(made)
        kinds = (FlipBit,) if only_flips else None
        other = specimen.other
        found = sampled_damages(specimen.path, share, other=other, kinds=kinds, seed=seed)
        places = places_of(specimen.path)
        for each in found:
            total += _attack(specimen, each, places)
    return total


@dataclass(frozen=True, slots=True)
class Place:
    """Where a chunk of a leaf lies."""

    leaf: str
    file: str
    start: int
    end: int


def places_of(path: Path) -> list[Place]:
    """Return where the manifest says that chunks lie; none of those only a database knows."""
    return list(_read_places(document_of(path)))


def _read_places(manifest: Any) -> Iterator[Place]:
    for item, entry in manifest["items"].items():
        for leaf in leaf_rows(entry):
            offsets = leaf["offsets"]
            files = leaf["files"] or [0] * len(offsets)
            lengths = leaf["lengths"]
            if offsets and "codec" not in leaf:
                itemsize = parse_dtype(leaf["dtype"]).itemsize
                lengths = [math.prod(leaf.get("chunks", [])) * itemsize] * len(offsets)
            for file, start, length in zip(files, offsets, lengths, strict=True):
                name = f"{item}/{entry['data_files'][file]}"
                yield Place(leaf["name"], name, start, start + length)


def _attack(specimen: Specimen, attack: Damage, places: list[Place]) -> Tally:
    whole = (specimen.path / attack.file).read_bytes()
    here = [place for place in places if place.file == attack.file]
    with damaged(specimen.path, attack):
        left = specimen.path / attack.file
        data = left.read_bytes() if left.exists() else b""
        touched = {
            place.leaf
            for place in here
            if whole[place.start : place.end] != data[place.start : place.end]
        }
        problems = [*_load(specimen, attack, touched if here else None), *_verify(specimen, attack)]
    where = f"{specimen.name}: {attack!r:.300}"
    return Tally(runs=1, faults=1, losses=[f"{where}: {problem}" for problem in problems])


def _load(specimen: Specimen, attack: Damage, touched: set[str] | None) -> Iterator[str]:
    """Yield what is wrong with a default restore; `touched` are the leaves that were damaged."""
    try:
        found = specimen.load()
    except CheckpointError as error:
        if not isinstance(error, _expected(specimen, attack)):
            yield f"load raised {type(error).__name__}: {error!s:.300}"
        elif touched is not None and error.leaf not in touched:
            yield f"load named the leaf {error.leaf!r}, and {sorted(touched)} were damaged"
        elif attack.file != MANIFEST and error.item != attack.file.split("/")[0]:
            yield f"load named the item {error.item!r}"
    except Exception as error:
        yield f"load raised {type(error).__name__}: {error!s:.300}"
    else:
        yield from (f"load was silent: {line}" for line in specimen.differences(found))
        # That of another step that holds the same is whole, and says how to read it.
        if attack.file == MANIFEST and not isinstance(attack, Replace):
            yield "a damaged manifest was taken for whole"


def _expected(specimen: Specimen, attack: Damage) -> tuple[type[CheckpointError], ...]:
    if attack.file != MANIFEST:
        return (CorruptCheckpointError,)
    if isinstance(attack, Replace) and specimen.wanted:
        # Another step has other items.
        return CorruptCheckpointError, InvalidArgumentError
    return CorruptCheckpointError, NotACheckpointError


def _verify(specimen: Specimen, attack: Damage) -> Iterator[str]:
    """Yield what is wrong with what `verify` says."""
    try:
        report = ckpt.sync.verify(specimen.path)
    except CheckpointError as error:
        # Without a manifest there is nothing to verify.
        if attack.file != MANIFEST or not isinstance(error, _expected(specimen, attack)):
            yield f"verify raised {type(error).__name__}: {error!s:.300}"
    except Exception as error:
        yield f"verify raised {type(error).__name__}: {error!s:.300}"
    else:
        named = [problem.file for problem in report.problems]
        # The manifest of another step is whole; that the files are not its own is what is told.
        foreign = attack.file == MANIFEST and isinstance(attack, Replace)
        if report.ok or not (foreign or attack.file in named):
            yield f"verify said ok={report.ok} and named {named[:5]}"
