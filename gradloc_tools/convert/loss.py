# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""The weight of each token in a loss over a whole batch, and the coefficient ∂L/∂log p that the loss gives it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# By name, the KL loss of a token, of r = log p_ref − log p.
KL_LOSSES: Mapping[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda r: -r,
    "k2": lambda r: r.square() / 2,
    "k3": lambda r: r.exp() - r - 1,
    "low_var_kl": lambda r: (r.exp() - r - 1).clamp(-10, 10),
}

# By name, as verl calls them: the weights of the tokens of a batch.
AGG_MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")


@dataclass(frozen=True)
class Loss:
    """PPO's clipped loss, which is also GRPO's, with a KL loss beside it.

    Args:
        loss_agg_mode (str): One of `AGG_MODES`.
        clip_low (float): The ratio is clipped under 1 minus this.
        clip_high (float): And over 1 plus this.
        clip_c (float, optional): With a negative advantage, the loss is at most this times −A (dual clip).
        kl_coef (float): What the KL loss is multiplied by.
        kl_type (str): One of `KL_LOSSES`.
        loss_scale_factor (float, optional): What seq-mean-token-sum-norm divides by; default: the longest response.
    """

    loss_agg_mode: str = "token-mean"
    clip_low: float = 0.2
    clip_high: float = 0.2
    clip_c: float | None = None
    kl_coef: float = 0.0
    kl_type: str = "low_var_kl"
    loss_scale_factor: float | None = None

    def weights(self, masks: Sequence[Tensor]) -> list[Tensor]:
        """The weight of each token: L = Σ w_t ℓ_t over the batch.

        Args:
            masks (Sequence[Tensor]): Each response's mask, float64 of shape (response length,).

        Returns:
            list[Tensor]: The same shapes.
        """
        lengths = [float(mask.sum()) for mask in masks]
        responses = max(sum(length > 0 for length in lengths), 1)
        if self.loss_agg_mode == "token-sum":
            return [mask.clone() for mask in masks]
        if self.loss_agg_mode == "token-mean":
            return [mask / max(sum(lengths), 1.0) for mask in masks]
        if self.loss_agg_mode == "seq-mean-token-mean":
            return [mask / (max(length, 1.0) * responses) for mask, length in zip(masks, lengths, strict=True)]
        factor = 1.0
        if self.loss_agg_mode == "seq-mean-token-sum-norm":
            factor = self.loss_scale_factor or float(max(len(mask) for mask in masks))
        return [mask / (responses * factor) for mask in masks]

    def coefficients(self, tokens: Mapping[str, Tensor]) -> tuple[Tensor, Tensor | None]:
        """∂L/∂log p of each token of a response, by autograd.

        Args:
            tokens (Mapping[str, Tensor]): `weight`, `advantage`, `log_prob`, and if available `old_log_prob`,
                `rollout_is_weight` and `ref_log_prob`; float64 of shape (response length,).

        Returns:
            tuple[Tensor, Tensor | None]: The coefficients, and the KL loss's part of them (None without one).
        """
        log_prob = tokens["log_prob"].clone().requires_grad_()
        with torch.enable_grad():
            policy = _gradient(self._policy_loss(log_prob, tokens), log_prob) * tokens["weight"]
            if not self.kl_coef:
                return policy, None
            kl_loss = self.kl_coef * KL_LOSSES[self.kl_type](tokens["ref_log_prob"] - log_prob)
            kl = _gradient(kl_loss, log_prob) * tokens["weight"]
        return policy + kl, kl

    def _policy_loss(self, log_prob: Tensor, tokens: Mapping[str, Tensor]) -> Tensor:
        advantage = tokens["advantage"]
        # Without old log-probs the loss still has a gradient: that of a ratio of 1.
        old = tokens.get("old_log_prob", log_prob.detach())
        ratio = (log_prob - old).exp()
        clipped = ratio.clamp(1 - self.clip_low, 1 + self.clip_high)
        found = torch.maximum(-advantage * ratio, -advantage * clipped)
        if self.clip_c is not None:
            found = torch.where(advantage < 0, torch.minimum(-advantage * self.clip_c, found), found)
        return found * tokens["rollout_is_weight"] if "rollout_is_weight" in tokens else found


def _gradient(loss: Tensor, log_prob: Tensor) -> Tensor:
    (found,) = torch.autograd.grad(loss.sum(), log_prob)
    return found
