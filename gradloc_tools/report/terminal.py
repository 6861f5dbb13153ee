# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Prints the summary to the terminal. It needs rich."""

import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from .comparison_table import remarks, tables
from .figures import count, culprit_factor, number, percent, short, threshold_factor, visible
from .meanings import DIAGNOSES, NOT_APPLIED, SOURCES
from .remedies import advice_by_source
from .summary import token_name
from .token_clips import EXPLANATION, clipped_token_name, done_to
from .verdicts import brief, lowered

Summary = Mapping[str, Any]

# The maximum width of the sparkline of a run's steps, in columns.
_SPARKLINE_WIDTH = 60
# Of a token with its context: under the first number, other columns are left out; the second is the least.
_CONTEXT_WIDTH, _TOKEN_WIDTH = 30, 14


def print_summary(summary: Summary) -> None:
    """Prints what `summarize` returns."""
    console = new_console()
    console.print()
    for fault in summary["faults"]:
        text = f"A fault was planted in this run on purpose: {visible(fault)}"
        console.print(Text(text, style="bold red"))
    if summary["lost_spikes"]:
        console.print(Text(summary["lost_spikes"], style="bold red"))
    for sentence in summary["merged"]:
        console.print(Text(sentence, style="bold yellow"))
    for warning in summary["warnings"]:
        console.print(Text(f"{warning['when']}: {visible(warning['sentence'])}", style="bold yellow"))
        console.print(Text(f"  {visible(warning['check'])}", style="yellow"))
    for drill in summary["drills"]:
        console.print(Text(drill["text"], style="green" if drill["found"] else "bold red"))
        for advice in drill["advice"]:
            console.print(Text(f"  {visible(advice)}", style="red"))
    if not summary["events"]:
        since = "" if summary["since"] is None else f" from step {summary['since']} on"
        none = "No gradient spike could be read" if summary["lost_spikes"] else "No gradient spike"
        console.print(f"{none} in {visible(summary['path'])}{since}.", markup=False)
        if summary["steps"] is not None:
            console.print(Text(_run_level(summary["steps"]), style="dim"))
    else:
        _print_verdict(console, summary)
        _print_totals(console, summary)
        for table in _tables(console, summary):
            console.print()
            console.print(table)
        if summary["culprits"] and summary["tokens"][0]["culprits"] > 1:
            counts = [f"{quoted(entry['token'][:40])} ({entry['culprits']})" for entry in summary["tokens"]]
            console.print(Text.assemble("\n", ("Most frequent culprits  ", "bold"), "   ".join(counts)))
    if summary["token_clip"] is not None:
        _print_clips(console, summary["token_clip"])
    if summary["replays"]:
        console.print()
        console.print(_sentences("Replays", ((replay, " ".join(replay["sentences"])) for replay in summary["replays"])))
    if warnings := _warnings(summary):
        console.print(Text("\n" + "\n".join(warnings), style="yellow"))
    console.print()


def print_comparison(comparison: Mapping[str, Any]) -> None:
    """Prints what `compare` returns."""
    console = new_console()
    console.print()
    for remark in remarks(comparison):
        console.print(visible(remark), markup=False)
    for table in tables(comparison):
        console.print()
        shown = titled(table.title)
        for name in table.columns:
            shown.add_column(name)
        for row in table.rows:
            shown.add_row(*(Text(visible(cell)) for cell in row))
        console.print(shown)
    console.print()


def new_console() -> Console:
    """The terminal; what is no terminal and has no width is taken to be wide."""
    return Console(highlight=False, width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else 140)


def quoted(token: str) -> str:
    """A token whose spaces at the ends can be seen."""
    text = visible(token)
    bare = text.strip(" ")
    start = text.index(bare) if bare else len(text)
    return "␣" * start + bare + "␣" * (len(text) - start - len(bare))


