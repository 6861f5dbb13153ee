# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Builds the view of a run."""

from collections.abc import Mapping, Sequence
from typing import Any

from ..judge.rules import SOURCES
from ..judge.said import lowered
from ..replay.advice import advice_by_source
from ..tools.figures import count, part_of, short, shown, visible
from ..tools.reading import Evidence
from ..tools.spike import Spike, mini_batch_of
from .charts import HINTS, clips_chart, levels, run_chart, steps_or_numbers
from .identities import HINT, identity_rows, remarks_of, said_of
from .replays import next_said, replay_tables
from .spike_view import (
    CULPRITS,
    PART_SPECS,
    SUSPECTED,
    TERMS,
    TOKEN,
    Details,
    of_field,
    spike_view,
    spikes_table,
    table_of,
    token_cell,
    told,
)
from .summary import largest_of, mini_batch_fields, summarize
from .token_clips import EXPLANATION, beside_spike, done_to, signals_of
from .view import Column, Table, View
from .words import DIAGNOSES, FIGURES, brief

Row = Mapping[str, Any]
Summary = Mapping[str, Any]

# How many culprits and clipped tokens the page has, which would be slow with more; the largest.
PAGE_ROWS = 5_000
# How many spikes and culprits the terminal has.
TABLE_ROWS = 20
# How many culprits have their details by default.
DETAILED = 500
# The columns of the page's table of identities.
IDENTITIES = (Column("Identity", "row"), Column("State"), Column("Over the run", "spark"))
_NO_TEXTS = "This page has no prompts, responses or ground truths: the evidence has them. spike_log=texts adds them."


def build(evidence: Evidence, rows: int = PAGE_ROWS, details: int = DETAILED) -> View:
    """Builds the view of a run.

    Args:
        evidence (Evidence): What was read.
        rows (int): How many culprits and clipped tokens are shown, and how many spikes are listed; totals count all.
        details (int): How many culprits have their response, texts and layers: the largest of each spike, then others.
            With 0, as for the terminal, the view has neither single spikes nor charts.
    """
    summary = summarize(evidence, rows)
    culprits = evidence.culprits()
    kept = {*_largest_of_each_first(culprits)[:rows]} if details else range(rows)
    culprits = [pair for i, pair in enumerate(culprits) if i in kept]
    advice = advice_by_source(evidence.replays)
    rules = {source: (rule.meaning, visible(advice[source])) for source, rule in SOURCES.items()}
    view = View(
        title=_title(summary),
        opening=_opening(summary, evidence),
        identities=[*map(visible, said_of(summary["identities"]))],
        alarms=_alarms(summary),
        warnings=remarks_of(evidence, _said_by_verdict(largest_of(evidence, 1))),
        drills=[
            (drill["text"], [*map(visible, drill["advice"])], "found" if drill["found"] else "failed")
            for drill in summary["drills"]
        ],
        facts=_facts(summary),
        notes=[*map(visible, summary["notes"])],
        tables=_tables(summary, evidence, culprits, rules),
        replays=[replay_tables(result) for result in evidence.replays],
        help=[*FIGURES.values()] if evidence.steps else [],
        rules=rules,
    )
    if clips := summary["token_clip"]:
        how = EXPLANATION if clips["largest_tokens"] else ""
        hint = visible(" ".join(clips["sentences"]))
        view.texts |= {"h-clips": clips["title"], "clips-hint": hint, "clips-how": how}
    if details:
        _add_spikes(view, evidence, culprits, details)
        view.texts["lead"] = _lead(summary, evidence)
        if view.identities:
            found = identity_rows(evidence)
            states = [[name, (state, what), line] for _, name, state, _, line, what in found]
            view.tables["identities"] = Table(view.identities[0], IDENTITIES, states, HINT)
            view.help = [*((name, holds) for holds, name, *_ in found), *view.help]
        view.warnings = [remark for remark in view.warnings if remark[2] != "said"]
        view.facts = [] if len(view.spikes) == 1 else view.facts  # those of the only spike are said of it
        if not evidence.texts:
            view.notes = [*view.notes, _NO_TEXTS]
        if len(culprits) < summary["culprits"]:
            shown_are = f"{count(len(culprits), 'culprit')} of {summary['culprits']:,}"
            cut = f"Shown are {shown_are}, the largest of each spike first. The totals count all of them."
            view.notes = [*view.notes, cut]
        _add_charts(view, evidence, summary, culprits)
    return view


def _largest_of_each_first(culprits: Sequence[tuple[Spike, Row]]) -> list[int]:
    """The numbers of culprits, which come the largest first: those of the largest of each spike before the others."""
    largest = {culprits[i][0].index: i for i in reversed(range(len(culprits)))}
    return sorted(range(len(culprits)), key=lambda i: largest[culprits[i][0].index] != i)


