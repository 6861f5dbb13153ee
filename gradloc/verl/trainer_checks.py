# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""What the Ray trainer refuses before it starts a worker."""

from typing import Any

_FSDP_ONLY = "needs the FSDP workers: set trainer.use_legacy_worker_impl=auto or actor_rollout_ref.actor"


def check_trainer(config: Any, total_training_steps: int) -> None:
    """Raises ValueError if the actor's settings cannot have an effect in this run.

    Args:
        config (DictConfig): verl's whole configuration.
        total_training_steps (int): The run's last step.
    """
    actor, trainer = config.actor_rollout_ref.actor, config.trainer
    if trainer.get("use_legacy_worker_impl", "auto") == "disable":
        if actor.get("spike_detection", False):
            raise ValueError(f"spike_detection {_FSDP_ONLY}.spike_detection=False.")
        if actor.get("layer_clip", {}).get("enable", False):
            raise ValueError(f"layer_clip {_FSDP_ONLY}.layer_clip.enable=False.")
    drill_step = actor.get("spike_drill_step")
    if isinstance(drill_step, int) and not trainer.get("critic_warmup", 0) <= drill_step <= total_training_steps:
        first = max(trainer.get("critic_warmup", 0), 1)
        raise ValueError(
            f"spike_drill_step={drill_step} is not a step in which the actor is trained: choose one of {first} to "
            f"{total_training_steps}, or null."
        )
