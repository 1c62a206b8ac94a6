import jax
import optax
from blaxbird import get_default_checkpointer, train_fn
from flax import nnx
from jax.sharding import PartitionSpec as P

from tests.programs_of_others.training import ROOT, batch, report

LAST = 8


def loss_of(model, key, x):
    return ((model(x) - x) ** 2).mean()


def step_of(model, key, x):
    return nnx.value_and_grad(loss_of)(model, key, x)


optimizer = nnx.ModelAndOptimizer(nnx.Linear(8, 8, rngs=nnx.Rngs(0)), optax.adam(1e-2))
save, restore_best, _ = get_default_checkpointer(ROOT, save_every_n_steps=1)
optimizer = restore_best(optimizer)
start = int(optimizer.opt_state[0].count[...])
losses = {}


def follow(step, *, metrics, **others):
    losses[start + step] = metrics["train/loss"]
    save(start + step, metrics=metrics, **others)


train = train_fn(
    fns=(step_of, loss_of),
    mesh=jax.make_mesh((jax.device_count(),), ("data",), (jax.sharding.AxisType.Auto,)),
    data_partition_spec=P("data"),
    n_steps=LAST - start,
    eval_every_n_steps=1,
    n_eval_batches=1,
    hooks=[follow],
)
train(
    jax.random.key(0),
    optimizer,
    (batch(step, 8, 8) for step in range(start + 1, LAST + 1)),
    (batch(0, 8, 8) for _ in range(LAST)),
)
report(start, losses, (nnx.state(optimizer.model), nnx.state(optimizer.opt_state)))
