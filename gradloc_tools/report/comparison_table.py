# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""A comparison of two runs as texts and tables."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from .figures import count, part_of, quoted, short, shown, visible
from .summary import token_name
from .verdicts import lowered
from .view import Cell, Column, Table

# What the figures of `compare` are called.
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

# Those that are shown only if a run has some.
_OF_TOKEN_CLIP = ("clipped_mini_batches", "stopped_mini_batches")


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
        ("sources", "source", "What looks wrong with the culprits"),
        ("boundaries", "boundary", "Where tokens were first over TokenClip's bounds"),
    ):
        totals = Counter[str]()
        for run in runs:
            totals.update(run[key])
        if totals:
            rows = [[shown(name), *(_part(run[key], name) for run in runs)] for name, _ in totals.most_common()]
            found.append(Table(title, (Column(column, "row"), *sides), rows))
    if comparison["shared"]:
        title = f"{count(comparison['shared_in_all'], 'culprit')} in both runs"
        if comparison["shared_in_all"] > len(comparison["shared"]):
            title += f", the {len(comparison['shared'])} largest"
        names_of = ("same", "token", "context in A", "times in A, B", "× threshold in A, B", "source in A; B")
        found.append(Table(title, [*map(Column, names_of)], [_shared(pair) for pair in comparison["shared"]]))
    return found


def remarks(comparison: Mapping[str, Any]) -> list[str]:
    """What the tables do not say: what A and B are, their verdicts and warnings, and what is missing."""
    runs = comparison["runs"]
    found = [f"{name}: {run['path']}{_verdict(run)}" for name, run in zip("AB", runs, strict=True)]
    for name, run in zip("AB", runs, strict=True):
        found += [f"{name}: {lowered(of['when'])}: {of['sentence']} {of['check']}" for of in run["warnings"]]
        if run["faults"]:
            found.append(f"In {name}, faults were planted on purpose: {', '.join(run['faults'])}.")
        if run["steps"] is None:
            found.append(f"{name} has no steps.jsonl, so how frequent spikes are is not known.")
        elif not run["steps"]:
            found.append(f"{name} has no step from {run['since']} on, so how frequent spikes are is not known.")
        found += [f"Note in the files of {name}: {note}." for note in run["notes"]]
        found += [f"In {name}: {sentence}" for sentence in run["other_versions"]]
        found += [f"In {name}: {sentence}" for sentence in run["merged"]]
        if run["lost_spikes"]:
            found.append(f"In {name}: {run['lost_spikes']}")
        if run["skipped_lines"]:
            found.append(f"{count(run['skipped_lines'], 'line')} of {name} skipped: malformed or unfinished.")
    if not comparison["shared"]:
        found.append("No culprit of A is in B, as the same token after the same prompt or in the same context.")
    return [*map(visible, found)]


def _verdict(run: Mapping[str, Any]) -> str:
    """What the spikes of a run come from."""
    spikes = f", {count(run['spikes'], 'spike')}" if run["spikes"] else ", no spike"
    return spikes if run["verdict"] is None else f"{spikes}: {lowered(run['verdict'])}"


def _part(counts: Mapping[str, int], name: str) -> str:
    if not counts.get(name):
        return "–"
    share = part_of(counts[name], sum(counts.values()))
    return f"{counts[name]:,} ({share})" if share.endswith("%") else share


def _shared(pair: Mapping[str, Any]) -> list[Cell]:
    return [
        pair["same"],
        quoted(token_name(pair)),
        visible(pair["context"] or ""),
        ", ".join(map(str, pair["count"])),
        ", ".join(map(short, pair["times_threshold"])),
        "; ".join(", ".join(sources) for sources in pair["sources"]),
    ]
