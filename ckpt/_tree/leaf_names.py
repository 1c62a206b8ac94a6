"""Leaf names: leaf paths, the names that they are stored under, and patterns of them.

A stored name is the escaped keys of a leaf path joined with dots. It equals the
texts of the keys joined with dots, wherever that is unambiguous (`params.layers.0.kernel`). It is
injective where those are not: `{"a": {"b": x}, "a.b": y}` is stored as `a.b` and `a%2Eb`.

Escapes, all introduced by `%`, which is itself escaped: two hex digits stand for one UTF-8 byte;
`%e` is an empty key; `%k` before a key marks a key that is not a string beside a string sibling of
the same text; the name of a leaf without any key is `%root`. A very long key is shortened to its
beginning, `%h` and a digest of all of it: the key itself is in the manifest.

Patterns of leaf paths. A leaf path is its keys joined by dots, as in messages:
`params.layers.0.kernel`. In a pattern `*` stands for any text within one key, `?` for one
character, and a key `**` for any number of keys. A pattern covers the leaves that it matches and
all leaves below its matches, so `params` is everything in `params`, and `layers.*.kernel` is every
layer's kernel. A slash within a key may be written as it is: `mlp/~/linear_0.w`.
"""

from __future__ import annotations

import difflib
import functools
import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

from msgspec import Struct

from ckpt._format.manifest_head import digest
from ckpt.errors import WHOLE_ITEM, InvalidArgumentError

ROOT = WHOLE_ITEM
_EMPTY = "%e"
_MARK = "%k"
_HASH = "%h"
# Names are keys of a database, whose length is limited, and every level of the tree adds to them.
_MOST_CHARACTERS = 512
_KEPT_CHARACTERS = 64
# Far deeper than any model, and far from Python's own limit on the way back.
MAX_DEPTH = 200

# A fixed list: which characters are printable changes with the version of Python; names must not.
_SPECIAL = re.compile(r"[%./\\\x00-\x1f\x7f-\xa0\u2028-\u202e\ud800-\udfff]")


def _is_plain(character: str) -> bool:
    return _SPECIAL.match(character) is None


def escape_key(key: str) -> str:
    """Return `key` with all characters escaped that have a meaning in stored names."""
    if not key:
        return _EMPTY
    if key.isidentifier():
        return key
    return _SPECIAL.sub(_escaped, key)


def escape_slashes(path: str) -> str:
    """Return a path or pattern as it is stored, with its slashes escaped.

    Users may write the slashes of keys such as Haiku's `mlp/~/linear_0` as they are.
    """
    return path.replace("/", "%2F")


def _escaped(match: re.Match[str]) -> str:
    # surrogatepass keeps names of undecodable file names (os.fsdecode) reversible.
    encoded = match[0].encode("utf-8", "surrogatepass")
    return "".join(f"%{byte:02X}" for byte in encoded)


def unescape_key(text: str) -> str:
    """Return the key whose escaped form is `text`; the inverse of `escape_key`.

    Raises:
        ValueError: `text` is not an escaped key.
    """
    if text == _EMPTY:
        return ""
    if not text or not all(_is_plain(c) or c == "%" for c in text):
        raise ValueError(f"not an escaped key: {text!r}")
    head, *rest = text.split("%")
    out = bytearray(head, "utf-8")
    for piece in rest:
        digits = piece[:2]
        if len(digits) != 2 or digits.upper() != digits:
            raise ValueError(f"not an escaped key: {text!r}")
        out.append(int(digits, 16))
        out += piece[2:].encode("utf-8")
    key = out.decode("utf-8", "surrogatepass")
    if escape_key(key) != text:
        raise ValueError(f"not an escaped key: {text!r}")
    return key


def key_text(name: str) -> str:
    """Return the text of the key whose stored name is `name`.

    A shortened key, and a key that is not valid text, keep their stored names.
    """
    if "%" not in name or _HASH in name:
        return name
    key = unescape_key(name.removeprefix(_MARK))
    return name if any("\ud800" <= character <= "\udfff" for character in key) else key


