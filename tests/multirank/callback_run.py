"""A planted spike in the worker of a verl that has callbacks and none of the hooks, which is on PYTHONPATH.

Run with a folder for the model, the checkpoint and the evidence; prints what `updated` returns without and with
callbacks, and `stopped`. Its ranks cannot be those of other tests, whose verl has the hooks.
"""

import json
import os
import sys
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from cluster import Cluster

ROWS, PROMPT, RESPONSE, WORDS = 8, 4, 6, 67
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
SPIKE = 5e3  # the factor on a planted token's advantage, as in actors.py
RANK, ROW, POSITION = 1, 5, 2
KEYS = """
    actor_rollout_ref.model.use_remove_padding=False
    +actor_rollout_ref.model.load_tokenizer=False
    +actor_rollout_ref.model.override_config.attn_implementation=sdpa
    actor_rollout_ref.actor.strategy=fsdp2
    actor_rollout_ref.actor.ppo_mini_batch_size=8
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2
    actor_rollout_ref.actor.use_torch_compile=False
    actor_rollout_ref.actor.optim.lr=1e-3
    actor_rollout_ref.actor.fsdp_config.dtype=float32
    actor_rollout_ref.actor.fsdp_config.use_torch_compile=False
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=2
    actor_rollout_ref.rollout.n=1
"""


def composed(folder: str, callbacks: str) -> Any:
    """verl's whole configuration."""
    from hydra import compose, initialize_config_module

    engine = "actor_rollout_ref.actor.fsdp_config"
    overrides = [*KEYS.split(), f"actor_rollout_ref.model.path={folder}/model", f"{engine}.callbacks={callbacks}"]
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", overrides=overrides)


def stopped(folder: str, spikes: list[int]) -> list[bool]:
    """Whether a run ends with each step, for the number of spikes in it: at two in two steps."""
    from verl.utils.callback import build_trainer_callbacks

    keys = f"spike_detection: true, spike_action: stop, spike_stop_after: 2, bisect_dump_dir: {folder}"
    config = composed(folder, f"[{{_target_: gradloc_callbacks.GradLoc, {keys}}}]")
    (callback,) = build_trainer_callbacks(config)
    trainer = SimpleNamespace(config=config, total_training_steps=9, global_steps=0)
    callback.on_start(trainer)
    stops = []
    for count in spikes:
        trainer.global_steps += 1
        stops.append(callback.should_stop(trainer, {"actor/gradloc/triggered": count}))
    return stops


def updated(folder: str, callbacks: str) -> tuple[list[float], list[Any]]:
    """The gradient norms of an update's two mini-batches, and the weights of this rank after it."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from verl.utils import tensordict_utils as tu
    from verl.workers.engine_workers import ActorRolloutRefWorker
    from verl.workers.utils.padding import left_right_2_no_padding, no_padding_2_padding

    rank, world = dist.get_rank(), dist.get_world_size()
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    torch.manual_seed(1)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, initializer_range=0.2, **SIZES))
    if rank == 0:
        model.save_pretrained(f"{folder}/model")
    dist.barrier()
    config = composed(folder, callbacks)
    worker = ActorRolloutRefWorker(config.actor_rollout_ref, "actor")
    worker.init_model()

    random = torch.Generator().manual_seed(rank)
    ids = torch.randint(3, WORDS, (ROWS, PROMPT + RESPONSE), generator=random)
    tensors = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "prompts": ids[:, :PROMPT]}
    tensors |= {"position_ids": torch.arange(ids.shape[1]).expand_as(ids).clone(), "responses": ids[:, PROMPT:]}
    tensors["response_mask"] = torch.ones(ROWS, RESPONSE)
    data = left_right_2_no_padding(tu.get_tensordict(tensors, {"temperature": 1.0}))
    tu.assign_non_tensor(data, compute_loss=False)
    log_probs = tu.get(worker.compute_log_prob(data), "log_probs")
    data["old_log_probs"] = no_padding_2_padding(log_probs, data)
    data["advantages"] = torch.randn(ROWS, 1, generator=random).sign().expand(ROWS, RESPONSE).clone()
    if rank == RANK:
        data["advantages"][ROW, POSITION] *= SPIKE
    tu.assign_non_tensor(data, mini_batch_size=8, global_batch_size=8, training_step=7)
    metrics = tu.get(worker.update_actor(data), "metrics")

    weights = [parameter.to_local().tolist() for parameter in worker.actor.engine.module.parameters()]
    worker.actor.engine._uses_fsdp2_cpu_offload_policy = True  # verl would move the model to a GPU first
    worker.save_checkpoint(f"{folder}/checkpoint")
    worker.load_checkpoint(f"{folder}/checkpoint")
    return metrics["grad_norm"], weights


if __name__ == "__main__":
    folder = sys.argv[1]
    keys = f"spike_detection: true, grad_norm_threshold: 1e3, bisect_dump_dir: {folder}"
    callbacks = f"[{{_target_: gradloc_callbacks.GradLoc, {keys}}}]"
    cluster = Cluster(2)
    without, found = (cluster.run(updated, folder, given) for given in ("[]", callbacks))
    print(json.dumps([without, found, stopped(f"{folder}/stopped", [1, 0, 1, 1])]))
