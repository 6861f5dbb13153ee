# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Computes the values of a summary, which `--json` prints and the terminal and the page show."""

import heapq
from collections.abc import Collection, Mapping
from typing import Any

from gradloc.evidence.schema import SCHEMA

from .condensed import NOT_SHOWN
from .drills import drill_report
from .figures import count, number, ranges, rounded, severity
from .lost_spikes import lost_spikes
from .reading import Evidence
from .token_clips import summarize_clips
from .verdicts import in_words

_EVENT_FIELDS = (
    "global_step epoch mini_batch diagnosis until explained more_tokens verdict summary explanation next_command"
).split()


def summarize(evidence: Evidence, top: int) -> dict[str, Any]:
    """Computes the summary, ready for `jsonable`.

    Args:
        evidence (Evidence): What was read.
        top (int): How many of the largest events, culprits, parts and clipped tokens are listed.
    """
    ranked = evidence.culprits()
    totals = evidence.totals
    largest = heapq.nlargest(top, evidence.events, key=lambda event: event["size"])
    verdicts = totals.verdicts.counts()
    return {
        "path": evidence.path,
        "since": evidence.since,
        "verdict": in_words(verdicts, totals.events),
        "verdicts": verdicts,
        "warnings": evidence.warnings.listed(evidence.since, evidence.bundle),
        "faults": evidence.faults,
        "drills": drill_reports(evidence),
        "steps": _steps(evidence),
        "lost_spikes": lost_spikes(evidence.steps, totals.by_step, evidence.left_out, evidence.since),
        "runs_in_folder": evidence.runs,
        "doubled_lines": evidence.doubled,
        "merged": merged(evidence),
        "events": totals.events,
        "named": totals.named,
        "culprits": evidence.sources.total(),
        "first_step": min(totals.by_step, default=None),
        "last_step": max(totals.by_step, default=None),
        "events_by_step": dict(sorted(totals.by_step.items())),
        "thresholds": sorted(totals.thresholds),
        "largest_grad_norm": number(ranked[0][-1]["grad_norm"]) if ranked else None,
        "diagnoses": dict(totals.diagnoses.most_common()),
        "largest_events": [
            {name: event[name] for name in _EVENT_FIELDS} | {"culprits": event["culprits_in_all"]} for event in largest
        ],
        "diffuse": totals.largest_parts(top),
        "suspected": [
            {"global_step": event["global_step"], **token} for event in largest for token in event["suspected"]
        ][:top],
        "suspected_title": next((event["suspected_title"] for event in largest if event["suspected"]), ""),
        "sources": dict(evidence.sources.most_common()),
        "tokens": [
            {"token": token_name({"token": token, "token_id": token_id}), "culprits": count}
            for (token, token_id), count in evidence.tokens.most_common(10)
        ],
        "incomplete_events": totals.ended_early,
        "not_applied": dict(totals.not_applied),
        "errors": dict(totals.errors),
        "passes": totals.passes,
        "seconds": totals.seconds,
        "largest_culprits": [
            rounded({name: row[name] for name in row if name not in NOT_SHOWN}) for *_, row in ranked[:top]
        ],
        "token_clip": summarize_clips(evidence.clips, totals.mini_batches, top),
        "replays": evidence.replays,
        "notes": messages(evidence.notes),
        "other_versions": other_versions(evidence),
        "skipped_lines": evidence.skipped,
    }


def drill_reports(evidence: Evidence) -> list[dict[str, Any]]:
    """The drills in words."""
    return [drill_report(drill, evidence.totals.mini_batches) for drill in evidence.drills]


def _steps(evidence: Evidence) -> dict[str, Any] | None:
    """The steps with figures: how many, the last one's figures, and where the margin was highest; None without any."""
    known = evidence.known_steps()
    if not known:
        return None
    margins = ((evidence.steps[step]["spike_margin"], step) for step in known)
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


def token_name(culprit: Mapping[str, Any]) -> str:
    """The token's text, or its id where that is not known."""
    token = culprit["token"]
    return f"id {culprit['token_id']}" if token is None else token


def other_versions(evidence: Evidence) -> list[str]:
    """For each other version of which there are lines, a sentence with what to do."""
    return [
        f"{count(lines, 'line')} of evidence version {version} left out, as this release of GradLoc reads versions "
        f"{SCHEMA - 1} and {SCHEMA}: use the release that wrote the file."
        for version, lines in sorted(evidence.other_versions.items())
    ]


def merged(evidence: Evidence) -> list[str]:
    """What is said of a folder with several runs, or with lines that are there more than once."""
    found = []
    if evidence.runs > 1:
        found.append(
            f"{evidence.runs} runs are in this folder: the steps begin again at 1, and the spikes of all are counted. "
            "Give each run a bisect_dump_dir of its own, or move the files of the others away."
        )
    if evidence.doubled:
        found.append(f"{count(evidence.doubled, 'line')} found more than once, and counted once.")
    return found


def messages(notes: Mapping[str, Collection[int]]) -> list[str]:
    """The notes' messages, each with its steps."""
    texts = []
    for message, steps in notes.items():
        known = sorted(steps)
        where = f"in step{'s' * (len(known) > 1)} {ranges(known)}: " if known else ""
        texts.append(where + message)
    return texts
