"""`OpenCommits`: the saves of a manager that are under way, and the reports of failed ones."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Awaitable, Callable
from typing import Literal

from ckpt._commit import Commit, CommitHooks
from ckpt._redaction import redact
from ckpt._runtime.exit import fail_exit
from ckpt._steps.unreadable import shortened
from ckpt.errors import CheckpointError, CommitCancelledError

logger = logging.getLogger("ckpt")

OnFailure = Literal["raise", "log"]

# Time at exit for input and output under way to end, and for removing what was written: one removal
# waits for the writes of other programs to a slow disk.
_GIVING_UP_SECONDS = 5.0


class OpenCommits:
    """The commits of saves under way, and of failed ones that nobody has checked.

    A failure is logged as soon as it happens, and raised once: by a call that waits for the commit,
    else by the next save, else when the manager closes, else when the interpreter exits.
    """

    def __init__(self, on_failure: OnFailure = "raise") -> None:
        """Begin with no commits; with "log", only the commits themselves raise their errors."""
        self._on_failure = on_failure
        # The saves, each with its place.
        self._saves: dict[CommitHooks, str] = {}
        # True if a save has failed since `are_in_doubt` was called, even if its error was checked.
        self._has_failed = False
        self._pid = os.getpid()

    def __len__(self) -> int:
        return len(self._saves)

    def __del__(self) -> None:
        # The last chance to report errors: the manager is gone. Nothing else is touched,
        # because at interpreter exit the modules may be gone already.
        if getattr(self, "_saves", None) and os.getpid() == self._pid and self._tell_unseen():
            fail_exit()

    def are_in_doubt(self, new: CommitHooks) -> bool:
        """Return True if a save has failed since the save before `new`, or may still fail."""
        has_failed, self._has_failed = self._has_failed, False
        return has_failed or any(hooks is not new for hooks in list(self._saves))

    def under_way(self, where: str | None = None) -> list[Commit]:
        """Return the commits of saves under way, to one place if `where` is given."""
        return [
            hooks.commit
            for hooks, place in list(self._saves.items())
            if not hooks.commit.done() and where in (None, place)
        ]

    def adopt(self, hooks: CommitHooks, where: str) -> None:
        """Count a save among those under way, and report its error; `where` is for messages."""
        self._forget_seen()
        self._saves[hooks] = where

    def drop(self, hooks: CommitHooks) -> None:
        """Forget a save: it has succeeded, or its error has another owner."""
        self._saves.pop(hooks, None)

    def fail(
        self, hooks: CommitHooks, error: Exception, *, returned: bool, newest: int | None = None
    ) -> None:
        """End a save with an error, which is logged unless a call raises it.

        Args:
            hooks: The save.
            error: The error; a `CommitCancelledError` is what the owner of the save asked for.
            returned: True if the call of the save has returned.
            newest: The newest durable step of the root.
        """
        owed = returned and not isinstance(error, CommitCancelledError)
        if owed:
            where = self._saves[hooks]
            logger.error("%s", _line(hooks.commit.step, where, error, newest))
        raises = self._on_failure == "raise" and not hooks.is_excused
        self._has_failed = self._has_failed or owed
        hooks.fail(error, owed=owed and raises)
        if hooks.is_seen:
            self.drop(hooks)

    def take(self) -> BaseException | None:
        """Return the failures that nobody has checked, as one error, and forget them."""
        return _first_error([error for error, _ in self._take()])

    def take_before(self, step: int) -> BaseException | None:
        """Do the same for a call that raises the error instead of saving `step`."""
        error = self.take()
        why = (
            "this is the error of an earlier save, whose commit nobody has checked. Nothing of "
            f"step {step} was begun: the same call again saves it"
        )
        if isinstance(error, CheckpointError):
            error.message = f"{error.message}; {why}"
        elif error is not None:
            error.add_note(why)
        return error

    def excuse(self, new: CommitHooks) -> None:
        """Count the failures of saves before `new` as checked: a call has raised them."""
        self.take()
        for hooks in self._saves:
            hooks.is_excused = hooks.is_excused or hooks is not new

    async def failure_after(self, wait: Callable[[], Awaitable[object]]) -> BaseException | None:
        """Wait; return the failures of the saves that were open before, as one error.

        Every call that waits gets the error, even if several wait.
        """
        waited = [hooks for hooks in list(self._saves) if not hooks.is_seen]
        with contextlib.ExitStack() as stack:
            for hooks in waited:
                stack.enter_context(hooks.awaited())
            await wait()
        errors = [error for hooks in waited if (error := hooks.owed_error()) is not None]
        self._forget_seen()
        return _first_error(errors)

    def _take(self) -> list[tuple[BaseException, str]]:
        errors = []
        for hooks, where in list(self._saves.items()):
            # An error that is being awaited stays: its waiter may still be cancelled.
            error = hooks.unseen_error()
            if error is not None:
                errors.append((error, where))
        self._forget_seen()
        return errors

    def _forget_seen(self) -> None:
        for hooks in list(self._saves):
            if hooks.commit.done() and hooks.is_seen:
                self.drop(hooks)

    def _cancel_all(self) -> list[tuple[Commit, str]]:
        """Ask every save under way to stop; return the commits and their places."""
        return [
            (hooks.commit, where)
            for hooks, where in list(self._saves.items())
            if hooks.commit.cancel()
        ]

    def _tell_unseen(self) -> bool:
        """Write unchecked errors to standard error; return True if there were any."""
        errors = self._take()
        for error, where in errors:
            sys.stderr.write(
                f"ckpt: a save to {redact(where)} failed, and was never awaited: {error}\n"
            )
        return bool(errors)

    def finish_at_exit(self, close: Callable[[float], bool], seconds: float) -> None:
        """At interpreter exit: finish saves under way, and report errors that were not checked.

        A save that does not end in time is given up, and the exit status is that of a failure.

        Args:
            close: Waits for so many seconds until all saves have ended; returns True if they have.
            seconds: Time to wait.
        """
        given_up = []
        if not close(seconds):
            given_up = self._cancel_all()
            close(_GIVING_UP_SECONDS)
        for commit, where in given_up:
            outcome = "may be there" if commit.stage == "publishing" else "was given up"
            step = "" if commit.step is None else f"of step {commit.step} "
            sys.stderr.write(
                f"ckpt: the save {step}to {redact(where)} had not ended {seconds} s after the "
                f"program had; it {outcome}\n"
            )
        if self._tell_unseen() or given_up:
            fail_exit()


def _line(step: int | None, where: str, error: Exception, newest: int | None) -> str:
    kind = "" if isinstance(error, CheckpointError) else f"{type(error).__name__}: "
    if step is None:
        return redact(f"{where} was NOT saved: {kind}{error}")
    # The line names the step first; do not repeat it.
    reason = f"{kind}{error}".removeprefix(f"step {step}: ").removeprefix(f"step {step}, ")
    durable = "no step is durable yet" if newest is None else f"the newest durable step is {newest}"
    return redact(f"step {step} of {where} was NOT saved: {reason}; {durable}")


def _first_error(errors: list[BaseException]) -> BaseException | None:
    """Return the first error, with a note about the other steps that failed."""
    if not errors:
        return None
    first = next((each for each in errors if isinstance(each, CheckpointError)), errors[0])
    if len(errors) > 1:
        numbers = [getattr(each, "step", None) for each in errors if each is not first]
        steps = sorted(each for each in numbers if each is not None)
        note = f"also failed: step{'s' * (len(steps) > 1)} {shortened(steps)}; the log says why"
        # The error may be raised by several calls: add the note once.
        if note not in getattr(first, "__notes__", ()):
            first.add_note(note)
    return first
