# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Computes the values of a summary, which `--json` prints and the terminal and the page show."""

import heapq
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .before_spike import StepHistory, what_moved
from .drills import drill_report, mini_batch_of
from .figures import excess, number, ranges, rounded, severity
from .reading import Evidence

_EVENT_FIELDS = (
    "global_step",
    "epoch",
    "mini_batch",
    "diagnosis",
    "until",
    "explained",
    "more_tokens",
    "summary",
    "explanation",
)


def summarize(evidence: Evidence, top: int) -> dict[str, Any]:
    """Computes the summary, ready for `jsonable`.

    Args:
        evidence (Evidence): What was read.
        top (int): How many of the largest events, culprits and parts are listed.
    """
    ranked = evidence.culprits()
    events = evidence.events
    steps = [event["global_step"] for event in events if event["global_step"] is not None]
    largest = heapq.nlargest(top, events, key=lambda event: event["size"])
    history = StepHistory(evidence.steps)
    return {
        "path": evidence.path,
        "since": evidence.since,
        "faults": evidence.faults,
        "drills": drill_reports(evidence),
        "steps": _steps(evidence),
        "events": len(events),
        "culprits": evidence.sources.total(),
        "first_step": min(steps, default=None),
        "last_step": max(steps, default=None),
        "events_by_step": dict(sorted(Counter(steps).items())),
        "thresholds": sorted({number(event["threshold"]) for event in events}),
        "largest_grad_norm": number(ranked[0][-1]["grad_norm"]) if ranked else None,
        "diagnoses": dict(Counter(event["diagnosis"] for event in events).most_common()),
        "largest_events": [
            {name: event[name] for name in _EVENT_FIELDS}
            | {"culprits": event["culprits_in_all"], "moved": moved_before(history, event)}
            for event in largest
        ],
        "diffuse": _largest_parts(events, top),
        "sources": dict(evidence.sources.most_common()),
        "tokens": [
            {"token": token_name({"token": token, "token_id": token_id}), "culprits": count}
            for (token, token_id), count in evidence.tokens.most_common(10)
        ],
        "incomplete_events": sum(event["ended_early"] for event in events),
        "not_applied": dict(Counter(event["action"] for event in events if not event["applied"])),
        "errors": dict(Counter(event["error"] for event in events if event["error"] is not None)),
        "passes": sum(event["passes"] for event in events),
        "seconds": sum(event["seconds"] for event in events),
        "largest_culprits": [
            rounded({name: row[name] for name in row if name != "details"}) for *_, row in ranked[:top]
        ],
        "replays": evidence.replays,
        "notes": messages(evidence.notes),
        "skipped_lines": evidence.skipped,
    }


def drill_reports(evidence: Evidence) -> list[dict[str, Any]]:
    """The drills in words."""
    spikes = {mini_batch_of(event) for event in evidence.events}
    return [drill_report(drill, spikes) for drill in evidence.drills]


def moved_before(history: StepHistory, event: Mapping[str, Any]) -> str | None:
    """The sentence on what moved before a spike; None where its steps are not known."""
    return None if event["global_step"] is None else what_moved(history.before(event["global_step"]))


def _steps(evidence: Evidence) -> dict[str, Any] | None:
    """The steps with figures: how many, the last one's figures, and where the margin was highest; None without any."""
    since = evidence.since
    known = {step: figures for step, figures in evidence.steps.items() if since is None or step >= since}
    if not known:
        return None
    margins = [
        (severity(figures["spike_margin"]), step)
        for step, figures in known.items()
        if figures["spike_margin"] is not None
    ]
    margin, where = max(margins, default=(None, None))
    return {
        "count": len(known),
        "first": min(known),
        "last": max(known),
        "last_figures": known[max(known)],
        "highest_spike_margin": margin,
        "highest_spike_margin_step": where,
    }


def token_name(culprit: Mapping[str, Any]) -> str:
    """The token's text, or its id where that is not known."""
    token = culprit["token"]
    return f"id {culprit['token_id']}" if token is None else token


def _largest_parts(events: Sequence[Mapping[str, Any]], most: int) -> list[dict[str, Any]]:
    """The parts of diffuse events that are farthest over their thresholds."""
    parts = [{"global_step": event["global_step"], **part} for event in events for part in event["diffuse"]]
    return heapq.nlargest(most, parts, key=excess)


def messages(notes: Iterable[Mapping[str, Any]]) -> list[str]:
    """The notes' messages, each once, with its steps."""
    steps: dict[str, list[int | None]] = {}
    for note in notes:
        steps.setdefault(note["message"], []).append(note["global_step"])
    texts = []
    for message, of in steps.items():
        known = sorted({step for step in of if step is not None})
        where = f"in step{'s' * (len(known) > 1)} {ranges(known)}: " if known else ""
        texts.append(where + message)
    return texts
