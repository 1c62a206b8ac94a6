"""Patterns of leaf paths.

A leaf path is its keys joined by dots, as in messages: `params.layers.0.kernel`. In a pattern `*`
stands for any text within one key, `?` for one character, and a key `**` for any number of keys. A
pattern covers the leaves that it matches and all leaves below its matches, so `params` is
everything in `params`, and `layers.*.kernel` is every layer's kernel. A slash within a key may be
written as it is: `mlp/~/linear_0.w`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence

from msgspec import Struct

from ckpt._tree.leaf_names import ROOT, escape_slashes
from ckpt.errors import InvalidArgumentError

# A pattern, a predicate of leaf paths, or several of them.
PathRule = str | Callable[[str], bool] | Sequence[str | Callable[[str], bool]]
_DIGITS = re.compile(r"(\d+)")


class Pattern(Struct, frozen=True):
    """A compiled pattern: for every key its expression, or None for `**`."""

    text: str
    keys: tuple[re.Pattern[str] | None, ...]

    def split(self, path: str) -> tuple[tuple[str, ...], str] | None:
        """Return the texts of the `*` in `path`, and the keys below the match; None if none."""
        keys = path.split(".")
        found = _match(self.keys, keys)
        if found is None:
            return None
        stars, end = found
        return stars, ".".join(keys[end:])

    def covers(self, path: str) -> bool:
        """Return True if the leaf at `path` matches the pattern, or is below a match."""
        return _match(self.keys, path.split(".")) is not None


def _match(
    pattern: Sequence[re.Pattern[str] | None], keys: Sequence[str]
) -> tuple[tuple[str, ...], int] | None:
    """Return the texts of the stars and the number of matched keys, the least possible."""
    if not pattern:
        return (), 0
    first, rest = pattern[0], pattern[1:]
    if first is None:
        for skipped in range(len(keys) + 1):
            found = _match(rest, keys[skipped:])
            if found is not None:
                return found[0], found[1] + skipped
        return None
    matched = first.fullmatch(keys[0]) if keys else None
    found = None if matched is None else _match(rest, keys[1:])
    if matched is None or found is None:
        return None
    return (*matched.groups(), *found[0]), found[1] + 1


def compile_pattern(text: str) -> Pattern:
    """Return a compiled pattern.

    Raises:
        InvalidArgumentError: `text` is not a pattern.
    """
    given: object = text
    if not isinstance(given, str) or not text:
        raise InvalidArgumentError(
            f"{given!r:.80}: expected a leaf path, such as 'params.*.kernel'"
        )
    return _compiled(text)


@functools.lru_cache(maxsize=1024)
def _compiled(text: str) -> Pattern:
    # Cached, since it is called once for every leaf.
    return Pattern(text, tuple(_expression(key) for key in escape_slashes(text).split(".")))


def _expression(key: str) -> re.Pattern[str] | None:
    if key == "**":
        return None
    special = {"*": "(.*)", "?": "."}
    return re.compile("".join(special.get(each) or re.escape(each) for each in key), re.DOTALL)


def compile_rule(rule: PathRule) -> list[tuple[str, Callable[[str], bool]]]:
    """Return the parts of a rule, each with its text for messages.

    Raises:
        InvalidArgumentError: A part is neither a pattern nor a predicate.
    """
    given: object = rule
    parts: Iterable[object] = [rule]
    if isinstance(given, Iterable) and not isinstance(given, str | bytes | Mapping):
        parts = list(given)
    compiled: list[tuple[str, Callable[[str], bool]]] = []
    for part in parts:
        if isinstance(part, str):
            compiled.append((part, compile_pattern(part).covers))
        elif callable(part):
            compiled.append((getattr(part, "__name__", "a predicate"), part))
        else:
            raise InvalidArgumentError(
                f"{part!r:.80}: expected a leaf path such as 'params.*.kernel', or a function"
            )
    return compiled


def fill_stars(text: str, stars: Sequence[str], below: str) -> str:
    """Return a pattern with `stars` in place of its `*`, and the path `below` after it.

    Raises:
        InvalidArgumentError: The pattern has another number of `*`.
    """
    pieces = escape_slashes(text).split("*")
    if len(pieces) != len(stars) + 1:
        raise InvalidArgumentError(
            f"{text!r:.80} has {len(pieces) - 1} '*', where {len(stars)} are to be filled in"
        )
    whole = pieces[0] + "".join(star + piece for star, piece in zip(stars, pieces[1:], strict=True))
    return ".".join(part for part in (whole, below) if part) or ROOT


def natural_key(text: str) -> tuple[tuple[int, str], ...]:
    """Return a sort key that orders the numbers in texts by value: `2` before `10`."""
    parts = _DIGITS.split(text)
    return tuple((int(part), "") if part.isdecimal() else (-1, part) for part in parts)
