"""The verify flow: a committed step is compared with its manifest, file by file, byte by byte.

Damage does not raise: it is the result. Nothing is written, except the digests of a virtual step
that has none yet. docs/how-to/verifying.md lists the damage that is found and that is not.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence, Set

from msgspec import Struct, field
from msgspec.structs import replace

from ckpt._engine.chunk_extensions import ReadCheck
from ckpt._engine.restore.step_files import StepFiles, VirtualFiles, files_of, unverified_arrays
from ckpt._engine.verify.damage import (
    DamagedFile,
    FirstDigests,
    compare_sources,
    note_digests,
    problems_of_item,
)
from ckpt._engine.verify.report import NO_LIMITS, FileSelection, Problem, ReadLimits, VerifyReport
from ckpt._engine.verify.scanner import MOST_DECODED_BYTES, MOST_FOREIGN_BYTES, Scanner
from ckpt._events import EventRecorder, Observer
from ckpt._format.chunk_locations import ChunkLocation, misplaced_leaves, places_in
from ckpt._format.leaf_table import LeafEntry
from ckpt._format.manifest import ItemEntry, Manifest, Node, of_item
from ckpt._format.manifest_head import FILE_NAME, FileEntry
from ckpt._format.step_files import BEGUN, SourceFile
from ckpt._plan.leaf_entries import check_leaves
from ckpt._runtime.threads import run_in_thread
from ckpt._tree.boxes import unboxed_names
from ckpt._tree.structure import unflatten
from ckpt._tree.table import format_bytes
from ckpt.errors import CorruptCheckpointError, StorageError, located
from ckpt.storage._base import UNKNOWN_SIZE, Storage
from ckpt.storage._manifests import files_folder, read_manifest, refuse_deleted

logger = logging.getLogger("ckpt")
_DATABASE = "manifest.ocdbt"
# The limit of Linux for a whole path.
_LONGEST_PATH = 4096
_CUSTOM = frozenset({"custom", "namedtuple"})


class Contradictions(Struct, frozen=True):
    """The contradictions in a manifest.

    Attributes:
        problems: All contradictions, as problems of the manifest.
        leaves: The leaves whose chunk locations cannot be trusted, by item; an item is left out if
            none of its leaves can be trusted.
        unsafe: Paths of listed files that must not be followed.
    """

    problems: tuple[Problem, ...]
    leaves: Mapping[str, frozenset[int]]
    unsafe: frozenset[str]


def contradictions(manifest: Manifest) -> Contradictions:
    """Return the contradictions in a manifest; no code of a class named in it runs."""
    problems: list[Problem] = []
    leaves: dict[str, frozenset[int]] = {}
    unsafe = frozenset(path for path in manifest.files if not _is_below(path))
    problems.extend(
        Problem(FILE_NAME, None, None, f"it lists {path!r:.200}, which is not a file of a step")
        for path in sorted(unsafe)
    )
    listed: dict[str, FileEntry | SourceFile] = {**manifest.files, **manifest.sources}
    for name, item in manifest.items.items():
        try:
            check_leaves(item)
            wrong = misplaced_leaves(name, item, listed)
            names = unboxed_names(item.nodes, item.leaves.names)
        except CorruptCheckpointError as error:
            problems.append(Problem(FILE_NAME, name, error.leaf, error.message))
            continue
        leaves[name] = frozenset(wrong)
        problems.extend(
            Problem(FILE_NAME, name, names[number], message) for number, message in wrong.items()
        )
        problems.extend(_problems_of_item(name, item, manifest))
    return Contradictions(tuple(problems), leaves, unsafe)


def _problems_of_item(name: str, item: ItemEntry, manifest: Manifest) -> list[Problem]:
    found: list[Problem] = []
    try:
        if item.nodes or item.leaves:
            unflatten([_bare(node) for node in item.nodes], range(len(item.leaves)))
    except CorruptCheckpointError as error:
        found.append(Problem(FILE_NAME, name, error.leaf, error.message))
    if (
        any(leaf.digests for leaf in item.leaves)
        # A step that is not made for other readers needs no database.
        and BEGUN in manifest.files
        and f"{name}/{_DATABASE}" not in manifest.files
    ):
        message = f"it does not list {name}/{_DATABASE}, the database of the item's arrays"
        found.append(Problem(FILE_NAME, name, None, message))
    return found


def _bare(node: Node) -> Node:
    """Return a node without its class, so that no code of the class runs."""
    return replace(node, class_name="?") if node.kind in _CUSTOM else node


def _is_below(path: str) -> bool:
    """Return True if a path can belong to a file of the step, other than the manifest."""
    if len(path) > _LONGEST_PATH:
        return False
    names = path.split("/")
    return path != FILE_NAME and "\0" not in path and not {"", ".", ".."} & set(names)


async def verify_step_dir(
    storage: Storage,
    step_dir: str,
    step: int | None,
    deep: bool,
    observers: tuple[Observer, ...],
    *,
    limits: ReadLimits = NO_LIMITS,
    may_write: bool = True,
    item: str = "",
) -> VerifyReport:
    """Return the problems of a step directory.

    Args:
        storage: Storage of the root.
        step_dir: Name of the step directory.
        step: The step that it should be; None for a one-shot checkpoint or any step.
        deep: True to read every byte; otherwise names, kinds and sizes are compared.
        observers: Receivers of the timed phases.
        limits: Limits of the read.
        may_write: True if the digests of a virtual step without any may be written into it. After a
            check of a part they never are.
        item: The only item that is compared; empty for the whole step.

    Raises:
        StepNotFoundError: `step` was given and there is no such step.
        StepDeletedError: The step was deleted or replaced meanwhile.
        NotACheckpointError: There is no checkpoint of that name.
        UnsupportedFormatError: The step has a later format.

    Cancellation: waits for a read that has begun, and frees the memory.
    """
    began = time.perf_counter()
    work = _Findings(f"{storage.location}/{step_dir}/{item}".rstrip("/"), step)
    with located(step=step):
        manifest = await _manifest(storage, step_dir, work)
        if manifest is not None:
            work.step = manifest.step
            if item:
                manifest, may_write = of_item(manifest, item), False
            await _compare_unless_deleted(
                storage, step_dir, manifest, deep, limits, observers, work, may_write
            )
            if item:
                work.unlisted = [each for each in work.unlisted if each.startswith(f"{item}/")]
    seconds = time.perf_counter() - began
    logger.info(
        "verified %s (%s): %d problems; %d files, %s read in %.2f s",
        work.path,
        "a part" if work.unread else "every byte" if deep else "names and sizes",
        len(work.problems),
        work.files,
        format_bytes(work.nbytes),
        seconds,
    )
    return VerifyReport(
        path=work.path,
        step=work.step,
        deep=deep,
        problems=tuple(work.problems),
        files=work.files,
        nbytes=work.nbytes,
        seconds=seconds,
        unlisted=tuple(work.unlisted),
        first_digests=work.first_digests,
        without_digests=work.without_digests,
        unread_files=len(work.unread),
        unread_nbytes=sum(work.unread.values()),
    )


class _Findings(Struct):
    """The findings so far, from which the report is made."""

    path: str
    step: int | None
    problems: list[Problem] = field(default_factory=list)
    files: int = 1
    nbytes: int = 0
    unlisted: list[str] = field(default_factory=list)
    unsized: set[str] = field(default_factory=set)
    first: FirstDigests = field(default_factory=dict)
    first_digests: int = 0
    without_digests: int = 0
    # The size of each file that the limits left out.
    unread: Mapping[str, int] = field(default_factory=dict)


async def _manifest(storage: Storage, step_dir: str, work: _Findings) -> Manifest | None:
    """Return the manifest; None, and a problem noted, if it exists but cannot be used."""
    try:
        return await read_manifest(storage, step_dir, step=work.step)
    except (CorruptCheckpointError, StorageError) as error:
        work.problems.append(Problem(FILE_NAME, None, None, error.message))
        return None


async def _compare_unless_deleted(
    storage: Storage,
    step_dir: str,
    manifest: Manifest,
    deep: bool,
    limits: ReadLimits,
    observers: tuple[Observer, ...],
    work: _Findings,
    may_write: bool,
) -> None:
    place = files_folder(step_dir, manifest)
    files = files_of(storage, step_dir, manifest)
    most_decoded = MOST_FOREIGN_BYTES if manifest.sources else MOST_DECODED_BYTES
    recorder = EventRecorder("verify", manifest.step, observers)
    check = None
    if any(item.leaves.extensions for item in manifest.items.values()):
        from ckpt.extensions import read_check

        check = read_check(manifest)
    scanner = Scanner(files, recorder, most_decoded, check)
    try:
        await _compare(
            storage, place, manifest, files, scanner if deep else None, limits, work, check
        )
    finally:
        scanner.close()
        work.nbytes = scanner.nbytes
    if any(problem.file != FILE_NAME for problem in work.problems):
        await refuse_deleted(storage, step_dir, manifest)
    work.without_digests = unverified_arrays(manifest)
    notes = work.first and not work.problems and not work.unread and may_write
    if notes and await note_digests(storage, step_dir, manifest, work.first):
        work.first_digests, work.without_digests = work.without_digests, 0


async def _compare(
    storage: Storage,
    place: str,
    manifest: Manifest,
    files: StepFiles,
    scanner: Scanner | None,
    limits: ReadLimits,
    work: _Findings,
    check: ReadCheck | None,
) -> None:
    """Compare the files in the directory `place` of the root with a manifest."""
    wrong = await run_in_thread(contradictions, manifest)
    work.problems.extend(wrong.problems)
    work.files += len(manifest.files) + len(manifest.sources)
    found = await _list_files(storage, place, manifest, work)
    if found is not None:
        work.unlisted = sorted(found.keys() - manifest.files.keys() - {FILE_NAME})
    damages = await run_in_thread(_damages_seen, manifest, found, wrong.unsafe)
    sizes = {path: file.size for path, file in manifest.files.items()}
    sizes |= {path: file.size for path, file in manifest.sources.items()}
    for path in (*damages, *wrong.unsafe):
        sizes.pop(path, None)
    selection = FileSelection(sizes, limits, manifest.attempt)
    if scanner is not None:
        scanner.plan(selection.nbytes)
    if isinstance(files, VirtualFiles):
        damages |= await compare_sources(
            files, manifest, wrong.leaves, scanner, selection, work.first
        )
    if scanner is not None:
        chunks = await run_in_thread(_chunks_by_file, manifest, wrong.leaves)

        async def goes_on(path: str, nbytes: int) -> bool:
            return path in work.unsized and await _goes_on(storage, place, path, nbytes)

        damages |= await _damages_read(manifest, selection, chunks, scanner, goes_on, check)
        if check is not None:
            found_wrong = check.problems(manifest)
            work.problems.extend(Problem(FILE_NAME, *each) for each in found_wrong)
        work.unread = selection.left_out
    by_item: dict[str | None, list[DamagedFile]] = {}
    # In the order of the manifest, not of discovery.
    for path in (*manifest.files, *manifest.sources):
        if path in damages:
            by_item.setdefault(_item_of(manifest, path), []).append(damages[path])
    for name, own in by_item.items():
        if name is None:
            work.problems.extend(
                Problem(each.path, None, None, f"{each.reason}; only Orbax reads it")
                for each in own
            )
        else:
            work.problems.extend(
                await problems_of_item(
                    name, manifest.items[name], own, wrong.leaves.get(name), scanner
                )
            )


async def _list_files(
    storage: Storage, place: str, manifest: Manifest, work: _Findings
) -> dict[str, int | None] | None:
    """Return the files and their sizes; None, and a problem noted, if the store cannot list them.

    Sizes that the store does not know are assumed to be right until every byte is read.
    """
    try:
        files = await storage.files(place)
        listed = manifest.files
        work.unsized = {path for path, size in files.items() if size == UNKNOWN_SIZE}
        return {
            path: size if size != UNKNOWN_SIZE else listed[path].size if path in listed else 0
            for path, size in files.items()
        }
    except StorageError as error:
        work.problems.append(Problem(".", None, None, error.message))
        return None


def _damages_seen(
    manifest: Manifest, found: Mapping[str, int | None] | None, unsafe: frozenset[str]
) -> dict[str, DamagedFile]:
    """Return the files that differ from the manifest, as far as that shows without reading."""
    if found is None:
        return {}
    directories = {path[:end] for path in found for end in _slashes(path)}
    damages: dict[str, DamagedFile] = {}
    for path, known in manifest.files.items():
        if path in unsafe:
            continue
        size = found.get(path)
        if path not in found:
            if path in directories:
                damages[path] = DamagedFile(path, "is a directory instead of a file", 0)
            elif any(path[:end] in found for end in _slashes(path)):
                reason = "is missing: a directory on the way is a link, or something else"
                damages[path] = DamagedFile(path, reason, 0)
            else:
                damages[path] = DamagedFile(path, "is missing", 0)
        elif size is None:
            reason = "is not a regular file, but a symbolic link or something else"
            damages[path] = DamagedFile(path, reason, 0)
        elif size != known.size:
            reason = f"has {size} bytes instead of {known.size}"
            damages[path] = DamagedFile(path, reason, size)
    return damages


def _slashes(path: str) -> list[int]:
    return [place for place, character in enumerate(path) if character == "/"]


def _chunks_by_file(
    manifest: Manifest, wrong: Mapping[str, Set[int]]
) -> dict[str, tuple[list[ChunkLocation], Sequence[LeafEntry]]]:
    """Return the chunks of each data file whose digests can be compared without decoding."""
    found: dict[str, tuple[list[ChunkLocation], Sequence[LeafEntry]]] = {}
    for name, contradictory in wrong.items():
        item = manifest.items[name]
        for place in places_in(item, range(len(item.data_files))):
            if place.leaf not in contradictory and item.leaves[place.leaf].codec is None:
                path = f"{name}/{item.data_files[place.file]}"
                found.setdefault(path, ([], item.leaves))[0].append(place)
    return found


async def _damages_read(
    manifest: Manifest,
    selection: FileSelection,
    chunks: Mapping[str, tuple[list[ChunkLocation], Sequence[LeafEntry]]],
    scanner: Scanner,
    goes_on: Callable[[str, int], Awaitable[bool]],
    check: ReadCheck | None,
) -> dict[str, DamagedFile]:
    """Read the selected files once; return those that differ or cannot be read."""
    damages: dict[str, DamagedFile] = {}

    async def read(listed: tuple[str, FileEntry], lane: int) -> None:
        path, known = listed
        if not selection.begins(path):
            return
        places, leaves = chunks.get(path, ([], []))
        try:
            found = await scanner.scan_file(path, known.size, places, leaves, lane)
            longer = await goes_on(path, known.size)
        except (StorageError, CorruptCheckpointError) as error:
            # Some of its chunks may still be readable.
            damages[path] = DamagedFile(path, f"cannot be read: {error.message}", known.size)
        else:
            if found.digest != known.digest:
                damages[path] = DamagedFile(path, "was changed", known.size)
            elif longer:
                reason = f"has more than {known.size} bytes"
                damages[path] = DamagedFile(path, reason, known.size)
            elif not found.is_right:
                # The file was damaged before it was written, or the manifest is not of this step.
                reason = "is as listed, but not what the arrays were"
                damages[path] = DamagedFile(path, reason, known.size)
            else:
                item = _item_of(manifest, path)
                if item is not None and check is not None:
                    check.add(item, found.checked)

    chosen = (path for path in selection.order if path in manifest.files)
    await scanner.in_lanes(((path, manifest.files[path]) for path in chosen), read)
    return damages


async def _goes_on(storage: Storage, place: str, path: str, nbytes: int) -> bool:
    """Return True if a file has more than `nbytes` bytes, by reading the next one."""
    try:
        await storage.read_block(place, path, nbytes, memoryview(bytearray(1)))
    except CorruptCheckpointError:
        return False
    return True


def _item_of(manifest: Manifest, path: str) -> str | None:
    name, slash, _ = path.partition("/")
    return name if slash and name in manifest.items else None
