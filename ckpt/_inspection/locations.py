"""The thing at a path: a root of steps, or one checkpoint."""

from __future__ import annotations

import errno
from collections.abc import Iterable

from msgspec import Struct

from ckpt._format.manifest_head import FILE_NAME
from ckpt._steps.index import StepIndex
from ckpt._steps.misplaced import convention
from ckpt._steps.opened import OpenedStep, open_step
from ckpt.errors import InvalidArgumentError, NotACheckpointError, StepNotFoundError, StorageError
from ckpt.step_names import Composite, Standard, StepNames
from ckpt.storage._base import Storage
from ckpt.storage._manifests import no_manifest
from ckpt.storage._resolve import local_path, open_root, open_step_dir


class RunRoot(Struct, frozen=True):
    """A directory of steps.

    Attributes:
        storage: The directory.
        names: Naming scheme of its steps.
        index: Its committed steps.
    """

    storage: Storage
    names: StepNames
    index: StepIndex

    @property
    def location(self) -> str:
        """Path or URL of the root, for messages."""
        return self.storage.location


class Checkpoint(Struct, frozen=True):
    """One step of a root, a one-shot checkpoint, or a file that is read as one.

    Attributes:
        storage: The directory above the checkpoint.
        opened: The checkpoint.
    """

    storage: Storage
    opened: OpenedStep

    @property
    def location(self) -> str:
        """Path or URL of the checkpoint, for messages."""
        return self.opened.location


class SkippedStep(Struct, frozen=True):
    """A step that was not compared.

    Attributes:
        step: Its number.
        reason: Reason why it was not compared.
    """

    step: int
    reason: str


async def locate(path: str) -> RunRoot | Checkpoint:
    """Return the root or the checkpoint at a path or URL.

    Raises:
        NotACheckpointError: There is neither a checkpoint nor a root; says what is there.
        CorruptCheckpointError: There is a damaged manifest.
        StorageError: The storage cannot be read.
    """
    single = _single(path)
    if single is not None:
        storage, name = single
        (stamp,) = await _stamps(storage, [name])
        if stamp is not None:
            opened = await open_step(storage, name)
            if opened is not None:
                return Checkpoint(opened.storage, opened)
    local = local_path(path)
    may_be_root = local is None or local.is_dir()
    if may_be_root and (root := await _begun_root(path)) is not None:
        return root
    failure: NotACheckpointError | None = None
    if single is not None:
        try:
            opened = await open_step(*single)
        except NotACheckpointError as error:
            failure, opened = error, None
        if opened is not None:
            return Checkpoint(opened.storage, opened)
    # The first save may have begun or ended meanwhile.
    if may_be_root and (root := await _begun_root(path)) is not None:
        return root
    if may_be_root and local is not None and not any(local.iterdir()):
        return await open_as_root(path)
    raise failure or await _diagnose(path)


async def _begun_root(path: str) -> RunRoot | None:
    """Return the root at a path if it has steps, or if its first step is being saved."""
    root = await open_as_root(path)
    if await root.index.latest() is not None or root.index.unreadable:
        return root
    # A save creates the lease of a new root first. Orbax regards an attempt as not finished.
    attempts = await root.storage.attempts()
    is_begun = any(not it.step_dir or root.names.step(it.step_dir) is not None for it in attempts)
    return root if is_begun else None


async def open_as_root(path: str) -> RunRoot:
    """Return the root at a path, whatever the naming scheme of its steps is."""
    storage = open_root(path, create=False)
    names = await _names_in(storage)
    return RunRoot(storage, names, StepIndex(storage, names))


async def checkpoint_at(path: str) -> Checkpoint:
    """Return the checkpoint at a path; for a root, its latest step.

    Raises:
        StepNotFoundError: The path is a root without steps.
        CheckpointError: As in `locate`.
    """
    found = await locate(path)
    if isinstance(found, Checkpoint):
        return found
    return Checkpoint(found.storage, await found.index.found(None))


