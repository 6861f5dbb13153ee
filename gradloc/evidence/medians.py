# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""What is usual in a mini-batch: medians over the tokens of all ranks."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..fsdp import collectives
from ..measure.micro_batch import MicroBatch

_NAMES = ("advantage", "weight")


def token_medians(micro_batches: Sequence[MicroBatch], sequence_parallel_size: int = 1) -> dict[str, float | None]:
    """Medians over the response tokens of a mini-batch, the same on every rank. A collective call.

    Zeros, and values that are not finite, are left out.

    Args:
        micro_batches (Sequence[MicroBatch]): This rank's.
        sequence_parallel_size (int): How many neighbouring ranks have the same tokens.

    Returns:
        dict: `median_advantage`, of |A|, and `median_weight`, of |w|; None without such tokens.
    """
    by_rank = collectives.exchange(lambda: {name: _counts(micro_batches, name) for name in _NAMES})
    by_rank = by_rank[::sequence_parallel_size]
    return {f"median_{name}": _median([counts[name] for counts in by_rank]) for name in _NAMES}


def medians_of(micro_batches: Sequence[MicroBatch]) -> dict[str, float | None]:
    """What `token_medians` returns, over the tokens of these micro-batches alone. No collective call."""
    return {f"median_{name}": _median([_counts(micro_batches, name)]) for name in _NAMES}


def _counts(micro_batches: Sequence[MicroBatch], name: str) -> tuple[Tensor, Tensor]:
    """The absolute values and how often each occurs: with one value for each response, few numbers are sent."""
    found = [
        micro_batch.tokens[name][micro_batch.tokens["response_mask"].bool()].abs()
        for micro_batch in micro_batches
        if name in micro_batch.tokens
    ]
    values = torch.cat(found).double().cpu() if found else torch.zeros(0, dtype=torch.float64)
    values, counts = values[values.isfinite() & (values != 0)].unique(return_counts=True)
    return values, counts


def _median(counted: Sequence[tuple[Tensor, Tensor]]) -> float | None:
    values = torch.cat([values for values, _ in counted])
    if not len(values):
        return None
    values, order = values.sort()
    reached = torch.cat([counts for _, counts in counted])[order].cumsum(0)
    total = int(reached[-1])
    middle = torch.tensor([(total - 1) // 2, total // 2])
    return float(values[torch.searchsorted(reached, middle, right=True)].mean())
