# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""The adapter for the `DataParallelPPOActor` of verl 0.7.0 and 0.7.1: what the hooks in its update call.

The actor owns `gradloc` and `layer_clip`, each None where it is off. Except for the two that build them, every function
does nothing for what is off.
"""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor
from verl.utils.device import get_device_id
from verl.utils.py_functional import append_to_dict

from ..evidence.token_facts import find_behind_end
from ..layers.layer_clip import LayerClip
from ..monitor import GradLoc
from .end_tokens import end_tokens
from .loss_weights import RecordedAggregation, kl_coefficients
from .replay_bundles import build_recorder, padded_rows
from .rows import forward_inputs, select_rows

if TYPE_CHECKING:
    from verl import DataProto
    from verl.workers.actor.dp_actor import DataParallelPPOActor

# The evidence's names for what is known of a token, and where a micro-batch holds it.
_EVIDENCE_KEYS = {
    "token_id": "responses",
    "response_mask": "response_mask",
    "advantage": "advantages",
    "ref_log_prob": "ref_log_prob",
    "rollout_log_prob": "rollout_log_probs",
}


def build_layer_clip(actor: "DataParallelPPOActor") -> LayerClip | None:
    """LayerClip, for an actor that is trained with `layer_clip.enable`."""
    config = actor.config.get("layer_clip")
    if actor.actor_optimizer is None or not config or not config.enable:
        return None
    return LayerClip(actor.actor_module, config, device=actor.device_name)


class ActorGradLoc(GradLoc):
    """GradLoc, and the aggregation of the loss that is being computed."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.aggregation = RecordedAggregation()


def build_gradloc(actor: "DataParallelPPOActor") -> ActorGradLoc | None:
    """GradLoc, for an actor that is trained with `spike_detection`."""
    if actor.actor_optimizer is None or not actor.config.get("spike_detection", False):
        return None
    # TiledMLP computes a weight's gradient in parts, which the local meter would take for several gradients.
    tiled_mlp = any(getattr(module, "is_tiled_mlp", False) for module in actor.actor_module.modules())
    return ActorGradLoc(
        actor.actor_module,
        actor.config.gradloc_config(),
        forward=partial(forward_rows, actor),
        device=actor.device_name,
        loss_scale=lambda: 1.0 if actor.scaler is None else actor.scaler.get_scale(),
        squared_norms=None if actor.layer_clip is None else actor.layer_clip.squared_norms,
        sequence_parallel_size=actor.ulysses_sequence_parallel_size,
        meter="reduced" if tiled_mlp else "local",
        recover=getattr(actor.actor_module, "reset_activation_offloading", None),
        recorder=build_recorder(
            actor.actor_module,
            actor.config,
            padded_rows,
            dtype=actor.param_dtype,
            grad_clip=actor.config.grad_clip,
            layer_clip=actor.layer_clip,
        ),
    )


def forward_rows(
    actor: "DataParallelPPOActor", inputs: dict[str, Any], rows: list[int], response_length: int
) -> tuple[Tensor | None, Tensor]:
    """The actor's forward of some rows of a micro-batch: `forward` as `GradLoc` takes it."""
    outputs = actor._forward_micro_batch(
        select_rows(inputs, rows, response_length, get_device_id()),
        temperature=inputs["temperature"],
        calculate_entropy=actor.config.entropy_coeff != 0,
    )
    # verl 0.7.1 gives by name what 0.7.0 gives in this order.
    entropy, log_prob = (outputs.get("entropys"), outputs["log_probs"]) if isinstance(outputs, dict) else outputs
    return None if entropy is None else entropy[:, :response_length], log_prob[:, :response_length]


def reports_ref_log_prob(actor: "DataParallelPPOActor", data: "DataProto") -> bool:
    """Whether the reference's log-probs are to be kept though no KL loss needs them: those of a KL penalty."""
    return actor.gradloc is not None and "ref_log_prob" in data.batch.keys()


