import numpy as np
import optax
from flax import linen as nn
from kauldron import kd

from tests.programs_of_others.training import ROOT, reached, report

losses = {}


class Model(nn.Module):
    x: kd.kontext.Key = kd.kontext.REQUIRED

    @nn.compact
    def __call__(self, x):
        return nn.Dense(8)(x)


class Losses(kd.train.metric_writer.NoopWriter):
    def write_step_metrics(self, *, step, aux, **others):
        losses[step] = aux.compute(flatten=False).loss_values["l2"]
        reached(step)


class Examples:
    def __len__(self):
        return 512

    def __getitem__(self, number):
        return {"x": np.random.default_rng(number).normal(size=8).astype(np.float32)}


trainer = kd.train.Trainer(
    seed=0,
    workdir=ROOT,
    train_ds=kd.data.py.DataSource(
        data_source=Examples(), shuffle=False, batch_size=8, num_workers=0
    ),
    model=Model(x="batch.x"),
    train_losses={"l2": kd.losses.L2(preds="preds", targets="batch.x")},
    optimizer=optax.adam(1e-2),
    num_train_steps=8,
    log_metrics_every=1,
    writer=Losses(),
    checkpointer=kd.ckpts.Checkpointer(save_interval_steps=1),
)
start = trainer.checkpointer.latest_step or 0
state, _ = trainer.train()
report(start, losses, (state.step, state.params, state.opt_state))
