# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Prints a replay's result to the terminal. It needs rich."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..report.command import TABLE_ROWS
from ..report.figures import short, visible
from ..report.reading import Evidence
from ..report.summary import summarize
from ..report.terminal import new_console, print_summary, titled

# The columns of texts.
_TEXTS = ("layer", "largest layer", "by", "remedy", "meaning", "switch")
_SWITCH_COLUMNS = ("norm", "log-probs differ by up to", "culprit")


def print_result(result: Mapping[str, Any]) -> None:
    """Prints what `build_result` returned."""
    step = "" if result["global_step"] is None else f", step {result['global_step']}"
    where = f"{result['model']}   {result['variant']} on {result['device']}   in training {result['recorded']}"
    console = _print_head(f"Replay of {result['bundle']}{step}", where, result["sentences"], result["notes"])
    measured = "remedy_notes" in result
    remedies = _measured_remedies(result) if measured else _remedies(result)
    for table in (_tokens(result), _units(result), _layers(result), _switches(result), remedies):
        if table.row_count:
            console.print()
            console.print(table)
    if measured:
        console.print()
        for row in result["remedies"]:
            if row["override"] is not None:
                console.print(Text(visible(f"{row['name']}: {row['override']}"), style="dim"), soft_wrap=True)
        notes = [f"{row['name']}: {row['note']}" for row in result["remedies"] if row["note"] is not None]
        for note in [*notes, *result["remedy_notes"]]:
            console.print(Text(visible(note), style="yellow"))
    console.print()


def print_search(
    bundle: str, where: str, sentences: Sequence[str], notes: Sequence[str], evidence: Evidence | None
) -> None:
    """Prints what a search found.

    Args:
        bundle (str): The bundle's name.
        where (str): With which model, and how, it was computed.
        sentences (Sequence[str]): What is to be said.
        notes (Sequence[str]): What is missing.
        evidence (Evidence, optional): What is printed as the report does; None if nothing was found.
    """
    console = _print_head(f"Search of {bundle}", where, sentences, notes)
    if evidence is None:
        console.print()
    else:
        print_summary(summarize(evidence, TABLE_ROWS))


def _print_head(title: str, where: str, sentences: Sequence[str], notes: Sequence[str]) -> Console:
    console = new_console()
    console.print(Text.assemble("\n", (visible(title), "bold")))
    console.print(Text(visible(where), style="dim"))
    console.print()
    for texts, style in ((sentences, ""), (notes, "yellow")):
        for text in texts:
            console.print(Text(visible(text), style=style))
    return console


def _table(title: str, *columns: str) -> Table:
    table = titled(title)
    for column in columns:
        table.add_column(
            visible(column),
            justify="left" if column in _TEXTS else "right",
        )
    return table


def _tokens(result: Mapping[str, Any]) -> Table:
    names = ("rank", "row", "position", "token id", "in training", "replayed", *result["variants"])
    table = _table("Gradient norms of tokens", *names, "log p", "replayed", "largest layer", "in training", "replayed")
    for token in result["tokens"]:
        style = "bold" if token["culprit"] else "dim"
        values = [
            *(str(token[name]) for name in ("rank", "row", "position", "token_id")),
            *map(short, (token["grad_norm"], token["replayed"], *token["others"])),
            *map(short, (token["log_prob"], token["replayed_log_prob"])),
            visible(token["layer"] or "–"),
            *map(short, (token["layer_norm"], token["replayed_layer_norm"])),
        ]
        table.add_row(*(Text(value, style=style) for value in values))
    return table


def _units(result: Mapping[str, Any]) -> Table:
    names = ("rank", "micro-batch", "rows", "threshold", "in training", "replayed", *result["variants"])
    table = _table("Gradient norms of micro-batches", *names, "without culprits")
    for unit in result["units"]:
        values = (unit["threshold"], unit["norm"], unit["replayed"], *unit["others"], unit["rest"])
        table.add_row(*(str(unit[name]) for name in ("rank", "micro_batch", "rows")), *map(short, values))
    return table


def _layers(result: Mapping[str, Any]) -> Table:
    table = _table("The first micro-batch by layer", "layer", "in training", "replayed", *result["variants"])
    for layer in result["layers"]:
        values = (layer["norm"], layer["replayed"], *layer["others"])
        table.add_row(Text(visible(layer["layer"])), *map(short, values))
    return table


def _switches(result: Mapping[str, Any]) -> Table:
    table = _table("What each switch changes in the first micro-batch", "switch", *_SWITCH_COLUMNS)
    for row in result.get("switches", ()):
        table.add_row(Text(visible(row["name"])), *map(short, (row["norm"], row["log_probs"], row["culprit"])))
    return table


def _remedies(result: Mapping[str, Any]) -> Table:
    table = _table("What would be left of the first micro-batch's gradient", "by", "norm", "meaning")
    for remedy in result["remedies"]:
        table.add_row(remedy["name"], short(remedy["norm"]), Text(visible(remedy["meaning"]), style="dim"))
    return table


def _measured_remedies(result: Mapping[str, Any]) -> Table:
    names = ("norm", "left", "under its threshold", "ordinary moved", "masked", "culprits")
    table = _table("Which remedy fits: the first micro-batch's gradient", "remedy", *names, "meaning")
    for row in result["remedies"]:
        masked = row["masked"]
        values = (
            short(row["norm"]),
            _percent(row["left"]),
            "yes" if row["under"] else "no",
            _percent(row["ordinary_moved"]),
            *(str(masked[name]) if masked["tokens"] else "" for name in ("tokens", "culprits")),
        )
        style = "bold" if row["under"] else "dim"
        meaning = Text(visible(row["meaning"]), style="dim")
        table.add_row(*(Text(visible(value), style=style) for value in (row["name"], *values)), meaning)
    return table


def _percent(share: float | None) -> str:
    if share is None:
        return "–"
    if share >= 10:
        return f"{share:,.0f} times"
    return f"{share:.2%}" if 0.0001 <= share < 0.01 else "under 0.01%" if 0 < share < 0.01 else f"{share:.1%}"
