"""The document of the page: served with its parts beside it, or as one file with all of them."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from importlib import resources

import msgspec

from ckpt._inspection.json_values import json_text
from ckpt.page.records import RunRecord, StepRecord

ASSETS = {"page.css": "text/css", "page.js": "text/javascript"}


class StaticData(msgspec.Struct, frozen=True):
    """All that a page shows that has no server.

    Attributes:
        run: The run.
        steps: The contents of some of its steps, by number.
    """

    run: RunRecord
    steps: Mapping[str, StepRecord]


def asset(name: str) -> str:
    """Return a file of the page."""
    return resources.files("ckpt.page").joinpath("assets", name).read_text(encoding="utf-8")


def served_page() -> str:
    """Return the page that asks a server for its parts and its data."""
    return asset("page.html").replace(
        "<!-- parts -->",
        '<link rel="stylesheet" href="page.css">\n<script src="page.js" defer></script>',
    )


def single_page(data: StaticData) -> str:
    """Return the page as one file, which needs neither a server nor a network."""
    style, script = asset("page.css"), asset("page.js")
    # In a script element, only this could end it; in JSON it means the same.
    encoded = json_text(data).replace("<", "\\u003c")
    policy = f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'"
    parts = (
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        f"<style>{style}</style>\n"
        f'<script type="application/json" id="data">{encoded}</script>\n'
    )
    page = asset("page.html").replace("<!-- parts -->", parts)
    return page.replace("</body>", f"<script>{script}</script>\n</body>")


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