def _print_verdict(console: Console, summary: Summary) -> None:
    """What the spikes come from, what to do about the largest, and how to check it."""
    first, last = summary["first_step"], summary["last_step"]
    where = "" if first is None else f" in step {first}" if first == last else f" in steps {first} to {last}"
    title = summary["named"] + where
    largest = summary["largest_events"][0]
    if summary["events"] == 1:
        console.print(Text(f"{title}: {lowered(visible(_opening(largest)))}", style="bold"))
    else:
        said = "" if summary["verdict"] is None else f": {lowered(visible(summary['verdict']))}"
        console.print(Text(f"{title}{said}.", style="bold"))
        step = "" if largest["global_step"] is None else f", in step {largest['global_step']}"
        console.print(Text(f"The largest{step}: {lowered(visible(_opening(largest)))}"))
    if largest["verdict"] is not None:
        console.print(Text(visible(largest["verdict"]["check"])), soft_wrap=True)  # it may have a command
    command = largest["next_command"]
    if command is not None and (largest["verdict"] is None or command not in largest["verdict"]["check"]):
        console.print(Text(f"Next: `{visible(command)}`"), soft_wrap=True)


def _opening(event: Mapping[str, Any]) -> str:
    """What is said first of an event; one of an older release has no verdict."""
    return event["summary"] if event["verdict"] is None else event["verdict"]["sentence"]


def _happened(summary: Summary) -> list[tuple[Mapping[str, Any], str]]:
    """What is still to be said of the events listed: the first one is the largest, whose verdict is said already."""
    found = []
    for place, event in enumerate(summary["largest_events"]):
        verdict = event["verdict"]
        parts = [f"{brief(verdict)}."] if place and verdict is not None else []
        parts += [event["summary"]] if place or verdict is not None else []
        if sentence := " ".join(filter(None, parts)):
            found.append((event, sentence))
    return found


def _print_totals(console: Console, summary: Summary) -> None:
    first, last = summary["first_step"], summary["last_step"]
    lowest, highest = short(summary["thresholds"][0]), short(summary["thresholds"][-1])
    threshold = lowest if lowest == highest else f"{lowest} to {highest}"
    facts = [count(summary["culprits"], "culprit token"), f"threshold {threshold}"]
    if summary["culprits"]:
        facts.append(f"largest token gradient {short(summary['largest_grad_norm'])}")
    facts.append(f"{count(summary['passes'], 'extra pass', 'extra passes')}, {summary['seconds']:.1f} s")
    console.print(Text("   ".join(facts), style="dim"))
    if first != last:
        sparkline = _sparkline(summary["events_by_step"], _SPARKLINE_WIDTH)
        console.print(Text.assemble("\n", (f"{first} ", "dim"), (sparkline, "red"), (f" {last}", "dim")))


def _tables(console: Console, summary: Summary) -> Iterator[Table]:
    """The tables to show, in order."""
    every = len(summary["largest_events"]) == summary["events"]
    if happened := _happened(summary):
        yield _sentences("What happened" if every else "What happened in the largest spikes", happened)
    yield _diagnoses(summary)
    if explained := [event for event in summary["largest_events"] if event["explanation"] is not None]:
        all_explained = len(explained) == summary["events"]
        title = "What the culprits explain" if all_explained else "What the culprits of the largest spikes explain"
        yield _sentences(title, ((event, event["explanation"]) for event in explained))
    if summary["diffuse"]:
        yield _diffuse_parts(summary["diffuse"])
    if summary["suspected"]:
        yield _suspected(summary["suspected"], summary["suspected_title"], console.width)
    if summary["culprits"]:
        yield _sources(summary)
        yield _culprits(summary, console.width)


def titled(title: str | None) -> Table:
    """A table without borders or columns."""
    return Table(title=title, title_justify="left", title_style="bold", box=None, padding=(0, 2, 0, 0))


def _add_columns(table: Table, *names: str, **options: Any) -> None:
    """Columns whose texts are not broken into lines."""
    for name in names:
        table.add_column(name, no_wrap=True, **options)


def _words(name: str, row: Mapping[str, Any], most: int, with_context: bool, style: str = "bold red") -> Text:
    """A token, with or without its context, of at most `most` columns."""
    context = visible(f"  {_context_around(row)}") if with_context else ""
    words = Text.assemble((quoted(name), style), context)
    words.truncate(most, overflow="ellipsis")
    return words


def _diagnoses(summary: Summary) -> Table:
    table = titled("What was found")
    table.add_column("diagnosis", style="bold")
    table.add_column("spikes", justify="right")
    table.add_column("what to look at", style="dim")
    for diagnosis, spikes in summary["diagnoses"].items():
        table.add_row(diagnosis, str(spikes), DIAGNOSES[diagnosis])
    return table


