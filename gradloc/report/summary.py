# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Computes the figures of a run, which `--json` prints and the view puts into words."""

import heapq
import math
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

from ..tools.figures import clipped, count, excess, ranges, rounded, severity
from ..tools.reading import MOST_BYTES, Evidence
from ..tools.spike import Spike
from .identities import changes_of, identities_of, warnings_of
from .token_clips import summarize_clips
from .words import NOT_APPLIED, count_causes, drill_report, ended_early, explanation, in_words

# Of an event, what is listed as it is there.
_EVENT_FIELDS = "global_step epoch mini_batch diagnosis until explained more_tokens".split()
# What a culprit has for the other tokens of its response, and what is too long for a list.
_LONG = (
    "response_tokens response_tokens_start response_suspicion response_kl layer_norms prompt response ground_truth"
).split()
_MEASURED = ("row", "position", "grad_norm", "share")
# How many tokens of a part are listed.
TOKENS = 20
# The note of a file that is full: from its step on, no spike is written.
_FULL = "size_limit"


def summarize(evidence: Evidence, top: int) -> dict[str, Any]:
    """Computes the summary, ready for `jsonable`.

    Args:
        evidence (Evidence): What was read.
        top (int): How many of the largest events, culprits, parts and clipped tokens are listed.
    """
    spikes, culprits, events = evidence.spikes, evidence.culprits(), evidence.events
    largest = largest_of(evidence, top)
    by_step = Counter(spike.step for spike in spikes if spike.step is not None)
    mini_batches = {spike.mini_batch for spike in spikes if spike.step is not None}
    causes = count_causes(spike.verdict for spike in spikes)
    suspected = [
        {"global_step": spike.step, **rounded(listed(token))} for spike in largest for token in suspected_of(spike)
    ]
    parts = [(spike, part) for spike in spikes for part in spike.event["diffuse"]]
    return {
        "path": evidence.path,
        "since": evidence.since,
        "verdict": in_words(causes, len(spikes)),
        "verdicts": causes,
        "identities": identities_of(evidence),
        "warnings": warnings_of(evidence),
        "changes": changes_of(evidence),
        "faults": evidence.faults,
        "drills": [drill_report(drill, mini_batches) for drill in evidence.drills],
        "steps": _steps(evidence),
        "lost_spikes": lost_spikes(evidence),
        "runs_in_folder": evidence.runs,
        "events": len(spikes),
        "spikes": sum(spike.is_spike for spike in spikes),
        "named": named(spikes),
        "culprits": len(culprits),
        "first_step": min(by_step, default=None),
        "last_step": max(by_step, default=None),
        "events_by_step": dict(sorted(by_step.items())),
        "thresholds": sorted({float(event["threshold"]) for event in events}),
        "largest_grad_norm": float(culprits[0][1]["grad_norm"]) if culprits else None,
        "diagnoses": dict(Counter(event["diagnosis"] for event in events).most_common()),
        "largest_events": [_listed_event(spike) for spike in largest],
        "diffuse": [
            {"global_step": spike.step, **_part(part)}
            for spike, part in heapq.nlargest(top, parts, key=lambda pair: excess(pair[1]))
        ],
        "suspected": suspected[:top],
        "suspected_title": next((spike.suspected_title for spike in largest if suspected_of(spike)), ""),
        "sources": dict(Counter(culprit["source"] for _, culprit in culprits).most_common()),
        "tokens": [
            {"token": token, "culprits": times}
            for token, times in Counter(token_name(culprit) for _, culprit in culprits).most_common(10)
        ],
        "incomplete_events": sum(map(ended_early, events)),
        "passes": sum(event["passes"] for event in events),
        "seconds": sum(event["seconds"] for event in events),
        "largest_culprits": [
            {**mini_batch_fields(spike), **rounded(listed(culprit))} for spike, culprit in culprits[:top]
        ],
        "token_clip": summarize_clips(evidence.clips, mini_batches, top),
        "replays": evidence.replays,
        "notes": _notes(evidence),
        "skipped_lines": evidence.skipped.total(),
    }


def largest_of(evidence: Evidence, top: int) -> list[Spike]:
    """The largest spikes, the largest first."""
    return heapq.nlargest(top, evidence.spikes, key=lambda spike: spike.size)


def lost_spikes(evidence: Evidence) -> str | None:
    """A sentence on spikes that steps.jsonl counts and spikes.jsonl lacks, with what to do; None if there are none.

    What the writer itself has left out, as its notes say, is not lost.
    """
    read = Counter(spike.step for spike in evidence.spikes)
    full_from = min((step for kind, step in evidence.left_out if kind == _FULL), default=math.inf)
    known = {step for _, step in evidence.left_out}
    counted = {
        step: int(triggered)
        for step in evidence.known_steps()
        if step not in known
        and step < full_from
        and math.isfinite(triggered := evidence.steps[step]["triggered"] or 0.0)
        and triggered > read[step]
    }
    if not counted:
        return None
    return (
        f"steps.jsonl counts {count(sum(counted.values()), 'spike')} in {_in_steps(counted)}, spikes.jsonl has "
        f"{sum(read[step] for step in counted)}: it is missing or cut. Copy it from the run again; if it is "
        "whole, a search failed, and the log says why."
    )


