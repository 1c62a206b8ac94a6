"""A target of which each branch is loaded from another checkpoint."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import jax

from ckpt._arguments import shown
from ckpt._plan.targets import is_abstract, wanted_text
from ckpt._tree.boxes import unboxed_names
from ckpt._tree.flatten import branch_at, describe
from ckpt._tree.leaf_specs import is_function
from ckpt._tree.suggestions import suggestion
from ckpt.errors import InvalidArgumentError, TargetMismatchError

# How many leaves a message lists; all of them are in `problems`.
_SHOWN = 200


class BranchedTarget:
    """The target of which each branch is loaded from elsewhere."""

    def __init__(self, like: Any) -> None:
        """Take the branches out of `like` one by one.

        Raises:
            InvalidArgumentError: It is a function.
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
        """Return the branch at a leaf path, which is to be loaded.

        Raises:
            InvalidArgumentError: There is none, or nothing in it.
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
        """Refuse leaves below no branch that are to come from somewhere.

        Args:
            keeps: Whether they may keep their values.

        Raises:
            TargetMismatchError: There are such leaves; lists them all.
        """
        problems = []
        for name, leaf in zip(self._names, self._structure.leaves, strict=True):
            has_value = leaf is ... or is_function(leaf) or (keeps and not is_abstract(leaf))
            is_gone = isinstance(leaf, jax.Array) and keeps and leaf.is_deleted()
            if self._branch_of(name) is None and (is_gone or not has_value):
                lost = ", and its array was donated or deleted" if is_gone else ""
                lost = ", and has no value to keep" if keeps and not is_gone else lost
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
        """Return the target with the branches that were loaded."""
        loaded = {name: self._leaves_of(name, branch) for name, branch in found.items()}
        leaves = []
        for name, leaf in zip(self._names, self._structure.leaves, strict=True):
            branch = self._branch_of(name)
            leaves.append(leaf if branch is None else next(loaded[branch]))
        return jax.tree.unflatten(jax.tree.structure(self._like), leaves)

    def _leaves_of(self, name: str, branch: Any) -> Iterator[Any]:
        # What a handler makes of a leaf may be a tree itself.
        structure: Any = jax.tree.structure(self._branches[name])
        return iter(structure.flatten_up_to(branch))
