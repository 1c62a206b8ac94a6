"""One process or several: who outside of the job's own rooms asks, as a list that only shrinks."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tests.unit.test_architecture import MODULES, name_of

# The rooms of jobs of several processes; and those that speak of processes which have saved, or
# would restore, a checkpoint that they describe.
OWN_ROOMS = (
    "ckpt._job",
    "ckpt.coordination",
    "ckpt._inspection",
    "ckpt.cli",
    "ckpt.testing",
)
# Questions "is this process alone, or which one of several is it?", by module. A number is lowered
# with the question that goes; none is ever raised. In `_tiers.settings`, `peers` is a setting of
# the user.
QUESTIONS = {
    "ckpt._engine.save.pipeline": 1,
    "ckpt._steps.service": 1,
    "ckpt._tiers.factory": 3,
    "ckpt._tiers.memory": 1,
    "ckpt._tiers.peer_replication": 1,
    "ckpt._tiers.settings": 1,
    "ckpt._tiers.tier_drains": 1,
    "ckpt.handlers._stateful": 2,
}
KINDS = {"SoloSave", "MultihostSave", "OneProcess", "SharedRoot", "SeparateRoots"}
ANSWERS = {"is_alone", "own_disks", "leads", "publishes", "owns_root", "tidies_alone"}
COUNTS = ("process_count", "processes.count", "group.count", "writer.processes")
OTHERS = {"peers", "processes.peers", "group", "plan.group", "self._group", "self._processes.steps"}


def questions(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(attr=attr, ctx=ast.Load()) if attr in ANSWERS:
                yield ast.unparse(node)
            case ast.Call(func=ast.Name(id="isinstance"), args=[_, kind]) if KINDS & {
                each.id for each in ast.walk(kind) if isinstance(each, ast.Name)
            }:
                yield ast.unparse(node)
            case ast.Compare(left=left, comparators=[ast.Constant(value=0 | 1)]) if ast.unparse(
                left
            ).endswith(COUNTS):
                yield ast.unparse(node)
            case ast.Compare(left=left, ops=[ast.Is() | ast.IsNot()]) if (
                ast.unparse(left) in OTHERS
            ):
                yield ast.unparse(node)


def test_no_more_is_asked_than_the_list_says() -> None:
    asked = Counter[str]()
    for path in MODULES:
        name = name_of(path)
        if not name.startswith(OWN_ROOMS):
            asked[name] = sum(1 for _ in questions(ast.parse(path.read_text())))
    assert {name: count for name, count in asked.items() if count} == QUESTIONS


def test_a_process_that_is_alone_imports_nothing_of_jobs(tmp_path: Path) -> None:
    script = (
        "import sys, numpy as np, ckpt.sync\n"
        "with ckpt.sync.CheckpointManager(sys.argv[1]) as mgr:\n"
        "    mgr.save(1, {'w': np.ones(3)})\n"
        "    mgr.restore(1)\n"
        "ckpt.sync.save(sys.argv[1] + '-one', {'w': np.ones(3)})\n"
        "ckpt.sync.load(sys.argv[1] + '-one')\n"
        "print(*(each for each in sys.modules if each.startswith(('ckpt._job', 'ckpt.coordi'))))"
    )
    alone = {"ckpt._job", "ckpt._job.solo"}
    run = subprocess.run(
        [sys.executable, "-c", script, tmp_path / "root"],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert set(run.stdout.split()) == alone