def _in_steps(steps: Collection[int]) -> str:
    return f"step{'s' * (len(steps) > 1)} {ranges(sorted(steps))}"


def named(spikes: Collection[Spike]) -> str:
    """How many there are of what, in words."""
    converted = sum(not spike.is_spike for spike in spikes)
    parts = [count(len(spikes) - converted, "gradient spike")] if len(spikes) > converted else []
    parts += [count(converted, "converted mini-batch", "converted mini-batches")] if converted else []
    return " and ".join(parts)


def token_name(token: Mapping[str, Any]) -> str:
    """The token's text, or its id where that is not known; of the prompt's tokens, neither is."""
    if token.get("token") is not None:
        return str(clipped(token["token"]))
    return "(prompt)" if token.get("position", 0) < 0 else f"id {token['token_id']}"


def listed(token: Mapping[str, Any]) -> dict[str, Any]:
    """A token without its response."""
    return {
        name: clipped(value) if isinstance(value, str) else value for name, value in token.items() if name not in _LONG
    }


def mini_batch_fields(spike: Spike) -> dict[str, Any]:
    return {name: spike.event[name] for name in ("global_step", "epoch", "mini_batch")}


def suspected_of(spike: Spike) -> list[dict[str, Any]]:
    """The suspected tokens of a converted spike; at most 16 are listed."""
    return [*spike.event.get("suspected", ())][:16]


def _listed_event(spike: Spike) -> dict[str, Any]:
    return {
        **{name: spike.event[name] for name in _EVENT_FIELDS},
        "verdict": spike.verdict,
        "summary": spike.summary,
        "explanation": explanation(spike.event),
        "next_command": spike.next_command,
        "culprits": len(spike.event["culprits"]),
    }


def _part(part: Mapping[str, Any]) -> dict[str, Any]:
    """A part of a diffuse event, with its rows as text."""
    tokens = [rounded({name: token.get(name) for name in _MEASURED}) for token in part["largest_tokens"][:TOKENS]]
    fields = {name: part[name] for name in ("rank", "micro_batch", "tokens", "norm", "threshold")}
    return {**rounded(fields), "rows": ranges(part["rows"]), "largest_tokens": tokens}


def _steps(evidence: Evidence) -> dict[str, Any] | None:
    """The steps with figures: how many, the last one's figures, and where the margin was highest; None without any."""
    known = evidence.known_steps()
    if not known:
        return None
    margins = [(evidence.steps[step]["spike_margin"], step) for step in known]
    margin, where = max(
        ((severity(margin), step) for margin, step in margins if margin is not None), default=(None, None)
    )
    return {
        "count": len(known),
        "first": min(known),
        "last": max(known),
        "last_figures": evidence.steps[max(known)],
        "highest_spike_margin": margin,
        "highest_spike_margin_step": where,
    }


def _notes(evidence: Evidence) -> list[str]:
    """Sentences on what was left out, failed or ended early."""
    found = []
    for message, steps in evidence.notes.items():
        found.append(f"Note in the file: {f'in {_in_steps(steps)}: ' if steps else ''}{message}.")
    if incomplete := sum(map(ended_early, evidence.events)):
        found.append(f"{count(incomplete, 'search', 'searches')} ended early: there may be more culprits.")
    errors = Counter(clipped(event["error"]) for event in evidence.events if event["error"] is not None)
    for error, searches in errors.items():
        found.append(f"{count(searches, 'search', 'searches')} failed with an error: {str(error).rstrip('.')}.")
    # Nothing is to be applied with "log"; a converted spike has nothing to apply.
    not_applied = [event for event in evidence.events if not event["applied"] and event["action"] != "log"]
    for action, spikes in Counter(event["action"] for event in not_applied).items():
        found.append(f"{count(spikes, 'spike')}, with spike_action={action}: {NOT_APPLIED[action]}")
    if evidence.runs > 1:
        found.append(
            f"{evidence.runs} runs are in this folder: the steps begin again at 1, and the spikes of all are counted. "
            "Give each run a bisect_dump_dir of its own, or move the files of the others away."
        )
    if evidence.too_large:
        found.append(f"Only the first {MOST_BYTES >> 20} MiB of a file are read: a run writes no more.")
    found += [f"{count(lines, 'line')} skipped: {why}." for why, lines in evidence.skipped.items()]
    return found
