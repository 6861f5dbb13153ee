# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""A replay's result as texts and tables, which terminal and page show."""

from collections.abc import Mapping, Sequence
from typing import Any

from .figures import percent, short, visible
from .spike_view import Spec, figure, index, table_of
from .view import Column, Table

Result = Mapping[str, Any]


def replay_tables(result: Result) -> dict[str, Any]:
    """A result as `title`, `where` it was computed, `sentences`, `notes`, `tables`, and `step`."""
    step = "–" if result["global_step"] is None else str(result["global_step"])
    where = f"{result['model']}, {result['variant']} on {result['device']}; in training {result['recorded']}"
    notes = [f"{row['name']}: {row['note']}" for row in result["remedies"] if row.get("note") is not None]
    tables = (_tokens(result), _units(result), _layers(result), _switches(result), _remedies(result))
    return {
        "step": step,
        "title": ("" if step == "–" else f"Step {step}: ") + visible(result["bundle"]),
        "where": visible(where),
        "sentences": [*map(visible, result["sentences"])],
        "notes": [visible(note) for note in (*result["notes"], *notes, *result.get("remedy_notes", ()))],
        "tables": [table for table in tables if table.rows],
    }


def _others(result: Result) -> list[Spec]:
    """A column for each other way of computing."""

    def column(name: str, i: int) -> Spec:
        return Column(visible(name), "num"), lambda row: short(next(iter(row["others"][i:]), None))

    return [column(name, i) for i, name in enumerate(result["variants"])]


def _text(head: str, name: str, kind: str = "") -> Spec:
    return Column(head, kind), lambda row: visible(row[name] or "–")


def _tokens(result: Result) -> Table:
    specs = (
        *(index("Rank", "rank"), index("Row", "row"), index("Position", "position"), index("Token id", "token_id")),
        *(figure("In training", "grad_norm"), figure("Replayed", "replayed"), *_others(result)),
        *(figure("Log p", "log_prob"), figure("Replayed", "replayed_log_prob"), _text("Largest layer", "layer")),
        *(figure("In training", "layer_norm"), figure("Replayed", "replayed_layer_norm")),
    )
    return table_of("Gradient norms of tokens", specs, result["tokens"])


def _units(result: Result) -> Table:
    specs = (
        *(index("Rank", "rank"), index("Micro-batch", "micro_batch"), index("Rows", "rows")),
        *(figure("Threshold", "threshold"), figure("In training", "norm"), figure("Replayed", "replayed")),
        *(*_others(result), figure("Without culprits", "rest")),
    )
    return table_of("Gradient norms of micro-batches", specs, result["units"])


def _layers(result: Result) -> Table:
    norms = figure("In training", "norm"), figure("Replayed", "replayed")
    specs = (_text("Layer", "layer", "row"), *norms, *_others(result))
    return table_of("The first micro-batch by layer", specs, result["layers"])


def _switches(result: Result) -> Table:
    norms = figure("Norm", "norm"), figure("Log-probs differ by up to", "log_probs"), figure("Culprit", "culprit")
    specs = (_text("Switch", "name", "row"), *norms)
    return table_of("What each switch changes in the first micro-batch", specs, result.get("switches", ()))


def _remedies(result: Result) -> Table:
    """Best first, with the overrides to copy."""
    specs: Sequence[Spec] = (
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
    return table_of("Which remedy fits: the first micro-batch's gradient", specs, result["remedies"])
