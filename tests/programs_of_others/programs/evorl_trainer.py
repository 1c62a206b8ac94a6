import jax
from evorl.algorithms.ppo import PPOWorkflow
from evorl.recorders import Recorder
from omegaconf import OmegaConf

from tests.programs_of_others.training import ROOT, reached, report

config = OmegaConf.create(
    {
        "env": {"env_type": "gymnax", "env_name": "CartPole-v1", "max_episode_steps": 8},
        "agent_network": {
            "actor_hidden_layer_sizes": [8],
            "critic_hidden_layer_sizes": [8],
            "policy_obs_key": "",
            "value_obs_key": "",
        },
        "optimizer": {"lr": 1e-2, "grad_clip_norm": 1.0},
        "checkpoint": {"enable": True, "save_interval_steps": 1, "max_to_keep": 3},
        "output_dir": ROOT,
        "num_envs": 4,
        "num_eval_envs": 4,
        "rollout_length": 4,
        "minibatch_size": 8,
        "reuse_rollout_epochs": 1,
        "total_timesteps": 8 * 16,
        "eval_interval": 100,
        "eval_episodes": 4,
        "clip_epsilon": 0.2,
        "normalize_obs": False,
        "normalize_gae": False,
        "gae_horizon": 4,
        "gae_lambda": 0.95,
        "discount": 0.99,
        "loss_weights": {"actor_loss": 1, "critic_loss": 1, "actor_entropy": 0},
    }
)
losses = {}


class Losses(Recorder):
    def init(self): ...
    def close(self): ...

    def write(self, data, step=None):
        reached(step)
        if "loss" in data:
            losses[step] = data["loss"]


workflow = PPOWorkflow.build_from_config(config)
workflow.add_recorders([Losses()])
state = workflow.init(jax.random.PRNGKey(0))
start = workflow.checkpoint_manager.latest_step() or 0
if start:
    state = workflow.checkpoint_manager.restore(start, state)
state = workflow.learn(state)
workflow.close()
report(start, losses, state)
