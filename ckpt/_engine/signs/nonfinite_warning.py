"""The warning of a save that has found NaN or infinite values."""

from __future__ import annotations

import logging

from ckpt._engine.engine import Engine
from ckpt._format.manifest import Manifest
from ckpt._redaction import redact
from ckpt._tree.unhealthy_leaves import nonfinite_leaves

logger = logging.getLogger("ckpt")

_MOST_NAMED = 5


def warn_of_nonfinite(engine: Engine, manifest: Manifest, where: str) -> None:
    """Warn of the leaves of a step that have values that are not finite.

    In the steps of a root, leaves are named again only if they differ from those of the step
    before: every step has the infinite values of, say, a mask.

    Args:
        engine: The engine, which knows the leaves of the last warning.
        manifest: The manifest of the new step.
        where: Path of a one-shot checkpoint.
    """
    found = nonfinite_leaves(manifest)
    are_known = manifest.step is not None and found.keys() == engine.odd_leaves
    engine.odd_leaves = frozenset(found)
    if not found or are_known:
        return
    named = [f"{leaf:.80} ({count})" for leaf, count in list(found.items())[:_MOST_NAMED]]
    logger.warning(
        "%s was saved with NaN or infinite values in %s: %s%s",
        redact(where) if manifest.step is None else f"step {manifest.step}",
        "1 leaf" if len(found) == 1 else f"{len(found)} leaves",
        ", ".join(named),
        ", ..." if len(found) > _MOST_NAMED else "",
    )
