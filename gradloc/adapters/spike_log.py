# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Adds a logger to verl's `Tracking` that sends spikes and identities of a run to the trackers, from the driver."""

from collections.abc import Mapping
from typing import Any


def add_spike_log(loggers: dict[str, Any], config: Mapping[str, Any] | None) -> None:
    """Adds a logger "gradloc" to those of a `Tracking`, if its run is to send spikes, identities or clipped tokens."""
    actor = ((config or {}).get("actor_rollout_ref") or {}).get("actor") or {}
    if not (actor.get("spike_detection", False) or (actor.get("token_clip") or {}).get("enable", False)):
        return
    from ..report.trackers import NO_TRACKERS, SpikeLog  # the only reader of evidence that training imports

    wanted = actor.get("spike_log")
    if wanted is None:
        wanted = not NO_TRACKERS.issuperset(loggers)
    if wanted:
        loggers["gradloc"] = SpikeLog(dict(loggers), actor["bisect_dump_dir"], wanted == "texts")