def _sentences(title: str, sentences: Iterable[tuple[Mapping[str, Any], str]]) -> Table:
    """A sentence for each of some events."""
    table = titled(title)
    table.add_column("step", justify="right")
    table.add_column("")
    for event, sentence in sentences:
        table.add_row(_step(event), Text(visible(sentence)))
    return table


def _diffuse_parts(parts: Sequence[Mapping[str, Any]]) -> Table:
    table = titled("The largest parts over their threshold that no small set of tokens explains")
    for name in ("step", "rank", "rows", "tokens", "norm", "× threshold"):
        table.add_column(name, justify="right")
    table.add_column("largest tokens measured (row, position: norm, share)", style="dim")
    for part in parts:
        table.add_row(
            _step(part),
            "several" if part["rank"] is None else str(part["rank"]),
            part["rows"],
            str(part["tokens"]),
            short(part["norm"]),
            short(threshold_factor(part)),
            "; ".join(map(_measured_token, part["largest_tokens"])),
        )
    return table


def _measured_token(token: Mapping[str, Any]) -> str:
    share = "" if token["share"] is None else f", {percent(number(token['share']))}"
    return f"{token['row']}, {token['position']}: {short(token['grad_norm'])}{share}"


def _suspected(tokens: Sequence[Summary], title: str, width: int) -> Table:
    """The tokens of spikes that were only recorded, with as many columns as the terminal is wide enough for."""
    figures = {name: partial(_figure, name) for name in ("suspicion", "ratio", "advantage", "reward")}
    places, optional = ("step", "rank", "row", "position"), ("reward", "rank", "advantage", "ratio")
    return _token_table(title, tokens, places, figures, optional, width, "bold")


def _sources(summary: Summary) -> Table:
    table = titled("What looks wrong")
    table.add_column("source", style="bold")
    table.add_column("culprits", justify="right")
    table.add_column("share", justify="right")
    table.add_column("rule, and what to do", style="dim")
    advice = advice_by_source(summary["replays"])
    for source, culprits in summary["sources"].items():
        rule = f"{SOURCES[source]}\n{visible(advice[source])}"
        table.add_row(source, str(culprits), f"{culprits / summary['culprits']:.0%}", rule)
    return table


def _culprits(summary: Summary, width: int) -> Table:
    """The largest culprits, with as many columns as the terminal is wide enough for."""
    culprits = summary["largest_culprits"]
    title = "The culprits" if len(culprits) == summary["culprits"] else "The largest culprits"
    figures: dict[str, Callable[[Summary], str]] = {
        "norm": lambda row: short(row["grad_norm"]),
        "× threshold": lambda row: short(culprit_factor(row)),
        **{name: partial(_figure, name) for name in ("ratio", "advantage", "reward")},
    }
    return _token_table(title, culprits, ("step", "rank"), figures, ("reward", "rank", "advantage", "ratio"), width)


def _figure(name: str, row: Mapping[str, Any]) -> str:
    return short(row[name])


def _token_table(
    title: str,
    rows: Sequence[Summary],
    places: Sequence[str],
    figures: Mapping[str, Callable[[Summary], str]],
    optional: Sequence[str],
    width: int,
    style: str = "bold red",
) -> Table:
    """Tokens in their contexts; in a narrow terminal columns are left out, so that the context and the source stay.

    Args:
        title (str): The table's.
        rows (Sequence[Mapping]): The tokens.
        places (Sequence[str]): The columns before the token: the step, and others as the rows have them.
        figures (Mapping): What is in the columns after it, by name.
        optional (Sequence[str]): The columns that may be left out, the first one first.
        width (int): Of the terminal, in columns.
        style (str): The token's.
    """
    cells = {name: [_step(row) if name == "step" else str(row[name]) for row in rows] for name in places}
    cells |= {name: [text(row) for row in rows] for name, text in figures.items()}
    cells["source"] = [row["source"] for row in rows]
    left = [*optional]
    while (most := width - sum(map(_column_width, cells, cells.values())) - 2) < _CONTEXT_WIDTH and left:
        cells.pop(left.pop(0), None)
    table = titled(title)
    words = [_words(token_name(row), row, max(most, _TOKEN_WIDTH), True, style) for row in rows]
    before = [name for name in places if name in cells]
    after = [name for name in figures if name in cells]
    _add_columns(table, *before, justify="right")
    _add_columns(table, "token in its context")
    _add_columns(table, *after, justify="right")
    _add_columns(table, "source")
    for index, token in enumerate(words):
        of_row = {name: texts[index] for name, texts in cells.items()}
        figures_of_row = (of_row[name] for name in (*after, "source"))
        table.add_row(*(of_row[name] for name in before), token, *figures_of_row)
    return table