def sibling_names(keys: Sequence[Hashable]) -> list[str]:
    """Return the escaped name of each of the `keys` of one node, all different.

    Args:
        keys: The keys of one mapping, the indices of a sequence, or field names.

    Raises:
        ValueError: Two keys that are not strings have the same text and cannot be told apart.
    """
    texts = [key for key in keys if type(key) is str and key.isidentifier()]
    if len(texts) == len(keys) and max(map(len, texts), default=0) <= _MOST_CHARACTERS:
        # The usual case, ten times as fast.
        return texts
    names = [_shortened(escape_key(_text_of(key))) for key in keys]
    counts = Counter(names)
    marked = [
        name if counts[name] == 1 or isinstance(key, str) else _MARK + name
        for key, name in zip(keys, names, strict=True)
    ]
    if len(set(marked)) != len(marked):
        twice = next(name for name, count in Counter(marked).items() if count > 1)
        raise ValueError(f"two different keys are both written {twice!r}")
    return marked


def _text_of(key: Hashable) -> str:
    if isinstance(key, str):
        return key
    if isinstance(key, int) and abs(key) >= 2**63:
        # Python limits the length of decimal texts.
        return hex(key)
    return str(key)


def _shortened(name: str) -> str:
    if len(name) <= _MOST_CHARACTERS:
        return name
    return name[:_KEPT_CHARACTERS] + _HASH + digest(name.encode())


def join_keys(names: Sequence[str]) -> str:
    """Return the stored name of the leaf whose escaped keys are `names`."""
    return ".".join(names) if names else ROOT


def nested(leaves: Mapping[str, Any]) -> Any:
    """Return leaves by path as nested dicts, with unescaped keys.

    Raises:
        InvalidArgumentError: A path is that of a leaf and of a dict with other leaves.
    """
    if set(leaves) == {ROOT}:
        return leaves[ROOT]
    tree: dict[str, Any] = {}
    nodes: dict[str, dict[str, Any]] = {"": tree}
    for path, leaf in leaves.items():
        node, above = tree, ""
        *parents, last = path.split(".")
        for key in parents:
            above = f"{above}.{key}"
            if above not in nodes:
                _refuse_taken(node, key, path)
                nodes[above] = node[_unescaped(key)] = {}
            node = nodes[above]
        _refuse_taken(node, last, path)
        node[_unescaped(last)] = leaf
    return tree


def _refuse_taken(node: Mapping[str, Any], key: str, path: str) -> None:
    if _unescaped(key) in node:
        raise InvalidArgumentError("there is another leaf at, above or below its path", leaf=path)


def _unescaped(key: str) -> str:
    try:
        return unescape_key(key)
    except ValueError:
        # A marked or shortened key stays as it is written.
        return key


def leaf_of_item(item: str, path: str) -> str:
    """Return how a leaf of an item is written, `model:params.w`; without an item, its path."""
    return ":".join(filter(None, (item, path)))


def split_leaf(text: str, items: Iterable[str]) -> tuple[str | None, str]:
    """Return the item and the path, as it is stored, of a leaf such as `model:params.w`.

    Args:
        text: The leaf, or a branch; the name of an item alone is all of it.
        items: The names of the items; none if there is one item, without a name.

    Returns:
        The item, or None if the text names none; and the path, which may be empty after an item.
    """
    for item in sorted(items, key=len, reverse=True):
        if text == item or text.startswith(f"{item}:"):
            return item, escape_slashes(text[len(item) + 1 :])
    return None, escape_slashes(text)


def branch_of(text: str, items: Sequence[str], *, unnamed: bool) -> tuple[str, str]:
    """Return the item and the path of a branch, as `split_leaf` does; one item needs no name.

    Raises:
        InvalidArgumentError: There are several items, and the text names none of them.
    """
    item, path = split_leaf(text, () if unnamed else items)
    if item is not None:
        return item, path
    if not items:
        raise InvalidArgumentError("it has no items")
    if len(items) > 1:
        first, _, below = path.partition(".")
        meant = leaf_of_item(items[0], path.rpartition(":")[2])
        if first in items:
            meant = leaf_of_item(first, below)
        raise InvalidArgumentError(
            f"it has several items ({', '.join(items)}): name one of them, as in {meant!r:.200}"
        )
    return items[0], path


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
