"""The text between the markers of a page, which scripts write."""

from __future__ import annotations


def updated(page: str, name: str, text: str) -> str:
    """Returns a page with this text between its two markers of that name.

    Raises:
        ValueError: The page does not have exactly one pair of these markers, in order.
    """
    start_mark, end_mark = f"<!-- {name}:start -->", f"<!-- {name}:end -->"
    before, start, rest = page.partition(start_mark)
    _, end, after = rest.partition(end_mark)
    if not start or not end or start_mark in rest or end_mark in after:
        raise ValueError(f"the page needs one {start_mark} and after it one {end_mark}")
    return f"{before}{start}\n\n{text.strip()}\n\n{end}{after}"
