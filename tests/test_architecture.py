"""The house: floors, seams, sizes. docs/design/000-map.md tells why."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "ckpt"
MODULES = sorted(PACKAGE.rglob("*.py"))

# A room imports from floors below its own, and from its own package.
FLOORS = [
    {"redaction", "digests"},
    {"errors"},
    {"backlog", "events", "manifest", "pace", "policies", "preemption", "settings"},
    {"statistics", "step_names", "waiting"},
    {"coordination", "layout", "storage", "commit", "observers"},
    {
        "handlers",
        "late_statistics",
        "peers",
        "pins",
        "root_metadata",
        "steps",
        "stepinfo",
        "surgery",
    },
    {"engine", "index"},
    {"entries", "history", "moments", "requests"},
    {"reading", "retention", "saves", "watcher"},
    {"disks", "parts"},
    {"partial", "service"},
    {"opening"},
    {"manager", "oneshot", "watching"},
    {"sync"},
]
FLOOR_OF = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}

# Who may name a third-party library; `testing` stands aside.
SEAMS = {
    "tensorstore": {"engine", "storage"},
    "pydantic": {"manifest"},
    "aiofiles": {"storage"},
    "xxhash": {"digests"},
    "matplotlib": {"observers"},
    "google_crc32c": {"layout"},
    "opentelemetry": {"observers"},
    "prometheus_client": {"observers"},
    "rich": {"observers"},
}
MAX_LINES = 400


def name_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room_of(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def imports_of(path: Path) -> set[str]:
    """Modules imported at import time; what stands under TYPE_CHECKING is left out."""
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            return
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            # `from ckpt.layout import plan` imports a module as well as a name.
            found.update({node.module, *(f"{node.module}.{alias.name}" for alias in node.names)})
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(path.read_text()))
    return found


GRAPH = {name_of(path): imports_of(path) for path in MODULES}


@pytest.mark.parametrize("module", GRAPH)
def test_a_room_imports_only_from_floors_below_its_own(module: str) -> None:
    room = room_of(module)
    if room in ("", "testing"):
        return
    assert room in FLOOR_OF, f"{module}: which floor is this room on?"
    for imported in GRAPH[module]:
        other = room_of(imported) if imported.startswith("ckpt.") else None
        if other and other in FLOOR_OF and other != room:
            assert FLOOR_OF[other] < FLOOR_OF[room], f"{module} imports upwards: {imported}"
        assert other != "testing", f"{module} imports what stands aside: {imported}"


def test_there_is_no_import_cycle() -> None:
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, f"cycle: {' -> '.join((*path, module))}"
        if module in done:
            return
        for imported in GRAPH[module] & set(GRAPH):
            if imported != "ckpt":
                visit(imported, (*path, module))
        done.add(module)

    for module in GRAPH:
        visit(module, ())
    assert done == set(GRAPH)


@pytest.mark.parametrize("module", GRAPH)
def test_third_party_libraries_are_named_only_at_their_seams(module: str) -> None:
    room = room_of(module)
    roots = {imported.split(".")[0] for imported in GRAPH[module]}
    for library, rooms in SEAMS.items():
        if room != "testing" and library in roots:
            assert room in rooms, f"{module} names {library}"


def test_private_modules_of_jax_are_named_in_exactly_one_file() -> None:
    private = {
        module
        for module, imported in GRAPH.items()
        if any(name == "jax._src" or name.startswith("jax._src.") for name in imported)
    }
    assert private == {"ckpt.coordination.jax_service"}
    # Nor are they reached by attribute.
    named = {name_of(path) for path in MODULES if "jax._src" in path.read_text()}
    assert named == private


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_no_file_is_longer_than_one_responsibility(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= MAX_LINES


@pytest.mark.parametrize(
    "module", ["ckpt", "ckpt.manifest", "ckpt.errors", "ckpt.policies", "ckpt.observers"]
)
def test_tools_can_read_manifests_without_jax(module: str) -> None:
    script = f"import sys, {module}; print([m for m in ('jax', 'tensorstore') if m in sys.modules])"
    run = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
    )
    assert run.stdout.strip() == "[]"


def test_importing_everything_public_imports_no_peer_or_tool() -> None:
    script = (
        "import sys, ckpt\nfor name in ckpt.__all__: getattr(ckpt, name)\n"
        "print(sorted({m.split('.')[0] for m in sys.modules} & "
        "{'orbax', 'flax', 'optax', 'hypothesis', 'pytest', 'IPython', 'matplotlib', 'sklearn', "
        "'opentelemetry', 'prometheus_client', 'rich'}))"
    )
    run = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
    )
    assert run.stdout.strip() == "[]"


FORBIDDEN = {"eval", "exec", "compile", "__import__"}


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_nothing_that_could_run_code_from_a_checkpoint_is_used(path: Path) -> None:
    tree = ast.parse(path.read_text())
    called = {
        node.func.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    assert not called & FORBIDDEN
    roots = {name.split(".")[0] for name in imports_of(path)}
    assert not roots & {"pickle", "marshal", "shelve", "cloudpickle", "dill"}
    if "importlib.import_module" in ast.unparse(tree):
        assert path.name == "__init__.py", "only the lazy root may import by name"
        assert path.parent == PACKAGE
