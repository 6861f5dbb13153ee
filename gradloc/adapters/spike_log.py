# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Adds a logger to verl's `Tracking` that sends the spikes of a run to the trackers, from the driver."""

import logging
from collections.abc import Mapping
from typing import Any

logger = logging.getLogger(__name__)

# verl's loggers that are no trackers: with these alone, `spike_log` is off unless it is set. The console has the
# summaries already, from the process that writes the evidence; RL-Insight takes figures only.
NO_TRACKERS = frozenset({"console", "file", "rl_insight"})


def add_spike_log(loggers: dict[str, Any], config: Mapping[str, Any] | None) -> None:
    """Adds a logger "gradloc" to those of a `Tracking`, if its run is to send its spikes or clipped tokens on."""
    actor = ((config or {}).get("actor_rollout_ref") or {}).get("actor") or {}
    if not (actor.get("spike_detection", False) or (actor.get("token_clip") or {}).get("enable", False)):
        return
    wanted = actor.get("spike_log")
    if wanted is None:
        wanted = not NO_TRACKERS.issuperset(loggers)
    if not wanted:
        return
    try:
        # Of the package that reads evidence, which need not be installed where training runs.
        from gradloc_tools.trackers import SpikeLog
    except Exception as error:  # whatever is wrong with a wheel, training goes on
        logger.warning(
            "Trackers get no spikes, as GradLoc's wheel is not installed beside the driver (%s): run pip install . in "
            "its checkout.",
            f"{type(error).__name__}: {error}",
        )
        return
    loggers["gradloc"] = SpikeLog(dict(loggers), actor["bisect_dump_dir"], wanted == "texts")
