"""A checkpoint is data: to open one runs no code of it, and touches nothing but its files."""

from __future__ import annotations

import copy
import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ckpt._format.manifest_head import digest
from tests.reliability.mutations import mutate
from tests.reliability.specimens import specimens
from tests.support.manifests import document_of, rewrite, spread
from tests.support.paths import PROGRAMS

COUNT = 40
# Names that would do something, were they imported, called or opened.
BAIT = (
    "bait:run", "os:system", "builtins:eval", "subprocess:Popen", "bait", "bait.run", "!!python/x",
    "cos\nsystem\n(S'true'\ntR.", "__import__('bait')", "/etc/hostname", "../../../../etc/hostname",
    "file:///etc/hostname", "http://127.0.0.1:9/x", "s3://bucket/x", "$(touch bait)", "ctypes:CDLL",
)  # fmt: skip
PLACES = (
    "class_name", "kind", "handler", "codec", "dtype", "impl", "value", "name", "model", "type",
    "bit_generator", "message", "protocol", "form", "platform", "text", "memory_kind",
)  # fmt: skip


def baited(document: object, source: random.Random) -> None:
    """Put bait wherever a document names a class, a codec, a file or the like."""
    if isinstance(document, dict):
        for key, value in document.items():
            if isinstance(value, str) and key in PLACES and source.random() < 0.3:
                document[key] = source.choice(BAIT)
            elif key == "static" and source.random() < 0.5:
                document[key] = {"aux": {"enum": [source.choice(BAIT), "run"]}}
            elif key in ("data_files", "keys") and value and source.random() < 0.2:
                value[0] = source.choice(BAIT)
            else:
                baited(value, source)
    elif isinstance(document, list):
        for value in document:
            baited(value, source)


def pointed(document: object, place: str) -> bool:
    """Put the name of a module that is there in one kind of place; whether there is one."""
    found = False
    if isinstance(document, dict):
        if isinstance(document.get(place), str):
            document[place] = "bait:run"
            found = True
        document = list(document.values())
    for value in document if isinstance(document, list) else ():
        found = pointed(value, place) or found
    return found


def hostile(directory: Path, count: int) -> None:
    """Make `count` checkpoints that want something, and a sound one of each kind."""
    source = random.Random(0)
    made = list(specimens(directory.with_name("made")))
    directory.mkdir()
    for number, specimen in enumerate(made):
        shutil.copytree(specimen.path, directory / f"sound-{number}")
    for place in PLACES:
        for specimen in made:
            document = spread(document_of(specimen.path))
            if pointed(document, place):
                path = directory / f"{place}-{specimen.name.replace('/', '-')}"
                shutil.copytree(specimen.path, path)
                rewrite(path, document)
                if place != "class_name":
                    # One of a kind will do.
                    break
    for number in range(count):
        specimen = made[number % len(made)]
        path = directory / str(number)
        shutil.copytree(specimen.path, path)
        document = spread(document_of(path))
        document["step"] = number
        changed = copy.deepcopy(document)
        if number % 2:
            baited(changed, source)
        else:
            mutate(changed, source)
        for name in document["files"]:
            # What handlers read holds bait too, with a digest that fits.
            if name.endswith((".json", ".bin", "config/metadata")) and source.random() < 0.3:
                data = json.dumps({"state": source.choice(BAIT), "type": "eval"}).encode()
                (path / name).write_bytes(data)
                if isinstance(changed.get("files"), dict):
                    changed["files"][name] = {"size": len(data), "digest": digest(data)}
        rewrite(path, changed)


def audited(root: Path, bait: Path) -> list[str]:
    child = PROGRAMS / "open_audited.py"
    path = [str(bait), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, child, root],
        capture_output=True,
        text=True,
        timeout=110,
        cwd=bait,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()


@pytest.mark.slow
def test_opening_a_hostile_checkpoint_runs_nothing(tmp_path: Path) -> None:
    hostile(tmp_path / "root", COUNT)
    bait = tmp_path / "bait"
    bait.mkdir()
    # A module that tells when somebody imports it.
    (bait / "bait.py").write_text("open('imported', 'w').close()\ndef run(*_): open('run', 'w')\n")
    *lines, last = audited(tmp_path / "root", bait)
    assert lines == []
    assert int(last.removeprefix("done ")) >= COUNT
    assert os.listdir(bait) == ["bait.py"]
