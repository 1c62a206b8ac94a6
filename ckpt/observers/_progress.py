"""`ProgressBar`: an observer that shows the progress of saves, restores and verifications."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import io
import logging
import sys
import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

from msgspec import Struct, field

from ckpt._arguments import invalid
from ckpt._events import Event
from ckpt.observers._tracing.timeline import END

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

logger = logging.getLogger("ckpt")

# Shorter operations are not shown, since they would only flicker.
_DELAY_NS = 300_000_000
# The least time between two drawings.
_PAUSE_NS = 100_000_000
# Seconds between drawings while no event comes: one chunk may be compressed for seconds.
_TICK_SECONDS = 0.25
# Phases after which there is progress to show.
_SHOWN = {"save": {"wait", "plan", "stage", "encode", "write"}, "restore": {"plan", "read"}}
_SHOWN["verify"] = _SHOWN["restore"]
# Most bars. An operation that never ends is forgotten when so many others have begun.
_MOST_BARS = 8
_WIDTH = 100
# Shares of the work on a byte that are done when it is in host memory, and when it is compressed.
# Only a byte on disk is done. Copies are fast, and so is writing data that took long to compress.
_STAGED, _ENCODED = 0.1, 0.9
# Largest share that is shown: an operation that has ended has no bar.
_MOST = 0.99


class _Bar(Struct, eq=False):
    """The progress of one operation.

    Attributes:
        began_ns: Beginning of its first phase, on the clock of events.
        total: Bytes to be moved; None until its plan is known.
        done: Bytes that it has moved; bytes in progress count in part.
        task: Its bar, if it is shown.
    """

    began_ns: int
    total: int | None = None
    done: float = 0.0
    task: TaskID | None = None
    _staged: dict[int | None, list[int]] = field(default_factory=dict)

    def take(self, event: Event) -> None:
        if event.phase == "plan" and event.nbytes:
            self.total = (self.total or 0) + event.nbytes
        elif event.operation != "save" and event.phase == "read":
            self.done += event.nbytes
        elif event.phase == "stage":
            self._staged.setdefault(event.batch, []).append(event.nbytes)
            self.done += _STAGED * event.nbytes
        elif event.phase == "encode":
            self.done += (_ENCODED - _STAGED) * event.nbytes
        elif event.phase == "write" and event.batch is not None:
            self._write(event.nbytes, self._staged.get(event.batch, []))

    def _write(self, nbytes: int, sizes: list[int]) -> None:
        """Add a written batch. Small files are not in the plan, and not added here."""
        if nbytes in sizes:
            sizes.remove(nbytes)
            self.done += (1 - _STAGED) * nbytes
        elif sizes:
            # The batch was compressed. Its planned size counts.
            self.done += (1 - _ENCODED) * sizes.pop(0)
        else:
            self.done += nbytes

    def columns(self, now_ns: int) -> dict[str, Any]:
        """Return the contents of its columns."""
        from rich.filesize import decimal

        seconds = max(now_ns - self.began_ns, 0) / 1e9
        spent = _clock(seconds)
        if self.total is None:
            return {"completed": 0, "total": None, "text": decimal(int(self.done)), "spent": spent}
        share = min(self.done / max(self.total, 1), _MOST)
        # Before that, only the speed of copies is known.
        if share > _STAGED:
            spent += f", {_clock(seconds / share - seconds)} left"
        text = f"{100 * share:3.0f}% of {decimal(self.total)}"
        return {"completed": share, "total": 1, "text": text, "spent": spent}


def _clock(seconds: float) -> str:
    return str(timedelta(seconds=int(seconds)))


class _Screen(Protocol):
    """A place where bars are drawn."""

    progress: Progress

    def draw(self) -> None:
        """Draw the bars as they are."""

    def clear(self) -> None:
        """Remove the bars."""


class ProgressBar:
    """Shows a bar for every save, restore and verification that takes more than a moment.

    In a terminal the bar is drawn on standard error, in a notebook below the cell. Elsewhere, as in
    a batch job, nothing is shown. It needs the package rich, and shows nothing without it:
    `pip install 'ckpt-jax[progress]'`. A bar disappears when its operation has ended or failed,
    before the caller hears of it, and never shows 100%. The cursor is never hidden, and no thread
    is started.

    Any number of managers may share one.

    Args:
        console: A rich console to draw on if it is interactive; None for standard error or the
            notebook.

    Raises:
        InvalidArgumentError: `console` is not a console.

    Example:
        ```python
        with ckpt.sync.CheckpointManager(root, observers=[ckpt.observers.ProgressBar()]) as mgr:
            mgr.save(step, state)
        ```
    """

    def __init__(self, console: Console | None = None) -> None:
        # Recognized by its attribute, since rich may not be installed.
        if console is not None and not hasattr(console, "is_interactive"):
            what = "a rich.console.Console, or None"
            raise invalid("console", console, what, of="ProgressBar")
        self._console = console
        self._lock = threading.Lock()
        self._bars: dict[tuple[str, int | None], _Bar] = {}
        self._screen: _Screen | None = None
        self._notebook: _Notebook | None = None
        self._drawn_ns = 0
        # The loop that will draw the bars soon.
        self._soon_drawn_by: asyncio.AbstractEventLoop | None = None
        self._is_off = not _has_rich()

    def __call__(self, event: Event) -> None:
        """Take one event; called by the library."""
        if self._is_off:
            return
        with self._lock:
            try:
                self._take(event)
            except Exception:
                # The terminal may be gone, for example. The caller logs that, once.
                self._is_off = True
                with contextlib.suppress(Exception):
                    self._clear()
                raise

    def _take(self, event: Event) -> None:
        key = (event.operation, event.step)
        if event.phase == END:
            self._drop(key)
        elif event.phase in _SHOWN.get(event.operation, ()):
            if key not in self._bars:
                self._bars[key] = _Bar(event.began_ns)
                if len(self._bars) > _MOST_BARS:
                    self._drop(next(iter(self._bars)))
            self._bars[key].take(event)
            self._show(event.ended_ns)
            self._tick_later()

    def _show(self, now_ns: int) -> None:
        """Draw the operations that take long, unless they were drawn just now."""
        shown = [key for key, bar in self._bars.items() if now_ns - bar.began_ns >= _DELAY_NS]
        if not shown or now_ns - self._drawn_ns < _PAUSE_NS:
            return
        if self._screen is None:
            self._screen = self._open()
            if self._screen is None:
                return
            # If the program ends during an operation, the terminal has a clean line.
            atexit.register(self._clear)
        self._drawn_ns = now_ns
        for key in shown:
            bar = self._bars[key]
            if bar.task is None:
                operation, step = key
                name = operation if step is None else f"{operation} step {step}"
                bar.task = self._screen.progress.add_task(name, **bar.columns(now_ns))
            else:
                self._screen.progress.update(bar.task, **bar.columns(now_ns))
        self._screen.draw()

    def _tick_later(self) -> None:
        """Draw the bars again in a while, also if no event comes."""
        if self._soon_drawn_by is not None and not self._soon_drawn_by.is_closed():
            return
        self._soon_drawn_by = None
        # The library calls observers on its loop.
        with contextlib.suppress(RuntimeError):
            self._soon_drawn_by = asyncio.get_running_loop()
            self._soon_drawn_by.call_later(_TICK_SECONDS, self._tick)

    def _tick(self) -> None:
        with self._lock:
            self._soon_drawn_by = None
            if self._is_off or not self._bars:
                return
            try:
                self._show(time.perf_counter_ns())
                self._tick_later()
            except Exception:
                # A timer has no caller to log it.
                self._is_off = True
                with contextlib.suppress(Exception):
                    self._clear()
                logger.exception("the progress bar failed, and is off; the operation goes on")

    def _open(self) -> _Screen | None:
        """Return the screen to draw on, or None if there is no terminal or notebook."""
        console = self._console
        if console is None and getattr(_shell(), "kernel", None) is not None:
            self._notebook = self._notebook or _Notebook()
            return self._notebook
        if console is None:
            # Rich takes a terminal for granted if some variables are set, which batch jobs set,
            # too.
            if sys.stderr is None or not sys.stderr.isatty():
                return None
            from rich.console import Console

            console = Console(stderr=True)
        return _Terminal(console) if console.is_interactive else None

    def _drop(self, key: tuple[str, int | None]) -> None:
        bar = self._bars.pop(key, None)
        if self._screen is None or bar is None or bar.task is None:
            return
        self._screen.progress.remove_task(bar.task)
        if not any(other.task is not None for other in self._bars.values()):
            self._clear()

    def _clear(self) -> None:
        atexit.unregister(self._clear)
        screen, self._screen = self._screen, None
        if screen is not None:
            screen.clear()


class _Terminal:
    def __init__(self, console: Console) -> None:
        self._console = console
        self.progress = _progress_on(console)
        # Written at once, so that the cursor is not hidden even for a moment.
        with console:
            self.progress.start()
            console.show_cursor(True)

    def draw(self) -> None:
        self.progress.refresh()

    def clear(self) -> None:
        self.progress.stop()


class _Notebook:
    """Draws text below the running cell, in one output for all its saves.

    Rich itself needs ipywidgets in notebooks, warns without it, and leaves an output for every bar.
    """

    def __init__(self) -> None:
        from rich.console import Console

        self._console = Console(
            file=io.StringIO(), width=_WIDTH, force_jupyter=False, color_system=None
        )
        self.progress = _progress_on(self._console)
        self._handle: Any = None
        self._cell: object = None

    def draw(self) -> None:
        with self._console.capture() as drawn:
            self._console.print(self.progress)
        self._put(drawn.get())

    def clear(self) -> None:
        self._put("")

    def _put(self, text: str) -> None:
        data = {"text/plain": text}
        cell = getattr(_shell(), "execution_count", None)
        if text and (self._handle is None or cell != self._cell):
            # IPython is imported, since this is a notebook.
            display = sys.modules["IPython.display"].display
            self._handle = display(data, raw=True, display_id=True)
            self._cell = cell
        else:
            self._handle.update(data, raw=True)


def _has_rich() -> bool:
    try:
        import rich.progress  # noqa: F401
    except ImportError:
        return False
    return True


def _shell() -> Any:
    """Return the IPython shell in which this runs, or None."""
    return getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()


def _progress_on(console: Console) -> Progress:
    from rich.progress import BarColumn, Progress, TextColumn

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[text]}", style="progress.download"),
        TextColumn("{task.fields[spent]}", style="progress.elapsed"),
        console=console,
        # Drawn when there is something new, on the thread that reports it.
        auto_refresh=False,
        transient=True,
        # Replacing the program's streams from another thread would break others that do so, too.
        redirect_stdout=False,
        redirect_stderr=False,
    )
