# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Applies `spike_action` to the gradient of a mini-batch with a spike."""

import logging
import math
from functools import partial

from torch import Tensor

from .fsdp import collectives
from .fsdp.state import SetAside
from .measure.micro_batch import TokenSubset
from .search.investigation import Investigation

logger = logging.getLogger(__name__)


def act(investigation: Investigation) -> tuple[bool, Tensor | None]:
    """Applies `spike_action` to the current gradient. A collective call.

    Args:
        investigation (Investigation): The search, after its end.

    Returns:
        tuple[bool, Tensor | None]: Whether it was applied, the same on every rank, and the squared norms by layer of
            the gradient that is left.
    """
    mini_batch, action = investigation.mini_batch, investigation.config.spike_action
    if action == "skip":
        # After an overflow the gradient scaler skips the step itself, and must see the overflow to lower its scale.
        return mini_batch.scale == 1 or math.isfinite(mini_batch.global_norm()), mini_batch.squared_norms
    if action == "drop":
        left = drop(investigation)
        return left is not None, mini_batch.squared_norms if left is None else left
    return True, mini_batch.squared_norms


def drop(investigation: Investigation) -> Tensor | None:
    """Recomputes the mini-batch's gradient without the culprits. A collective call.

    Subtracting the culprits' gradient would take fewer passes, but in half precision the rounding errors of the spike
    would remain.

    Args:
        investigation (Investigation): The search, after its end.

    Returns:
        Tensor | None: The squared norms by layer of the gradient without the culprits, which has replaced the current
            one; None if that is unchanged.
    """
    culprits = investigation.groups.subsets_by_micro_batch(investigation.culprits)
    if not culprits or investigation.error is not None:
        return None
    mini_batch, passes = investigation.mini_batch, investigation.passes
    budget = investigation.config.bisect_budget_steps
    count = 1 + max(index for _, index in investigation.figures)
    needed = count + passes.rehearsals_due(True)
    if passes.count + needed > budget:
        logger.warning(
            "spike_action=drop was not applied: it takes %d passes, and the search has used %d of "
            "bisect_budget_steps=%d.",
            needed,
            passes.count,
            budget,
        )
        return None

    def without_culprits(rank: int, index: int) -> TokenSubset | None:
        if (rank, index) not in investigation.figures:
            return None
        micro_batch = mini_batch.micro_batches[index].portable(passes.scale)
        keep = micro_batch.tokens["response_mask"].bool()
        culprit = culprits.get((rank, index))
        return TokenSubset(micro_batch, keep if culprit is None else keep & ~culprit.keep)

    try:
        with SetAside(mini_batch.model.module) as gradient:
            passes.rehearse(True)
            for index in range(count):
                passes.accumulate(partial(without_culprits, index=index), lambda: None, own=index)
            squared_norms = mini_batch.model.reduced_squares(mini_batch.scale)
            if not math.isfinite(math.fsum(squared_norms.tolist())):
                return None
            gradient.replace()
        return squared_norms
    except collectives.RankFailedError as error:
        investigation.error = str(error)
        return None
