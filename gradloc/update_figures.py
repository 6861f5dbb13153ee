# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Figures of an update's tokens: importance ratios, unlikely tokens, the margin to τ."""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from .evidence.sources import UNLIKELY


def own_figures(micro_batches: Sequence[Mapping[str, Tensor]]) -> Tensor:
    """What one rank knows of a mini-batch, from which the figures of all ranks can be computed. No host sync.

    Only response tokens with a weight in the loss count.

    Args:
        micro_batches (Sequence[Mapping[str, Tensor]]): Each micro-batch's tensors of shape (rows, response length):
            `response_mask`, `weight`, `log_prob`, and if available `old_log_prob` and `rollout_log_prob`.

    Returns:
        Tensor: float64 of shape (4,): the largest log-ratio and the largest size of a log-ratio to the rollout (−Inf
            without data), and the numbers of tokens and of unlikely tokens.
    """
    device = micro_batches[0]["weight"].device
    maxima = torch.full((2,), -math.inf, dtype=torch.float64, device=device)
    counts = torch.zeros(2, dtype=torch.float64, device=device)
    for tokens in micro_batches:
        counted = tokens["response_mask"].bool() & (tokens["weight"] != 0)
        log_prob = tokens["log_prob"].double()
        # NaN counts as unlikely.
        unlikely = counted & ~(log_prob >= math.log(UNLIKELY))
        counts += torch.stack([counted.sum(), unlikely.sum()])
        if "old_log_prob" in tokens:
            log_ratio = log_prob - tokens["old_log_prob"].double()
            maxima[0] = torch.maximum(maxima[0], _largest(log_ratio, counted))
        if "rollout_log_prob" in tokens:
            difference = (log_prob - tokens["rollout_log_prob"].double()).abs()
            maxima[1] = torch.maximum(maxima[1], _largest(difference, counted))
    return torch.cat([maxima, counts])


class UpdateFigures:
    """Collects the figures of an update's mini-batches; the same on every rank."""

    def __init__(self) -> None:
        self._log_ratio = self._rollout_log_ratio = -math.inf
        self._tokens = self._unlikely = 0.0
        self._margin: float | None = None

    def take_in(self, by_rank: Tensor) -> None:
        """Adds a mini-batch.

        Args:
            by_rank (Tensor): What `own_figures` returned on each rank, shape (ranks, 4), on the CPU.
        """
        log_ratio, rollout_log_ratio = by_rank[:, :2].amax(0).tolist()
        tokens, unlikely = by_rank[:, 2:].sum(0).tolist()
        self._log_ratio = max(self._log_ratio, log_ratio)
        self._rollout_log_ratio = max(self._rollout_log_ratio, rollout_log_ratio)
        self._tokens += tokens
        self._unlikely += unlikely

    def take_in_margin(self, token_norm: float, threshold: float | None) -> None:
        """Adds a mini-batch's largest token-equivalent norm and its τ; None in the warm-up of an automatic one."""
        if threshold is not None:
            self._margin = max(self._margin or 0.0, token_norm / threshold)

    def metrics(self) -> dict[str, float]:
        """The update's figures; those without data are missing.

        - `ratio_max`: the largest importance ratio p/p_old. Small ratios do not count: a token's coefficient shrinks
          with its ratio.
        - `rollout_ratio_max`: the largest of p/p_rollout and p_rollout/p: either way training and rollout disagree.
        - `unlikely_share`: the share of tokens with p < 0.05, as the rule `unlikely` has it.
        - `spike_margin`: the largest token-equivalent norm over τ; at 1 it is at the threshold.

        A log-prob that is NaN makes the ratios infinite and counts as unlikely.
        """
        figures = {}
        if self._log_ratio != -math.inf:
            figures["ratio_max"] = _exp(self._log_ratio)
        if self._rollout_log_ratio != -math.inf:
            figures["rollout_ratio_max"] = _exp(self._rollout_log_ratio)
        if self._tokens:
            figures["unlikely_share"] = self._unlikely / self._tokens
        if self._margin is not None:
            figures["spike_margin"] = self._margin
        return {f"actor/gradloc/{name}": value for name, value in figures.items()}


def _largest(log_ratios: Tensor, counted: Tensor) -> Tensor:
    """The largest of those counted, NaN as infinity; −Inf without any."""
    return torch.where(counted, log_ratios.nan_to_num(nan=math.inf, posinf=math.inf, neginf=-math.inf), -math.inf).max()


def _exp(x: float) -> float:
    return math.exp(x) if x < 700 else math.inf
