# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""What each profile gives to verl beside the settings, where verl's own default is another. Keys as in verl 0.7.0."""

from .settings import ACTOR, ROLLOUT

ALL = (
    "algorithm.adv_estimator=grpo",
    "data.filter_overlong_prompts=True",
    "data.seed=1",
    "trainer.project_name=gradloc",
    f"{ACTOR}.spike_detection=True",
    f"{ACTOR}.clip_ratio_high=0.28",
    # The evidence shows where training's probabilities differ from the rollout's.
    f"{ROLLOUT}.calculate_log_probs=True",
)

# GradLoc's keys, which a verl that is not patched lacks.
PLUGIN = ("actor@actor_rollout_ref.actor=gradloc_dp_actor", "critic=gradloc_dp_critic")

CLUSTER = (
    "data.train_batch_size=128",
    "data.max_prompt_length=1024",
    "data.max_response_length=8192",
    f"{ACTOR}.ppo_mini_batch_size=32",
    f"{ACTOR}.use_dynamic_bsz=True",
    f"{ACTOR}.ppo_max_token_len_per_gpu=18432",
    f"{ROLLOUT}.name=vllm",
    f"{ROLLOUT}.n=8",
    f"{ROLLOUT}.tensor_model_parallel_size=1",
    f"{ROLLOUT}.gpu_memory_utilization=0.6",
    "trainer.total_epochs=10",
    "trainer.test_freq=10",
    "trainer.save_freq=20",
    "trainer.max_actor_ckpt_to_keep=3",
)

EMBEDDED = (
    "trainer.device=cpu",
    "trainer.experiment_name=embedded",
    "+ray_kwargs.ray_init.address=local",
    "+ray_kwargs.ray_init.include_dashboard=False",
    "data.train_batch_size=6",
    "data.max_prompt_length=48",
    "data.max_response_length=32",
    "data.dataloader_num_workers=0",
    f"{ACTOR}.ppo_mini_batch_size=3",
    f"{ACTOR}.ppo_micro_batch_size_per_gpu=2",
    f"{ACTOR}.strategy=fsdp2",  # the only one that a CPU can run
    f"{ACTOR}.fsdp_config.dtype=float32",
    # Every gathering of the weights takes a second, and there is memory for all of them.
    f"{ACTOR}.fsdp_config.reshard_after_forward=False",
    f"{ACTOR}.use_torch_compile=False",
    "actor_rollout_ref.ref.use_torch_compile=False",
    "actor_rollout_ref.model.use_remove_padding=False",
    "actor_rollout_ref.model.enable_gradient_checkpointing=False",
    "+actor_rollout_ref.model.override_config.attn_implementation=sdpa",
    f"{ROLLOUT}.name=hf",
    f"{ROLLOUT}.n=4",
    f"{ROLLOUT}.load_format=safetensors",
    f"{ROLLOUT}.agent.num_workers=1",
    f"{ROLLOUT}.agent.default_agent_loop=whole_batch",
    "reward_model.num_workers=1",
    "trainer.total_epochs=1",
    "trainer.val_before_train=False",
    "trainer.resume_mode=disable",
)

TINY = (
    "data.train_batch_size=4",
    "data.max_response_length=12",
    f"{ACTOR}.ppo_mini_batch_size=2",
)

# The trainer that verl 0.9 has by default; without effect with trainer.use_v1=False.
_SAMPLER = "trainer.v1.sampler.custom_sampler"
V1_TRAINER = (
    "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
    f"+{ROLLOUT}.agent.agent_loop_manager_class=embedded.v1_trainer.OrderedAgentLoopManager",
    f"{_SAMPLER}.path=pkg://embedded.v1_trainer",
    f"{_SAMPLER}.name=OrderedReplayBuffer",
)
