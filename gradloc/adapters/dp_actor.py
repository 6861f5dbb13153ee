# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""The adapter for the `DataParallelPPOActor` of verl 0.7.0 and 0.7.1: what the hooks in it and its worker call.

The actor always owns `watch`, and with it `gradloc` and `layer_clip`, each of which is None where it is off.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from verl.utils.device import get_device_id

from ..gradloc import GradLoc
from ..layers.layer_clip import LayerClip
from ..measure.pass_recorder import unchanged
from .loss_weights import eos_tokens
from .replay_bundles import context_of, padded_rows
from .saved_state import read_state
from .update_evidence import EVIDENCE_KEYS, TrainedData, UpdateEvidence
from .watch import Watch, watch_actor

if TYPE_CHECKING:
    from verl import DataProto
    from verl.utils.checkpoint.checkpoint_manager import BaseCheckpointManager
    from verl.workers.actor.dp_actor import DataParallelPPOActor

# What a forward needs of a micro-batch.
FORWARD_KEYS = ("responses", "input_ids", "attention_mask", "position_ids", "multi_modal_inputs")


def build(actor: "DataParallelPPOActor") -> tuple[Watch, GradLoc | None, LayerClip | None]:
    """What watches an actor. It does nothing if the actor is not trained, or if nothing is turned on."""
    config = actor.config
    clips = [config.get(name, {}).get("enable", False) for name in ("layer_clip", "token_clip")]
    on = config.get("spike_detection", False) or any(clips)
    if actor.actor_optimizer is None or not on:
        return Watch(config, lambda: 1.0, 1), None, None
    if config.get("spike_search", "training") == "replay":
        raise ValueError("spike_search=replay needs an engine of verl 0.9: set spike_search=training.")
    watch = watch_actor(
        actor.actor_module,
        config,
        partial(forward_rows, actor),
        padded_rows,
        partial(context_of, actor.actor_module, config, actor.param_dtype, config.grad_clip),
        loss_scale=lambda: 1.0 if actor.scaler is None else actor.scaler.get_scale(),
        sequence_parallel_size=actor.ulysses_sequence_parallel_size,
        learning_rate=lambda: actor.actor_optimizer.param_groups[0]["lr"],
        eos_tokens=eos_tokens(actor.actor_module),
    )
    return watch, watch.gradloc, watch.layer_clip if config.layer_clip.enable else None


def forward_rows(
    actor: "DataParallelPPOActor", inputs: dict[str, Any], rows: list[int], response_length: int
) -> tuple[Tensor | None, Tensor]:
    """The actor's forward of some rows of a micro-batch: `forward` as `GradLoc` takes it."""
    whole_length, device = inputs["responses"].size(-1), get_device_id()
    # Images in a response, which tools may give, cannot be cut off.
    computed_length = whole_length if "multi_modal_inputs" in inputs else response_length
    length = inputs["input_ids"].size(-1) - whole_length + computed_length
    selected = {"responses": inputs["responses"][rows, :computed_length].to(device)}
    for key in ("input_ids", "attention_mask", "position_ids"):
        selected[key] = inputs[key][rows][..., :length].to(device)
    if "multi_modal_inputs" in inputs:
        selected["multi_modal_inputs"] = inputs["multi_modal_inputs"][rows]
    outputs = actor._forward_micro_batch(
        selected, temperature=inputs["temperature"], calculate_entropy=actor.config.entropy_coeff != 0
    )
    # verl 0.7.1 gives by name what 0.7.0 gives in this order.
    entropy, log_prob = (outputs.get("entropys"), outputs["log_probs"]) if isinstance(outputs, dict) else outputs
    return None if entropy is None else entropy[:, :response_length], log_prob[:, :response_length]


def reports_ref_log_prob(actor: "DataParallelPPOActor", data: "DataProto") -> bool:
    """Whether the reference's log-probs are to be kept though no KL loss needs them: those of a KL penalty."""
    return actor.gradloc is not None and "ref_log_prob" in data.batch.keys()


