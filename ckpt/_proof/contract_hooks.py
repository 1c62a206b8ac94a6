"""The comparison of steps with the contract of a run, where they are restored, and before saves."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ckpt._arguments import shown
from ckpt._proof.run_notes import CONTRACT_NOTE
from ckpt._redaction import redact
from ckpt._steps.run_hooks import RunHooks
from ckpt.errors import ContractMismatchError, CorruptCheckpointError, UnsupportedFormatError

if TYPE_CHECKING:
    from ckpt._format.manifest import Manifest
    from ckpt._proof.contract import Contract
    from ckpt._steps.root import Root

logger = logging.getLogger("ckpt")

_NOTHING = object()
# Most differing fields that a message lists; `problems` has all of them.
_SHOWN = 20


class ContractHooks(RunHooks):
    """Compares the steps of a run with its contract."""

    def __init__(self, contract: Contract) -> None:
        """Take the contract of this run."""
        self._contract = contract
        # The places whose newest step no restore has compared yet.
        self._unseen: list[Root] = []

    async def opening(self, root: Root) -> None:
        self._unseen.append(root)

    async def before_save(self, step: int) -> None:
        # Without a restore before it, a save would go on with whatever is there.
        while self._unseen:
            root = self._unseen[-1]
            newest = None
            if root.processes.process == 0:
                # A step that cannot be read says nothing, and is no reason to save none.
                with contextlib.suppress(CorruptCheckpointError, UnsupportedFormatError):
                    newest = await root.index.open_latest()
            if newest is not None and CONTRACT_NOTE in newest.manifest.extensions:
                check(self._contract, newest.manifest, newest.location)
            self._unseen.pop()

    async def before_restore(self, root: Root, manifest: Manifest) -> None:
        check(
            self._contract,
            manifest,
            f"{root.storage.location}/{root.names.name(manifest.step or 0)}",
        )
        self._unseen.clear()


def check(contract: Contract, manifest: Manifest, where: str) -> None:
    """Compare a checkpoint with a contract, as its `on_mismatch` says.

    Args:
        contract: What was expected.
        manifest: The manifest of the checkpoint.
        where: Its path.

    Raises:
        ContractMismatchError: It is of another contract.
    """
    if CONTRACT_NOTE not in manifest.extensions:
        logger.warning("%s notes no contract, so it was not compared", redact(where))
        return
    problems = tuple(_differences(contract.run, manifest.extensions[CONTRACT_NOTE]))
    if not problems:
        return
    listed = "\n  ".join(problems[:_SHOWN])
    more = len(problems) - _SHOWN
    broken = ContractMismatchError(
        f"{where} is of another contract than this run: {len(problems)} "
        f"{'field differs' if len(problems) == 1 else 'fields differ'}. Run with what the step was "
        "saved with; or begin a run of its own in another root, resume(source=...) if it is to go "
        "on from this step; or take the change with Contract(..., on_mismatch='warn').\n  "
        + listed
        + (f"\n  ... and {more} more, in .problems" if more > 0 else ""),
        step=manifest.step,
    )
    broken.problems = problems
    if contract.on_mismatch == "raise":
        raise broken
    logger.warning("%s", broken)


def _differences(run: Any, step: Any, where: str = "") -> Iterator[str]:
    """Yield a line for each field of a run that differs from that of a step."""
    if isinstance(run, dict) and isinstance(step, dict):
        for key in dict.fromkeys([*run, *step]):
            path = f"{where}.{key}" if where else f"{key}"
            yield from _differences(run.get(key, _NOTHING), step.get(key, _NOTHING), path)
    elif isinstance(run, list) and isinstance(step, list) and len(run) == len(step):
        for number, pair in enumerate(zip(run, step, strict=True)):
            yield from _differences(*pair, f"{where}.{number}")
    elif run != step or isinstance(run, bool) != isinstance(step, bool):
        yield f"{where[:200]}: expected {_text(run)}, found {_text(step)}"


def _text(value: Any) -> str:
    return "nothing" if value is _NOTHING else shown(value, 80)
