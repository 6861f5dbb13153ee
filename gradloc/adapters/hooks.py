# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""What the patches do in verl's files and the plugin does from outside: a change of it is made here.

Each of them calls these functions at places of its own; tests/tools/test_plugin_and_patch.py compares the plugin and
the patch for verl 0.9.1.
"""

import logging
import os
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch
from hydra.errors import InstantiationException
from omegaconf import OmegaConf
from torch import Tensor
from verl.utils.config import omega_conf_to_dataclass

from ..config import GradLocConfig
from ..evidence.writer import writer_of

logger = logging.getLogger(__name__)

_ACTOR = "actor_rollout_ref.actor"
# Of a run that `spike_action=stop` ends. A scheduler that restarts failed jobs can be told to leave this one alone.
EXIT_CODE = 76


def refuse_bad_keys(config: Any) -> None:
    """Ends the process with one sentence if the actor's or the critic's configuration has a bad value.

    To be called before Ray starts, which takes longer than the run's whole configuration.
    """
    from verl.trainer.ppo.utils import need_critic  # which loads Ray: reward workers import this module, too

    sections = [config.actor_rollout_ref.actor, *([config.critic] if need_critic(config) else [])]
    for section in sections:
        try:
            omega_conf_to_dataclass(section)
        except InstantiationException as error:  # from the error of the class that Hydra builds
            if not isinstance(error.__cause__, ValueError):
                raise
            sys.exit(str(error.__cause__))


class RepeatedSpikes(RuntimeError):
    """Ends a run; the message is one sentence that names the evidence and the checkpoint."""


class SpikeStop:
    """Counts the events of the last steps, by verl's whole configuration. A run in its last step is not stopped.

    With `spike_action=stop`, the trainer ends a run in which spikes come again and again: it saves a checkpoint and
    raises `RepeatedSpikes`. The actor takes its optimizer steps as with `spike_action=log`.

    Attributes:
        ends_run (bool): Whether the last step that was taken in is the run's last one.
    """

    def __init__(self, config: Any, total_training_steps: int) -> None:
        actor = config.actor_rollout_ref.actor
        on = actor.get("spike_detection", False) and actor.get("spike_action", "log") == "stop"
        self._after: int | None = actor.spike_stop_after if on else None
        self._last_step = total_training_steps
        self._evidence: str = actor.get("bisect_dump_dir", "")
        self._checkpoints: str = config.trainer.default_local_dir
        self._events: deque[int] = deque(maxlen=self._after)  # of each of the last N steps
        self.ends_run = False

    def is_due(self, metrics: Mapping[str, Any], step: int) -> bool:
        """Takes in a step; returns whether there were N events within the last N steps, N being `spike_stop_after`.

        The metrics are those of the actor, before or after they are reduced over its workers.
        """
        if self._after is not None:
            value = metrics.get("actor/gradloc/triggered", 0)
            self._events.append(int(value[0] if isinstance(value, (list, tuple)) else value))
            self.ends_run = sum(self._events) >= self._after and step < self._last_step
        return self.ends_run

    def end_if_due(self, step: int) -> None:
        """Raises RepeatedSpikes if `is_due` has said so of this step. To be called when the step is logged."""
        if not self.ends_run:
            return
        count = sum(self._events)
        spikes = "1 gradient spike" if count == 1 else f"{count} gradient spikes"
        steps = "step" if self._after == 1 else f"{self._after} steps"
        checkpoint = os.path.join(self._checkpoints, f"global_step_{step}")
        raise RepeatedSpikes(
            f"Training ends after step {step}, because of {spikes} in the last {steps} (spike_action=stop): "
            f"the evidence is in {self._evidence}, the checkpoint in {checkpoint}."
        )


@contextmanager
def exit_at_repeated_spikes() -> Iterator[None]:
    """Turns RepeatedSpikes, also of a remote run, into the end of this process: its sentence and `EXIT_CODE`."""
    try:
        yield
    except RepeatedSpikes as error:
        # Ray raises an error of its own that also is the remote one, and has that as its cause.
        print(getattr(error, "cause", error), file=sys.stderr, flush=True)
        sys.exit(EXIT_CODE)


def start_spike_stop(config: Any, total_training_steps: int) -> SpikeStop:
    """Refuses settings that cannot work, once the number of steps is known; returns what counts the run's spikes."""
    check_trainer(config, total_training_steps)
    return SpikeStop(config, total_training_steps)