def _column_width(name: str, texts: Sequence[str]) -> int:
    """With the space after it."""
    return max(map(len, (name, *texts))) + 2


def _print_clips(console: Console, clips: Summary) -> None:
    console.print(Text.assemble("\n", (clips["title"], "bold")))
    console.print(Text(visible(" ".join(clips["sentences"]))))
    if clips["largest_tokens"]:
        console.print(Text(EXPLANATION, style="dim"))
        console.print(_clipped_tokens(clips["largest_tokens"], console.width))


def _clipped_tokens(rows: Sequence[Summary], width: int) -> Table:
    """The tokens furthest over TokenClip's bounds, with as many columns as the terminal is wide enough for."""
    with_place, with_context = width >= 80, width >= 120
    table = titled(None)
    _add_columns(table, "step", justify="right")
    _add_columns(table, "token in its context" if with_context else "token", "first over at")
    _add_columns(table, "× usual", justify="right")
    _add_columns(table, "signal")
    _add_columns(table, *(("rank", "row", "position", "reward") if with_place else ()), justify="right")
    _add_columns(table, *(("data source", "spike") if with_context else ()))
    most = width - 100 if with_context else 20 if with_place else 14
    for row in rows:
        boundary, source = Text(visible(row["boundary"])), Text(visible(row["data_source"] or "–"))
        boundary.truncate(18, overflow="ellipsis")
        source.truncate(14, overflow="ellipsis")
        place = (str(row["rank"]), str(row["row"]), str(row["position"]), short(row["reward"]))
        table.add_row(
            _step(row),
            _words(clipped_token_name(row), row, most, with_context),
            boundary,
            short(row["multiple"]),
            done_to(row),
            *(place if with_place else ()),
            *((source, "yes" if row["spike"] else "") if with_context else ()),
        )
    return table


def _run_level(steps: Mapping[str, Any]) -> str:
    facts = [f"{count(steps['count'], 'step')}, {steps['first']} to {steps['last']}"]
    if steps["highest_spike_margin"] is not None:
        margin, step = short(steps["highest_spike_margin"]), steps["highest_spike_margin_step"]
        facts.append(f"largest micro-batch norm per token over its threshold {margin}, in step {step}")
    return "   ".join(facts)


def _context_around(culprit: Mapping[str, Any], before: int = 12) -> str:
    """The context from shortly before the culprit on: a column is narrow."""
    context = culprit["context"] or ""
    start = max(context.find(f"«{culprit['token']}»") - before, 0)
    return ("…" if start else "") + context[start:]


def _warnings(summary: Summary) -> list[str]:
    warnings = [f"Note in the file: {visible(note)}." for note in summary["notes"]]
    if incomplete := summary["incomplete_events"]:
        warnings.append(f"{count(incomplete, 'search', 'searches')} ended early: there may be more culprits.")
    for error, searches in summary["errors"].items():
        warnings.append(f"{count(searches, 'search', 'searches')} failed with an error: {visible(error).rstrip('.')}.")
    for action, spikes in summary["not_applied"].items():
        warnings.append(f"{count(spikes, 'spike')}, with spike_action={action}: {NOT_APPLIED[action]}")
    warnings += summary["other_versions"]
    if summary["skipped_lines"]:
        warnings.append(f"{count(summary['skipped_lines'], 'line')} skipped: malformed or unfinished.")
    return warnings


def _step(of: Mapping[str, Any]) -> str:
    return "–" if of["global_step"] is None else str(of["global_step"])


def _sparkline(counts: Mapping[int, int], most: int) -> str:
    """How many events there are over the steps, as a row of at most `most` bars."""
    first, last = min(counts), max(counts)
    bars = min(most, last - first + 1)
    heights = [0] * bars
    for step, events in counts.items():
        heights[(step - first) * bars // (last - first + 1)] += events
    return "".join("·" if not h else "▁▂▃▄▅▆▇█"[math.ceil(8 * h / max(heights)) - 1] for h in heights)
