"""`adopt`: make a step whose data stays in the files of another library."""

from __future__ import annotations

from typing import get_args

from ckpt._arguments import one_of
from ckpt._calls.conversion import place_of
from ckpt._calls.oneshot import Call
from ckpt._commit import StepInfo
from ckpt._engine.save.save_request import SaveRequest
from ckpt._settings import IfTaken, Staging
from ckpt._steps.factory import make_engine
from ckpt._steps.path_diagnosis import opened_checkpoint
from ckpt._steps.saves.adoption import adopt_step
from ckpt.step_names import StepNames
from ckpt.storage._resolve import PathLike, open_beside, open_step_dir


def adopt_call(
    source: PathLike,
    target: PathLike,
    step: int | None,
    step_names: StepNames | None,
    if_exists: IfTaken,
) -> Call[StepInfo]:
    one_of("if_exists", if_exists, get_args(IfTaken))
    storage, step_dir = place_of(target, step, step_names)
    found, name = open_step_dir(source, follow=True)
    # Readers have no more of the source than its path or URL.
    open_beside(found, f"{found.location}/{name}")
    request = SaveRequest(step_dir, step, {}, False, None, None, if_exists)
    engine = make_engine(Staging(), (), ())

    async def call() -> StepInfo:
        opened = await opened_checkpoint(source, found, name)
        return await adopt_step(opened, f"{found.location}/{name}", storage, request, engine)

    return call
