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
from .fsdp.unless_it_fails import is_known_on_all_ranks
from .measure.mini_batch import MiniBatch, OrdinaryGradient
from .search.investigation import Investigation
from .search.time_limit import HEAD_START, SHARE, SearchTime

logger = logging.getLogger(__name__)


class Located(NamedTuple):
    """What `GradLoc.locate` found; the same on every rank.

    Args:
        take_step (bool): Whether to take the optimizer step.
        squared_norms (Tensor | None): The squared norms by layer of the gradient that is left, without the loss scale;
            None if they were not measured.
        event (dict | None): The event, which may be added to; None without a spike, or where an error prevented it.
        norm (float | None): With a spike, the norm of the reduced gradient before anything was done to it.
    """

    take_step: bool
    squared_norms: Tensor | None = None
    event: dict[str, Any] | None = None
    norm: float | None = None


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
        mini_batch (MiniBatch): The gradient, which is over its threshold.
        threshold (float): τ.
        config (GradLocConfig): How to search, and what to do.
        ordinary (OrdinaryGradient): What is known of ordinary tokens.
        where (Mapping): `global_step`, `epoch`, `mini_batch` and `steps_since_resume`.
        started (float): What `time.perf_counter` gave before the gradient was measured.
        search_time (SearchTime): Limits the search, and counts its time.
        warnings (Sequence[Mapping]): What `RunChecks.warnings` returned.
        bundle_writer (BundleWriter, optional): Keeps a bundle of the event.
    """
    model, action = mini_batch.model, config.spike_action
    norm = mini_batch.global_norm()
    located = Located(not (action == "skip" and can_skip(mini_batch)), mini_batch.squared_norms, None, norm)
    try:
        with undisturbed(model.module, model.device), search_time.search() as time_limit:
            investigation = Investigation(
                mini_batch, threshold, config, ordinary.token_norm, time_limit, reserve=action == "drop"
            )
            with SetAside(model.module):
                investigation.run()
            done = act(investigation)
        located = located._replace(squared_norms=done.squared_norms)
        _say_if_cut_short(investigation, where["global_step"])
        event = build_event(investigation, ordinary, where, action, done.applied, started, warnings, error=done.error)
    except Exception as error:
        if not is_known_on_all_ranks(error):
            raise
        logger.warning("a gradient spike in step %s has no event", where["global_step"], exc_info=True)
        return located
    event["replay"] = _keep_bundle(bundle_writer, event, investigation)
    return located._replace(event=event)


def _say_if_cut_short(investigation: Investigation, step: int | None) -> None:
    setting = investigation.config.bisect_budget_seconds
    if investigation.out_of_time and collectives.rank() == 0:
        of_run = f" (over the run, {SHARE:.0%} of its time and {HEAD_START:g} seconds)"
        logger.warning(
            "Step %s: the search for the tokens behind a gradient spike was ended after %d passes, because "
            "bisect_budget_seconds=%s%s left it %.0f seconds.",
            step,
            investigation.passes.count,
            setting,
            of_run if setting == "auto" else "",
            investigation.time_limit.seconds,
        )


def _keep_bundle(writer: BundleWriter | None, event: Mapping[str, Any], investigation: Investigation) -> str | None:
    """The folder that the event's bundle is in; None without one. A collective call."""
    if writer is None:
        return None
    try:
        return writer.keep(event, investigation)
    except collectives.RankFailedError:
        logger.warning("a gradient spike is reported without a replay bundle", exc_info=True)
        return None
