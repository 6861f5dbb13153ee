# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""A replay's result as texts and tables, which terminal and page show."""

from collections.abc import Mapping, Sequence
from typing import Any

from ..judge.said import lowered
from ..replay.advice import recommended
from ..tools.figures import percent, short, visible
from ..tools.spike import Spike, mini_batch_of
from .spike_view import Spec, figure, index, table_of
from .view import Column

Result = Mapping[str, Any]


def replay_tables(result: Result) -> dict[str, Any]:
    """A result as `title`, `where` it was computed, `sentences`, `notes`, `tables`, and `step`."""
    step = "–" if result["global_step"] is None else str(result["global_step"])
    where = f"{result['model']}, {result['variant']} on {result['device']}; in training {result['recorded']}"
    notes = [f"{row['name']}: {row['note']}" for row in result["remedies"] if row.get("note") is not None]
    others = [_other(name, i) for i, name in enumerate(result["variants"])]
    norms = figure("In training", "norm"), figure("Replayed", "replayed")
    of_unit = index("Rank", "rank"), index("Micro-batch", "micro_batch"), index("Rows", "rows")
    rest = figure("Without culprits", "rest")
    tables = (
        table_of("Gradient norms of tokens", (*_PLACE, *others, *_LARGEST), result["tokens"]),
        table_of(
            "Gradient norms of micro-batches",
            (*of_unit, figure("Threshold", "threshold"), *norms, *others, rest),
            result["units"],
        ),
        table_of("The first micro-batch by layer", (_text("Layer", "layer", "row"), *norms, *others), result["layers"]),
        table_of("What each switch changes in the first micro-batch", _SWITCH, result.get("switches", ())),
        table_of("Which remedy fits: the first micro-batch's gradient", _REMEDY, result["remedies"]),
    )
    return {
        "step": step,
        "title": ("" if step == "–" else f"Step {step}: ") + visible(result["bundle"]),
        "where": visible(where),
        "sentences": [*map(visible, result["sentences"])],
        "notes": [visible(note) for note in (*result["notes"], *notes, *result.get("remedy_notes", ()))],
        "tables": [table for table in tables if table.rows],
    }


def next_said(spike: Spike, replays: Sequence[Result]) -> str:
    """The next thing to do about a spike: the advice of a replay with all remedies, or else the next command."""
    for result in replays:
        if mini_batch_of(result) == spike.mini_batch and result["units"] and "remedy_notes" in result:
            return f"In a replay, {lowered(recommended(result)[1])}"
    return spike.next_said


def _other(name: str, i: int) -> Spec:
    """A column for another way of computing."""
    return Column(visible(name), "num"), lambda row: short(next(iter(row["others"][i:]), None))


def _text(head: str, name: str, kind: str = "") -> Spec:
    return Column(head, kind), lambda row: visible(row[name] or "–")


_PLACE: Sequence[Spec] = (
    *(index("Rank", "rank"), index("Row", "row"), index("Position", "position"), index("Token id", "token_id")),
    *(figure("In training", "grad_norm"), figure("Replayed", "replayed")),
)
_LARGEST: Sequence[Spec] = (
    *(figure("Log p", "log_prob"), figure("Replayed", "replayed_log_prob"), _text("Largest layer", "layer")),
    *(figure("In training", "layer_norm"), figure("Replayed", "replayed_layer_norm")),
)
_SWITCH: Sequence[Spec] = (
    *(_text("Switch", "name", "row"), figure("Norm", "norm")),
    *(figure("Log-probs differ by up to", "log_probs"), figure("Culprit", "culprit")),
)
# Best first, with the overrides to copy.
_REMEDY: Sequence[Spec] = (
    _text("By", "name", "row"),
    figure("Norm", "norm"),
    (Column("Left", "num"), lambda row: percent(row["left"])),
    (Column("Under its threshold", "num"), lambda row: "yes" if row["under"] else "no"),
    (Column("Ordinary moved", "num"), lambda row: percent(row["ordinary_moved"])),
    (Column("Masked", "num"), lambda row: str(row["masked"]["tokens"])),
    (Column("Of them culprits", "num"), lambda row: str(row["masked"]["culprits"])),
    _text("Meaning", "meaning"),
    (Column("Override", "code"), lambda row: row["override"] or ""),
)
