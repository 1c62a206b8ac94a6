"""Every command with what it cannot use: one clear line, the right exit status, nothing changed."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from ckpt.cli import commands
from ckpt.cli.app import run
from ckpt.errors import StorageError
from tests.support.command import Ran, ckpt_command, ckpt_process, environment

# How each command is called with a path; those without any come with the reason.
CALLS: dict[str, tuple[str, ...]] = {
    "ls": ("PATH",),
    "show": ("PATH",),
    "diff": ("PATH", "PATH"),
    "bisect": ("PATH", "PATH"),
    "verify": ("PATH",),
    "cp": ("PATH", "OUT"),
    "convert": ("PATH", "OUT"),
    "merge": ("PATH=1", "--to", "OUT"),
    "rm": ("STEP",),
    "trash": ("PATH",),
    "gc": ("PATH", "--dry-run"),
    "pin": ("PATH",),
    "stats": ("PATH",),
    "ui": ("PATH", "--export", "OUT"),
}
WITHOUT_PATH = {
    "completion": "prints what a shell needs",
    "drill": "takes a program; see test_drill",
    "trace": "takes a file of events; see test_trace_command",
    "watch": "waits for a root that is not there; see test_watch_command",
    "doctor": "looks at what is above a path that is not there; see test_doctor",
}


def call(name: str, path: object, tmp_path: Path, **extra: str) -> Ran:
    return ckpt_command(name, *arguments_of(name, path, tmp_path), **extra)


def arguments_of(name: str, path: object, tmp_path: Path) -> list[str]:
    """Return the arguments of a command for a path that may be a root."""
    is_root = isinstance(path, Path) and (path / "10").exists()
    places = {
        "PATH": str(path),
        "STEP": f"{path}/10" if is_root else str(path),
        "FOREIGN": str(foreign(tmp_path)) if is_root else str(path),
        "OUT": str(tmp_path / "out"),
    }
    parts = (re.split("(PATH|STEP|FOREIGN|OUT)", each) for each in CALLS[name])
    return ["".join(places.get(part, part) for part in each) for each in parts]


def foreign(tmp_path: Path) -> Path:
    """Return a file of another library."""
    path = tmp_path / "model.safetensors"
    save_file({"w": np.zeros(4, np.float32)}, path)
    return path


@pytest.fixture
def root(run_root: Path, tmp_path: Path) -> Path:
    """Return a root of one's own."""
    shutil.copytree(run_root, tmp_path / "runs")
    return tmp_path / "runs"


def test_every_command_is_tried_here() -> None:
    assert set(CALLS) | set(WITHOUT_PATH) == set(commands.NAMES)


def check_refused(ran: Ran, status: int, *texts: str) -> None:
    assert ran.status == status, ran
    lines = ran.err.splitlines()
    assert len(lines) == 1, ran.err
    assert lines[0].startswith("ckpt: ")
    for text in texts:
        assert text in ran.err
    assert ran.out == ""


def snapshot(folder: Path) -> dict[str, tuple[int, int]]:
    return {
        str(each): (each.lstat().st_size, each.lstat().st_mtime_ns)
        for each in sorted(folder.rglob("*"))
    }


@pytest.mark.parametrize("name", CALLS)
def test_a_path_that_is_not_there(name: str, tmp_path: Path) -> None:
    path = tmp_path / "missing"
    check_refused(call(name, path, tmp_path), 2, str(path))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", CALLS)
