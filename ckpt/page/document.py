"""The document of the page: served with separate parts, or as one file with all parts."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from importlib import resources

import msgspec

from ckpt._inspection.json_values import json_text
from ckpt.page.records import NormsRecord, RunRecord, StepRecord

# In the order of execution: the last script shows the page.
SCRIPTS = ("norms.js", "page.js")
ASSETS = {"page.css": "text/css", **dict.fromkeys(SCRIPTS, "text/javascript")}


class StaticData(msgspec.Struct, frozen=True):
    """The data of a page without a server.

    Attributes:
        run: The run.
        steps: The contents of some of its steps, by number.
        norms: The norms of its layers.
    """

    run: RunRecord
    steps: Mapping[str, StepRecord]
    norms: NormsRecord


def asset(name: str) -> str:
    """Return a file of the page."""
    return resources.files("ckpt.page").joinpath("assets", name).read_text(encoding="utf-8")


def served_page() -> str:
    """Return the page that requests its parts and data from a server."""
    parts = ['<link rel="stylesheet" href="page.css">']
    parts += [f'<script src="{name}" defer></script>' for name in SCRIPTS]
    return asset("page.html").replace("<!-- parts -->", "\n".join(parts))


def single_page(data: StaticData) -> str:
    """Return the page as one file, which needs neither a server nor a network."""
    style, scripts = asset("page.css"), [asset(name) for name in SCRIPTS]
    # In a script element, only "<" could end the data; the escape has the same meaning in JSON.
    encoded = json_text(data).replace("<", "\\u003c")
    allowed = " ".join(f"'{_hash(script)}'" for script in scripts)
    policy = f"default-src 'none'; style-src '{_hash(style)}'; script-src {allowed}"
    parts = (
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        f"<style>{style}</style>\n"
        f'<script type="application/json" id="data">{encoded}</script>\n'
    )
    page = asset("page.html").replace("<!-- parts -->", parts)
    elements = "".join(f"<script>{script}</script>\n" for script in scripts)
    return page.replace("</body>", f"{elements}</body>")


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