def _title(summary: Summary) -> str:
    if not summary["events"]:
        return "No gradient spike could be read" if summary["lost_spikes"] else "No gradient spike"
    first, last = summary["first_step"], summary["last_step"]
    where = "" if first is None else f" in step {first}" if first == last else f" in steps {first} to {last}"
    return str(summary["named"]) + where


def _opening(summary: Summary, evidence: Evidence) -> list[str]:
    """The verdict on the largest spike, and what to do."""
    title, verdicts = _title(summary), summary["verdicts"]
    if not summary["events"]:
        since = "" if summary["since"] is None else f" from step {summary['since']} on"
        return [f"{title} in {visible(summary['path'])}{since}."]
    largest = max(evidence.spikes, key=lambda spike: spike.size)
    said, *todo = filter(None, told(largest, next_said(largest, evidence.replays)).values())
    if summary["events"] == 1:
        found = [f"{title}: {lowered(said)}"]
    elif len(verdicts) == 1 and verdicts[0]["cause"] is not None and verdicts[0]["events"] == summary["events"]:
        found = [f"{title}, all from one cause: {lowered(said)}"]
    else:
        of_all = "" if summary["verdict"] is None else f": {lowered(visible(summary['verdict']))}"
        step = "" if largest.step is None else f", in step {largest.step}"
        found = [f"{title}{of_all}.", f"The largest{step}: {lowered(said)}"]
    return [*found, *todo]


def _alarms(summary: Summary) -> list[str]:
    faults = ", ".join(map(visible, summary["faults"]))
    found = [f"A fault was planted in this run on purpose: {faults}"] if faults else []
    return [*found, *filter(None, [summary["lost_spikes"]])]


def _said_by_verdict(spikes: Sequence[Spike]) -> set[str]:
    """The identities, or names, of the warnings that verdicts say: of each spike, the first with the cause's name."""
    causes = [(spike.event.get("warnings", ()), (spike.verdict or {}).get("cause")) for spike in spikes]
    firsts = (next((each for each in warnings if each["name"] == cause), None) for warnings, cause in causes)
    return {each.get("identity", each["name"]) for each in firsts if each is not None}


def _lead(summary: Summary, evidence: Evidence) -> str:
    """The sentence below the page's title; empty where the verdict on the only spike stands below."""
    if summary["events"]:
        return f"{visible(summary['verdict'])}." if summary["verdict"] and summary["events"] > 1 else ""
    steps = len(levels(evidence))
    where = f" in {count(steps, 'step')}" if steps else ""
    return "" if summary["lost_spikes"] else f"No micro-batch was over its threshold{where}."


def _facts(summary: Summary) -> list[tuple[str, str, str]]:
    if not summary["events"]:
        steps = summary["steps"]
        if steps is None:
            return []
        found = [("Steps", f"{steps['count']:,}", f"{steps['first']} to {steps['last']}")]
        if steps["highest_spike_margin"] is not None:
            name = "Largest micro-batch norm per token over its threshold"
            where = f"in step {steps['highest_spike_margin_step']}"
            found.append((name, short(steps["highest_spike_margin"]), where))
        return found
    ends = (summary["thresholds"][0], summary["thresholds"][-1])
    thresholds = " to ".join(dict.fromkeys(map(short, ends)))
    searched = summary["events"] - summary["diagnoses"].get("unsearched", 0)
    found = [
        ("Spikes", f"{summary['spikes']:,}", "" if summary["spikes"] == summary["events"] else summary["named"]),
        ("Culprit tokens", f"{summary['culprits']:,}", ""),
        ("Largest token gradient", short(summary["largest_grad_norm"]), f"threshold {thresholds}"),
        ("Searches complete", f"{searched - summary['incomplete_events']:,}", f"of {searched:,}"),
    ]
    if clips := summary["token_clip"]:
        of_all = count(clips["mini_batches"], "mini-batch", "mini-batches")
        found.append(("Stopped by TokenClip", f"{clips['stopped']:,}", f"of {of_all} with outlying tokens"))
    return [*found, ("Extra passes", f"{summary['passes']:,}", f"{summary['seconds']:.1f} s in all")]


