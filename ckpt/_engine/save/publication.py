"""Publication: the attempt of a save gets the name of its step, and becomes visible."""

from __future__ import annotations

from ckpt._engine.save.save_request import SaveRequest, step_exists
from ckpt._engine.save.session import SaveSession
from ckpt._format.manifest import Manifest
from ckpt._plan.unchanged.compared_leaves import how_items_differ
from ckpt._runtime.threads import run_in_thread
from ckpt.errors import CheckpointError, SaveSkippedError, StepExistsError
from ckpt.storage._base import Storage
from ckpt.storage._manifests import read_manifest


async def give_name(
    session: SaveSession, request: SaveRequest, manifest: Manifest | None = None
) -> None:
    """Publish the attempt; shielded by the callers.

    A cancellation after the store has published, and before we know of it, would remove a published
    step.

    Args:
        session: The save.
        request: Its request.
        manifest: The manifest, to compare it with that of a step that exists if the request says
            so; None if parts of the step are elsewhere, so that it cannot be compared.

    Raises:
        SaveSkippedError: The step exists, and holds the same data.
        StepExistsError: The step exists, and differs or was not compared.
    """
    attempt = await session.opened()
    with session.hooks.watch.taking("published"):
        try:
            await session.storage.publish(
                attempt, overwrite=request.replaces_any, files=session.sizes
            )
        except StepExistsError as error:
            if request.if_exists != "equal" or manifest is None:
                raise
            raise await _compared(session.storage, request, manifest) from error
    session.attempt = None


async def _compared(
    storage: Storage, request: SaveRequest, manifest: Manifest
) -> SaveSkippedError | StepExistsError:
    """Return the error for a step that exists already: skipped if it holds the same data."""
    where = f"{storage.location}/{request.step_dir}"
    try:
        there = await read_manifest(storage, request.step_dir)
        differs = await run_in_thread(how_items_differ, there, manifest)
    except CheckpointError as error:
        what = f"{where} already exists, and what it holds cannot be compared: {error.message}"
        return step_exists(what, request.step)
    if differs:
        return step_exists(f"{where} already exists and differs: {differs}", request.step)
    others = [name for name in ("metrics", "metadata") if _unlike(name, there, manifest)]
    stays = f"; its {' and '.join(others)} stay what they were" if others else ""
    return SaveSkippedError(f"it already holds the same{stays}")


def _unlike(name: str, there: Manifest, manifest: Manifest) -> bool:
    new = getattr(manifest, name)
    return new is not None and new != getattr(there, name)
