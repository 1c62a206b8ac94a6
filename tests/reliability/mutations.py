"""Manifests that lie, by the thousand: only errors of the library, each at once, in little memory.

A manifest is changed where its structure says that it hurts, and given checksums that fit. Of
columns single values are changed, or the text that they are in the file. What comes of it is an
error of the library, or values whose bytes are those that the manifest vouches for. What a manifest
says is believed where nothing contradicts it, so the trees may be others.
"""

from __future__ import annotations

import copy
import json
import random
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import ckpt
import ckpt.sync
from ckpt._format.array_format import DTYPES
from ckpt._format.manifest import decode
from ckpt._format.manifest_head import digest
from ckpt.errors import CheckpointError
from tests.reliability.specimens import Specimen, specimens
from tests.reliability.tally import Tally
from tests.support.manifests import document_of, packed, rewrite, spread

__all__ = ["mutate", "mutations"]

# What a call may take, at most, of time and of memory beyond what was there before it. Of JSON the
# shortest values are the worst: three bytes become an object of a hundred.
SLOW_S = 20.0
MANY_BYTES = 64 << 20
MANY_TIMES = 50
# Names of leaves may have tens of thousands of characters.
LONG_MESSAGE = 200_000
INTEGERS = (0, 1, -1, 2, 7, 64, 2**16, 2**31, 2**33, 2**48, 2**48 + 1, 2**62, 2**63, 2**64, 10**30)
OTHERS: tuple[Any, ...] = (
    *INTEGERS, -(2**63), 10**400, 1.5, 1e308, -0.0, True, False, None, [], {}, [[]], [None] * 100,
    [0] * 1000, {"a": {}}, {"tuple": [{"int": "0x1"}]}, {"dict": [[1, 2], [1, 3]]},
    {"float": "nan"}, {"int": "0x" + "f" * 5000}, {"bytes": "!"}, {"dtype": "object"},
    {"numpy": ["float32", "AAAA"]}, {"enum": ["os:system", "x"]}, {"scalar_type": "os.system"},
    "", ".", "..", "../..", "/etc/passwd", "a/../../b", "a\0b", "a\nb", "\\", "%", "%2E", "%e",
    "%root", "%h", "\ud800", "x" * 5000, "nan", "-inf", "1e999", "0x", "(1+2j)", "AA==", "\u202e",
    "d/" + "0" * 32, "d/" + "0" * 31 + "\n", "state", "os:system", "builtins:eval",
)  # fmt: skip
WORDS = (
    "dict", "ordered_dict", "default_dict", "list", "tuple", "namedtuple", "none", "custom", "jax",
    "key", "numpy", "numpy_scalar", "int", "float", "complex", "bool", "str", "bytes", "numpy_str",
    "numpy_bytes", "callable", "named", "single", "other", "zstd", "blosc", "pytree", "json",
    "random_state", "stateful", "protobuf", "get_state", "form", "tree", "generator", "PCG64",
    "MT19937", "threefry2x32", "rbg", "compression", *DTYPES,
)  # fmt: skip
# Members that the schema knows and this document may lack.
MEMBERS = (
    "offsets", "files", "lengths", "codec", "packed", "same_as", "impl", "sharding", "value",
    "weak_type", "committed", "dtype", "shape", "chunks", "digests", "class_name", "static",
    "unstored", "keys", "children", "data_files", "nbytes", "data", "metrics", "metadata",
    "requires", "process_count", "items", "name", "kind", "handler", "step", "unnamed", "format",
    "version", "attempt", "created_ns", "type", "bit_generator", "protocol", "nodes", "leaves",
    "shardings", "spec", "device_ids", "axis_sizes",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Victim:
    """A step whose manifest is changed.

    Attributes:
        specimen: What it is a copy of.
        path: Its directory.
        document: Its manifest as it should be, spread and without checksums.
        wanted: The items to restore.
        files: Its JSON files that a handler reads.
    """

    specimen: Specimen
    path: Path
    document: Any
    wanted: list[str]
    files: dict[str, bytes]

    @property
    def step(self) -> int:
        return int(self.path.name)

    def write(self, document: Any) -> None:
        """Write a manifest."""
        rewrite(self.path, document)

    def heal(self) -> None:
        """Make everything as it should be."""
        self.write(self.document)
        for name, data in self.files.items():
            (self.path / name).write_bytes(data)


def mutations(directory: Path, count: int, seed: int = 0) -> Tally:
    """Load, describe, verify and list steps with `count` manifests that are not what they were."""
    victims = list(_victims(directory))
    source = random.Random(seed)
    tally = Tally()
    with ckpt.sync.CheckpointManager(victims[0].path.parent, mode="r") as mgr:
        targets = {each.step: mgr.restore(each.step, items=each.wanted) for each in victims}
        for number in range(count):
            victim = source.choice(victims)
            # Some are changed in the bytes of their columns.
            changed = (packed if source.random() < 0.2 else spread)(victim.document)
            done = [mutate(changed, source) for _ in range(source.choice((1, 1, 1, 2, 4)))]
            _spoil_a_file(victim, changed, source)
            victim.write(changed)
            problems = list(_problems(mgr, victim, targets[victim.step], number))
            victim.heal()
            where = f"{victim.specimen.name}, seed {seed}, number {number}: {'; '.join(done)}"
            tally.runs += 1
            tally.faults += packed(changed) != packed(victim.document)
            tally.losses += [f"{where:.600}: {problem}" for problem in problems]
    return tally


def _victims(directory: Path) -> Iterator[_Victim]:
    """Make a root whose steps are checkpoints of every kind."""
    for step, specimen in enumerate(specimens(directory / "made")):
        path = Path(shutil.copytree(specimen.path, directory / "root" / str(step)))
        document = spread(document_of(path))
        document["step"] = step
        files = {
            name: (path / name).read_bytes()
            for name in document["files"]
            if name.endswith((".json", "config/metadata")) and "/_" not in name
        }
        wanted = list(specimen.wanted or document["items"])
        victim = _Victim(specimen, path, document, wanted, files)
        victim.heal()
        yield victim


# -- what is changed ------------------------------------------------------------------------------


def mutate(document: Any, source: random.Random) -> str:
    """Change one place of a JSON document; return what was done."""
    slots = list(_slots(document, ""))
    # All digests together as often as all shapes: lists of numbers are long, and files are many.
    by_name: dict[str, list[tuple[Any, Any, str]]] = {}
    for slot in slots:
        name = slot[2].rpartition(".")[2].split("[")[0]
        by_name.setdefault(name if name in MEMBERS else "", []).append(slot)
    container, key, where = source.choice(by_name[source.choice(list(by_name))])
    value = container[key]
    how = source.choice(_ways(value))
    if how == "replace":
        container[key] = copy.deepcopy(source.choice(OTHERS))
    elif how == "word":
        container[key] = source.choice(WORDS)
    elif how == "graft":
        other, other_key, _ = source.choice(slots)
        container[key] = copy.deepcopy(other[other_key])
    elif how == "exchange":
        alike = [each for each in slots if type(each[0][each[1]]) is type(value)]
        other, other_key, _ = source.choice(alike)
        container[key], other[other_key] = copy.deepcopy((other[other_key], value))
    elif how == "deep":
        for _ in range(source.choice((50, 150, 190, 250))):
            value = [value]
        container[key] = value
    elif how == "drop":
        del container[key]
    else:
        container[key] = _changed(value, how, source)
    return f"{where} {how} -> {container[key] if how != 'drop' else None!r:.80}"


def _slots(node: Any, where: str) -> Iterator[tuple[Any, Any, str]]:
    """Yield every place that holds a value: its container, its key, its path."""
    if isinstance(node, dict):
        for key, value in node.items():
            yield node, key, f"{where}.{key}"
            yield from _slots(value, f"{where}.{key}")
    elif isinstance(node, list):
        for number, value in enumerate(node):
            yield node, number, f"{where}[{number}]"
            yield from _slots(value, f"{where}[{number}]")


def _ways(value: Any) -> list[str]:
    ways = ["replace", "replace", "graft", "exchange", "drop", "deep"]
    if isinstance(value, bool) or value is None:
        return [*ways, "word"]
    if isinstance(value, int | float):
        return [*ways, "near", "near", "times"]
    if isinstance(value, str):
        return [*ways, "word", "word", "letter", "long", "prefix"]
    if isinstance(value, list):
        return [*ways, "less", "again", "shuffle", "many", "zip"]
    return [*ways, "member", "member", "rename", "shuffle", "many"]


def _changed(value: Any, how: str, source: random.Random) -> Any:
    """A value that is a little different."""
    match how, value:
        case "near", _:
            return value + source.choice((-64, -1, 1, 64, 4096))
        case "times", _:
            return value * source.choice((-1, 0, 2, 8, 2**20, 2**40))
        case "letter", str():
            place = source.randrange(len(value) + 1)
            return value[:place] + source.choice("\0/.%:A0\u00e9") + value[place + 1 :]
        case "long", str():
            return value * 1000
        case "prefix", str():
            return source.choice(("../", "/", " ", "\n", "./")) + value
        case "less", list():
            return value[: source.randrange(len(value) + 1)]
        case "again", list():
            return [*value, *value[: source.randrange(len(value) + 1)]]
        case "many", list():
            times = 300_000 // len(json.dumps(value or [0]))
            return (value or [0]) * min(max(times, 2), source.choice((100, 10_000)))
        case "many", dict():
            return {**{str(number): value for number in range(200)}, **value}
        case "zip", list():
            return [[each, each] for each in value]
        case "shuffle", list():
            return source.sample(value, len(value))
        case "shuffle", dict():
            return dict(source.sample(list(value.items()), len(value)))
        case "rename", dict():
            renamed = source.choice([*value, "x"])
            other = source.choice([text for text in OTHERS if isinstance(text, str)])
            return {other if name == renamed else name: each for name, each in value.items()}
        case _:
            return {**value, source.choice(MEMBERS): source.choice((*OTHERS, *WORDS))}


def _spoil_a_file(victim: _Victim, changed: Any, source: random.Random) -> None:
    """Sometimes change a JSON file of a handler too, with size and digest that fit."""
    if not victim.files or source.random() < 0.7:
        return
    name = source.choice(list(victim.files))
    value = [json.loads(victim.files[name])]
    mutate(value, source)
    data = json.dumps(value[0] if value else None).encode()
    (victim.path / name).write_bytes(data)
    listed = changed.get("files")
    if isinstance(listed, dict):
        listed[name] = {"size": len(data), "digest": digest(data)}


# -- what comes of it -----------------------------------------------------------------------------


def _problems(
    mgr: ckpt.sync.CheckpointManager, victim: _Victim, target: Any, number: int
) -> Iterator[str]:
    """Yield what is wrong with how the library takes the manifest that lies there now."""
    step, wanted = victim.step, victim.wanted
    size = (victim.path / "ckpt.json").stat().st_size

    def restore() -> None:
        unknown = list(_not_vouched_for(mgr.restore(step, items=wanted), victim.path))
        assert not unknown, f"no digest vouches for {unknown[:5]}"

    def describe() -> None:
        found = mgr.metadata(step)
        assert found.target() is not None
        assert str(found)

    calls: dict[str, Callable[[], object]] = {
        "metadata": describe,
        "restore": restore,
    }
    if number % 2:
        calls["restore onto a target"] = lambda: mgr.restore(step, items=target)
    else:
        calls["verify"] = lambda: mgr.verify(step)
    if number % 20 == 0:
        # These take longer, and see what the others have seen.
        calls["all_steps"] = mgr.all_steps
        calls["latest_step"] = mgr.latest_step
        calls["metrics"] = lambda: mgr.metrics(step)
        calls["load"] = lambda: ckpt.sync.load(victim.path, items=wanted)
        calls["one-shot metadata"] = lambda: ckpt.sync.metadata(victim.path)
    for name, call in calls.items():
        yield from (f"{name} {problem}" for problem in _problems_of(call, size))


def _problems_of(call: Callable[[], object], size: int) -> Iterator[str]:
    before = _memory("VmRSS")
    # The highest mark so far is forgotten.
    Path("/proc/self/clear_refs").write_text("5")
    began = time.monotonic()
    try:
        call()
    except CheckpointError as error:
        if len(str(error)) > LONG_MESSAGE:
            yield f"raised a message of {len(str(error))} characters"
    except Exception as error:
        yield f"raised {type(error).__name__}: {error!s:.300}"
    took, more = time.monotonic() - began, _memory("VmHWM") - before
    if took > SLOW_S:
        yield f"took {took:.1f} s"
    if more > MANY_BYTES + MANY_TIMES * size:
        yield f"took {more >> 20} MiB for a manifest of {size >> 10} KiB"


def _not_vouched_for(found: Any, step_dir: Path) -> Iterator[str]:
    """Yield arrays whose bytes have no digest in a manifest."""
    manifest = decode((step_dir / "ckpt.json").read_bytes(), where="")
    entries = [leaf for item in manifest.items.values() for leaf in item.leaves]
    digests = {text for leaf in entries for text in leaf.digests}
    in_chunks = {tuple(leaf.shape) for leaf in entries if len(leaf.digests) > 1}
    for path, leaf in jax.tree_util.tree_flatten_with_path(found)[0]:
        if not hasattr(leaf, "dtype") or not leaf.size or tuple(leaf.shape) in in_chunks:
            continue
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            continue
        if digest(np.asarray(leaf).tobytes()) not in digests:
            yield jax.tree_util.keystr(path)[:80]


def _memory(name: str) -> int:
    """A figure of /proc/self/status in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) << 10
    raise AssertionError(name)
