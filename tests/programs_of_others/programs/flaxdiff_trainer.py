import jax
import optax
from flax import linen as nn
from flaxdiff.trainer.simple_trainer import SimpleTrainer

from tests.programs_of_others.training import ROOT, batch, reached, report

EPOCHS, STEPS = 4, 2


class Model(nn.Module):
    @nn.compact
    def __call__(self, image):
        return nn.Dense(4)(image)


def make(load_from):
    return SimpleTrainer(
        Model(),
        {"image": (8,)},
        optax.sgd(1e-2),
        jax.random.PRNGKey(0),
        name="run",
        load_from_checkpoint=load_from,
        checkpoint_base_path=ROOT,
    )


class Losses(dict):
    def log(self, values, step):
        if "train/loss" in values:
            self[int(step)] = values["train/loss"]


trainer = make(None)
if trainer.checkpointer.latest_step() is not None:
    trainer = make(trainer.checkpoint_path())
start = trainer.latest_step
losses = trainer.wandb = Losses()


def data():
    # The same in every step: the trainer saves epochs that are better than those before.
    image = batch(0, 8, 8)
    step = start
    while True:
        reached(step)
        yield {"image": image, "label": image[:, :4]}
        step += 1


trainer.fit({"train": data}, STEPS, EPOCHS, val_steps_per_epoch=0)
report(start, losses, trainer.state.params)
