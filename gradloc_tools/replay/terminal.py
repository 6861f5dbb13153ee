# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Prints a replay's result to the terminal. It needs rich."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.text import Text

from ..report.command import TABLE_ROWS
from ..report.figures import visible
from ..report.reading import Evidence
from ..report.replay_tables import replay_tables
from ..report.terminal import new_console, print_report, print_table


def print_result(result: Mapping[str, Any]) -> None:
    """Prints what `build_result` returned."""
    shown = replay_tables(result)
    _print_head(f"Replay of {shown['title']}", shown["where"], shown["sentences"], ())
    console = new_console()
    for table in shown["tables"]:
        print_table(console, table)
    for note in shown["notes"]:
        console.print(Text(note, style="yellow"))
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
    _print_head(f"Search of {bundle}", where, sentences, notes)
    if evidence is None:
        print()
    else:
        print_report(evidence, TABLE_ROWS)


def _print_head(title: str, where: str, sentences: Sequence[str], notes: Sequence[str]) -> None:
    console = new_console()
    console.print(Text.assemble("\n", (visible(title), "bold")))
    console.print(Text(visible(where), style="dim"))
    console.print()
    for texts, style in ((sentences, ""), (notes, "yellow")):
        for text in texts:
            console.print(Text(visible(text), style=style))
