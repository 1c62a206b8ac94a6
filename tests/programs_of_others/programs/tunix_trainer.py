import jax
import optax
import orbax.checkpoint as ocp
from flax import nnx
from jax.sharding import PartitionSpec as P
from tunix.sft.hooks import TrainingHooks
from tunix.sft.peft_trainer import PeftTrainer, TrainingConfig

from tests.programs_of_others.training import ROOT, batch, report

LAST = 8
mesh = jax.make_mesh((jax.device_count(),), ("fsdp",), (jax.sharding.AxisType.Auto,))


@nnx.jit
def make_model():
    made = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    state = nnx.state(made)
    spread = jax.tree.map(lambda x: P("fsdp", *[None] * (x.ndim - 1)), state)
    nnx.update(made, jax.lax.with_sharding_constraint(state, spread))
    return made


def loss_of(model, x):
    return ((model(x) - x) ** 2).mean()


losses = {}


class Losses(TrainingHooks):
    def on_train_step_end(self, trainer, step, loss):
        losses[step] = loss

    def on_train_start(self, trainer): ...
    def on_train_end(self, trainer): ...
    def on_train_step_start(self, trainer): ...
    def on_eval_step_start(self, trainer): ...
    def on_eval_step_end(self, trainer, eval_loss): ...


with jax.set_mesh(mesh), mesh:
    config = TrainingConfig(
        eval_every_n_steps=100,
        max_steps=LAST,
        checkpoint_root_directory=ROOT,
        checkpointing_options=ocp.CheckpointManagerOptions(save_interval_steps=1, max_to_keep=3),
    )
    trainer = PeftTrainer(make_model(), optax.adam(1e-2), config)
    trainer = trainer.with_loss_fn(loss_of).with_gen_model_input_fn(lambda x: {"x": x})
    trainer.with_training_hooks(Losses())
    start = trainer.train_steps
    trainer.train(batch(step, 8, 8) for step in range(LAST + 1))
state = nnx.state(trainer.model), nnx.state(trainer.optimizer, nnx.optimizer.OptState)
report(start, losses, state)
