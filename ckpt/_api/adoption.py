"""`adopt`: a step whose data stays where another library wrote it."""

from __future__ import annotations

from ckpt._api.faces.coroutines import awaited
from ckpt._api.oneshot import Call
from ckpt._arguments import check_step, true_or_false
from ckpt._commit import StepInfo
from ckpt._engine.save.request import SaveRequest
from ckpt._runtime.loop import run_once
from ckpt._settings import Staging
from ckpt._steps.factory import make_engine
from ckpt._steps.saves.adoption import adopt_step
from ckpt._steps.wrong_paths import opened_checkpoint
from ckpt.step_names import Standard, StepNames
from ckpt.storage._resolve import PathLike, open_root, open_step_dir


@awaited("ckpt.adopt", "ckpt.sync.adopt")
async def adopt(
    source: PathLike,
    target: PathLike,
    *,
    step: int | None = None,
    step_names: StepNames | None = None,
    overwrite: bool = False,
) -> StepInfo:
    """Make a checkpoint of what another library wrote, without copying a byte of its arrays.

    The new checkpoint is a *virtual* one: its manifest says where in the files of `source` each
    chunk of each array is. Everything that reads a checkpoint reads it: `load`, `open_array`, a
    manager, any mesh, `Adapt`. Those files must stay where they are. They have no digests, so until
    the first `verify` a file that was changed is recognized by its size and time (in a store by
    what the store says). That `verify` reads all bytes once and writes their digests into the
    manifest; from then on a changed byte is never taken for what was there.

    One process makes the call, also in a job of several.

    Args:
        source: Models in safetensors (a file, or a directory), or a checkpoint of Orbax.
        target: A directory that does not exist yet; or a URL, or a store of `ckpt.storage`. With
            `step`, the root of a manager.
        step: The number of the step that it becomes in that root.
        step_names: How the manager names its steps, if not by the number alone.
        overwrite: Replace an existing checkpoint.

    Returns:
        What was made.

    Raises:
        NotACheckpointError: There is nothing that can be read at `source`.
        InvalidArgumentError: `source` is a checkpoint of this library, which needs no adoption.
        StepExistsError: There is a checkpoint already.
        CorruptCheckpointError: What describes `source` is damaged.
        UnsupportedFormatError: An array in it has a dtype that is not read.
        StorageError: A store refused.

    Cancellation: nothing is left behind, unless the checkpoint was just being published.

    Example:
        ```python
        await ckpt.adopt("models/llama", "runs/a", step=0)
        params = await ckpt.load("runs/a/0", like=params)
        ```
    """
    return await run_once(adopt_call(source, target, step, step_names, overwrite))


def adopt_call(
    source: PathLike,
    target: PathLike,
    step: int | None,
    step_names: StepNames | None,
    overwrite: bool,
) -> Call[StepInfo]:
    """Return the call behind `adopt`."""
    true_or_false("overwrite", overwrite)
    if step is None:
        storage, step_dir = open_step_dir(target)
    else:
        storage = open_root(target)
        step_dir = (step_names or Standard()).name(check_step(step))
    found, name = open_step_dir(source, follow=True)
    request = SaveRequest(step_dir, step, {}, False, None, None, overwrite)
    engine = make_engine(Staging(), (), ())

    async def call() -> StepInfo:
        opened = await opened_checkpoint(source, found, name)
        return await adopt_step(opened, f"{found.location}/{name}", storage, request, engine)

    return call
