# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""The data of the page: lists and texts are limited in size, totals cover all events."""

import heapq
from collections.abc import Mapping
from typing import Any

from gradloc.evidence.token_texts import window_start

from . import reading
from .condensed import NOT_SHOWN
from .drills import mini_batch_of
from .figures import rounded
from .meanings import APPLIED, DIAGNOSES, FIGURES, NOT_APPLIED, SOURCES
from .remedies import advice_by_source
from .steps import level, steps_before
from .summary import summarize
from .token_clips import EXPLANATION, clipped_token_name, done_to

# The charts over the run are for runs of more steps than these.
FEW_STEPS = 5

_TOTALS = (
    "events",
    "named",
    "culprits",
    "first_step",
    "last_step",
    "sources",
    "incomplete_events",
    "passes",
    "seconds",
)
# A response of which some tokens are shown: its event's index, rank and row, and the first token's position.
_StripKey = tuple[int, int, int, int]


def page_data(evidence: reading.Evidence) -> dict[str, Any]:
    """The data that the page shows, ready for `jsonable`.

    If there are too many events, those with the largest norms are kept. If there are too many culprits, the largest of
    each event come first, then the largest others. The tokens of a response are stored once, as a strip; its culprits
    refer to the strip by index.
    """
    kept_events, culprits = _kept(evidence)
    strips = _Strips()
    rows = []
    for _, _, index, row in culprits:
        shown = {name: row[name] for name in row if name not in NOT_SHOWN} | {"event": kept_events[index]}
        if details := row.get("details"):
            shown |= _with_texts(details, strips.add(index, row, details))
        rows.append(rounded(shown))
    summary = summarize(evidence, 0)
    thresholds = summary["thresholds"]
    return {
        "top": evidence.top,
        "texts": evidence.texts,
        "verdict": summary["verdict"],
        "warnings": summary["warnings"],
        "charts": _has_charts(summary),
        "source_rules": SOURCES,
        "source_advice": advice_by_source(evidence.replays),
        "figure_names": FIGURES,
        "faults": evidence.faults,
        "drills": summary["drills"],
        "level": level(evidence.steps, evidence.since),
        "diagnoses": DIAGNOSES,
        "applied": APPLIED,
        "not_applied": NOT_APPLIED,
        "events": _events(evidence, kept_events),
        "culprits": rows,
        "strips": strips.found,
        "clips": _clips(evidence, summary["token_clip"], kept_events),
        "totals": {name: summary[name] for name in _TOTALS} | {"thresholds": [*thresholds[:1], *thresholds[-1:]]},
        "tokens": [
            {"token": token, "token_id": token_id, "count": count}
            for (token, token_id), count in evidence.tokens.most_common(8)
        ],
        "replays": [_replay(result) for result in evidence.replays],
        "notes": summary["notes"],
        "other_versions": summary["other_versions"],
        "skipped": evidence.skipped,
        "merged": summary["merged"],
        "lost_spikes": summary["lost_spikes"],
    }


def _has_charts(summary: Mapping[str, Any]) -> bool:
    """Whether the run has more than a few steps; without the number of any step, more than a few spikes."""
    clips = summary["token_clip"]
    known = [*summary["events_by_step"], *(clips["by_step"] if clips else ())]
    span = max(known) - min(known) + 1 if known else summary["events"]
    return max(span, summary["steps"]["count"] if summary["steps"] else 0) > FEW_STEPS


def _clips(
    evidence: reading.Evidence, summary: Mapping[str, Any] | None, kept: Mapping[int, int]
) -> dict[str, Any] | None:
    """What TokenClip found: its tokens, each with its spike's index on the page, and the steps that have most."""
    if summary is None:
        return None
    spikes = {mini_batch_of(evidence.kept[index]): on_page for index, on_page in kept.items()}
    steps = summary["by_step"]
    marked = heapq.nlargest(reading.PAGE_ROWS, steps, key=lambda step: steps[step]["over"])
    return {
        **{name: summary[name] for name in ("title", "sentences", "over", "cut", "stopped", "mini_batches", "tokens")},
        "explanation": EXPLANATION,
        "rows": [
            {
                **row,
                "name": clipped_token_name(row),
                "done": done_to(row),
                "event": spikes.get(mini_batch_of(row)) if row["spike"] else None,
            }
            for row in evidence.clips.largest(reading.PAGE_ROWS, evidence.totals.mini_batches)
        ],
        "marks": [{"global_step": step, **steps[step]} for step in sorted(marked)],
        "steps_in_all": len(steps),
    }


def _replay(result: Mapping[str, Any]) -> dict[str, Any]:
    """A replay as the page shows it, with its figures rounded."""
    lists = ("units", "tokens", "layers", "remedies", "switches")
    return {**result, **rounded({name: result[name] for name in lists if name in result})}


def _kept(evidence: reading.Evidence) -> tuple[dict[int, int], list[reading.RankedCulprit]]:
    """The events that the page shows, as {index in the evidence: index on the page}; and the culprits that it shows."""
    largest = heapq.nlargest(reading.PAGE_ROWS, evidence.kept, key=lambda index: evidence.kept[index]["size"])
    events = {index: on_page for on_page, index in enumerate(sorted(largest))}
    culprits = [*sorted(evidence.largest.values(), reverse=True), *sorted(evidence.others, reverse=True)]
    return events, sorted([ranked for ranked in culprits if ranked[2] in events][: reading.PAGE_ROWS], reverse=True)


def _events(evidence: reading.Evidence, kept: Mapping[int, int]) -> list[dict[str, Any]]:
    """The events that the page shows, with `token_clip`; the largest with the steps before them, as `before`."""
    events = [evidence.kept[index] for index in kept]
    largest = heapq.nlargest(evidence.top, range(len(events)), key=lambda index: events[index]["size"])
    for index in largest if evidence.steps else ():
        step = events[index]["global_step"]
        before = None if step is None else steps_before(evidence.steps, step)
        if before is not None:
            events[index] = {**events[index], "before": before}
    return [{**event, "token_clip": evidence.clips.beside(event)} for event in events]


class _Strips:
    """The responses around culprits, token by token, each once."""

    def __init__(self) -> None:
        self.found: list[dict[str, Any]] = []
        self._numbers: dict[_StripKey, int] = {}

    def add(self, event: int, row: Mapping[str, Any], details: Mapping[str, Any]) -> int | None:
        """The index of the culprit's strip; None where the evidence has none."""
        start = details["response_tokens_start"]
        start = window_start(row["position"]) if start is None else start
        key = (event, row["rank"], row["row"], start)
        heat = details["response_suspicion"]
        if key not in self._numbers and heat is not None:
            self._numbers[key] = len(self.found)
            self.found.append({"start": start, "tokens": details["response_tokens"], "heat": heat})
        return self._numbers.get(key)


def _with_texts(details: Mapping[str, Any], strip: int | None) -> dict[str, Any]:
    """The details in the page's form; the response's text is left out if it has a strip."""
    return {
        "strip": strip,
        "layer_norms": details["layer_norms"],
        "prompt": details["prompt"],
        "response": details["response"] if strip is None else None,
        "ground_truth": details["ground_truth"],
    }
