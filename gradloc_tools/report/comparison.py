# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Compares the evidence of two runs, or of two parts of a run, such as before and after a change."""

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .figures import culprit_factor, severity
from .reading import Evidence
from .summary import summarize

# At most so many shared culprits are listed.
SHARED = 50

_AS_IN_A_SUMMARY = (
    "path since verdict verdicts warnings faults notes other_versions merged lost_spikes skipped_lines "
    "culprits diagnoses sources"
).split()

Row = Mapping[str, Any]
# A token's id, and its prompt or its context.
Key = tuple[int, str]


def compare(before: Evidence, after: Evidence) -> dict[str, Any]:
    """Compares two runs, ready for `jsonable`.

    Returns:
        dict: `runs`, the figures of both; `shared`, the culprits of both that are the same token after the same prompt
            or in the same context, those with the largest norms first; `shared_in_all`, how many there are.
    """
    shared = _shared(*([row for _, row in evidence.culprits()] for evidence in (before, after)))
    return {
        "runs": [_figures(before), _figures(after)],
        "shared": shared[:SHARED],
        "shared_in_all": len(shared),
    }


def _figures(evidence: Evidence) -> dict[str, Any]:
    summary = summarize(evidence, 0)
    steps = evidence.known_steps()
    found = (evidence.steps[step]["spike_margin"] for step in steps)
    margins = sorted(severity(margin) for margin in found if margin is not None)
    spikes, clips = summary["events"], summary["token_clip"] or {}
    return {
        **{name: summary[name] for name in _AS_IN_A_SUMMARY},
        "steps": len(steps) if evidence.steps else None,
        "spikes": spikes,
        "spikes_per_hundred_steps": 100 * spikes / len(steps) if steps else None,
        "steps_with_spikes": len(summary["events_by_step"]),
        "clipped_mini_batches": clips.get("mini_batches", 0),
        "stopped_mini_batches": clips.get("stopped", 0),
        "margin_median": statistics.median(margins) if margins else None,
        "margin_p90": margins[math.ceil(0.9 * len(margins)) - 1] if margins else None,
        "margin_max": margins[-1] if margins else None,
        "passes_per_spike": summary["passes"] / spikes if spikes else None,
        "boundaries": clips.get("boundaries", {}),
    }


def _shared(before: Sequence[Row], after: Sequence[Row]) -> list[dict[str, Any]]:
    """The same tokens in both runs: after the same prompt, and of the rest, in the same context."""
    found: list[dict[str, Any]] = []
    for same in ("prompt", "context"):
        groups = [_by(same, rows) for rows in (before, after)]
        keys = groups[0].keys() & groups[1].keys()
        found += [_pair(same, [group[key] for group in groups]) for key in keys]
        before, after = ([row for row in rows if _key(same, row) not in keys] for rows in (before, after))
    return sorted(found, key=lambda pair: (-max(pair["times_threshold"]), str(pair["context"])))


def _key(same: str, row: Row) -> Key | None:
    return None if row.get(same) is None else (row["token_id"], str(row[same]))


def _by(same: str, rows: Iterable[Row]) -> dict[Key, list[Row]]:
    groups = defaultdict(list)
    for row in rows:
        if (key := _key(same, row)) is not None:
            groups[key].append(row)
    return groups


def _pair(same: str, groups: Sequence[Sequence[Row]]) -> dict[str, Any]:
    """A culprit of both runs; what is a list has a value for each run."""
    first = groups[0][0]
    return {
        "same": same,
        "token": first.get("token"),
        "token_id": first["token_id"],
        "context": first.get("context"),
        "count": [len(rows) for rows in groups],
        "times_threshold": [max(severity(culprit_factor(row)) for row in rows) for rows in groups],
        "sources": [[name for name, _ in Counter(row["source"] for row in rows).most_common()] for rows in groups],
    }
