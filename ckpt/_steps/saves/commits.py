"""`OpenCommits`: the commits of saves under way, and of failed ones whose error was not fetched."""

from __future__ import annotations

import sys
from collections.abc import Callable

from ckpt._commit import Commit, CommitHooks
from ckpt._redaction import redact
from ckpt._runtime.exit import fail_exit

# At exit, for input and output under way to end, and for removing what was written: one removal
# waits for what other programs write to a slow disk.
_GIVING_UP_SECONDS = 5.0


class OpenCommits:
    """The commits of saves under way, and of failed ones whose error was not fetched yet."""

    def __init__(self) -> None:
        """Begin without any."""
        # With each, where it is saved to.
        self._commits: dict[CommitHooks, tuple[Commit, str]] = {}

    def __len__(self) -> int:
        return len(self._commits)

    @property
    def under_way(self) -> list[Commit]:
        """The commits of saves under way."""
        return [commit for commit, _ in list(self._commits.values()) if not commit.done()]

    def adopt(self, hooks: CommitHooks, commit: Commit, where: str) -> None:
        """Count a save among those under way, and report its error; `where` is for messages."""
        self.forget_seen()
        self._commits[hooks] = commit, where

    def drop(self, hooks: CommitHooks) -> None:
        """Forget a save: it has succeeded, or its error has another owner."""
        self._commits.pop(hooks, None)

    def forget_seen(self) -> None:
        """Drop failed saves whose error was fetched from their commit since."""
        for hooks, (commit, _) in list(self._commits.items()):
            if commit.done() and hooks.is_seen:
                self.drop(hooks)

    def take_errors(self) -> list[BaseException]:
        """Return the errors of ended saves that were not fetched yet; each is given out once."""
        return [error for error, _ in self._take()]

    def _take(self) -> list[tuple[BaseException, str]]:
        errors = []
        for hooks, (commit, where) in list(self._commits.items()):
            error = hooks.unseen_error() if commit.done() else None
            if error is not None:
                errors.append((error, where))
        # An error that is being awaited stays: its waiter may still be cancelled.
        self.forget_seen()
        return errors

    def cancel_all(self) -> list[tuple[Commit, str]]:
        """Ask every save under way to stop; return their commits, and where they are saved to."""
        return [each for each in list(self._commits.values()) if each[0].cancel()]

    def tell_unseen(self) -> bool:
        """Write errors that were not fetched to standard error; return whether there were any."""
        errors = self._take()
        for error, where in errors:
            sys.stderr.write(
                f"ckpt: a save to {redact(where)} failed, and was never awaited: {error}\n"
            )
        return bool(errors)

    def finish_at_exit(self, close: Callable[[float], bool], seconds: float) -> None:
        """At interpreter exit: finish what is under way, and report errors that were not fetched.

        What has not ended in time is given up, and the exit status is that of a failure.

        Args:
            close: Waits for so many seconds until all saves have ended; returns whether they have.
            seconds: How long to wait.
        """
        given_up = []
        if not close(seconds):
            given_up = self.cancel_all()
            close(_GIVING_UP_SECONDS)
        for commit, where in given_up:
            outcome = "may be there" if commit.stage == "publishing" else "was given up"
            step = "" if commit.step is None else f"of step {commit.step} "
            sys.stderr.write(
                f"ckpt: the save {step}to {redact(where)} had not ended {seconds} s after the "
                f"program had; it {outcome}\n"
            )
        if self.tell_unseen() or given_up:
            fail_exit()
