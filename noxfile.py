"""Everything that a contributor or a build machine runs; `nox -l` lists it.

Each session makes its own environment with the interpreter that runs nox, so a machine with Python
and git needs `python -m pip install nox` and no more. uv makes the environments where it is
installed, virtualenv elsewhere.
"""

from __future__ import annotations

import itertools
import os
import shutil
import tempfile
from pathlib import Path

import nox

nox.needs_version = ">=2025.2.9"  # the first with nox.project.dependency_groups
nox.options.default_venv_backend = "uv|virtualenv"
nox.options.sessions = ["lint", "types", "tests"]

PYPROJECT = nox.project.load_toml("pyproject.toml")

# Two, also where there are more cores: many tests start jobs of up to four processes. The tests of
# a file stay together, because they share things that are slow to make. Files come in the order of
# their names: those of few and long tests would be last otherwise, and one worker idle in the end.
WORKERS = ("-n", "2", "--dist", "loadfile", "--no-loadscope-reorder")


def group(name: str) -> tuple[str, ...]:
    """Returns the requirements of one dependency group of pyproject.toml."""
    return nox.project.dependency_groups(PYPROJECT, name)


def hermetic_env(session: nox.Session) -> dict[str, str | None]:
    """Returns an environment on the CPU in which no setting or credential of the user is seen.

    A variable set to None is removed. The home directory is an empty one: Jupyter, IPython and the
    cloud drivers of TensorStore would read their settings from it.
    """
    prefixes = ("JAX_", "XLA_", "LIBTPU_", "TENSORSTORE_", "ORBAX_", "CKPT_", "JUPYTER_", "XDG_")
    env: dict[str, str | None] = {name: None for name in os.environ if name.startswith(prefixes)}
    home = Path(session.virtualenv.location, "home").resolve()
    home.mkdir(exist_ok=True)
    return env | {
        "HOME": str(home),
        "IPYTHONDIR": None,
        "PYTHONPATH": None,
        "JAX_PLATFORMS": "cpu",
    }


@nox.session
def demo(session: nox.Session) -> None:
    """Kill a training run and resume it, with the package installed as a user installs it."""
    session.install(".", *group("demo"))
    session.run(
        "python", "docs/examples/resume_after_kill.py", *session.posargs, env=hermetic_env(session)
    )


@nox.session
def tests(session: nox.Session) -> None:
    """Run the tests but the slow ones; arguments after -- go to pytest, `-n 0` is one process."""
    run_tests(session, "not slow")


@nox.session
def slow(session: nox.Session) -> None:
    """Run the slow tests: example programs; kills, power cuts and damage in large numbers."""
    # Kills and power cuts are tried on a disk.
    run_tests(session, "slow", {"TMPDIR": tempfile.gettempdir()})


def run_tests(session: nox.Session, marks: str, env: dict[str, str | None] | None = None) -> None:
    """Runs the tests with these marks in two processes."""
    session.install("-e", ".", *group("test"))
    options = (*WORKERS, "-m", marks, *session.posargs)
    session.run("python", "-m", "pytest", *options, env=hermetic_env(session) | (env or {}))


@nox.session
def lowest(session: nox.Session) -> None:
    """Run the tests but the slow ones with the lowest versions that pyproject.toml allows.

    What users install beside it, such as the frameworks, is of the newest version that goes with
    them. Arguments after -- go to pytest.
    """
    project = PYPROJECT["project"]
    required = [*project["dependencies"]]
    required += itertools.chain.from_iterable(project["optional-dependencies"].values())
    required += [each for each in group("test") if each.startswith("orbax-checkpoint")]
    pins = Path(session.create_tmp(), "lowest.txt")
    pins.write_text("".join(each.replace(">=", "==") + "\n" for each in required))
    session.install("-e", ".", *group("test"), "--constraint", str(pins))
    # The plugin of an older anyio uses names that pytest warns of; no test needs it.
    options = (*WORKERS, "-p", "no:anyio", "-m", "not slow", *session.posargs)
    session.run("python", "-m", "pytest", *options, env=hermetic_env(session))


@nox.session(python="3.13")
def newest(session: nox.Session) -> None:
    """Run the tests but the slow ones with Python 3.13 and the newest versions of all libraries.

    The newest jax needs a newer Python than the oldest one that is supported. Arguments after -- go
    to pytest.
    """
    session.install("--upgrade", "-e", ".", *group("test"))
    options = (*WORKERS, "-m", "not slow", *session.posargs)
    session.run("python", "-m", "pytest", *options, env=hermetic_env(session))


@nox.session
def stores(session: nox.Session) -> None:
    """Run the tests of object stores against real servers, on this machine's loopback.

    Arguments after -- go to pytest.
    """
    session.install("-e", ".", *group("stores"))
    env = hermetic_env(session) | {"CKPT_ALL_STORES": "1"}
    # Here it is servers that are shared, and every worker has its own.
    options = (*WORKERS, "--dist", "worksteal", *session.posargs)
    session.run("python", "-m", "pytest", "tests/stores", *options, env=env)


@nox.session(python="3.11")
def programs(session: nox.Session) -> None:
    """Train with projects that know Orbax alone, by ckpt_orbax, and kill them: ten minutes.

    They are installed as they are on the package index, in the versions that one file names.
    Arguments after -- go to pytest.
    """
    folder = Path("tests/programs_of_others")
    # The file names all that they import; much of what they ask for beside that they never do.
    session.install("--no-deps", "--requirement", str(folder / "requirements.txt"))
    session.install("-e", ".", *group("programs"))
    options = (*WORKERS, "--dist", "loadgroup", "-o", "timeout=900", *session.posargs)
    checks = str(folder / "checks.py")
    session.run("python", "-m", "pytest", checks, *options, env=hermetic_env(session))


