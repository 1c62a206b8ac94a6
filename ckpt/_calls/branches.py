"""`Source`, and loading a tree whose branches are in several checkpoints."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
from msgspec import Struct
from msgspec.structs import replace

from ckpt._arguments import invalid, shown
from ckpt._engine.restore.composed import BranchedTarget
from ckpt._engine.restore.context import RestoreContext
from ckpt._engine.restore.pipeline import ItemTarget, restore_items
from ckpt._format.manifest import Manifest
from ckpt._plan.adapt import Adapt
from ckpt._redaction import redact
from ckpt._runtime.futures import for_each
from ckpt._runtime.threads import run_in_thread
from ckpt._settings import Staging
from ckpt._steps.opened import OpenedStep
from ckpt._steps.path_diagnosis import opened_checkpoint
from ckpt._steps.restore_arguments import context_of, volume_text, wanted_items
from ckpt._steps.restore_options import RestoreOptions
from ckpt._steps.service import make_engine, place_in_job
from ckpt._tree.leaf_names import branch_of, escape_slashes, nested
from ckpt.errors import CheckpointError, InvalidArgumentError, located
from ckpt.handlers._registry import HandlersLike
from ckpt.storage._base import Storage
from ckpt.storage._resolve import PathLike, open_step_dir

if TYPE_CHECKING:
    from ckpt.coordination._base import Coordinator

logger = logging.getLogger("ckpt")


@dataclass(frozen=True, slots=True)
class Source:
    """A checkpoint from which a branch is loaded that has another path there.

    Attributes:
        path: Directory, URL or store of the checkpoint, as for `ckpt.load`.
        at: Leaf path of the branch in the checkpoint, such as `params`; if the checkpoint has named
            items, `model:params`, or `model` for all of one. None stands for the whole checkpoint.

    Example:
        ```python
        llama = ckpt.Source("models/llama")
        found = await ckpt.load({"params": llama, "opt_state": "runs/b/50"})
        ```
    """

    path: PathLike
    at: str | None = None


class _BranchLoad(Struct, frozen=True):
    """A branch to load, before anything is read.

    Attributes:
        name: Its leaf path in the result.
        source: The checkpoint of the branch.
        like: Its target, or None.
        adapt: The allowed differences.
        storage: The storage of the checkpoint.
        step_dir: The directory of the checkpoint.
    """

    name: str
    source: Source
    like: Any
    adapt: Adapt
    storage: Storage
    step_dir: str

    @property
    def where(self) -> str:
        """The checkpoint, for messages."""
        return redact(f"{self.storage.location}/{self.step_dir}")

    @contextlib.contextmanager
    def named(self) -> Iterator[None]:
        """Name the branch and its checkpoint in errors of the body."""
        with _naming_branch(self.name, f" from {self.where}"), located():
            yield


class _Start:
    """A barrier for branches, so that nothing is read if one of them is refused."""

    def __init__(self, count: int) -> None:
        self._coming = set(range(count))
        self._all_here = anyio.Event()

    def arrive(self, number: int) -> None:
        self._coming.discard(number)
        if not self._coming:
            self._all_here.set()

    async def wait(self, number: int) -> None:
        self.arrive(number)
        await self._all_here.wait()


def branches_call(
    sources: Mapping[Any, Any],
    options: RestoreOptions,
    handlers: HandlersLike,
    coordinator: Coordinator | None,
) -> Callable[[], Awaitable[Any]]:
    """Return the call behind `load` of several checkpoints.

    Raises:
        InvalidArgumentError: An argument is invalid.
    """
    like, adapt = options.like, options.adapt
    if options.items is not None or options.at is not None:
        name = "at" if options.items is None else "items"
        raise InvalidArgumentError(
            f"{name}= goes with one checkpoint: of several, each branch "
            "says what it is in its own, as in {'params': ckpt.Source(path, at='model')}"
        )
    given = _checked(sources)
    adapts = _adapts(adapt, given)
    keeps = isinstance(adapt, Adapt) and adapt.missing == "keep"
    branches = []
    for name, source in given.items():
        with _naming_branch(name):
            storage, step_dir = open_step_dir(source.path, follow=True)
            branches.append(_BranchLoad(name, source, None, adapts[name], storage, step_dir))
    process, count = place_in_job(coordinator)
    context_for = partial(
        context_of,
        engine=make_engine(Staging(), handlers, ()),
        process=process,
        count=count,
        options=options,
    )

    async def call() -> Any:
        if like is None:
            return nested(await _loaded(branches, context_for))
        target, parts = await run_in_thread(_with_targets, branches, like, keeps)
        return target.filled(await _loaded(parts, context_for))

    return call


def _with_targets(
    branches: Sequence[_BranchLoad], like: Any, keeps: bool
) -> tuple[BranchedTarget, list[_BranchLoad]]:
    """Return the target, and the branches with their targets."""
    target = BranchedTarget(like)
    parts = []
    for branch in branches:
        with _naming_branch(branch.name):
            parts.append(replace(branch, like=target.branch(branch.name)))
    target.check_rest(keeps=keeps)
    return target, parts


async def _loaded(
    branches: Sequence[_BranchLoad], context_for: Callable[[OpenedStep], RestoreContext]
) -> dict[str, Any]:
    """Return the loaded branches; all are loaded at the same time, in the memory of one load."""
    start = _Start(len(branches))
    found: dict[str, Any] = dict.fromkeys(branch.name for branch in branches)
    slots: anyio.Semaphore | None = None
    ready: list[tuple[_BranchLoad, RestoreContext, dict[str, ItemTarget]]] = []
    began = time.perf_counter()
    for number, branch in enumerate(branches):
        with branch.named():
            opened = await opened_checkpoint(branch.source.path, branch.storage, branch.step_dir)
            context = context_for(opened)
            slots = slots or context.slots
            context = replace(context, slots=slots, may_read=partial(start.wait, number))
            options = _options_of_branch(opened.manifest, branch)
            ready.append((branch, context, wanted_items(opened.manifest, options)))

    async def load(number: int) -> None:
        branch, context, wanted = ready[number]
        with branch.named():
            (found[branch.name],) = (await restore_items(context, wanted)).values()
        # A branch without arrays has not arrived yet.
        start.arrive(number)
        volume = volume_text(context, began)
        logger.info("loaded the branch %s from %s: %s", branch.name, branch.where, volume)

    await for_each(load, range(len(ready)))
    return found


def _options_of_branch(manifest: Manifest, branch: _BranchLoad) -> RestoreOptions:
    """Return the options that load the one item of a branch."""
    item, path = branch_of(branch.source.at or "", list(manifest.items), unnamed=manifest.unnamed)
    return RestoreOptions(items={item: branch.like}, at=path or None, adapt=branch.adapt)


def _checked(sources: Mapping[Any, Any]) -> dict[str, Source]:
    """Return the sources by the paths of their branches."""
    if not sources:
        raise InvalidArgumentError("the mapping of branches to checkpoints is empty")
    found: dict[str, Source] = {}
    for name, source in sources.items():
        if not isinstance(name, str) or not name or "*" in name:
            raise invalid("path", name, "the leaf path of a branch, such as 'params', as each key")
        branch = escape_slashes(name)
        if not isinstance(source, Source):
            source = Source(source, branch)
        at: object = source.at
        if at is not None and (not isinstance(at, str) or not at or "*" in at):
            what = "the leaf path of one branch, such as 'params'; None for all"
            raise invalid("at", at, what, of="Source")
        if branch in found:
            raise InvalidArgumentError(f"the branch {branch!r:.200} is there twice")
        found[branch] = source
    for branch in found:
        inner = next((each for each in found if each.startswith(f"{branch}.")), None)
        if inner is not None:
            raise InvalidArgumentError(
                f"the branch {inner!r:.200} is inside the branch {branch!r:.200}: each leaf has to "
                "come from one checkpoint"
            )
    return found


def _adapts(adapt: object, branches: Mapping[str, Source]) -> dict[str, Adapt]:
    """Return the allowed differences of each branch."""
    if adapt is None or isinstance(adapt, Adapt):
        return dict.fromkeys(branches, adapt or Adapt())
    if not isinstance(adapt, Mapping) or not all(isinstance(a, Adapt) for a in adapt.values()):
        raise invalid("adapt", adapt, "a ckpt.Adapt, or a dict of one for each branch")
    given = {escape_slashes(str(name)): each for name, each in adapt.items()}
    unknown = next((name for name in given if name not in branches), None)
    if unknown is not None:
        raise InvalidArgumentError(
            f"adapt={{{shown(unknown)}: ...}}: expected branches to load: {', '.join(branches)}"
        )
    return {name: given.get(name) or Adapt() for name in branches}


@contextlib.contextmanager
def _naming_branch(name: str, source: str = "") -> Iterator[None]:
    try:
        yield
    except CheckpointError as error:
        error.message = f"branch {name!r:.200}{source}: {error.message}"
        error.args = (error.message,)
        raise
