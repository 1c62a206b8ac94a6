"""A restore target with branches that are loaded from different checkpoints."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import jax

from ckpt._arguments import shown
from ckpt._plan.targets import wanted_text
from ckpt._tree.boxes import unboxed_names
from ckpt._tree.flatten import branch_at, describe
from ckpt._tree.leaf_specs import is_function
from ckpt._tree.suggestions import suggestion
from ckpt.errors import InvalidArgumentError, TargetMismatchError

# Most leaves that a message lists; `problems` has all of them.
_SHOWN = 200


class BranchedTarget:
    """A restore target with branches that are loaded from different checkpoints."""

    def __init__(self, like: Any) -> None:
        """Take the branches out of `like` one by one.

        Raises:
            InvalidArgumentError: `like` is a function.
        """
        if is_function(like):
            raise InvalidArgumentError(
                f"like= is the function {shown(like, 60)}: pass what it returns, or "
                "jax.eval_shape(function), which allocates nothing"
            )
        self._like = like
        self._structure = describe(like)
        self._names = unboxed_names(self._structure.nodes, self._structure.names)
        self._branches: dict[str, Any] = {}

    def branch(self, name: str) -> Any:
        """Return the branch at a leaf path, to be loaded.

        Raises:
            InvalidArgumentError: There is no such branch, or it is empty.
        """
        try:
            found = self._branches[name] = branch_at(self._like, name)
        except KeyError:
            raise InvalidArgumentError(
                f"the target like= has no such branch{suggestion(name, self._names)}"
            ) from None
        if found is None:
            raise InvalidArgumentError(
                "the target like= has None there, which has no leaves: leave the branch out"
            )
        return found

    def check_rest(self, *, keeps: bool) -> None:
        """Refuse leaves outside all branches that would have no source.

        Args:
            keeps: True if such leaves may keep their values.

        Raises:
            TargetMismatchError: There are such leaves; the error lists all of them.
        """
        problems = []
        for name, leaf in zip(self._names, self._structure.leaves, strict=True):
            stays = keeps or leaf is ... or is_function(leaf)
            is_gone = isinstance(leaf, jax.Array) and keeps and leaf.is_deleted()
            if self._branch_of(name) is None and (is_gone or not stays):
                lost = ", and its array was donated or deleted" if is_gone else ""
                problems.append(f"{name}: below no branch{lost}, wanted {wanted_text(leaf)}")
        if problems:
            count = len(problems)
            listed = "\n  ".join(problems[:_SHOWN])
            more = f"\n  ... and {count - _SHOWN} more, in .problems" if count > _SHOWN else ""
            raise TargetMismatchError(
                f"{count} {'leaf' if count == 1 else 'leaves'} of the target are below none of the "
                f"branches {', '.join(self._branches)!s:.300}; no array was read. Name a "
                "checkpoint for them too; put ... in their place; or keep their values with "
                f"adapt=ckpt.Adapt(missing='keep').\n  {listed}{more}",
                problems=tuple(problems),
            )

    def _branch_of(self, name: str) -> str | None:
        above = itertools.accumulate(name.split("."), "{}.{}".format)
        return next((each for each in above if each in self._branches), None)

    def filled(self, found: Mapping[str, Any]) -> Any:
        """Return the target with the loaded branches in place."""
        loaded = {name: self._leaves_of(name, branch) for name, branch in found.items()}
        leaves = []
        for name, leaf in zip(self._names, self._structure.leaves, strict=True):
            branch = self._branch_of(name)
            leaves.append(leaf if branch is None else next(loaded[branch]))
        return jax.tree.unflatten(jax.tree.structure(self._like), leaves)

    def _leaves_of(self, name: str, branch: Any) -> Iterator[Any]:
        # A handler may turn a leaf into a tree.
        structure: Any = jax.tree.structure(self._branches[name])
        return iter(structure.flatten_up_to(branch))