def start_update(actor: "DataParallelPPOActor", data: "DataProto") -> None:
    if actor.gradloc is not None:
        actor.gradloc.start_update(data.meta_info.get("global_steps"))


def begin_pass(
    actor: "DataParallelPPOActor", model_inputs: dict[str, Any], temperature: float, rows: Sequence[int]
) -> None:
    """Called before a micro-batch's forward.

    Args:
        actor (DataParallelPPOActor): The actor.
        model_inputs (dict): The micro-batch.
        temperature (float): The rollout's, which the forward divides the logits by.
        rows (Sequence[int]): The micro-batch's rows in this rank's mini-batch.
    """
    if actor.gradloc is not None:
        actor.gradloc.begin_pass({**forward_inputs(model_inputs), "temperature": temperature}, rows)
        actor.gradloc.aggregation.start()


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
        actor (DataParallelPPOActor): The actor.
        model_inputs (dict): The micro-batch.
        entropy (Tensor, optional): Of shape (batch size, response length), as all that follow.
        log_prob (Tensor): What the loss is computed from.
        old_log_prob (Tensor): What the loss compares it with.
        loss_scale_factor (float): The micro-batch's part in the mini-batch's loss.
    """
    if actor.gradloc is None:
        return
    actor.gradloc.aggregation.stop()  # what follows is not the loss
    mask = model_inputs["response_mask"]
    facts = {name: model_inputs[key] for name, key in _EVIDENCE_KEYS.items() if key in model_inputs}
    if actor.config.use_kl_loss:
        kl = kl_coefficients(actor.config, mask, log_prob, model_inputs["ref_log_prob"])
        facts["kl_coefficient"] = kl * loss_scale_factor
    if ends := end_tokens(actor.actor_module):
        facts["behind_end"] = find_behind_end(model_inputs["responses"], mask, ends)
    actor.gradloc.observe(
        log_prob=log_prob,
        entropy=entropy,
        weight=actor.gradloc.aggregation.weights(actor.config, mask) * loss_scale_factor,
        old_log_prob=old_log_prob,
        **facts,
    )


def end_pass(actor: "DataParallelPPOActor") -> None:
    """Called after a micro-batch's backward."""
    if actor.gradloc is not None:
        actor.gradloc.end_pass()


def may_step(actor: "DataParallelPPOActor", metrics: dict[str, Any], epoch: int, mini_batch: int) -> bool:
    """Looks for a spike before the optimizer step, and says whether to make the step. A collective call.

    Args:
        actor (DataParallelPPOActor): The actor.
        metrics (dict): The update's metrics, which a step that is left out adds its gradient norm to.
        epoch (int): The PPO epoch.
        mini_batch (int): The mini-batch's index in the update.
    """
    gradloc = actor.gradloc
    if gradloc is None or gradloc.locate(epoch, mini_batch):
        return True
    if actor.layer_clip is not None:
        assert gradloc.squared_norms is not None  # a spike is found by them
        gradloc.add_to_event(layer_clip=actor.layer_clip.preview(gradloc.squared_norms))
    append_to_dict(metrics, {"actor/grad_norm": gradloc.events[-1]["global_norm"]})
    return False


def clip_layers(actor: "DataParallelPPOActor") -> Tensor | None:
    """Clips every layer's gradient against its own bound; the global clip then sees the clipped gradient.

    Returns:
        Tensor | None: The norm of the gradient before that; None where LayerClip is off.
    """
    if actor.layer_clip is None:
        return None
    if actor.gradloc is None:
        return actor.layer_clip.clip()
    unclipped_norm = actor.layer_clip.clip(actor.gradloc.squared_norms)
    actor.gradloc.add_to_event(layer_clip=actor.layer_clip.last_step)
    return unclipped_norm


def metrics(actor: "DataParallelPPOActor") -> dict[str, Any]:
    """The update's figures for the training log."""
    return {
        name: value
        for part in (actor.gradloc, actor.layer_clip)
        if part is not None
        for name, value in part.metrics().items()
    }
