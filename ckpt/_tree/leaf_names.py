"""Leaf names: leaf paths, and the names that they are stored under.

A stored name is the escaped keys of a leaf path joined with dots. It equals the dotted name that
Orbax uses, wherever that name is unambiguous (`params.layers.0.kernel`); `orbax_names` returns the
others. It is injective where Orbax's is not: `{"a": {"b": x}, "a.b": y}` is stored as `a.b` and
`a%2Eb`.

Escapes, all introduced by `%`, which is itself escaped: two hex digits stand for one UTF-8 byte;
`%e` is an empty key; `%k` before a key marks a key that is not a string beside a string sibling of
the same text; the name of a leaf without any key is `%root`. A very long key is shortened to its
beginning, `%h` and a digest of all of it: the key itself is in the manifest.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from ckpt._format.digests import digest
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


def orbax_key(name: str) -> str:
    """Return Orbax's name for the key whose stored name is `name`: its text.

    A shortened key, and a key that is not valid text, keep their stored names.
    """
    if "%" not in name or _HASH in name:
        return name
    key = unescape_key(name.removeprefix(_MARK))
    return name if any("\ud800" <= character <= "\udfff" for character in key) else key


def orbax_names(names: Sequence[str]) -> Sequence[str]:
    """Return Orbax's names for leaves, in order: the texts of their keys, joined with dots.

    Names without escapes stay as they are. Several leaves may get the same name; see `same_name`.
    """
    if not any("%" in name for name in names):
        return names
    return [
        "" if name == ROOT else ".".join(map(orbax_key, name.split("."))) if "%" in name else name
        for name in names
    ]


def same_name(names: Sequence[str]) -> tuple[str, str] | None:
    """Return two leaves for which Orbax has the same name, or None."""
    found = orbax_names(names)
    if found is names:
        return None
    first: dict[str, str] = {}
    for name, folder in zip(names, map(orbax_folder, found), strict=True):
        if first.setdefault(folder, name) != name:
            return first[folder], name
    return None


def orbax_folder(name: str) -> str:
    """Return the beginning of the keys of an array with this name in a database of Orbax.

    It is the directory that TensorStore makes of the name.
    """
    return "" if name in ("", "/") else name if name.endswith("/") else f"{name}/"


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
