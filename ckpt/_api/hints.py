"""Hints at the right name, for names of Orbax and misspelt ones.

Nothing is looked up before Python itself has found that a name is unknown.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from typing import Any, TypeVar, cast

Call = TypeVar("Call", bound=Callable[..., Any])

_BEST = 'say keep=ckpt.keep.Best(3, metric="loss", mode="min")'
_KEEP = "keep=3 keeps the latest three; ckpt.keep has more policies"
_LIKE = "say like=, whose leaves have the dtypes and shardings that you want"
_SAVE_WHEN = "say save_when=ckpt.save_when.EverySteps(100)"
_STEP_NAMES = "say step_names=ckpt.step_names.Standard(prefix, digits)"
_KEYWORDS = {
    "abstract_state": _LIKE,
    "args": "pass the tree itself, or several as items={name: tree}; a target is like=",
    "best_fn": _BEST,
    "best_mode": _BEST,
    "enable_async_checkpointing": "save(durable=True) returns when the step is durable",
    "item_handlers": "say handlers=",
    "item_names": "name the items at each call, as in items={name: tree}",
    "keep_period": "say keep=ckpt.keep.EverySteps(1000)",
    "max_to_keep": _KEEP,
    "metadata": "say custom_metadata=",
    "options": "options are arguments of the manager itself, such as save_when= and keep=",
    "overwrite": 'say if_exists="replace"',
    "preservation_policy": _KEEP,
    "read_only": 'say mode="r"',
    "restore_args": _LIKE,
    "save_decision_policy": _SAVE_WHEN,
    "save_interval_steps": _SAVE_WHEN,
    "step_name_format": _STEP_NAMES,
    "step_prefix": _STEP_NAMES,
    "target": _LIKE,
    "todelete_subdir": 'say trash="trash"',
    "transforms": "adapt= takes a ckpt.Adapt",
}
_ONE_SHOT = "use ckpt.save and ckpt.load"
_NAMES = {
    "CheckpointManagerOptions": "options are arguments of ckpt.CheckpointManager",
    "Checkpointer": _ONE_SHOT,
    "PyTreeCheckpointer": _ONE_SHOT,
    "StandardCheckpointer": _ONE_SHOT,
    "args": "trees are passed as they are: mgr.save(step, tree)",
    "check_for_errors": "await the commit, or ask commit.exception()",
    "item_metadata": "metadata(step) describes the items",
    "load": "say restore(step, like)",
    "restore": "say load(path, like)",
    "wait": "a manager has wait_until_finished()",
}


def hinted(function: Call) -> Call:
    """Return the function; if it is called with an unknown keyword, the error names the right one.

    A coroutine function stays one, and a class stays the same, with such an `__init__`.
    """
    if isinstance(function, type):
        cls: Any = function
        cls.__init__ = hinted(cls.__init__)
        return function

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except TypeError as error:
            # One from within the function is no error of this call.
            if error.__traceback__ is not None and error.__traceback__.tb_next is None:
                _explain(error, function)
            raise

    @functools.wraps(function)
    async def awaited(*args: Any, **kwargs: Any) -> Any:
        return await call(*args, **kwargs)

    return cast("Call", awaited if inspect.iscoroutinefunction(function) else call)


def _explain(error: TypeError, function: Callable[..., Any]) -> None:
    text = str(error)
    found = re.search(r"unexpected keyword argument '(\w+)'", text)
    if found is None:
        return
    # Slow to import, and seldom needed.
    import difflib

    unknown, known = found[1], inspect.signature(function).parameters
    near = difflib.get_close_matches(unknown, known, n=1)
    if unknown in _KEYWORDS:
        text = f"{text.partition('. Did you mean')[0]}: {_KEYWORDS[unknown]}"
    elif near and "Did you mean" not in text:
        # Python 3.13 says this itself.
        text = f"{text}. Did you mean {near[0]!r}?"
    error.args = (text,)


def no_attribute(owner: str, name: str) -> AttributeError:
    """Return the error for a name that `owner` lacks, with a hint if Orbax has the name."""
    if name not in _NAMES:
        # Python itself names a similar one.
        return AttributeError(f"{owner} has no attribute {name!r}")
    # With a name, but no object, Python adds no guess of its own.
    text = f"{owner} has no attribute {name!r}: {_NAMES[name]}"
    return AttributeError(text, name=name, obj=None)
