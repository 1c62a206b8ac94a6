"""What was perhaps meant by a leaf path or pattern that is nowhere."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

from ckpt._tree.patterns import compile_pattern

__all__ = ["near_miss", "what_is_there"]

# Looking for what is nearly right in more takes seconds.
_MOST_NAMES = 10_000
_MOST_LISTED = 8

_Keys = tuple[str, ...]


def near_miss(text: str, names: Iterable[str]) -> str:
    """Return a hint at the path or pattern that was perhaps meant, or nothing.

    The first key that is nowhere is replaced by the one most like it that stands at its place, so
    that `layer.*.kernel` leads to `layers.*.kernel`.

    Args:
        text: A leaf path, or a pattern.
        names: The leaf paths that there are.
    """
    known = list(names)
    if len(known) > _MOST_NAMES or not text:
        return ""
    found = _corrected(text, known)
    return f" (is it {found!r}?)" if found else ""


def what_is_there(text: str, names: Iterable[str]) -> str:
    """Return `near_miss`, or else what there is where the first wrong key of a pattern stands."""
    known = list(names)
    hint = near_miss(text, known)
    if hint or not known or len(known) > _MOST_NAMES or not text:
        return hint
    keys = text.split(".")
    place, here = _first_wrong(keys, [tuple(name.split(".")) for name in known])
    if "**" in keys or not here:
        return ""
    where = f"below {'.'.join(keys[:place])!r:.80}" if place else "at the top"
    listed = ", ".join(repr(key) for key in here[:_MOST_LISTED])
    more = ", ..." if len(here) > _MOST_LISTED else ""
    return f" ({where} there is {listed}{more})"


def _corrected(text: str, names: Sequence[str]) -> str | None:
    keys, paths = text.split("."), [tuple(name.split(".")) for name in names]
    place, here = _first_wrong(keys, paths)
    if here and keys[place].isdecimal():
        # No number is more like it than another.
        return None
    if here:
        near = difflib.get_close_matches(keys[place], here, n=1) or _short(keys[place], here)
        if near:
            for end in (len(keys), place + 1):
                found = ".".join((*keys[:place], *near, *keys[place + 1 : end]))
                if any(map(compile_pattern(found).covers, names)):
                    return found
    if place:
        # Something stands above it: a leaf from elsewhere is not what was meant.
        return None
    return next(iter(difflib.get_close_matches(text, names, n=1)), None)


def _short(key: str, others: Sequence[str]) -> list[str]:
    """Return the key that another one is short for: `b` for `bias`."""
    found = [each for each in others if each and (key.startswith(each) or each.startswith(key))]
    return found[:1] if not key.isdigit() else []


def _first_wrong(keys: Sequence[str], paths: Sequence[_Keys]) -> tuple[int, list[str]]:
    """Return the number of the first key that stands nowhere, and what stands at its place."""
    left = list(paths)
    anywhere = False
    for place, key in enumerate(keys):
        if key == "**":
            anywhere = True
            continue
        (expression,) = compile_pattern(key).keys if key else (None,)
        if anywhere:
            here = [each for path in left for each in path]
        else:
            here = [path[place] for path in left if len(path) > place]
        if expression is None or not any(map(expression.fullmatch, here)):
            return place, list(dict.fromkeys(here))
        if not anywhere:
            left = [
                path for path in left if len(path) > place and expression.fullmatch(path[place])
            ]
    return len(keys), []
