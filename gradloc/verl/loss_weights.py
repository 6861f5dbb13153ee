# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""How much each token counts in verl's losses."""

from typing import Any

import torch
from torch import Tensor
from verl.trainer.ppo.core_algos import agg_loss, kl_penalty
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask

from ..measure.token_weights import token_weights

# Policy losses that aggregate in one way, whatever loss_agg_mode says.
_FIXED_LOSS_AGG_MODES = {
    "gspo": "seq-mean-token-mean",
    "sapo": "seq-mean-token-mean",
    "geo_mean": "seq-mean-token-mean",
}

# What decides which tokens bypass_mode leaves out of the policy loss.
_REJECTION_KEYS = (
    "rollout_rs",
    "rollout_rs_threshold",
    "rollout_rs_threshold_lower",
    "rollout_token_veto_threshold",
)


def loss_weights(config: Any, response_mask: Tensor, log_prob: Tensor, old_log_prob: Tensor) -> Tensor:
    """The weight of each token in the policy loss, gradient accumulation left out.

    Args:
        config (ActorConfig): verl's configuration of the actor.
        response_mask (Tensor): Which tokens are responses, shape (batch size, response length).
        log_prob (Tensor): The log-probs that the loss is computed from, same shape.
        old_log_prob (Tensor): Those that it compares them with; in bypass mode the rollout's.

    Returns:
        Tensor: Same shape.
    """
    loss_mode = config.policy_loss.get("loss_mode", "vanilla")
    loss_agg_mode = _FIXED_LOSS_AGG_MODES.get(loss_mode, config.loss_agg_mode)

    def weights(mask: Tensor, **options: Any) -> Tensor:
        return token_weights(lambda loss_mat: agg_loss(loss_mat, mask, loss_agg_mode, **options), log_prob)

    if loss_mode == "geo_mean":
        # A mean over all sequences, also those without a token.
        return weights(response_mask, global_batch_size=len(response_mask))
    if loss_mode != "bypass_mode":
        return weights(response_mask, **config.global_batch_info)

    correction = config.policy_loss.get("rollout_correction", {})
    options = {key: correction[key] for key in _REJECTION_KEYS if correction.get(key) is not None}
    _, accepted, _ = compute_rollout_correction_and_rejection_mask(
        old_log_prob=log_prob.detach(), rollout_log_prob=old_log_prob, response_mask=response_mask, **options
    )
    weight = weights(accepted, **config.global_batch_info)
    if config.use_kl_loss or config.entropy_coeff != 0:
        # Of a rejected token, these terms remain.
        weight = torch.where(accepted.bool(), weight, weights(response_mask))
    return weight


def kl_coefficients(config: Any, response_mask: Tensor, log_prob: Tensor, ref_log_prob: Tensor) -> Tensor:
    """The derivative of the KL loss with respect to each log-prob, gradient accumulation left out.

    It comes from verl's own KL loss by autograd, so it is exact for every kl_loss_type, including the straight-through
    ones (k1+, k3+), whose derivative is not that of their value.

    Args:
        config (ActorConfig): verl's configuration of the actor.
        response_mask (Tensor): Which tokens are responses, shape (batch size, response length).
        log_prob (Tensor): The log-probs that the loss is computed from, same shape.
        ref_log_prob (Tensor): Those of the reference policy, same shape.

    Returns:
        Tensor: Same shape.
    """
    penalty: Any = kl_penalty  # annotated for FloatTensor, which type checkers do not take a Tensor for
    with torch.enable_grad():
        x = log_prob.detach().requires_grad_()
        estimate = penalty(logprob=x, ref_logprob=ref_log_prob, kl_penalty=config.kl_loss_type)
        loss = agg_loss(loss_mat=estimate, loss_mask=response_mask, loss_agg_mode=config.loss_agg_mode)
        return torch.autograd.grad(loss * config.kl_loss_coef, x)[0]
