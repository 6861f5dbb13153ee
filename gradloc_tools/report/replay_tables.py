# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""A replay's result as texts and tables, which terminal and page show."""

from collections.abc import Mapping, Sequence
from typing import Any

from .figures import percent, short, visible
from .view import Cell, Column, Table

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


def _table(title: str, texts: Sequence[str], figures: Sequence[str], rows: Sequence[Sequence[Cell]]) -> Table:
    """A table whose first columns are texts; the others but "meaning" and "override" are numbers."""
    kinds = {"Meaning": "", "Override": "code", "Largest layer": ""}
    columns = [Column(name, "row") for name in texts]
    columns += [Column(visible(name), kinds.get(name, "num")) for name in figures]
    return Table(title, columns, rows)


def _tokens(result: Result) -> Table:
    where, before = ("rank", "row", "position", "token_id"), ("In training", "Replayed")
    names = ("Rank", "Row", "Position", "Token id", *before, *result["variants"])
    rows = [
        [
            *(str(token[name]) for name in where),
            *map(short, (token["grad_norm"], token["replayed"], *token["others"])),
            *map(short, (token["log_prob"], token["replayed_log_prob"])),
            visible(token["layer"] or "–"),
            *map(short, (token["layer_norm"], token["replayed_layer_norm"])),
        ]
        for token in result["tokens"]
    ]
    return _table("Gradient norms of tokens", (), (*names, "Log p", "Replayed", "Largest layer", *before), rows)


def _units(result: Result) -> Table:
    names = ("Rank", "Micro-batch", "Rows", "Threshold", "In training", "Replayed", *result["variants"])
    rows = [
        [
            *(str(unit[name]) for name in ("rank", "micro_batch", "rows")),
            *map(short, (unit["threshold"], unit["norm"], unit["replayed"], *unit["others"], unit["rest"])),
        ]
        for unit in result["units"]
    ]
    return _table("Gradient norms of micro-batches", (), (*names, "Without culprits"), rows)


def _layers(result: Result) -> Table:
    rows = [
        [visible(layer["layer"]), *map(short, (layer["norm"], layer["replayed"], *layer["others"]))]
        for layer in result["layers"]
    ]
    names = ("In training", "Replayed", *result["variants"])
    return _table("The first micro-batch by layer", ("Layer",), names, rows)


def _switches(result: Result) -> Table:
    rows = [
        [visible(row["name"]), *map(short, (row["norm"], row["log_probs"], row["culprit"]))]
        for row in result.get("switches", ())
    ]
    names = ("Norm", "Log-probs differ by up to", "Culprit")
    return _table("What each switch changes in the first micro-batch", ("Switch",), names, rows)


def _remedies(result: Result) -> Table:
    """Best first, with the overrides to copy."""
    names = ("Norm", "Left", "Under its threshold", "Ordinary moved", "Masked", "Of them culprits", "Meaning")
    rows = [
        [
            visible(row["name"]),
            short(row["norm"]),
            percent(row["left"]),
            "yes" if row["under"] else "no",
            percent(row["ordinary_moved"]),
            *(str(row["masked"][name]) for name in ("tokens", "culprits")),
            visible(row["meaning"]),
            row["override"] or "",
        ]
        for row in result["remedies"]
    ]
    return _table("Which remedy fits: the first micro-batch's gradient", ("By",), (*names, "Override"), rows)
