"""`adopt`: make a step whose data stays in the files of another library."""

from __future__ import annotations

from typing import get_args

from ckpt._arguments import check_step, one_of
from ckpt._calls.oneshot import Call
from ckpt._commit import StepInfo
from ckpt._engine.save.save_request import SaveRequest
from ckpt._settings import IfTaken, Staging
from ckpt._steps.factory import make_engine
from ckpt._steps.path_diagnosis import opened_checkpoint
from ckpt._steps.saves.adoption import adopt_step
from ckpt.step_names import Standard, StepNames
from ckpt.storage._resolve import PathLike, open_root, open_step_dir


def adopt_call(
    source: PathLike,
    target: PathLike,
    step: int | None,
    step_names: StepNames | None,
    if_exists: IfTaken,
) -> Call[StepInfo]:
    one_of("if_exists", if_exists, get_args(IfTaken))
    if step is None:
        storage, step_dir = open_step_dir(target)
    else:
        storage = open_root(target)
        step_dir = (step_names or Standard()).name(check_step(step))
    found, name = open_step_dir(source, follow=True)
    request = SaveRequest(step_dir, step, {}, False, None, None, if_exists)
    engine = make_engine(Staging(), (), ())

    async def call() -> StepInfo:
        opened = await opened_checkpoint(source, found, name)
        return await adopt_step(opened, f"{found.location}/{name}", storage, request, engine)

    return call
