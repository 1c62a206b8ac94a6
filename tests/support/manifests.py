"""Manifests taken apart and put together again, for tests that change them.

The columns of leaves are bytes in base64. In a document that is `spread` they are lists, so that
tests see and change single chunks; what is sealed may have either.
"""

from __future__ import annotations

import base64
import copy
import json
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ckpt._format.manifest_head import FILE_NAME, Summary, digest

HEAD = frozenset(Summary.__struct_fields__) - {"rest"}
_PACKED = ("form", "digests", "offsets", "files", "lengths")
_TRAILER = b',"checksum":"xxh3_128:%s"}\n'
_NUMBERS = {"form": "<u4", "offsets": "<i8", "files": "<u4", "lengths": "<i8"}


def document(data: bytes) -> dict[str, Any]:
    """A manifest as JSON, without its checksums."""
    found = json.loads(data)
    return {key: found[key] for key in found if key not in ("head", "rest", "checksum")}


def document_of(step_dir: Path) -> dict[str, Any]:
    """The manifest of a step directory as JSON, without its checksums."""
    return document((step_dir / FILE_NAME).read_bytes())


def contradict(step_dir: Path) -> None:
    """Change the nodes of a tree so that one of them is at two places, in a whole manifest."""
    found = document_of(step_dir)
    found["items"]["default"]["nodes"] = [
        {"kind": "dict", "keys": ["a", "b"], "children": [-1, -1]},
        {"kind": "custom", "keys": ["value"], "children": [0]},
    ]
    rewrite(step_dir, found)


def leaf_rows(item: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The leaves of an item of a document, one by one, read as `docs/reference/format.md` says.

    Each has the members of its form and its name, `digests` (hexadecimal), `offsets`, `files` and
    `lengths` of its chunks, and `same_as` and `value` if there are any.
    """
    columns = item.get("leaves")
    if columns is None:
        return []
    data = {name: base64.b64decode(columns.get(name, "")) for name in _PACKED}
    numbers = {
        name: [each for (each,) in struct.iter_unpack(code, data[name])]
        for name, code in (("form", "<I"), ("offsets", "<q"), ("files", "<I"), ("lengths", "<q"))
    }
    same_as = dict(columns.get("same_as", []))
    values = dict(columns.get("values", []))
    rows: list[dict[str, Any]] = []
    first = 0
    for number, name in enumerate(columns["names"]):
        form = columns["forms"][numbers["form"][number] if numbers["form"] else 0]
        row = {"name": name, **form}
        if number in same_as:
            kept = ("digests", "offsets", "files", "lengths")
            row |= {key: rows[same_as[number]][key] for key in kept}
            row["same_as"] = same_as[number]
        else:
            end = first + form.get("count", 0)
            hexadecimal = data["digests"][16 * first : 16 * end].hex()
            row["digests"] = [hexadecimal[at : at + 32] for at in range(0, len(hexadecimal), 32)]
            for key in ("offsets", "files", "lengths"):
                row[key] = numbers[key][first:end]
            first = end
        if number in values:
            row["value"] = values[number]
        rows.append(row)
    return rows


def spread(document: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a document with lists for columns: of numbers, and of digests as text."""
    return _with_columns(document, _spread)


def packed(document: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a document with bytes for columns. Lists of anything else stay as they are."""
    return _with_columns(document, _packed)


def change_leaf(item: dict[str, Any], leaf: int, **changes: Any) -> None:
    """Make a leaf of an item say something else.

    Args:
        item: The item in a document that is spread.
        leaf: Number of the leaf.
        **changes: Members of its form, which becomes one of its own, and columns, of which those of
            its chunks are replaced, by as many or not. None takes a member of the form away.
    """
    columns = item["leaves"]
    forms, total = columns["forms"], len(columns.get("offsets", []))
    numbers = columns.setdefault("form", [0] * len(columns["names"]))
    same = {number for number, _ in columns.get("same_as", [])}
    counts = [0 if n in same else forms[at].get("count", 0) for n, at in enumerate(numbers)]
    chunks = slice(sum(counts[:leaf]), sum(counts[: leaf + 1]))
    form = dict(forms[numbers[leaf]])
    for name, value in changes.items():
        if name in ("digests", "offsets", "files", "lengths"):
            columns.setdefault(name, [0] * total)[chunks] = value
        elif value is None:
            form.pop(name, None)
        else:
            form[name] = value
    numbers[leaf] = len(forms)
    forms.append(form)


def sealed(changed: Mapping[str, Any], more: bytes = b"") -> bytes:
    """The manifest with the members of a document, whose length and checksums fit.

    Args:
        changed: The members. Those that belong to the head go there.
        more: What is put before the last checksum.
    """
    head, rest = parts(changed)
    return sealed_parts(head, rest + more)


def parts(changed: Mapping[str, Any]) -> tuple[bytes, bytes]:
    """The members of the head and those of the rest, without the braces around them."""
    changed = packed(changed)
    head = {key: changed[key] for key in changed if key in HEAD}
    rest = {key: changed[key] for key in changed if key not in HEAD}
    return _inner(head), _inner(rest)


def sealed_parts(head: bytes, rest: bytes) -> bytes:
    """The manifest with these members, without the braces around them."""
    end = len(_TRAILER % (b"0" * 32))
    front = b'{%s,"rest":%d' % (head, 1 + len(rest) + end)
    return sealed_body(b'%s,"head":"xxh3_128:%s",%s' % (front, digest(front).encode(), rest))


def sealed_body(body: bytes) -> bytes:
    """`body`, a JSON object without its last brace, with a checksum that fits."""
    return body + _TRAILER % digest(body).encode()


def rewrite(step_dir: Path, changed: Mapping[str, Any]) -> None:
    """Write a changed manifest into a step directory."""
    (step_dir / FILE_NAME).write_bytes(sealed(changed))


def _inner(members: Mapping[str, Any]) -> bytes:
    return json.dumps(members, ensure_ascii=False).encode("utf-8", "surrogatepass")[1:-1]


def _with_columns(document: Mapping[str, Any], change: Callable[[str, Any], Any]) -> dict[str, Any]:
    found = copy.deepcopy(dict(document))
    items = found.get("items")
    for item in items.values() if isinstance(items, dict) else ():
        columns = item.get("leaves") if isinstance(item, dict) else None
        if isinstance(columns, dict):
            for name in columns.keys() & {*_NUMBERS, "digests"}:
                columns[name] = change(name, columns[name])
    return found


def _spread(name: str, column: Any) -> Any:
    if not isinstance(column, str):
        return column
    data = base64.b64decode(column)
    if name == "digests":
        return [data[start : start + 16].hex() for start in range(0, len(data), 16)]
    return np.frombuffer(data, _NUMBERS[name]).tolist()


def _packed(name: str, column: Any) -> Any:
    if not isinstance(column, list):
        return column
    if name == "digests":
        try:
            data = b"".join(map(bytes.fromhex, column))
        except (TypeError, ValueError):
            return column
    elif all(type(each) is int for each in column):
        kind = np.dtype(_NUMBERS[name])
        # What is too large for the column loses its upper bits.
        mask = (1 << 8 * kind.itemsize) - 1
        unsigned = f"<u{kind.itemsize}"
        data = np.array([each & mask for each in column], unsigned).tobytes()
    else:
        return column
    return base64.b64encode(data).decode()