def _tables(
    summary: Summary, evidence: Evidence, culprits: Sequence[tuple[Spike, Row]], rules: Mapping[str, tuple[str, str]]
) -> dict[str, Table]:
    """The tables in the order of the terminal."""
    listed, events = summary["largest_events"], summary["events"]
    largest = "" if len(listed) == events else "largest "
    tables = {
        "spikes": spikes_table(f"The {largest}spikes", largest_of(evidence, len(listed)) if events > 1 else ()),
        "happened": Table(
            f"What happened in the {largest}spikes" if events > 1 else "What happened",
            (Column("Step", "num"), Column("")),
            [[shown(event["global_step"]), _happened(event, place == 0)] for place, event in enumerate(listed)],
        ),
        "parts": table_of(
            "The largest parts over their threshold that no small set of tokens explains",
            PART_SPECS,
            summary["diffuse"],
        ),
        "suspected": table_of(summary["suspected_title"], SUSPECTED, summary["suspected"]),
        "sources": Table(
            "What the culprits are",
            (Column("Source", "link"), Column("Culprits", "num"), Column("Share", "num"), Column("Rule")),
            [
                [(source, f"?source {source}"), f"{n:,}", part_of(n, summary["culprits"]), rules[source][0]]
                for source, n in summary["sources"].items()
            ],
        ),
        "tokens": Table(
            "The most frequent culprits",
            (Column("Token", "link"), Column("Culprits", "num")),
            [[(name, f"?token {name}"), f"{n:,}"] for name, n in _frequent(summary)],
        ),
        "culprits": table_of(
            "The culprits" if len(culprits) == summary["culprits"] else "The largest culprits",
            CULPRITS,
            [{**mini_batch_fields(spike), **culprit} for spike, culprit in culprits],
        ),
    }
    for name, kept, of in (("spikes", len(listed), events), ("culprits", len(culprits), summary["culprits"])):
        tables[name].more = f"{of - kept:,} smaller ones left out" if of > kept else ""
    return tables | _clip_tables(summary, evidence)


def _happened(event: Row, said: bool) -> str:
    """A spike's summary, and what its culprits explain; its verdict and what to look at, unless they are `said`."""
    verdict, diagnosis = event["verdict"], event["diagnosis"]
    parts = [event["summary"], event["explanation"]]
    if not said:
        parts.insert(0, None if verdict is None or verdict["cause"] is None else f"{brief(verdict)}.")
        parts.append(None if diagnosis == "tokens" else DIAGNOSES[diagnosis])
    return visible(" ".join(filter(None, parts)))


def _clip_tables(summary: Summary, evidence: Evidence) -> dict[str, Table]:
    """The tokens furthest over TokenClip's bounds."""
    clips = summary["token_clip"]
    if clips is None:
        return {}
    spikes = {spike.mini_batch: f"s{spike.index}" for spike in evidence.spikes}
    specs = (
        of_field("global_step"),
        TOKEN,
        (Column("First over at"), lambda row: shown(row["boundary"])),
        of_field("multiple"),
        (Column("Signal"), done_to),
        of_field("rank", 4),
        of_field("row", 5),
        (Column("Position", "num", 6), lambda row: "prompt" if row["position"] < 0 else str(row["position"])),
        of_field("log_prob", 1),
        of_field("reward", 2),
        of_field("data_source", 3),
        (Column("Spike", "link", 7), lambda row: ("yes", spikes[mini_batch_of(row)]) if row["spike"] else "–"),
    )
    return {"clips": table_of(clips["title"], specs, clips["largest_tokens"])}


def _frequent(summary: Summary) -> list[tuple[str, int]]:
    """The tokens that most culprits of several spikes are, if one of them is a culprit twice."""
    tokens = [(token_cell(entry)[0], entry["culprits"]) for entry in summary["tokens"]]
    return tokens if summary["events"] > 1 and tokens and tokens[0][1] > 1 else []


def _add_spikes(view: View, evidence: Evidence, culprits: Sequence[tuple[Spike, Row]], details: int) -> None:
    """Adds the spikes and their culprits."""
    mine: list[list[int]] = [[] for _ in evidence.spikes]
    for i, (spike, _) in enumerate(culprits):
        mine[spike.index].append(i)
    what, places = steps_or_numbers(evidence.spikes)
    signals = signals_of(evidence.clips)
    for spike in evidence.spikes:
        place = f"{what.capitalize()} {places[spike.index]}"
        said = beside_spike(signals.get(spike.mini_batch)) if spike.step is not None else None
        before = evidence.steps if spike.index < details else {}
        then = next_said(spike, evidence.replays)
        view.spikes.append(spike_view(spike, place, said, then, before, mine[spike.index]))
    maker = Details(view, evidence.texts, details)
    detailed = {*_largest_of_each_first(culprits)[:details]}
    view.culprits = [maker.culprit(i, spike, culprit, i in detailed) for i, (spike, culprit) in enumerate(culprits)]
    view.tables["terms"] = table_of("", TERMS, [culprit for _, culprit in culprits])


def _add_charts(view: View, evidence: Evidence, summary: Summary, culprits: Sequence[tuple[Spike, Row]]) -> None:
    """Adds the charts and what is said below them."""
    clips = summary["token_clip"]
    by_step = clips["by_step"] if clips else {}
    if chart := run_chart(evidence, culprits, summary["drills"], by_step):
        view.charts["level"] = chart
        names = {series.name for series in chart.series}
        view.texts["level-hint"] = " ".join(text for text, of in HINTS.items() if names.intersection(of))
    rows = [{**row, "done": done_to(row)} for row in (clips["largest_tokens"] if clips else ())]
    if chart := clips_chart(rows):
        view.charts["clips-chart"] = chart
