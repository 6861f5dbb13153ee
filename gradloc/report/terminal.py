# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Draws the view in the terminal. It needs rich."""

import os
import sys
from collections.abc import Sequence
from dataclasses import replace

from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from .view import Cell, Column, Table, View

# How many culprits of a single spike are listed.
_SHORT = 5
# Of a warning, of one that the largest spike's verdict says as well, of a change, and of drills.
_STYLES = dict.fromkeys(("", "said"), ("bold yellow", "yellow"))
_STYLES |= {"change": ("", ""), "found": ("green", ""), "failed": ("bold red", "red")}
# Of a token with its context: under the first number, other columns are left out; the second is the least.
_CONTEXT_WIDTH, _TOKEN_WIDTH = 30, 14


def print_report(view: View, everything: bool, short: bool = False) -> None:
    """Prints a view that was built without details.

    Args:
        everything (bool): Whether to print all that is known, and not only what is to be done.
        short (bool): Whether of the culprits of a single spike, few are listed.
    """
    console = new_console()
    console.print()
    for text in view.alarms:
        console.print(Text(text, style="bold red"))
    _print_list(console, view.identities)
    for text, more, kind in (*view.warnings, *view.drills):
        if everything or kind != "said":
            _print_list(console, [text, *more], *_STYLES[kind])
    _print_list(console, view.opening)
    tables = {name: table for name, table in view.tables.items() if table.rows}
    has_spikes = "happened" in tables
    if has_spikes and not everything:
        first = next(filter(tables.get, ("spikes", "culprits", "parts", "suspected")), "happened")
        tables = {first: _shortened(tables[first]) if short and first != "spikes" else tables[first]}
    elif view.facts:
        facts = (f"{name}: {value}" + (f" ({more})" if more else "") for name, value, more in view.facts)
        console.print(Text("   ".join(facts), style="dim"))
    for name, table in tables.items():
        print_table(console, table)
        if name == "clips":
            console.print(Text(view.texts["clips-how"], style="dim"))
    if "clips-hint" in view.texts:
        console.print(Text.assemble("\n", (view.texts["h-clips"], "bold"), "\n", view.texts["clips-hint"]))
    if view.replays and everything:
        said = [[replay["step"], " ".join(replay["sentences"])] for replay in view.replays]
        print_table(console, Table("Replays", (Column("Step", "num"), Column("")), said))
    if view.notes:
        console.print(Text("\n" + "\n".join(view.notes), style="yellow"))
    if has_spikes and not everything:
        console.print(Text("\nMore: --all, or --html report.html", style="dim"))
    console.print()


def _print_list(console: Console, texts: Sequence[str], style: str = "bold", style_of_more: str = "") -> None:
    """Prints a sentence, and below it what belongs to it."""
    for place, text in enumerate(texts):
        shown = Text(f"  {text}", style_of_more) if place else Text(text, style)
        console.print(shown, soft_wrap="`" in text)  # a command is to be copied


def _shortened(table: Table) -> Table:
    """The first rows of a table."""
    absent = len(table.rows) - _SHORT
    return table if absent <= 0 else replace(table, rows=table.rows[:_SHORT], more=f"{absent:,} more with --all")


def print_texts_and_tables(texts: Sequence[str], shown: Sequence[Table], notes: Sequence[str] = ()) -> None:
    """Prints texts, then tables, then notes."""
    console = new_console()
    console.print()
    for text in texts:
        console.print(Text(text))
    for table in shown:
        print_table(console, table)
    for note in notes:
        console.print(Text(note, style="yellow"))
    console.print()


def new_console() -> Console:
    """The terminal; what is no terminal and has no width is taken to be wide."""
    return Console(highlight=False, width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else 140)


def print_table(console: Console, table: Table) -> None:
    """Prints a table, with as many columns as the terminal is wide enough for."""
    kept, most = _fitting(table, console.width)
    drawn = RichTable(box=None, padding=(0, 2, 0, 0))
    for column in (table.columns[place] for place in kept):
        drawn.add_column(
            column.name[:1].lower() + column.name[1:] if len(column.name) > 1 else column.name,
            justify="right" if column.kind == "num" else "left",
            no_wrap=column.kind in ("num", "token", "badge"),
            style="bold" if column.kind in ("row", "badge") else "",
        )
    for row in table.rows:
        drawn.add_row(*(_cell(row[place], table.columns[place].kind, most) for place in kept))
    console.print()
    if table.title:
        console.print(Text(table.title, style="bold"))  # as wide as the terminal, not as the table
    console.print(drawn)
    if table.more:
        console.print(Text(table.more, style="dim"))
    for row in table.rows:
        for cell, column in zip(row, table.columns, strict=True):
            if column.kind == "code" and cell:
                console.print(Text(f"{row[0]}: {cell}", style="dim"), soft_wrap=True)  # to be copied


def _fitting(table: Table, width: int) -> tuple[list[int], int]:
    """The columns to show, and the width of a token in its context."""
    kept = [place for place, column in enumerate(table.columns) if column.kind != "code"]
    order = sorted((place for place in kept if table.columns[place].drop), key=lambda at: table.columns[at].drop)
    widths = {place: _width(table.columns[place].name, [row[place] for row in table.rows]) for place in kept}
    least = _CONTEXT_WIDTH if 0 in widths.values() else 0
    while (most := width - sum(widths[place] for place in kept)) < least and order:
        kept.remove(order.pop(0))
    return kept, max(most - 2, _TOKEN_WIDTH)


def _width(name: str, cells: Sequence[Cell]) -> int:
    """With the space after it; a token in its context takes what is left."""
    texts = [name, *(text for text in cells if isinstance(text, str))]
    return 0 if len(texts) <= len(cells) else max(len(line) for text in texts for line in text.split("\n")) + 2


def _cell(cell: Cell, kind: str, most: int) -> Text:
    if isinstance(cell, str) or kind == "link":
        return Text(cell if isinstance(cell, str) else cell[0])
    words = Text.assemble((cell[0], "bold red"), "  ", cell[1])
    words.truncate(most, overflow="ellipsis")
    return words
