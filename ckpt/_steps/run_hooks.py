"""`RunHooks`: what features, and extensions of users' choice, do beside the saves of a root."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from ckpt._commit import Commit, StepInfo
from ckpt._format.manifest_head import ReplacedSave

if TYPE_CHECKING:
    from ckpt._format.manifest import Manifest
    from ckpt._steps.root import Root


class RunHooks:
    """What a feature does beside the saves of a root. These do nothing; a feature replaces some.

    An extension has the same hooks at all places of a run: the root, tiers, and memory.
    """

    async def opening(self, root: Root) -> None:
        """Hear, in all processes of a job, that a root is opened; the primary has listed it."""

    async def before_save(self, step: int) -> None:
        """Do something at the beginning of a save, in all processes of a job."""

    async def before_restore(self, root: Root, manifest: Manifest) -> None:
        """Look at a step that is about to be restored, in all processes; raise to refuse it."""

    async def restored(self, root: Root, manifest: Manifest) -> None:
        """Hear of a step that all processes have restored, before the call returns."""

    async def before_publish(self, step: int, replaces_any: bool) -> Sequence[ReplacedSave]:
        """Return saves in further places that give way to a save of `step`.

        With `replaces_any`, the save may replace any other one.
        """
        return ()

    def committed(self, info: StepInfo, save: str, commit: Commit) -> bool:
        """Hear of a save with the id `save`, before `commit` is done; return True if it counts.

        A step that is copied on counts only when it has arrived.
        """
        return True

    def protected(self) -> Collection[int]:
        """Return steps that stay, whatever the keep policy answers."""
        return ()

    async def before_retention(self, step: int) -> bool:
        """Return True if steps may be deleted now, after the commit of `step`."""
        return True
