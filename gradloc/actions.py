# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Applies `spike_action` to the gradient of a mini-batch with a spike."""

import logging
import math

from torch import Tensor

from .evidence.event import Done
from .fsdp import collectives
from .fsdp.state import set_aside
from .measure.mini_batch import MiniBatch
from .measure.passes import Passes
from .search.findings import Findings

logger = logging.getLogger(__name__)


def act(action: str, mini_batch: MiniBatch, findings: Findings) -> Done:
    """Applies `spike_action` to the current gradient, but for a skipped step. A collective call."""
    if action == "skip":
        return Done(can_skip(mini_batch), mini_batch.squared_norms)
    if action == "drop":
        passes = Passes(mini_batch.model, mini_batch.micro_batches, mini_batch.scale)
        try:
            left, error = drop(mini_batch, findings, passes), None
        except collectives.RankFailedError as failure:
            left, error = None, str(failure)
        return Done(left is not None, mini_batch.squared_norms if left is None else left, passes.count, error)
    return Done(True, mini_batch.squared_norms)


def can_skip(mini_batch: MiniBatch) -> bool:
    """Whether the optimizer step can be skipped. A collective call.

    After an overflow the gradient scaler skips the step itself, and must see the overflow to lower its scale.
    """
    return mini_batch.scale == 1 or math.isfinite(mini_batch.global_norm())


def drop(mini_batch: MiniBatch, findings: Findings, passes: Passes) -> Tensor | None:
    """Recomputes the mini-batch's gradient without the culprits. A collective call.

    Subtracting the culprits' gradient would take fewer passes, but in half precision the rounding errors of the spike
    would remain.

    Returns:
        Tensor | None: The squared norms by layer of the gradient without the culprits, which has replaced the current
            one; None if that is unchanged.

    Raises:
        RankFailedError: A pass failed on some rank; the gradient is unchanged.
    """
    if not findings.culprits or findings.error is not None:
        return None
    without_culprits = passes.whole_micro_batches(findings.figures, findings.culprits)
    needed = len(without_culprits)
    if findings.passes + needed > findings.budget:
        logger.warning(
            "spike_action=drop was not applied: it takes %d passes, and the search has used %d of "
            "bisect_budget_steps=%d.",
            needed,
            findings.passes,
            findings.budget,
        )
        return None

    with set_aside(mini_batch.model.module) as replace:
        for index, subset_of in enumerate(without_culprits):
            passes.accumulate(subset_of, lambda: None, own_index=index)
        squared_norms = mini_batch.model.reduced_norms.squared_norms() / mini_batch.scale**2
        if not math.isfinite(math.fsum(squared_norms.tolist())):
            return None
        replace()
    return squared_norms
