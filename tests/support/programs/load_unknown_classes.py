"""Loads checkpoints with classes it does not have: `load_unknown_classes.py ROOT`, prints JSON.

Every line is what one attempt found: types, values and warnings.
"""

from __future__ import annotations

import collections
import json
import logging
import sys
from pathlib import Path
from typing import Any

import jax

import ckpt
import ckpt.sync
from tests.support.trees import structure

root = Path(sys.argv[1])
warnings: list[str] = []


class Handler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        warnings.append(record.getMessage())


logging.getLogger("ckpt").addHandler(Handler(logging.WARNING))
# A class of this script that has the name of one of the script that saved.
Mine = collections.namedtuple("Mine", ["mean", "count"])


def tell(name: str, **options: Any) -> Any:
    warnings.clear()
    found = ckpt.sync.load(root / name, **options)
    line = {
        "types": {key: type(value).__name__ for key, value in found.items()},
        "leaves": [leaf if isinstance(leaf, int) else leaf.tolist() for leaf in leaves(found)],
        "warnings": list(warnings),
    }
    sys.stdout.write(json.dumps(line) + "\n")
    return found


def leaves(tree: Any) -> list[Any]:
    return jax.tree.leaves(tree)


assert not [name for name in sys.modules if name.startswith("tests.interop")]
unknown = tell("lent")
ckpt.sync.save(root / "again", unknown)
tell("main")
assert not [name for name in sys.modules if name.startswith("tests.interop")]

from tests.interop.frameworks.lent import Lent, Named, Struct, Twin  # noqa: E402

renamed = {
    "tests.interop.frameworks.lent:Named": Twin,
    "tests.interop.frameworks.lent:Struct": Struct,
    "tests.interop.frameworks.lent:Lent": Lent,
}
known = tell("lent")
assert type(known["named"]) is Named
assert (known["struct"].kind, known["lent"].name) == ("a kind", "a name")
# What a process without the classes saved again is what it was.
again = tell("again")
assert structure(again) == structure(known)
tell("lent", handlers=[ckpt.handlers.PyTreeHandler(classes=renamed)])
tell("main", handlers=[ckpt.handlers.PyTreeHandler(classes={"__main__:Absent": Twin})])
