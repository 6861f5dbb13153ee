# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Reduces events and culprits to what the report shows, because the files may be far larger than the memory."""

from collections.abc import Mapping
from typing import Any

from .explanation import ended_early, explanation
from .figures import excess, number, ranges, rounded, severity, threshold_factor

# How many parts of a diffuse event are kept: those farthest over their thresholds.
PARTS = 20

_EVENT_FIELDS: tuple[str, ...] = ("global_step", "epoch", "mini_batch", "trigger", "threshold", "global_norm")
_EVENT_FIELDS += ("global_threshold", "passes", "action", "applied", "diagnosis", "seconds", "world_size", "error")
_EVENT_FIELDS += ("until", "explained", "more_tokens", "summary")
_ROW_FIELDS: tuple[str, ...] = ("rank", "micro_batch", "row", "position", "token_id", "token", "context", "grad_norm")
_ROW_FIELDS += ("threshold", "weight", "coefficient", "suspicion", "share", "advantage", "log_prob", "old_log_prob")
_ROW_FIELDS += ("ratio", "ref_log_prob", "entropy", "rollout_log_prob", "rollout_ratio", "sequence_ratio")
_ROW_FIELDS += ("misaligned_share", "source", "reward", "data_source", "uid")
_DETAILS: tuple[str, ...] = ("response_tokens", "response_tokens_start", "response_suspicion", "layer_norms")
_DETAILS += ("prompt", "response", "ground_truth")


def condensed_event(event: Mapping[str, Any], largest: Mapping[str, Any] | None) -> dict[str, Any]:
    """An event without its culprits and without the layers of its units.

    Args:
        event (Mapping): As the evidence has it.
        largest (Mapping, optional): Its largest culprit.

    Returns:
        dict: The event with new fields: `level` (the token-equivalent norm that triggered it), `size` (the largest
            culprit's norm, or without a culprit the largest token-equivalent norm), `explanation`, `ended_early`,
            `open_tokens`, `culprits_in_all`, `diffuse_in_all`.
    """
    ordinary = event["ordinary_layer_norms"]
    units = [_without(unit, "layer_norms", "rest") for unit in event["units"]]
    # The units may not be known.
    trigger = number(event["threshold"]) * threshold_factor(event["trigger"])
    norms = [trigger, *(unit["token_equivalent"] for unit in units)] if largest is None else [largest["grad_norm"]]
    parts = sorted(event["diffuse"], key=excess, reverse=True)
    return {
        **rounded({name: event.get(name) for name in _EVENT_FIELDS}),
        "ordinary_layer_norms": None if ordinary is None else rounded(ordinary),
        "units": units,
        "open_tokens": sum(segment["tokens"] for segment in event["open_segments"]),
        "culprits_in_all": len(event["culprits"]),
        "ended_early": ended_early(event),
        "explanation": explanation(event),
        "level": trigger,
        "size": max(map(severity, norms)),
        "diffuse": [_part(part) for part in parts[:PARTS]],
        "diffuse_in_all": len(parts),
    }


def culprit_row(event: Mapping[str, Any], culprit: Mapping[str, Any]) -> dict[str, Any]:
    """A culprit as one row of a table."""
    where = {name: event[name] for name in ("global_step", "epoch", "mini_batch")}
    # Events before version 3 have one source for each culprit.
    sources = culprit.get("sources") or [culprit["source"]]
    return where | {name: culprit.get(name) for name in _ROW_FIELDS} | {"sources": sources}


def culprit_details(culprit: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that are too long to keep for every culprit."""
    return {name: culprit.get(name) for name in _DETAILS}


def _without(unit: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return rounded({name: unit[name] for name in unit if name not in names})


def _part(part: Mapping[str, Any]) -> dict[str, Any]:
    """A part of a diffuse event, with its rows as text."""
    tokens = [rounded(token) for token in part["largest_tokens"]]
    return {**rounded(part), "rows": ranges(part["rows"]), "largest_tokens": tokens}
