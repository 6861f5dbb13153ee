# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Applies `spike_action` to the gradient of a mini-batch with a spike."""

import logging
import math
from collections.abc import Callable, Sequence
from functools import partial

from torch import nn

from .fsdp import collectives
from .fsdp.state import SetAside
from .measure.passes import MicroBatch, Passes, TokenSubset
from .search.investigation import Investigation

logger = logging.getLogger(__name__)


def drop(
    investigation: Investigation,
    passes: Passes,
    own: Sequence[MicroBatch],
    budget: int,
    module: nn.Module,
    reduced_norm: Callable[[], float],
) -> bool:
    """Recomputes the mini-batch's gradient without the culprits. A collective call.

    Subtracting the culprits' gradient would take fewer passes, but in half precision the rounding errors of the spike
    would remain.

    Args:
        investigation (Investigation): The search, after its end.
        passes (Passes): Runs the passes.
        own (list[MicroBatch]): This rank's micro-batches.
        budget (int): The maximum number of passes for an event, the search included.
        module (nn.Module): The model.
        reduced_norm (Callable): Measures the norm of the reduced gradient.

    Returns:
        bool: Whether the gradient was replaced by one without the culprits; if not, it is unchanged.
    """
    culprits = investigation.subsets_by_unit(investigation.culprits)
    if not culprits or investigation.error is not None:
        return False
    count = 1 + max(index for _, index in investigation.units)
    if passes.count + count > budget:
        logger.warning(
            "The culprits' gradient is not dropped: that takes %d passes, and of bisect_budget_steps=%d the search "
            "has used %d.",
            count,
            budget,
            passes.count,
        )
        return False

    def without_culprits(rank: int, index: int) -> TokenSubset | None:
        if (rank, index) not in investigation.units:
            return None
        micro_batch = own[index].portable(passes.scale)
        keep = micro_batch.tokens["response_mask"].bool()
        culprit = culprits.get((rank, index))
        return TokenSubset(micro_batch, keep if culprit is None else keep & ~culprit.keep)

    try:
        with SetAside(module) as gradient:
            for index in range(count):
                passes.accumulate(partial(without_culprits, index=index), lambda: None)
            finite = math.isfinite(reduced_norm())
            if finite:
                gradient.replace()
        return finite
    except collectives.RankFailedError as error:
        investigation.error = str(error)
        return False
