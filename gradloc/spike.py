# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""What is done about a spike: the search for its tokens, `spike_action`, the event and its bundle."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from .actions import act, can_skip
from .bundles.bundle_writer import BundleWriter
from .config import GradLocConfig
from .evidence.event import build_event
from .fsdp import collectives
from .fsdp.state import SetAside, undisturbed
from .measure.mini_batch import MiniBatch, OrdinaryGradient
from .search.findings import Findings
from .search.investigation import investigate
from .search.time_limit import HEAD_START, SHARE, SearchTime

logger = logging.getLogger(__name__)


class Located(NamedTuple):
    """What `GradLoc.locate` found; the same on every rank."""

    take_step: bool  # whether to take the optimizer step
    # The squared norms by layer of the gradient that is left, without the loss scale; None if they were not measured.
    squared_norms: Tensor | None = None
    # The event, which may be added to; None without a spike, or where an error prevented it.
    event: dict[str, Any] | None = None
    norm: float | None = None  # with a spike, the norm of the reduced gradient before anything was done to it


def explain(
    mini_batch: MiniBatch,
    threshold: float,
    config: GradLocConfig,
    ordinary: OrdinaryGradient,
    where: Mapping[str, Any],
    started: float,
    search_time: SearchTime,
    warnings: Sequence[Mapping[str, str]],
    bundle_writer: BundleWriter | None,
) -> Located:
    """Searches for the tokens behind a spike, applies the action and builds the event. A collective call.

    After an error in the search or the event that all ranks know of, there is no event. The step is skipped all the
    same where that is the action.

    Args:
        where (Mapping): `global_step`, `epoch`, `mini_batch` and `steps_since_resume`.
        started (float): What `time.perf_counter` gave before the gradient was measured.
    """
    model, action = mini_batch.model, config.spike_action
    norm = mini_batch.global_norm()
    located = Located(not (action == "skip" and can_skip(mini_batch)), mini_batch.squared_norms, None, norm)
    with collectives.guarded_on_all_ranks(f"a gradient spike in step {where['global_step']} has no event"):
        with undisturbed(model.module, model.device), search_time.search() as time_limit:
            with SetAside(model.module):
                findings = investigate(
                    mini_batch, threshold, config, ordinary.token_norm, time_limit, reserve=action == "drop"
                )
            done = act(action, mini_batch, findings)
        located = located._replace(squared_norms=done.squared_norms)
        _say_if_cut_short(findings, config.bisect_budget_seconds, where["global_step"])
        event = build_event(mini_batch, findings, ordinary, where, action, done, started, warnings)
        if bundle_writer is not None:
            with collectives.guarded_on_all_ranks("a gradient spike is reported without a replay bundle"):
                event["replay"] = bundle_writer.keep(event, mini_batch, findings)
        located = located._replace(event=event)
    return located


def _say_if_cut_short(findings: Findings, setting: float | str | None, step: int | None) -> None:
    if findings.out_of_time and collectives.rank() == 0:
        of_run = f" (over the run, {SHARE:.0%} of its time and {HEAD_START:g} seconds)"
        logger.warning(
            "Step %s: the search for the tokens behind a gradient spike was ended after %d passes, because "
            "bisect_budget_seconds=%s%s left it %.0f seconds.",
            step,
            findings.passes,
            setting,
            of_run if setting == "auto" else "",
            findings.budget_seconds,
        )
