# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Two runs side by side, or two parts of a run, such as before and after a change: the figures, and as tables."""

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from ..judge.said import lowered
from ..tools.figures import COUNTED, count, culprit_factor, part_of, quoted, severity, short, shown, visible
from ..tools.reading import Evidence
from .identities import said_of
from .summary import summarize, token_name
from .view import Cell, Column, Table

# At most so many shared culprits are listed.
SHARED = 50

_AS_IN_A_SUMMARY = (
    "path since verdict verdicts identities warnings changes faults notes lost_spikes skipped_lines culprits diagnoses "
    "sources"
).split()

# What the figures are called; those of TokenClip are shown only if a run has some.
_FIGURES = {
    "steps": "steps with figures",
    "spikes": "spikes",
    "spikes_per_hundred_steps": "spikes per hundred steps",
    "steps_with_spikes": "steps with spikes",
    "culprits": "culprits",
    "clipped_mini_batches": "mini-batches with tokens over TokenClip's bounds",
    "stopped_mini_batches": "of these, stopped by TokenClip",
    "passes_per_spike": "extra passes per spike",
    "margin_median": "largest micro-batch norm per token ÷ τ, median step",
    "margin_p90": "largest micro-batch norm per token ÷ τ, 90th percentile of steps",
    "margin_max": "largest micro-batch norm per token ÷ τ, maximum",
}
_OF_TOKEN_CLIP = ("clipped_mini_batches", "stopped_mini_batches")

Row = Mapping[str, Any]


def compare(before: Evidence, after: Evidence) -> dict[str, Any]:
    """Compares two runs, ready for `jsonable`.

    Returns:
        dict: `runs`, the figures of both; `shared`, the culprits of both that are the same token after the same prompt
            or in the same context, those with the largest norms first; `shared_in_all`, how many there are.
    """
    shared = _shared(*([row for _, row in evidence.culprits()] for evidence in (before, after)))
    return {"runs": [_figures(before), _figures(after)], "shared": shared[:SHARED], "shared_in_all": len(shared)}


def _figures(evidence: Evidence) -> dict[str, Any]:
    summary = summarize(evidence, 0)
    steps = evidence.known_steps()
    found = (evidence.steps[step]["spike_margin"] for step in steps)
    margins = sorted(severity(margin) for margin in found if margin is not None)
    spikes, clips = summary["spikes"], summary["token_clip"] or {}
    return {
        **{name: summary[name] for name in _AS_IN_A_SUMMARY},
        "steps": len(steps) if evidence.steps else None,
        "spikes": spikes,
        "spikes_per_hundred_steps": 100 * spikes / len(steps) if steps else None,
        "steps_with_spikes": len({spike.step for spike in evidence.spikes if spike.is_spike} - {None}),
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
    runs = [before, after]
    for same in ("prompt", "context"):
        groups: list[dict[Any, list[Row]]] = [defaultdict(list), defaultdict(list)]
        for rows, of_run in zip(runs, groups, strict=True):
            for row in rows:
                of_run[row.get(same) and (row["token_id"], str(row[same]))].append(row)
        keys = (groups[0].keys() & groups[1].keys()) - {None}
        found += [_pair(same, [of_run[key] for of_run in groups]) for key in keys]
        runs = [[row for key, rows in of_run.items() if key not in keys for row in rows] for of_run in groups]
    return sorted(found, key=lambda pair: (-max(pair["times_threshold"]), str(pair["context"])))


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


def tables(comparison: Mapping[str, Any]) -> list[Table]:
    """The tables of what `compare` returns."""
    runs = comparison["runs"]
    clipped = any(run["clipped_mini_batches"] for run in runs)
    names = {key: name for key, name in _FIGURES.items() if clipped or key not in _OF_TOKEN_CLIP}
    sides = (Column("A", "num"), Column("B", "num"))
    figures = [[name, *(short(run[key]) for run in runs)] for key, name in names.items()]
    found = [Table("The runs", (Column("", "row"), *sides), figures)]
    for key, column, title in (
        ("diagnoses", "diagnosis", "What was found"),
        ("sources", "source", "What the culprits are"),
        ("boundaries", "boundary", "Where tokens were first over TokenClip's bounds"),
    ):
        totals = Counter(runs[0][key]) + Counter(runs[1][key])
        if totals:
            rows = [[shown(name), *(_part(run[key], name) for run in runs)] for name, _ in totals.most_common()]
            found.append(Table(title, (Column(column, "row"), *sides), rows))
    if comparison["shared"]:
        title = f"{count(comparison['shared_in_all'], 'culprit')} in both runs"
        if comparison["shared_in_all"] > len(comparison["shared"]):
            title += f", the {len(comparison['shared'])} largest"
        names_of = ("same", "token", "context in A", "times in A, B", "× threshold in A, B", "source in A; B")
        found.append(Table(title, [*map(Column, names_of)], [_cells(pair) for pair in comparison["shared"]]))
    return found


def _part(counts: Mapping[str, int], name: str) -> str:
    if not counts.get(name):
        return "–"
    total = sum(counts.values())
    share = part_of(counts[name], total)
    return f"{counts[name]:,} ({share})" if total > COUNTED else share


def _cells(pair: Row) -> list[Cell]:
    return [
        pair["same"],
        quoted(token_name(pair)),
        visible(pair["context"] or ""),
        ", ".join(map(str, pair["count"])),
        ", ".join(map(short, pair["times_threshold"])),
        "; ".join(", ".join(sources) for sources in pair["sources"]),
    ]


def remarks(comparison: Mapping[str, Any]) -> list[str]:
    """Sentences beside the tables: the paths, verdicts and identities of A and B, and what is missing."""
    runs = dict(zip("AB", comparison["runs"], strict=True))
    found = []
    for name, run in runs.items():
        verdict = "" if run["verdict"] is None else f": {lowered(run['verdict'])}"
        found.append(
            f"{name}: {run['path']}, {count(run['spikes'], 'spike') if run['spikes'] else 'no spike'}{verdict}"
        )
    for name, run in runs.items():
        found += [f"{name}: {sentence}" for sentence in said_of(run["identities"])]
        found += [f"{name}: {lowered(of['when'])}: {of['sentence']} {of['check']}" for of in run["warnings"]]
        found += [f"{name}: {sentence}" for sentence in run["changes"]]
        if run["faults"]:
            found.append(f"In {name}, faults were planted on purpose: {', '.join(run['faults'])}.")
        if not run["steps"]:
            lacks = "steps.jsonl" if run["steps"] is None else f"step from {run['since']} on"
            found.append(f"{name} has no {lacks}, so how frequent spikes are is not known.")
        found += [f"In {name}: {lowered(note)}" for note in run["notes"]]
        if run["lost_spikes"]:
            found.append(f"In {name}: {run['lost_spikes']}")
    if not comparison["shared"]:
        found.append("No culprit of A is in B, as the same token after the same prompt or in the same context.")
    return [*map(visible, found)]
