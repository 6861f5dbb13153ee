# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Figures of an update that may move before a spike: importance ratios, unlikely tokens, the margin to τ."""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

# A token under this probability is unlikely.
UNLIKELY = 1e-3
# `ratio_p999` is exceeded by at most one token in so many.
_ONE_IN = 1000

# The histogram of log-ratios: _PER_DECADE bins for each power of ten from e^_SMALLEST to e^_LARGEST. The first bin also
# has all smaller ratios, the last one all larger ones and NaN.
_PER_DECADE = 40
_SMALLEST, _LARGEST = 1e-4, 10.0
_BINS = round(_PER_DECADE * math.log10(_LARGEST / _SMALLEST)) + 2
_MAXIMA = 2
_WIDTH = _MAXIMA + 2 + _BINS


def own_figures(micro_batches: Sequence[Mapping[str, Tensor]]) -> Tensor:
    """What one rank knows of a mini-batch, in a form that all ranks' figures can be computed from. No host sync.

    Only response tokens with a weight in the loss count.

    Args:
        micro_batches (Sequence[Mapping[str, Tensor]]): Each micro-batch's tensors of shape (rows, response length):
            `response_mask`, `weight`, `log_prob`, and if available `old_log_prob` and `rollout_log_prob`.

    Returns:
        Tensor: float64 of shape (n,): the largest log-ratio and the largest size of a log-ratio to the rollout (−Inf
            without data), the numbers of tokens and of unlikely tokens, and the histogram of the log-ratios.
    """
    device = micro_batches[0]["weight"].device
    maxima = torch.full((_MAXIMA,), -math.inf, dtype=torch.float64, device=device)
    counts = torch.zeros(2 + _BINS, dtype=torch.float64, device=device)
    for tokens in micro_batches:
        counted = tokens["response_mask"].bool() & (tokens["weight"] != 0)
        log_prob = tokens["log_prob"].double()
        # NaN counts as unlikely.
        unlikely = counted & ~(log_prob >= math.log(UNLIKELY))
        counts[:2] += torch.stack([counted.sum(), unlikely.sum()])
        if "old_log_prob" in tokens:
            log_ratio = _without_nan(log_prob - tokens["old_log_prob"].double())
            maxima[0] = torch.maximum(maxima[0], _largest(log_ratio, counted))
            counts[2:].index_add_(0, _bins(log_ratio).flatten(), counted.double().flatten())
        if "rollout_log_prob" in tokens:
            difference = _without_nan((log_prob - tokens["rollout_log_prob"].double()).abs())
            maxima[1] = torch.maximum(maxima[1], _largest(difference, counted))
    return torch.cat([maxima, counts])


class EarlyWarning:
    """Collects the figures of an update's mini-batches; the same on every rank."""

    def __init__(self) -> None:
        self.start_update()

    def start_update(self) -> None:
        """Discards the figures of the last update."""
        self._maxima = torch.full((_MAXIMA,), -math.inf, dtype=torch.float64)
        self._counts = torch.zeros(_WIDTH - _MAXIMA, dtype=torch.float64)
        self._margin: float | None = None

    def take_in(self, by_rank: Tensor) -> None:
        """Adds a mini-batch.

        Args:
            by_rank (Tensor): What `own_figures` returned on each rank, shape (ranks, n), on the CPU.
        """
        self._maxima = torch.maximum(self._maxima, by_rank[:, :_MAXIMA].amax(0))
        self._counts += by_rank[:, _MAXIMA:].sum(0)

    def take_in_margin(self, token_norm: float, threshold: float | None) -> None:
        """Adds a mini-batch's largest token-equivalent norm and its τ; None in the warm-up of an automatic one."""
        if threshold is not None:
            self._margin = max(self._margin or 0.0, token_norm / threshold)

    def metrics(self) -> dict[str, float]:
        """The update's figures; those without data are missing.

        - `ratio_max`: the largest importance ratio p/p_old. Small ratios do not count: a token's coefficient shrinks
          with its ratio.
        - `ratio_p999`: 99.9% of the tokens' ratios are at most this; at least 1. Its logarithm is at most 6% too large,
          from the width of the histogram's bins. Over e^10 it is the largest ratio.
        - `rollout_ratio_max`: the largest of p/p_rollout and p_rollout/p: either way training and rollout disagree.
        - `unlikely_share`: the share of tokens with p < 1e-3.
        - `spike_margin`: the largest token-equivalent norm over τ; at 1 it is at the threshold.

        A log-prob that is NaN makes the ratios infinite and counts as unlikely.
        """
        tokens, unlikely = self._counts[:2].tolist()
        histogram = self._counts[2:]
        largest, rollout = self._maxima.tolist()
        figures = {}
        if float(histogram.sum()):
            figures["ratio_max"] = _exp(largest)
            figures["ratio_p999"] = max(1.0, min(_percentile(histogram), figures["ratio_max"]))
        if rollout != -math.inf:
            figures["rollout_ratio_max"] = _exp(rollout)
        if tokens:
            figures["unlikely_share"] = unlikely / tokens
        if self._margin is not None:
            figures["spike_margin"] = self._margin
        return {f"actor/gradloc/{name}": value for name, value in figures.items()}


def _without_nan(log_ratio: Tensor) -> Tensor:
    return log_ratio.nan_to_num(nan=math.inf, posinf=math.inf, neginf=-math.inf)


def _largest(values: Tensor, counted: Tensor) -> Tensor:
    return torch.where(counted, values, -math.inf).max()


def _bins(log_ratio: Tensor) -> Tensor:
    """The bin of each log-ratio: bin i > 0 has those over edge i − 1 and up to edge i; see `_edge`."""
    decades = (log_ratio.clamp(min=_SMALLEST) / _SMALLEST).log10()
    return (_PER_DECADE * decades).ceil().clamp(0, _BINS - 1).long()


def _edge(bin_index: int) -> float:
    """The largest log-ratio of a bin."""
    return _SMALLEST * 10 ** (bin_index / _PER_DECADE) if bin_index < _BINS - 1 else math.inf


def _percentile(histogram: Tensor) -> float:
    """The ratio at the upper edge of the bin with the percentile; 1 in the first bin, infinite in the last."""
    total = histogram.sum()
    reached = (total - histogram.cumsum(0)) * _ONE_IN <= total
    first = int(reached.long().argmax())
    return _exp(_edge(first)) if first else 1.0


def _exp(x: float) -> float:
    return math.exp(x) if x < 700 else math.inf