def test_a_path_that_is_no_checkpoint(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "src"
    folder.mkdir()
    (folder / "main.py").write_text("print(1)\n")
    before = snapshot(tmp_path)
    check_refused(call(name, folder, tmp_path), 2, str(folder))
    check_refused(call(name, folder / "main.py", tmp_path), 2, "main.py")
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("name", CALLS)
def test_a_url_that_is_none(name: str, tmp_path: Path) -> None:
    check_refused(call(name, "ftp://host/run", tmp_path), 2, "ftp")
    check_refused(call(name, "s3:bucket/run", tmp_path), 2, "s3://")


# Each waits until TensorStore gives up.
UNREACHABLE = ["ls", *(pytest.param(n, marks=pytest.mark.slow) for n in CALLS if n != "ls")]


@pytest.mark.parametrize("name", UNREACHABLE)
def test_a_store_that_cannot_be_reached(name: str, tmp_path: Path) -> None:
    # Nothing listens on port 1.
    ran = call(name, "gs://bucket/run", tmp_path, TENSORSTORE_GCS_HTTP_URL="http://127.0.0.1:1")
    assert ran.status == 3
    # TensorStore logs that it has found no credentials.
    own = [line for line in ran.err.splitlines() if not re.match(r"[EW][0-9]{4} ", line)]
    assert len(own) == 1
    assert own[0].startswith("ckpt: ")
    assert "gs://bucket/run" in own[0]


# Runs commands one after the other, and says where the output of each ends.
_ALL_IN_ONE = """
import json, sys
from ckpt.cli.app import run

for arguments in json.loads(sys.argv[1]):
    status = run(arguments)
    for stream in (sys.stdout, sys.stderr):
        print(f"\\0{status}", file=stream, flush=True)
"""


def test_a_place_that_may_not_be_read(root: Path, tmp_path: Path) -> None:
    calls = []
    for name in CALLS:
        arguments = arguments_of(name, root, tmp_path)
        if "FOREIGN" in CALLS[name]:
            arguments[0] = str(root)
        calls.append([name, *arguments])
    root.chmod(0)
    ran = as_user("-c", _ALL_IN_ONE, json.dumps(calls))
    root.chmod(0o755)
    outputs, errors = (text.split("\0") for text in (ran.out, ran.err))
    assert len(outputs) == len(errors) == len(calls) + 1, ran.err
    status = [int(text.splitlines()[0]) for text in errors[1:]]
    for number in range(len(calls)):
        error = errors[number].partition("\n")[2] if number else errors[0]
        out = outputs[number].partition("\n")[2] if number else outputs[0]
        check_refused(Ran(status[number], out, error), 3, str(root))


def as_user(*arguments: str) -> Ran:
    """Run Python as somebody to whom permissions apply, as they do not to root."""
    powers = "-dac_override,-dac_read_search"
    prefix = ["setpriv", f"--bounding-set={powers}", f"--inh-caps={powers}"]
    if os.geteuid() == 0 and shutil.which("setpriv") is None:
        pytest.skip("root may read everything, and setpriv is not installed")
    ran = subprocess.run(
        [*(prefix if os.geteuid() == 0 else []), sys.executable, *arguments],
        capture_output=True,
        text=True,
        env=environment(),
        timeout=120,
        check=False,
    )
    return Ran(ran.returncode, ran.stdout, ran.stderr)


@pytest.mark.parametrize("name", CALLS)
def test_a_reader_that_goes_away(
    name: str, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = arguments_of(name, root, tmp_path)
    reader, writer = os.pipe()
    os.close(reader)
    err = io.StringIO()
    with open(writer, "w") as out, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", out)
        patch.setattr(sys, "stderr", err)
        status = run([name, *arguments])
    assert (status, err.getvalue()) == (141, "")


class Terminal(io.TextIOWrapper):
    """A stream that says that it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("name", CALLS)
def test_a_terminal_that_is_narrow_and_knows_no_unicode(
    name: str, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = arguments_of(name, root, tmp_path)
    screen = io.BytesIO()
    with monkeypatch.context() as patch:
        terminals = [Terminal(screen, "ascii", write_through=True) for _ in range(2)]
        patch.setattr(sys, "stdout", terminals[0])
        patch.setattr(sys, "stderr", terminals[1])
        patch.setenv("COLUMNS", "20")
        patch.setenv("TERM", "xterm-256color")
        status = run([name, *arguments])
    shown = screen.getvalue().decode("ascii")
    assert status == 0, shown
    assert "Traceback" not in shown


@pytest.mark.parametrize("name", commands.NAMES)
def test_wrong_options_say_where_the_help_is(name: str) -> None:
    ran = ckpt_command(name, "--nonsense")
    assert ran.status == 2
    assert f"See 'ckpt {name} --help'" in ran.err
    help_text = ckpt_command(name, "--help")
    assert help_text.status == 0
    assert help_text.out.startswith(f"Usage: ckpt {name} ")


def test_a_command_that_there_is_not_leads_to_the_right_one() -> None:
    check_refused(ckpt_command("verfy", "runs"), 2, "'verfy'", "is it 'verify'?")
    check_refused(ckpt_command("quux"), 2, "There is no command 'quux'. See 'ckpt --help'.")
    assert set(commands.RENAMED).isdisjoint(commands.NAMES)
    for name, command in commands.RENAMED.items():
        check_refused(ckpt_command(name, "runs"), 2, f"{name!r}: use 'ckpt {command}'")
        assert command.split()[0] in commands.NAMES
    check_refused(ckpt_command("du", "runs"), 2, "use 'ckpt ls --by-size'")
    check_refused(ckpt_command("unpin", "runs"), 2, "use 'ckpt pin --remove'")
    assert ckpt_command().status == 2
    assert ckpt_command("--help").status == 0
    assert ckpt_command("--version").out.startswith("ckpt ")


def test_of_several_errors_the_first_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        inner = [StorageError("cannot list /proc/1", errno=13), ValueError("another")]
        raise ExceptionGroup("outer", [ExceptionGroup("inner", inner)])

    monkeypatch.setattr("ckpt.cli.commands.doctor.disk", fail)
    check_refused(ckpt_command("doctor", tmp_path), 3, "ckpt: cannot list /proc/1")


def test_without_its_libraries_the_command_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "click.py").write_text("raise ModuleNotFoundError('no', name='click')\n")
    extra = {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    ran = ckpt_process("ls", tmp_path, **extra)
    check_refused(ran, 2, "click", "pip install 'ckpt-jax[cli]'")


def test_the_help_has_every_command_with_a_whole_sentence_below_a_heading() -> None:
    shown = ckpt_command("--help").out
    for heading, names in commands.GROUPS.items():
        listed = shown.partition(f"\n{heading}:\n")[2].partition("\n\n")[0]
        assert tuple(re.findall(r"^  (\w+) ", listed, re.MULTILINE)) == names
        assert "..." not in listed
        assert listed.count(".") == len(names)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_complete_commands_and_options(shell: str) -> None:
    ran = ckpt_command("completion", shell)
    assert ran.status == 0
    assert "_CKPT_COMPLETE" in ran.out
    words = {"bash": {"COMP_WORDS": "ckpt sho", "COMP_CWORD": "1"}}.get(shell)
    if words is not None:
        found = ckpt_command(_CKPT_COMPLETE="bash_complete", **words)
        assert found.out.split() == ["plain,show"]
        words["COMP_WORDS"] = "ckpt show --s"
        found = ckpt_command(_CKPT_COMPLETE="bash_complete", **words | {"COMP_CWORD": "2"})
        assert found.out.split() == ["plain,--summary"]
        words["COMP_WORDS"] = "ckpt vrify "
        found = ckpt_command(_CKPT_COMPLETE="bash_complete", **words | {"COMP_CWORD": "2"})
        assert (found.status, found.err) == (0, "")