@nox.session
def contracts(session: nox.Session) -> None:
    """Run the contracts of Orbax, in its own calls, on the installed Orbax and on `ckpt_orbax`.

    They are a part of the tests, too. Arguments after -- go to pytest.
    """
    session.install("-e", ".", *group("test"))
    # Nearly all are in one file.
    options = (*WORKERS, "--dist", "worksteal", "tests/orbax_calls", *session.posargs)
    session.run("python", "-m", "pytest", *options, env=hermetic_env(session))


@nox.session
def page(session: nox.Session) -> None:
    """Run the tests of the page in a real browser; arguments after -- go to pytest.

    Chromium is installed from Debian if it is missing and that is possible.
    """
    if shutil.which("chromium") is None:
        if shutil.which("apt-get") is None or os.geteuid():
            session.skip("there is no chromium; install it to run these tests")
        session.run("apt-get", "update", "-q", external=True, silent=True)
        session.run("apt-get", "install", "-y", "-q", "chromium", external=True, silent=True)
    session.install("-e", ".", *group("page"))
    options = (*WORKERS, "tests/page", *session.posargs)
    session.run("python", "-m", "pytest", *options, env=hermetic_env(session))


@nox.session
def reliability(session: nox.Session) -> None:
    """Attack the library for an hour or two and record the counts.

    They go to docs/explanation/reliability.md. Arguments after -- go to
    `python -m tests.reliability`. Power cuts need root and loop devices.
    """
    session.install("-e", ".", *group("test"))
    env = hermetic_env(session) | {"HYPOTHESIS_PROFILE": "thorough"}
    session.run("python", "-m", "tests.reliability", *session.posargs, env=env)


@nox.session
def ledger(session: nox.Session) -> None:
    """Take away everything that users can see, and look whether its test fails: an hour or two.

    Arguments after -- go to `python -m tests.ledger`.
    """
    session.install("-e", ".", *group("test"))
    session.run("python", "-m", "tests.ledger", *session.posargs, env=hermetic_env(session))


@nox.session
def lint(session: nox.Session) -> None:
    """Check style and formatting."""
    session.install(*group("lint"))
    session.run("ruff", "check")
    session.run("ruff", "format", "--check")
    session.run("python", "tests/plain_face.py", "--check")


@nox.session
def types(session: nox.Session) -> None:
    """Check the types of the package, its tests, its benchmarks and the example programs."""
    session.install("-e", ".", *group("types"))
    session.run("mypy", *session.posargs)
    # What users' own type checkers see: every public name has a type that needs no guessing.
    python = ("--pythonpath", str(Path(session.bin, "python")))
    for package in ("ckpt", "ckpt_orbax"):
        session.run("basedpyright", *python, "--verifytypes", package, "--ignoreexternal")
    session.run("basedpyright", *python, "--level", "error", "tests/types")


@nox.session
def build(session: nox.Session) -> None:
    """Build a release, and use it where there is no repository: a killed run, then the command.

    The wheel is built from the source archive, so both are complete. They stay in dist/.
    """
    session.install(*group("build"))
    dist, away = Path("dist").resolve(), Path(session.create_tmp()).resolve()
    shutil.rmtree(dist, ignore_errors=True)
    shutil.rmtree(away / "runs", ignore_errors=True)
    session.run("python", "-m", "build", "--outdir", str(dist))
    session.run("twine", "check", "--strict", *map(str, dist.iterdir()))
    example = shutil.copy("docs/examples/resume_after_kill.py", away)
    session.run("python", "-m", "venv", "--clear", str(away / "venv"))
    session.chdir(away)
    [wheel] = dist.glob("*.whl")
    env = hermetic_env(session)
    installed = (f"{wheel}[cli]", *group("demo"))
    for command in (
        ("python", "-m", "pip", "install", "--quiet", *installed),
        ("python", example, "--quick", "--root", "runs"),
        ("python", "-c", "import ckpt_orbax"),
        ("ckpt", "--help"),
        ("ckpt", "verify", "runs/interrupted"),
    ):
        session.run(str(away / "venv/bin" / command[0]), *command[1:], env=env, external=True)


@nox.session
def bench(session: nox.Session) -> None:
    """Run the benchmarks; arguments after -- go to them."""
    session.install("-e", ".", *group("bench"))
    session.run("python", "-m", "benchmarks", *session.posargs)


@nox.session
def changelog(session: nox.Session) -> None:
    """Show what the files in changes/ will say in CHANGELOG.md; a wrong name fails.

    Arguments after -- go to `towncrier build` instead: `--version 0.2.0` makes the release's part.
    """
    session.install(*group("changelog"))
    draft = ("--draft", "--version", "next")
    session.run("towncrier", "build", *(session.posargs or draft))


@nox.session
def docs(session: nox.Session) -> None:
    """Build the documentation into site/; a broken link or reference fails."""
    # mkdocstrings reads the sources and imports nothing, so the package is not installed here.
    session.install(*group("docs"))
    # The theme would print an advertisement for its successor.
    env = {"NO_MKDOCS_2_WARNING": "1"}
    session.run("mkdocs", "build", "--strict", *session.posargs, env=env)