def check_trainer(config: Any, total_training_steps: int) -> None:
    """Raises ValueError if the actor's settings cannot have an effect in this run; warns of a τ without detection."""
    actor, trainer = config.actor_rollout_ref.actor, config.trainer
    unsupported = _unsupported(config)
    for key in ("spike_detection", "layer_clip.enable", "token_clip.enable"):
        if unsupported is not None and OmegaConf.select(actor, key):
            raise ValueError(f"{key.removesuffix('.enable')} {unsupported}, or {_ACTOR}.{key}=False.")
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


def _unsupported(config: Any) -> str | None:
    """What the run trains with that the package cannot watch, and what to set instead; None if they can."""
    if config.trainer.get("use_legacy_worker_impl", "auto") == "disable":  # verl 0.7
        return "needs the FSDP workers: set trainer.use_legacy_worker_impl=auto"
    strategy = config.actor_rollout_ref.actor.get("strategy", "fsdp")
    if strategy not in ("fsdp", "fsdp2") and config.actor_rollout_ref.actor.get("spike_search") != "replay":
        return f"needs the FSDP engine and does not know strategy={strategy}: set {_ACTOR}.strategy=fsdp2"
    if (config.get("distillation") or {}).get("enabled", False):
        return "does not know distillation losses: set distillation.enabled=False"
    return None


def step_of(trainer: Any) -> dict[str, Any]:
    """What travels with the batch of an update, so that its events name their step."""
    return {"training_step": trainer.global_steps}


def update_of(trainer: Any) -> dict[str, Any]:
    """The same where a step may have several updates of the actor: also the update's number, and how many there are."""
    return step_of(trainer) | {"update_of_step": (trainer.local_trigger_step, trainer.parameter_sync_step)}


def place_of_mini_batch(number: int, of_epoch: int) -> dict[str, Any]:
    """What travels with a mini-batch of an update, so that an event names its epoch and its mini-batch."""
    return {"epoch_and_mini_batch": divmod(number, of_epoch)}


# The data sources that have a scorer of ours, and the scorer's module in verl.utils.reward_score.
SCORERS = {"math_verify": "guarded_math_verify", "ps_grpo": "ps_grpo"}


def score(data_source: str, solution: str, ground_truth: str, extra_info: Any, **options: Any) -> Any:
    """The reward of an answer from a data source in SCORERS."""
    scorer = import_module(f"verl.utils.reward_score.{SCORERS[data_source]}")
    if data_source == "math_verify":
        return scorer.compute_score(solution, ground_truth, **options)
    return scorer.compute_score(solution, ground_truth, extra_info, data_source=data_source, **options)


def with_a_token(
    old_log_prob: Tensor, rollout_log_prob: Tensor | None, response_mask: Tensor
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Log-probs and mask of a micro-batch for its metrics; one in which no token is left shows no difference.

    Rejection sampling may leave none, which verl asserts not to happen. Every micro-batch has to report all metrics, or
    those of different workers cannot be averaged.
    """
    if response_mask.any():
        return old_log_prob, rollout_log_prob, response_mask
    zeros = None if rollout_log_prob is None else torch.zeros_like(rollout_log_prob)
    return torch.zeros_like(old_log_prob), zeros, torch.ones_like(response_mask)


def forget_broken_pass(handler: Any) -> None:
    """Makes verl's ActivationHandler forget a forward or backward pass that was broken off by an error."""
    if handler._offload_ctx.inside_context:
        handler._offload_ctx.__exit__(None, None, None)
    offloading = handler._offload_ctx.offload_handler
    offloading.groupid_reset()
    offloading.tensor_tag_to_buf.clear()
    offloading.group_offload_mapping.clear()
    offloading.offloaded_group_count = 0