async def doubled_steps(root: RunRoot) -> dict[int, list[str]]:
    """Return the numbers that several directories of a root share, such as `a_1` and `b_1`."""
    if isinstance(root.names, Standard):
        return {}
    found: dict[int, list[str]] = {}
    for name in await root.storage.step_dirs():
        step = root.names.step(name)
        if step is not None:
            found.setdefault(step, []).append(name)
    several = {step: sorted(names) for step, names in found.items() if len(names) > 1}
    return {
        step: names
        for step, names in several.items()
        if sum([await root.index.look(name) is not None for name in names]) > 1
    }


async def refuse_doubled(root: RunRoot) -> None:
    """Raise if several steps of a root have one number, since any of them may be meant.

    Raises:
        InvalidArgumentError: Several steps have one number; names two of them.
    """
    for step, (first, second, *_) in sorted((await doubled_steps(root)).items()):
        raise InvalidArgumentError(
            f"{root.location} has several steps {step}: {first} and {second}. Give the paths of "
            "single steps"
        )


async def root_at(path: str) -> RunRoot:
    """Return the root at a path.

    Raises:
        InvalidArgumentError: The path is a single checkpoint.
        CheckpointError: As in `locate`.
    """
    found = await locate(path)
    if isinstance(found, RunRoot):
        return found
    raise InvalidArgumentError(
        f"{found.location} is a single checkpoint, not a root of steps. Give the directory above it"
    )


def _single(path: str) -> tuple[Storage, str] | None:
    """Return the directory above a path and its name there; None for a path without a name."""
    try:
        return open_step_dir(path, follow=True)
    except InvalidArgumentError:
        # A whole bucket or disk can be a root. For other paths, this raises what is wrong with
        # them.
        open_root(path, create=False)
        return None


async def _stamps(storage: Storage, names: list[str]) -> list[object]:
    try:
        return list(await storage.stamps(names, FILE_NAME))
    except StorageError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR):
            raise
        return [None] * len(names)


async def _names_in(storage: Storage) -> StepNames:
    """Return names that fit all steps of a root, with every prefix and width that occurs there."""
    try:
        found = await storage.step_dirs()
    except StorageError as error:
        if error.errno != errno.ENOENT:
            raise
        raise StepNotFoundError(f"there is no directory {storage.location}") from None
    kinds = {name: kind for name in found if (kind := convention(name)) is not None}
    named = [name for name, kind in kinds.items() if kind.prefix]
    stamps = await storage.stamps(named, FILE_NAME) if named else []
    padded = [name for name, kind in kinds.items() if kind.digits and not kind.prefix]
    present = (name for name, stamp in zip(named, stamps, strict=True) if stamp is not None)
    conventions = {kinds[name] for name in (*present, *padded)}
    if not conventions:
        # The first save of the run shows how its steps are named.
        begun = [convention(each.step_dir) for each in await storage.attempts()]
        conventions = {kind for kind in begun if kind is not None}
    return Composite(Standard(), *sorted(conventions, key=str)) if conventions else Standard()


class StepPath(Struct, frozen=True):
    """A place with the name of a step in the root above; the step need not exist.

    Attributes:
        root: The root above. Its index knows only steps with this kind of name.
        step: The step.
        name: Name of its directory.
    """

    root: RunRoot
    step: int
    name: str

    @property
    def location(self) -> str:
        """Path or URL of the step, for messages."""
        return f"{self.root.location}/{self.name}"


def step_path_of(path: str) -> StepPath | None:
    """Return the step that a path names; None if its last component is not the name of a step.

    A link is not followed: a change applies to the named path itself.
    """
    storage, name = open_step_dir(path)
    # Only this kind of name: a step of the same number with another kind of name is another step.
    names = convention(name)
    step = None if names is None else names.step(name)
    if names is None or step is None:
        return None
    return StepPath(RunRoot(storage, names, StepIndex(storage, names)), step, name)


def names_of(step_dirs: Iterable[str]) -> StepNames:
    """Return names that fit these step directories."""
    conventions = {kind for name in step_dirs if (kind := convention(name)) is not None}
    return Composite(Standard(), *sorted(conventions, key=str))


async def _diagnose(path: str) -> NotACheckpointError:
    # Imported only here: the explanation needs modules that lists of steps do without.
    from ckpt._steps.path_diagnosis import diagnose

    return await diagnose(path, no_manifest(path))
