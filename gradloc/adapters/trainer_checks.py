# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Refuses settings that cannot have an effect in a run, by the trainer's whole configuration."""

import logging
from typing import Any

from omegaconf import OmegaConf

from ..config import GradLocConfig
from ..evidence.writer import writer_of

logger = logging.getLogger(__name__)

_ACTOR = "actor_rollout_ref.actor"


def check_trainer(config: Any, total_training_steps: int) -> None:
    """Raises ValueError if the actor's settings cannot have an effect in this run; warns of a τ without detection."""
    actor, trainer = config.actor_rollout_ref.actor, config.trainer
    if (why := why_unsupported(config)) is not None:
        raise ValueError(why)
    threshold = actor.get("grad_norm_threshold", GradLocConfig.grad_norm_threshold)
    if not actor.get("spike_detection", False) and threshold != GradLocConfig.grad_norm_threshold:
        logger.warning(
            f"{_ACTOR}.grad_norm_threshold={threshold} has no effect: GradLoc is off. To turn it on, set "
            f"{_ACTOR}.spike_detection=True."
        )
    directory = actor.get("bisect_dump_dir")
    if actor.get("spike_detection", False) and directory and (other := writer_of(directory)):
        raise ValueError(
            f"{other} writes its evidence to {directory}: end it, or give this run another {_ACTOR}.bisect_dump_dir."
        )
    drill_step = actor.get("spike_drill_step")
    if isinstance(drill_step, int) and not trainer.get("critic_warmup", 0) <= drill_step <= total_training_steps:
        first = max(trainer.get("critic_warmup", 0), 1)
        raise ValueError(
            f"spike_drill_step={drill_step} is not a step in which the actor is trained: choose one of {first} to "
            f"{total_training_steps}, or null."
        )


def why_unsupported(config: Any) -> str | None:
    """Why the run cannot have what it turns on, and what to set instead; None if it can."""
    unsupported = _unsupported(config)
    for key in ("spike_detection", "layer_clip.enable", "token_clip.enable"):
        if unsupported is not None and OmegaConf.select(config.actor_rollout_ref.actor, key):
            return f"{key.removesuffix('.enable')} {unsupported}, or {_ACTOR}.{key}=False."
    return None


def _unsupported(config: Any) -> str | None:
    """What the run trains with that the package cannot watch, and what to set instead; None if they can."""
    if config.trainer.get("use_legacy_worker_impl", "auto") == "disable":  # verl 0.7
        return "needs the FSDP workers: set trainer.use_legacy_worker_impl=auto"
    strategy = config.actor_rollout_ref.actor.get("strategy", "fsdp")
    if strategy not in ("fsdp", "fsdp2"):
        instead = f"train with FSDP (model_engine=dp, {_ACTOR}.strategy=fsdp2)"
        return f"needs the FSDP engine and does not know strategy={strategy}: {instead}"
    if (config.get("distillation") or {}).get("enabled", False):
        return "does not know distillation losses: set distillation.enabled=False"
    return None
