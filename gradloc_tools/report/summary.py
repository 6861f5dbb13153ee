# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Computes the figures of a run, which `--json` prints and the view puts into words."""

import heapq
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

from gradloc.evidence.schema import SCHEMA

from .drills import drill_report
from .figures import clipped, count, excess, number, ranges, rounded, severity
from .lost_spikes import lost_spikes
from .reading import MOST_BYTES, Evidence
from .spikes import Spike
from .token_clips import summarize_clips
from .verdicts import Verdicts, in_words

# Of an event, what is listed as it is there.
_EVENT_FIELDS = "global_step epoch mini_batch diagnosis until explained more_tokens".split()
# What a culprit has for the other tokens of its response, and what is too long for a list.
_LONG = (
    "response_tokens response_tokens_start response_suspicion response_kl layer_norms prompt response ground_truth"
).split()
_MEASURED = ("row", "position", "grad_norm", "share")
# How many tokens of a part are listed.
TOKENS = 20


def summarize(evidence: Evidence, top: int) -> dict[str, Any]:
    """Computes the summary, ready for `jsonable`.

    Args:
        evidence (Evidence): What was read.
        top (int): How many of the largest events, culprits, parts and clipped tokens are listed.
    """
    spikes, culprits = evidence.spikes, evidence.culprits()
    events = evidence.events
    largest = heapq.nlargest(top, spikes, key=lambda spike: spike.size)
    by_step = Counter(spike.step for spike in spikes if spike.step is not None)
    mini_batches = {spike.mini_batch for spike in spikes if spike.step is not None}
    verdicts = Verdicts()
    for spike in spikes:
        verdicts.add(spike.verdict)
    suspected = [
        {"global_step": spike.step, **rounded(listed(token))} for spike in largest for token in suspected_of(spike)
    ]
    # Nothing is to be applied with "log"; a recorded spike has nothing to apply.
    not_applied = [event for event in events if not event["applied"] and event["action"] != "log"]
    return {
        "path": evidence.path,
        "since": evidence.since,
        "verdict": in_words(verdicts.counts(), len(spikes)),
        "verdicts": verdicts.counts(),
        "warnings": evidence.warnings.listed(evidence.since, evidence.bundle),
        "faults": evidence.faults,
        "drills": [drill_report(drill, mini_batches) for drill in evidence.drills],
        "steps": _steps(evidence),
        "lost_spikes": lost_spikes(evidence.steps, by_step, evidence.left_out, evidence.since),
        "runs_in_folder": evidence.runs,
        "doubled_lines": evidence.doubled,
        "merged": merged(evidence),
        "events": len(spikes),
        "named": named(spikes),
        "culprits": len(culprits),
        "first_step": min(by_step, default=None),
        "last_step": max(by_step, default=None),
        "events_by_step": dict(sorted(by_step.items())),
        "thresholds": sorted({number(event["threshold"]) for event in events}),
        "largest_grad_norm": number(culprits[0][1]["grad_norm"]) if culprits else None,
        "diagnoses": dict(Counter(event["diagnosis"] for event in events).most_common()),
        "largest_events": [_listed_event(spike) for spike in largest],
        "diffuse": [{"global_step": spike.step, **_part(part)} for spike, part in _parts(spikes, top)],
        "suspected": suspected[:top],
        "suspected_title": next((spike.suspected_title for spike in largest if suspected_of(spike)), ""),
        "sources": dict(Counter(culprit["source"] for _, culprit in culprits).most_common()),
        "tokens": [
            {"token": token, "culprits": times}
            for token, times in Counter(token_name(culprit) for _, culprit in culprits).most_common(10)
        ],
        "incomplete_events": sum(spike.ended_early for spike in spikes),
        "not_applied": dict(Counter(event["action"] for event in not_applied)),
        "errors": dict(Counter(clipped(event["error"]) for event in events if event["error"] is not None)),
        "passes": sum(event["passes"] for event in events),
        "seconds": sum(event["seconds"] for event in events),
        "largest_culprits": [
            {**mini_batch_fields(spike), **rounded(listed(culprit))} for spike, culprit in culprits[:top]
        ],
        "token_clip": summarize_clips(evidence.clips, mini_batches, top),
        "replays": evidence.replays,
        "notes": messages(evidence.notes),
        "other_versions": other_versions(evidence),
        "skipped_lines": evidence.skipped,
    }


def named(spikes: Collection[Spike]) -> str:
    """How many there are of what, in words."""
    recorded = sum(not spike.is_spike for spike in spikes)
    parts = [count(len(spikes) - recorded, "gradient spike")] if len(spikes) > recorded else []
    parts += [count(recorded, "recorded mini-batch", "recorded mini-batches")] if recorded else []
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
    """The suspected tokens of a recorded spike; at most 16 are listed."""
    return [*spike.event.get("suspected", ())][:16]


def _listed_event(spike: Spike) -> dict[str, Any]:
    return {
        **{name: spike.event[name] for name in _EVENT_FIELDS},
        "verdict": spike.verdict,
        "summary": spike.summary,
        "explanation": spike.explanation,
        "next_command": spike.next_command,
        "culprits": len(spike.event["culprits"]),
    }


def _parts(spikes: Collection[Spike], top: int) -> list[tuple[Spike, Mapping[str, Any]]]:
    """The parts of diffuse events that are farthest over their thresholds."""
    parts = [(spike, part) for spike in spikes for part in spike.event["diffuse"]]
    return heapq.nlargest(top, parts, key=lambda pair: excess(pair[1]))


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


def other_versions(evidence: Evidence) -> list[str]:
    """For each other version of which there are lines, a sentence with what to do."""
    return [
        f"{count(lines, 'line')} of evidence version {version} left out, as this release of GradLoc reads versions "
        f"{SCHEMA - 1} and {SCHEMA}: use the release that wrote the file."
        for version, lines in sorted(evidence.other_versions.items())
    ]


def merged(evidence: Evidence) -> list[str]:
    """What is said of a folder with several runs, with lines that are there more than once, or with too much."""
    found = []
    if evidence.runs > 1:
        found.append(
            f"{evidence.runs} runs are in this folder: the steps begin again at 1, and the spikes of all are counted. "
            "Give each run a bisect_dump_dir of its own, or move the files of the others away."
        )
    if evidence.doubled:
        found.append(f"{count(evidence.doubled, 'line')} found more than once, and counted once.")
    if evidence.too_large:
        found.append(f"Only the first {MOST_BYTES >> 20} MiB of the evidence are read: a run writes no more.")
    return found


def messages(notes: Mapping[str, Collection[int]]) -> list[str]:
    """The notes' messages, each with its steps."""
    texts = []
    for message, steps in notes.items():
        known = sorted(steps)
        where = f"in step{'s' * (len(known) > 1)} {ranges(known)}: " if known else ""
        texts.append(where + message)
    return texts
