"""Suggestions for leaf paths and patterns that match nothing."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

from ckpt._tree.patterns import compile_pattern

# Looking for close matches among more names takes seconds.
_MOST_NAMES = 10_000
_MOST_LISTED = 8

_Keys = tuple[str, ...]


def near_miss(text: str, names: Iterable[str]) -> str:
    """Return a hint at the path or pattern that was probably meant, or empty text.

    The first key that does not exist is replaced by the most similar one at its place, so that
    `layer.*.kernel` leads to `layers.*.kernel`.
    """
    known = list(names)
    if len(known) > _MOST_NAMES or not text:
        return ""
    found = _corrected(text, known)
    return f" (is it {found!r}?)" if found else ""


def suggestion(text: str, names: Iterable[str]) -> str:
    """Return `near_miss`, or else the keys that exist in place of the first wrong one."""
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
        # No number is more similar to it than another.
        return None
    if here:
        near = difflib.get_close_matches(keys[place], here, n=1) or _short(keys[place], here)
        if near:
            for end in (len(keys), place + 1):
                found = ".".join((*keys[:place], *near, *keys[place + 1 : end]))
                if any(map(compile_pattern(found).covers, names)):
                    return found
    if place:
        # Its first keys exist: a leaf from elsewhere was not meant.
        return None
    return next(iter(difflib.get_close_matches(text, names, n=1)), None)


def _short(key: str, others: Sequence[str]) -> list[str]:
    """Return the key that another one abbreviates, or is an abbreviation of: `b` and `bias`."""
    found = [each for each in others if each and (key.startswith(each) or each.startswith(key))]
    return found[:1] if not key.isdigit() else []


def _first_wrong(keys: Sequence[str], paths: Sequence[_Keys]) -> tuple[int, list[str]]:
    """Return the number of the first key that does not exist, and the keys in its place."""
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
