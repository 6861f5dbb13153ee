# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""What later releases of verl call the keys of verl 0.7.0, and which of them they have no more."""

import re
from dataclasses import dataclass

from .targets import number


@dataclass(frozen=True)
class Renamed:
    """Keys or values of verl 0.7.0 that a later verl has under another name.

    Args:
        since: The first release that has the new name.
        old: The start of an override: a key, a part of keys that ends in a dot, or a key with its value.
        new: What takes its place.
    """

    since: str
    old: str
    new: str


QUOTES = "'\""
_REJECTION = "algorithm.rollout_correction.rollout_rs"
RENAMED = (
    Renamed("0.7.1", f"{_REJECTION}=token", f"{_REJECTION}=token_k1"),
    Renamed("0.7.1", f"{_REJECTION}=sequence", f"{_REJECTION}=seq_sum_k1"),
    Renamed("0.7.1", f"{_REJECTION}=geometric", f"{_REJECTION}=seq_mean_k1"),
    # 0.7.1 takes the old names, too. From 0.8.0 on they are in the configuration and not read.
    Renamed("0.7.1", "custom_reward_function.", "reward.custom_reward_function."),
    Renamed("0.7.1", "reward_model.num_workers", "reward.num_workers"),
    Renamed("0.7.1", "reward_model.reward_manager", "reward.reward_manager.name"),
    Renamed("0.7.1", "reward_model.sandbox_fusion.", "reward.sandbox_fusion."),
    Renamed("0.7.1", "reward_model.enable", "reward.reward_model.enable"),
    Renamed("0.7.1", "reward_model.enable_resource_pool", "reward.reward_model.enable_resource_pool"),
    Renamed("0.7.1", "reward_model.n_gpus_per_node", "reward.reward_model.n_gpus_per_node"),
    Renamed("0.7.1", "reward_model.nnodes", "reward.reward_model.nnodes"),
    Renamed("0.7.1", "reward_model.model.path", "reward.reward_model.model_path"),
    Renamed("0.7.1", "reward_model.rollout.", "reward.reward_model.rollout."),
    Renamed("0.7.1", "reward_manager.", "reward.reward_manager."),
    Renamed(
        "0.7.1",
        "actor_rollout_ref.rollout.update_weights_bucket_megabytes",
        "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes",
    ),
    Renamed("0.8.0", "critic.model.fsdp_config.", "critic.fsdp."),
    # These are still in the configuration, and the engine does not read them.
    *(
        Renamed("0.8.0", f"{model}.{old}", new.format(f"{model}.fsdp_config"))
        for model in ("actor_rollout_ref.actor", "actor_rollout_ref.ref")
        for old, new in (
            ("fsdp_config.dtype", "++{}.mixed_precision.param_dtype"),
            ("use_torch_compile", "{}.use_torch_compile"),
        )
    ),
    Renamed("0.8.0", "actor_rollout_ref.actor.grad_clip", "actor_rollout_ref.actor.optim.clip_grad"),
    Renamed("0.8.0", "critic.grad_clip", "critic.optim.clip_grad"),
)

_OF_MODEL = "input_tokenizer override_config use_shm use_remove_padding use_fused_kernels fsdp_config"
_OF_REWARD_MODEL = (
    "strategy micro_batch_size micro_batch_size_per_gpu max_length use_dynamic_bsz forward_max_token_len_per_gpu "
    "launch_reward_fn_async profiler ulysses_sequence_parallel_size use_reward_loop"
)
# The first release without some keys, the first that has them again, and the keys, alone or with those below them.
GONE = (
    (
        "0.7.1",
        "",
        *(f"reward_model.model.{key}" for key in _OF_MODEL.split()),
        *(f"reward_model.{key}" for key in _OF_REWARD_MODEL.split()),
        *(
            f"{model}.profiler.tool_config.torch.{key}"
            for model in ("actor_rollout_ref.actor", "actor_rollout_ref.ref", "critic")
            for key in ("step_start", "step_end")
        ),
        f"{_REJECTION}_threshold_lower",
        "algorithm.rollout_correction.rollout_token_veto_threshold",
    ),
    (
        "0.8.0",
        "",
        "actor_rollout_ref.rollout.multi_turn.interaction_config_path",
        "actor_rollout_ref.rollout.skip_rollout",
        "actor_rollout_ref.rollout.skip_dump_dir",
        "data.sampler",
        "data.datagen",
        "trainer.use_legacy_worker_impl",
    ),
    ("0.9.1", "0.10.0", "actor_rollout_ref.actor.router_replay", "actor_rollout_ref.ref.router_replay"),
)


def is_gone(override: str, version: str) -> bool:
    """Whether this verl rejects the override, because it does not have the key of verl 0.7.0 under any name."""
    key = override.removeprefix("~").partition("=")[0] + "."
    return any(
        number(first) <= number(version) and not (again and number(again) <= number(version))
        for first, again, *keys in GONE
        if any(key.startswith(f"{gone}.") for gone in keys)
    )


def translated(override: str, version: str) -> str:
    """An override as this verl takes it, given one for any of the supported ones."""
    prefix = re.match(r"[+~]*", override)
    assert prefix is not None
    rest = override[prefix.end() :]
    for entry in RENAMED:
        if number(version) >= number(entry.since) and (end := _matches(rest, entry.old)):
            new = entry.new + rest[end:]
            return new if new.startswith("+") else prefix[0] + new
    return override


def _matches(override: str, old: str) -> int:
    """The length of what the old name stands for at the start of the override; 0 if it does not."""
    key, _, value = override.partition("=")
    if "=" in old:
        return len(override) if f"{key}={value.strip(QUOTES)}" == old else 0
    return len(old) if key == old or (old.endswith(".") and key.startswith(old)) else 0
