import functools
import pathlib

import jax.numpy as jnp
from brax import envs
from brax.training.agents.bc import networks
from brax.training.agents.bc import train as bc

from tests.programs_of_others.training import ROOT, reached, report

LAST = 8


def teacher(observations, key):
    action = 1 - observations["state"][..., :1]
    return action, {"loc": action}


# Brax counts from 0 again when it goes on, so each run has a folder.
saved = sorted(pathlib.Path(ROOT).glob("*/*"))
start = int(saved[-1].parent.name) + int(saved[-1].name) if saved else 0
losses = {}


def follow(step, metrics):
    reached(start + int(step))
    if "actor_loss" in metrics:
        losses[start + int(step)] = jnp.mean(metrics["actor_loss"])


fast = envs.get_environment("fast", obs_mode="dict_state")
_, params, _ = bc.train(
    demo_length=4,
    teacher_inference_fn=teacher,
    epochs=2,
    env=envs.training.wrap(fast, episode_length=16),
    num_envs=4,
    num_eval_envs=4,
    eval_length=4,
    batch_size=8,
    scramble_time=4,
    network_factory=functools.partial(
        networks.make_bc_networks, policy_hidden_layer_sizes=(8,), policy_obs_key="state"
    ),
    dagger_steps=LAST - start,
    num_evals=LAST - start + 1,
    progress_fn=follow,
    save_checkpoint_path=f"{ROOT}/{start:03}",
    restore_checkpoint_path=str(saved[-1]) if saved else None,
)
report(start, losses, params)
