"""`ckpt doctor`: checks whether this machine and a place are fit for checkpoints."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import anyio
import click

from ckpt._inspection.disk import disk, file_system_of
from ckpt._inspection.machine import Diagnosis, Finding, diagnosis, limits, software
from ckpt.cli import exit_status, options
from ckpt.cli.output import count_text, printable, show, table
from ckpt.errors import CheckpointError, InvalidArgumentError
from ckpt.storage._resolve import local_path, open_root

# Views of the kernel, which hold no files of programs.
_KERNEL = ("proc", "sysfs", "cgroup", "cgroup2", "devpts", "securityfs", "debugfs")
_COLOURS = {"ok": "green", "warning": "yellow", "problem": "red"}


@click.command()
@click.argument("path", type=options.PATH, required=False)
@options.as_json
def doctor(path: str | None, as_json: bool) -> int:
    """Check this machine, and a place for checkpoints.

    It says what is slow or unsafe, and what to change. On a disk it makes a few small files, in
    a store a few small objects, and removes them. Of a path that does not exist, the directory
    above it is checked. Exit status 1: there is a problem.
    """
    findings = [*software(), *limits()]
    if path is not None:
        findings += _place(path)
    found = diagnosis(path, findings)
    show(found, _view, as_json=as_json)
    return exit_status.FOUND if found.problems else exit_status.OK


def _place(path: str) -> list[Finding]:
    local = local_path(path)
    if local is None:
        return anyio.run(_store, path)
    directory = local
    # The functions of `os.path` return False if a directory above may not be entered.
    while not os.path.exists(directory):
        directory = directory.parent
    if not os.path.isdir(directory):
        raise InvalidArgumentError(f"{path}: {directory} is a file, so no steps can be there")
    kind = file_system_of(directory)
    if kind in _KERNEL:
        raise InvalidArgumentError(f"{path}: no files can be made in {directory}, which is {kind}")
    found = []
    if directory != local:
        shown = f"does not exist; {directory} was checked"
        found.append(Finding("disk", "directory", "ok", shown))
    return [*found, *disk(directory, anyio.run(_last_step_bytes, directory))]


async def _last_step_bytes(directory: Path) -> int | None:
    from ckpt._inspection.locations import open_as_root

    try:
        latest = await (await open_as_root(str(directory))).index.latest()
    except CheckpointError:
        return None
    return None if latest is None else latest.stored_bytes


async def _store(path: str) -> list[Finding]:
    # Imported only here, since this imports TensorStore.
    from ckpt._inspection.machine import store

    return [each async for each in store(open_root(path))]


def _view(found: Diagnosis) -> Iterator[str]:
    group = ""
    rows = []
    for each in found.findings:
        rows.append(
            (each.group if each.group != group else "", each.name, each.verdict, each.found)
        )
        group = each.group
    head, *lines = table(("", "check", "verdict", "found"), rows)
    yield head
    for line, each in zip(lines, found.findings, strict=True):
        # Only the word of the verdict is coloured, not the same word elsewhere in the line.
        before, word, after = line.partition(f"  {each.verdict}")
        yield before + click.style(word, fg=_COLOURS[each.verdict]) + after
    yield ""
    for each in found.findings:
        if each.advice:
            mark = click.style(each.verdict, fg=_COLOURS[each.verdict])
            yield f"{mark}: {printable(each.name)}: {printable(each.advice)}"
    place = "this machine" if found.path is None else f"this machine and {printable(found.path)}"
    problems, warnings = (
        count_text(number, noun)
        for number, noun in ((found.problems, "problem"), (found.warnings, "warning"))
    )
    yield click.style(f"{place}: {problems}, {warnings}", dim=True)
