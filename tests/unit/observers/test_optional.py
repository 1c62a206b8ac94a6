"""Libraries that only some users need: imported when they are used, missed with a word."""

from __future__ import annotations

import subprocess
import sys

import pytest

from ckpt.errors import CheckpointError
from ckpt.observers import OpenTelemetry, ProgressBar, Prometheus
from tests.unit.observers.examples import a_whole_save


def test_importing_the_observers_imports_nothing_that_is_optional() -> None:
    script = (
        "import sys, ckpt.observers as o; o.JsonLines(sys.stderr)\n"
        "print(sorted({m.split('.')[0] for m in sys.modules} & {'jax', 'tensorstore', 'numpy', "
        "'opentelemetry', 'prometheus_client', 'rich', 'matplotlib', 'IPython'}))"
    )
    run = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
    )
    assert run.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("observer", "blocked", "extra"),
    [
        (OpenTelemetry, "opentelemetry", "opentelemetry"),
        (Prometheus, "prometheus_client", "prometheus"),
    ],
)
def test_a_missing_library_is_missed_with_the_command_that_installs_it(
    observer: type, blocked: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in list(sys.modules):
        if name.split(".")[0] == blocked:
            monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, blocked, None)
    with pytest.raises(CheckpointError, match=rf"pip install 'ckpt-jax\[{extra}\]'") as caught:
        observer()
    assert isinstance(caught.value.__cause__, ImportError)


def test_without_rich_there_is_no_progress_and_no_error(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name in ("rich", "rich.progress", "rich.console"):
        monkeypatch.setitem(sys.modules, name, None)
    observer = ProgressBar()
    for each in a_whole_save():
        observer(each)
    assert capfd.readouterr() == ("", "")
