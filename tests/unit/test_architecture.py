"""The house: floors, seams, sizes. docs/design/000-map.md tells why."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.support.paths import ROOT

PACKAGE = ROOT / "ckpt"
MODULES = sorted(PACKAGE.rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))

# The table of docs/design/000-map.md. A room is a folder, or a file where it is named here; the
# longest name that fits a module is its room. A room imports from floors below its own, and from
# itself.
FLOORS = [
    {"_api.hints", "_events", "_redaction"},
    {"errors"},
    {"_arguments", "_vitals"},
    {"_format", "_runtime", "_settings", "exports", "step_names"},
    {
        "_tree",
        "coordination",
        "manifest",
        "observers._tracing",
        "orbax",
        "storage._base",
        "storage._store",
    },
    {"keep"},
    {
        "_commit",
        "_job.agreement",
        "_vitals.stored_signs",
        "observers",
        "storage._local",
        "storage._object",
    },
    {"_proof.run_notes"},
    {"extensions._readers"},
    {"_plan", "_steps.run_hooks", "save_when", "storage"},
    {"surgery"},
    {"_engine.memory", "handlers"},
    {"_vitals.extension"},
    {"_proof"},
    {"extensions"},
    {"_engine"},
    {"_engine.save", "_engine.restore"},
    {"_engine.verify", "_interop"},
    {"_steps"},
    {"_job"},
    {"_steps.saves"},
    {"_steps.service"},
    {"_conversion", "_inspection"},
    {"_tiers.drains"},
    {"_tiers"},
    {"_calls", "tiers"},
    {"_api"},
    {"_api.plain"},
    {"sync", "types"},
    {"page"},
    {"cli"},
    {"__main__"},
]
FLOOR_OF = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}

# Who may name a third-party library; `testing` stands aside.
SEAMS = {
    "tensorstore": {"storage._local", "storage._object"},
    "numcodecs": {"_engine"},
    "pydantic": {"handlers"},
    "aiofiles": {"storage._local"},
    "xxhash": {"_format"},
    "obstore": {"storage._object"},
    "google_crc32c": {"_interop"},
    "opentelemetry": {"observers"},
    "prometheus_client": {"observers"},
    "rich": {"cli", "observers"},
    "click": {"cli"},
    "orbax": {"orbax"},
    "etils": {"orbax"},
}
# The core names no extension. Lines of its rooms that still name vital signs, or the health of
# steps that rests on them, by file; each number may only fall. In `_format` they read manifests
# from before there were `extensions`, and name a folder of steps; in `_steps` a policy.
CORE = ("_steps", "_job", "_engine", "_plan", "_tree", "_format", "storage", "_runtime")
WORDS_OF_SIGNS = re.compile(
    r"vital|signs_|_signs|\.signs\b|signs=|nonfinite|not finite|unequal|health|frozen leaves", re.I
)
NAMES_SIGNS = {
    "_format/leaf_table.py": 4,
    "_format/manifest_head.py": 6,
    "_steps/removal/recorded_policy.py": 2,
    "_steps/removal/retention.py": 1,
}
# Nor a reader of its steps. Lines that still name Orbax: steps that it wrote are listed, kept, and
# spared or deleted; names of its files are taken or mean that a place is not free; messages. What
# is written for it is in `_interop`.
NAMES_ORBAX = {
    "_engine/codecs.py": 1,
    "_engine/verify/damage.py": 2,
    "_engine/verify/pipeline.py": 1,
    "_engine/verify/report.py": 2,
    "_format/array_format.py": 1,
    "_format/manifest_head.py": 1,
    "_format/step_files.py": 7,
    "_job/processes.py": 1,
    "_steps/index.py": 4,
    "_steps/opened.py": 6,
    "_steps/path_diagnosis.py": 1,
    "_steps/removal/recorded_policy.py": 2,
    "_steps/removal/retention.py": 6,
    "_steps/root.py": 3,
    "_steps/saves/save_arguments.py": 3,
    "_tree/structure.py": 2,
    "storage/_local/attempts.py": 4,
    "storage/_local/leases.py": 3,
    "storage/_object/listing.py": 4,
    "storage/_object/storage.py": 1,
    "storage/_object/trash.py": 3,
}
MAX_LINES = 600
MAX_FILES = 15


def name_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room_of(module: str) -> str:
    name = module.partition(".")[2]
    while name and name not in FLOOR_OF:
        name = name.rpartition(".")[0]
    return name


def imports_of(path: Path) -> set[str]:
    """Modules imported at import time; what stands under TYPE_CHECKING is left out."""
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            return
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            # `from ckpt._plan import match` imports a module as well as a name.
            found.update({node.module, *(f"{node.module}.{alias.name}" for alias in node.names)})
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(syntax_of(path))
    return found


@functools.cache
def syntax_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@functools.cache
def graph() -> dict[str, set[str]]:
    """Returns what each module of the package imports."""
    return {name_of(path): imports_of(path) for path in MODULES}


def test_a_room_imports_only_from_floors_below_its_own() -> None:
    wrong = []
    for module in graph():
        room = room_of(module)
        if module == "ckpt" or module.startswith("ckpt.testing"):
            continue
        if not room:
            wrong.append(f"{module}: which floor is this room on?")
            continue
        for imported in sorted(graph()[module] & set(graph())):
            if imported.startswith("ckpt.testing"):
                wrong.append(f"{module} imports a tool for tests")
            other = room_of(imported)
            # A package that only hands on names of its own files is no floor for them.
            is_floor = other and other != room and not module.startswith(f"{imported}.")
            if is_floor and FLOOR_OF[other] >= FLOOR_OF[room]:
                wrong.append(f"{module} imports upwards: {imported}")
    assert wrong == []


@pytest.mark.parametrize(
    ("words", "known"),
    [(WORDS_OF_SIGNS, NAMES_SIGNS), (re.compile("orbax", re.I), NAMES_ORBAX)],
    ids=["vital signs", "Orbax"],
)
def test_the_core_names_extensions_only_where_it_is_known_to(
    words: re.Pattern[str], known: dict[str, int]
) -> None:
    found = {
        str(path.relative_to(PACKAGE)): sum(
            bool(words.search(line)) for line in path.read_text().splitlines()
        )
        for room in CORE
        for path in (PACKAGE / room).rglob("*.py")
    }
    assert {name: count for name, count in found.items() if count} == known


def test_the_core_reaches_readers_of_other_libraries_by_one_module_each_for_two_needs() -> None:
    imported = {
        (str(path.relative_to(PACKAGE)), node.module)
        for room in CORE
        for path in (PACKAGE / room).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("ckpt._interop")
    }
    opening, adopting = "ckpt._interop.files", "ckpt._interop.adoption"
    assert imported == {
        ("_steps/opened.py", opening),
        ("_steps/index.py", opening),
        ("_steps/saves/adoption.py", adopting),
        # The type of the files of a foreign step.
        ("_steps/opened.py", "ckpt._interop.foreign"),
    }


def test_a_save_and_a_restore_without_extensions_import_none(tmp_path: Path) -> None:
    script = (
        "import sys, numpy, ckpt.sync as ckpt\n"
        f"with ckpt.CheckpointManager({str(tmp_path)!r}, keep=1) as mgr:\n"
        "    for step in range(3): mgr.save(step, {'w': numpy.ones(4)})\n"
        f"with ckpt.CheckpointManager({str(tmp_path)!r}) as mgr:\n"
        "    mgr.restore(2); mgr.metadata(2); mgr.verify(2)\n"
        "print([m for m in sys.modules if m.startswith(('ckpt._vitals', 'ckpt.extensions'))])"
    )
    run = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
    )
    assert run.stdout.strip() == "[]"


# Features that a plain save does not use, each by a module that belongs to it.
NOT_FOR_SAVES = (
    "_api.plain.functions",
    "_api.plain.partial",
    "_api.plain.watch",
    "_api.resumption",
    "_calls",
    "_engine.codecs",
    "_engine.restore",
    "_engine.verify",
    "_interop.adoption",
    "_interop.files",
    "_interop.foreign",
    "_interop.orbax.step",
    "_plan.adapt",
    "_plan.match",
    "_plan.targets",
    "_steps.removal.recorded_policy",
    "_steps.saves.partial",
    "_steps.step_metadata",
    "_steps.watcher",
    "_tiers",
    "coordination",
    "handlers._json",
    "handlers._stateful",
    "handlers._text",
    "keep._by_item",
    "storage._local.tensorstore_files",
)


def test_a_save_imports_no_feature_that_it_does_not_use(tmp_path: Path) -> None:
    script = (
        "import sys, numpy, ckpt.sync as ckpt\n"
        f"with ckpt.CheckpointManager({str(tmp_path)!r}) as mgr:\n"
        "    mgr.save(1, {'w': numpy.ones(4), 'step': 1})\n"
        f"print([m for m in {NOT_FOR_SAVES} if 'ckpt.' + m in sys.modules])"
    )
    run = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
    )
    assert run.stdout.strip() == "[]"
    assert set(graph()).issuperset(f"ckpt.{name}" for name in NOT_FOR_SAVES)


def test_no_folder_is_a_flat_drawer() -> None:
    counts = Counter(str(path.parent.relative_to(PACKAGE.parent)) for path in MODULES)
    # A command is a module there, and is found by its name.
    del counts["ckpt/cli/commands"]
    assert {folder: count for folder, count in counts.items() if count > MAX_FILES + 1} == {}


def test_there_is_no_import_cycle() -> None:
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, f"cycle: {' -> '.join((*path, module))}"
        if module in done:
            return
        for imported in graph()[module] & set(graph()):
            if imported != "ckpt":
                visit(imported, (*path, module))
        done.add(module)

    for module in graph():
        visit(module, ())
    assert done == set(graph())


def test_third_party_libraries_are_named_only_at_their_seams() -> None:
    wrong = []
    for module, found in graph().items():
        roots = {imported.split(".")[0] for imported in found}
        for library, rooms in SEAMS.items():
            is_tool = module.startswith("ckpt.testing")
            if not is_tool and library in roots and room_of(module) not in rooms:
                wrong.append(f"{module} names {library}")
    assert wrong == []


def test_private_modules_of_jax_are_named_in_one_file() -> None:
    # Neither imported nor reached by attribute.
    named = {name_of(path) for path in MODULES if "jax._src" in path.read_text()}
    assert named == {"ckpt._runtime.jax_internals"}


@pytest.mark.parametrize("paths", [MODULES, TESTS], ids=["package", "tests"])
def test_no_file_is_longer_than_one_responsibility(paths: list[Path]) -> None:
    lengths = {name_of(path): len(path.read_text().splitlines()) for path in paths}
    assert {name: lines for name, lines in lengths.items() if lines > MAX_LINES} == {}


def test_threads_are_asked_for_in_one_place() -> None:
    # Elsewhere the error of a system that refuses one would be anybody's RuntimeError.
    asking = {name_of(path) for path in MODULES if "anyio.to_thread" in path.read_text()}
    assert asking == {"ckpt._runtime.threads"}


WITHOUT_JAX = (
    "ckpt",
    "ckpt.manifest",
    "ckpt.errors",
    "ckpt.keep",
    "ckpt.save_when",
    "ckpt.observers",
    "ckpt._conversion.copies.steps",
    "ckpt._plan.chunk_reads",
    "ckpt._plan.leaf_entries",
    "ckpt._inspection.listed_steps",
    "ckpt._inspection.leaf_records",
    "ckpt._inspection.norms",
    "ckpt._inspection.divergence",
    "ckpt._inspection.save_times",
    "ckpt._inspection.followed_run",
    "ckpt._inspection.disk",
    "ckpt._tiers.drains.drainer",
    "ckpt._tiers.drains.leader",
)


def test_tools_can_read_manifests_without_jax() -> None:
    script = (
        "import importlib, sys\n"
        f"for name in {WITHOUT_JAX}:\n"
        "    importlib.import_module(name)\n"
        "    found = [m for m in ('jax', 'tensorstore') if m in sys.modules]\n"
        "    if found: sys.exit(f'{name} imports {found}')"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (run.returncode, run.stderr) == (0, "")


def test_importing_everything_public_imports_no_peer_or_tool() -> None:
    script = (
        "import sys, ckpt\nfor name in ckpt.__all__: getattr(ckpt, name)\n"
        "print(sorted({m.split('.')[0] for m in sys.modules} & "
        "{'orbax', 'flax', 'optax', 'hypothesis', 'pytest', 'IPython', 'matplotlib', 'sklearn', "
        "'obstore', 'opentelemetry', 'prometheus_client', 'rich'}))"
    )
    run = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
    )
    assert run.stdout.strip() == "[]"


FORBIDDEN = {"eval", "exec", "compile", "__import__"}
UNSAFE = {"pickle", "marshal", "shelve", "cloudpickle", "dill"}
LAZY = (PACKAGE, PACKAGE / "cli" / "commands")


def test_nothing_that_could_run_code_from_a_checkpoint_is_used() -> None:
    assert [problem for path in MODULES for problem in could_run_code(path)] == []


def could_run_code(path: Path) -> list[str]:
    nodes = [*ast.walk(syntax_of(path))]
    called = {
        node.func.id
        for node in nodes
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    found = [f"{name_of(path)} calls {name}" for name in called & FORBIDDEN]
    roots = {name.split(".")[0] for name in imports_of(path)}
    found += [f"{name_of(path)} imports {name}" for name in roots & UNSAFE]
    by_name = any(
        isinstance(each, ast.Attribute) and each.attr == "import_module" for each in nodes
    )
    if by_name and (path.name != "__init__.py" or path.parent not in LAZY):
        found.append(f"{name_of(path)} imports by name, as only lazy packages may")
    return found