def begin_pass(
    actor: "DataParallelPPOActor",
    mini_batch: "DataProto",
    model_inputs: dict[str, Any],
    temperature: float,
    rows: Sequence[int],
) -> None:
    """Called before a micro-batch's forward.

    Args:
        mini_batch (DataProto): The mini-batch, which stays on the host: what a search needs is kept from there.
        model_inputs (dict): The micro-batch, on the device.
        temperature (float): The rollout's, which the forward divides the logits by.
        rows (Sequence[int]): The micro-batch's rows in this rank's mini-batch.
    """
    if actor.watch.watches_passes:
        columns = {**mini_batch.batch, **mini_batch.non_tensor_batch}
        indices = [int(row) for row in rows]
        inputs = {key: columns[key][indices] for key in FORWARD_KEYS if key in columns} | {"temperature": temperature}
        actor.watch.begin_pass(inputs, indices, partial(_sequences, model_inputs))
        actor.watch.start_loss(lambda: model_inputs["response_mask"])


def observe(
    actor: "DataParallelPPOActor",
    model_inputs: dict[str, Any],
    entropy: Tensor | None,
    log_prob: Tensor,
    old_log_prob: Tensor,
    loss_scale_factor: float,
) -> None:
    """Called between a micro-batch's loss and its backward.

    Args:
        model_inputs (dict): The micro-batch.
        entropy (Tensor, optional): Of shape (batch size, response length), as all that follow.
        log_prob (Tensor): What the loss is computed from.
        old_log_prob (Tensor): What the loss compares it with.
        loss_scale_factor (float): The micro-batch's part in the mini-batch's loss.
    """
    if actor.watch.watches_passes:
        tokens = {name: model_inputs[key] for name, key in EVIDENCE_KEYS.items() if key in model_inputs}
        # These may be the forward's instead of the data's. They are kept without a graph.
        tokens |= {"log_prob": log_prob.detach(), "old_log_prob": old_log_prob.detach()}
        loss_inputs = {"coefficient": (log_prob, unchanged)}
        if entropy is not None:
            tokens["entropy"] = entropy.detach()
            loss_inputs["entropy_coefficient"] = entropy, unchanged
        actor.watch.observe(loss_inputs, lambda: tokens, lambda: log_prob.shape, loss_scale_factor)


def optimizer_step(actor: "DataParallelPPOActor", epoch: int, mini_batch: int) -> Tensor:
    """Takes the actor's optimizer step by `Watch.step`; returns the gradient's norm, shape (). A collective call."""
    norm = actor.watch.step(epoch, mini_batch, actor._optimizer_step)
    return norm if isinstance(norm, Tensor) else torch.tensor(norm, dtype=torch.float64)


def write_evidence(trained: Any, data: "DataProto", tokenizer: Any, metrics: Mapping[str, Any]) -> None:
    """Writes the evidence of an update, which `data` went into and `metrics` came out of. A collective call.

    Args:
        trained (DataParallelPPOActor | WatchedCritic): What was trained.
    """
    config, watch = trained.config, trained.watch
    if watch.watches_passes:
        evidence = UpdateEvidence(config.bisect_dump_dir, tokenizer, watch.sequence_parallel_size)
        trained_data = TrainedData({**data.batch, **data.non_tensor_batch}, config.ppo_mini_batch_size)
        evidence.add(watch.lines(), trained_data)
        evidence.take_in_rewards(trained_data)
        evidence.write(data.meta_info.get("global_steps"), metrics, watch.warnings)


def save_state(actor: "DataParallelPPOActor", manager: "BaseCheckpointManager", folder: str | None) -> None:
    """Called after a checkpoint was saved."""
    if manager.should_save_extra and folder is not None:
        actor.watch.save(folder)


def load_state(actor: "DataParallelPPOActor", manager: "BaseCheckpointManager", folder: str | None) -> None:
    """Called after a checkpoint was loaded. A collective call."""
    actor.watch.load(lambda: read_state(folder if manager.should_load_extra else None))


def _sequences(model_inputs: Mapping[str, Any]) -> tuple[Tensor, list[int]]:
    """Where a micro-batch has tokens, and the column of each response's first one."""
    mask = model_inputs["attention_mask"].bool()
    return mask, [mask.shape[1] - model_inputs["responses"].shape[1]] * len(mask)
