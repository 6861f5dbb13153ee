# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Builds the view of a run."""

import heapq
from collections.abc import Mapping, Sequence
from typing import Any

from .charts import clips_chart, run_level, timeline
from .figures import count, part_of, short, shown, times, visible
from .meanings import DIAGNOSES, FIGURES, NOT_APPLIED, SOURCES
from .reading import Evidence
from .remedies import advice_by_source
from .replay_tables import replay_tables
from .spike_view import (
    CULPRITS,
    PART_SPECS,
    SUSPECTED,
    TERMS,
    Details,
    figure,
    index,
    spike_view,
    table_of,
    token_cell,
)
from .spikes import Spike
from .steps import level
from .summary import mini_batch_fields, summarize
from .token_clips import EXPLANATION, beside_spike, clipped_tokens, done_to, signals_of
from .verdicts import brief, lowered
from .view import Column, Table, View

Row = Mapping[str, Any]
Summary = Mapping[str, Any]

# How many spikes, culprits and clipped tokens the page has, which would be slow with more; the largest.
PAGE_ROWS = 5_000
# How many culprits have their details by default.
DETAILED = 500
# The charts over the run are for runs of more steps than these.
FEW_STEPS = 5


def build(evidence: Evidence, rows: int = PAGE_ROWS, details: int = DETAILED) -> View:
    """Builds the view of a run.

    Args:
        evidence (Evidence): What was read.
        rows (int): How many of the largest spikes, culprits and clipped tokens are shown; totals count all.
        details (int): How many culprits have their response, texts and layers: the largest of each spike, then others.
            With 0, as for the terminal, the view has neither single spikes nor charts.
    """
    summary = summarize(evidence, rows)
    spikes = sorted(heapq.nlargest(rows, evidence.spikes, key=lambda spike: spike.size), key=lambda spike: spike.index)
    culprits = _kept(evidence, spikes, rows) if details else evidence.culprits()[:rows]
    advice = advice_by_source(evidence.replays)
    view = View(
        title=_title(summary),
        opening=_opening(summary),
        alarms=_alarms(summary),
        warnings=[
            (f"{said['when']}: {visible(said['sentence'])}", visible(said["check"])) for said in summary["warnings"]
        ],
        drills=[(drill["text"], drill["found"], [*map(visible, drill["advice"])]) for drill in summary["drills"]],
        facts=_facts(summary),
        notes=_notes(evidence, summary),
        by_step=summary["events_by_step"],
        tables=_tables(summary, evidence, culprits),
        replays=[replay_tables(result) for result in evidence.replays],
        help=[*FIGURES.values()] if evidence.steps else [],
        rules={source: (rule, visible(advice[source])) for source, rule in SOURCES.items()},
    )
    view.bars = _bars(summary)
    if clips := summary["token_clip"]:
        how = EXPLANATION if clips["largest_tokens"] else ""
        hint = visible(" ".join(clips["sentences"]))
        view.texts |= {"h-clips": clips["title"], "clips-hint": hint, "clips-how": how}
    if details:
        _add_spikes(view, evidence, spikes, culprits, details)
        view.lead = _lead(view, summary, evidence, culprits)
        if len(spikes) < summary["events"] or len(culprits) < summary["culprits"]:
            view.notes = [*view.notes, _cut(summary, len(spikes), len(culprits))]
        _add_charts(view, evidence, summary, spikes, culprits)
    return view


def _kept(evidence: Evidence, spikes: Sequence[Spike], rows: int) -> list[tuple[Spike, Row]]:
    """The culprits shown, the largest first: before all others the largest of each spike."""
    shown_spikes = {spike.index for spike in spikes}
    pairs = [pair for pair in evidence.culprits() if pair[0].index in shown_spikes]
    first = {spike.index: culprit for spike, culprit in reversed(pairs)}
    largest = {id(culprit) for culprit in first.values()}
    others = [id(culprit) for _, culprit in pairs if id(culprit) not in largest]
    kept = largest | {*others[: max(rows - len(largest), 0)]}
    return [pair for pair in pairs if id(pair[1]) in kept]


def _title(summary: Summary) -> str:
    if not summary["events"]:
        return "No gradient spike could be read" if summary["lost_spikes"] else "No gradient spike"
    first, last = summary["first_step"], summary["last_step"]
    where = "" if first is None else f" in step {first}" if first == last else f" in steps {first} to {last}"
    return str(summary["named"]) + where


def _opening(summary: Summary) -> list[str]:
    """What the spikes come from, what to do about the largest, and how to check it."""
    title = _title(summary)
    if not summary["events"]:
        since = "" if summary["since"] is None else f" from step {summary['since']} on"
        return [f"{title} in {visible(summary['path'])}{since}."]
    largest = summary["largest_events"][0]
    verdict = largest["verdict"]
    said = lowered(visible(largest["summary"] if verdict is None else verdict["sentence"]))
    if summary["events"] == 1:
        found = [f"{title}: {said}"]
    else:
        of_all = "" if summary["verdict"] is None else f": {lowered(visible(summary['verdict']))}"
        step = "" if largest["global_step"] is None else f", in step {largest['global_step']}"
        found = [f"{title}{of_all}.", f"The largest{step}: {said}"]
    if verdict is not None:
        found.append(visible(verdict["check"]))
    command = largest["next_command"]
    if command is not None and (verdict is None or command not in verdict["check"]):
        found.append(f"Next: `{visible(command)}`")
    return found


def _alarms(summary: Summary) -> list[str]:
    faults = ", ".join(map(visible, summary["faults"]))
    found = [f"A fault was planted in this run on purpose: {faults}"] if faults else []
    return [*found, *filter(None, [summary["lost_spikes"]])]


def _lead(view: View, summary: Summary, evidence: Evidence, culprits: Sequence[tuple[Spike, Row]]) -> list[Any]:
    """What the page says below its title; what is emphasized is a list."""
    if not summary["events"]:
        if summary["lost_spikes"]:
            return [summary["lost_spikes"]]
        known = level(evidence.steps, evidence.since)
        where = f"in {count(known['steps_in_all'], 'step')}" if known else "in this evidence"
        clips = summary["token_clip"]
        said = [f"No spike is {where}: no micro-batch was over its threshold."]
        return [" ".join([*said, *(clips["sentences"][:1] if clips else ())])]
    verdict = "" if summary["verdict"] is None else f"{visible(summary['verdict'])}. "
    if not culprits:
        searched = any(diagnosis != "unsearched" for diagnosis in summary["diagnoses"])
        found = "No single token was found to be over the threshold." if searched else "No token was measured."
        return [["", verdict], found]
    spike, worst = culprits[0]
    if summary["culprits"] == 1:
        many = "One token stands out: "
    else:
        where = "it" if summary["events"] == 1 else "them"
        many = f"{count(summary['culprits'], 'token')} stand out in {where}. The largest is "
    size = times({"norm": worst["grad_norm"], "threshold": worst["threshold"]})
    size = "whose gradient is not finite" if size == "not finite" else f"with a gradient {size} the threshold"
    place = view.spikes[view.culprits[0].spike].content["spike"].split(",")[0]
    return [["", verdict], many, ["tok", token_cell(worst)[0]], f" in {lowered(place)}, {size}."]


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
    complete = summary["events"] - summary["incomplete_events"]
    found = [
        ("Spikes", f"{summary['events']:,}", ""),
        ("Culprit tokens", f"{summary['culprits']:,}", ""),
        ("Largest token gradient", short(summary["largest_grad_norm"]), f"threshold {thresholds}"),
        ("Searches complete", f"{complete:,}", f"of {summary['events']:,}"),
    ]
    if clips := summary["token_clip"]:
        of_all = count(clips["mini_batches"], "mini-batch", "mini-batches")
        found.append(("Stopped by TokenClip", f"{clips['stopped']:,}", f"of {of_all} with outlying tokens"))
    return [*found, ("Extra passes", f"{summary['passes']:,}", f"{summary['seconds']:.1f} s in all")]


def _notes(evidence: Evidence, summary: Summary) -> list[str]:
    found = [f"Note in the file: {visible(note)}." for note in summary["notes"]]
    if not evidence.texts:
        found.append(
            "This page has no prompts, responses or ground truths: the evidence has them. spike_log=texts adds them."
        )
    if incomplete := summary["incomplete_events"]:
        found.append(f"{count(incomplete, 'search', 'searches')} ended early: there may be more culprits.")
    for error, searches in summary["errors"].items():
        found.append(f"{count(searches, 'search', 'searches')} failed with an error: {visible(error).rstrip('.')}.")
    for action, spikes in summary["not_applied"].items():
        found.append(f"{count(spikes, 'spike')}, with spike_action={action}: {NOT_APPLIED[action]}")
    found += [*summary["other_versions"], *summary["merged"]]
    if summary["skipped_lines"]:
        found.append(f"{count(summary['skipped_lines'], 'line')} skipped: malformed or unfinished.")
    return found


def _cut(summary: Summary, spikes: int, culprits: int) -> str:
    cut = []
    if spikes < summary["events"]:
        cut.append(f"the {count(spikes, 'spike')} with the largest norms of {summary['events']:,}")
    if culprits < summary["culprits"]:
        cut.append(f"{count(culprits, 'culprit')} of {summary['culprits']:,}, the largest of each spike first")
    return f"Shown are {', and '.join(cut)}. The totals count all of them."


def _tables(summary: Summary, evidence: Evidence, culprits: Sequence[tuple[Spike, Row]]) -> dict[str, Table]:
    """The tables in the order of the terminal."""
    listed, events = summary["largest_events"], summary["events"]
    every = len(listed) == events
    said = [(event, _happened(event, first=place == 0)) for place, event in enumerate(listed)]
    explained = [(event, event["explanation"]) for event in listed if event["explanation"] is not None]
    of_all = "What the culprits explain", "What the culprits of the largest spikes explain"
    tables = {
        "happened": _sentences("What happened" if every else "What happened in the largest spikes", said),
        "diagnoses": Table(
            "What was found",
            (Column("Diagnosis", "row"), Column("Spikes", "num"), Column("What to look at")),
            [[name, f"{n:,}", DIAGNOSES[name]] for name, n in summary["diagnoses"].items()],
        ),
        "explained": _sentences(of_all[len(explained) < events], explained),
        "parts": table_of(
            "The largest parts over their threshold that no small set of tokens explains",
            PART_SPECS,
            summary["diffuse"],
        ),
        "suspected": table_of(summary["suspected_title"], SUSPECTED, summary["suspected"]),
        "sources": _sources(summary),
        "culprits": table_of(
            "The culprits" if len(culprits) == summary["culprits"] else "The largest culprits",
            CULPRITS,
            [{**mini_batch_fields(spike), **culprit} for spike, culprit in culprits],
        ),
    }
    if absent := summary["culprits"] - len(culprits):
        tables["culprits"].more = f"{absent:,} smaller ones left out"
    return tables | _clip_tables(summary, evidence)


def _happened(event: Row, first: bool) -> str:
    """What is still to be said of a spike: the verdict of the first one, the largest, is said already."""
    verdict = event["verdict"]
    if verdict is None:
        return "" if first else str(event["summary"])
    return event["summary"] if first else f"{brief(verdict)}. {event['summary']}"


def _sentences(title: str, said: Sequence[tuple[Row, str]]) -> Table:
    rows = [["–" if of["global_step"] is None else str(of["global_step"]), visible(text)] for of, text in said if text]
    return Table(title, (Column("Step", "num"), Column("")), rows)


def _sources(summary: Summary) -> Table:
    advice = advice_by_source(summary["replays"])
    rows = [
        [source, f"{n:,}", part_of(n, summary["culprits"]), f"{SOURCES[source]}\n{visible(advice[source])}"]
        for source, n in summary["sources"].items()
    ]
    columns = (Column("Source", "badge"), Column("Culprits", "num"), Column("Share", "num"), Column("Rule, what to do"))
    return Table("What looks wrong", columns, rows)


def _clip_tables(summary: Summary, evidence: Evidence) -> dict[str, Table]:
    """The tokens furthest over TokenClip's bounds."""
    clips = summary["token_clip"]
    if clips is None:
        return {}
    specs = (
        index("Step", "global_step"),
        (Column("Token in its context", "token"), token_cell),
        (Column("First over at"), lambda row: shown(row["boundary"])),
        figure("× usual", "multiple"),
        (Column("Signal"), done_to),
        index("Rank", "rank", 4),
        index("Row", "row", 5),
        (Column("Position", "num", 6), lambda row: "prompt" if row["position"] < 0 else str(row["position"])),
        figure("log p", "log_prob", 1),
        figure("Reward", "reward", 2),
        (Column("Data source", "", 3), lambda row: shown(row["data_source"])),
        (Column("Spike", "link", 7), lambda row: "yes" if row["spike"] else "–"),
    )
    return {"clips": table_of(clips["title"], specs, clips["largest_tokens"])}


def _bars(summary: Summary) -> dict[str, Sequence[tuple[str, int, str, bool]]]:
    culprits = summary["culprits"]
    return {
        "sources": [(name, n, part_of(n, culprits), False) for name, n in summary["sources"].items()],
        "tokens": [
            (token_cell({"token": entry["token"]})[0], entry["culprits"], "", True) for entry in summary["tokens"][:8]
        ],
    }


def _add_spikes(
    view: View, evidence: Evidence, spikes: Sequence[Spike], culprits: Sequence[tuple[Spike, Row]], details: int
) -> None:
    """Adds the spikes and their culprits."""
    numbers = {spike.index: number for number, spike in enumerate(spikes)}
    mine: dict[int, list[int]] = {number: [] for number in range(len(spikes))}
    for i, (spike, _) in enumerate(culprits):
        mine[numbers[spike.index]].append(i)
    have_steps = all(spike.step is not None for spike in spikes)
    signals = signals_of(evidence.clips)
    figures = evidence.steps if _span(evidence) > FEW_STEPS else None
    for number, spike in enumerate(spikes):
        place = f"Step {spike.step}" if have_steps else f"Event {number + 1}"
        said = beside_spike(signals.get(spike.mini_batch)) if spike.step is not None else None
        steps = figures if number < details else None
        made = spike_view(spike, place, said, steps, [culprits[i][1] for i in mine[number]])
        made.culprits = mine[number]
        view.spikes.append(made)
    maker = Details(evidence.texts, details)
    first = {indices[0] for indices in mine.values() if indices}
    detailed = {*sorted(first)[:details]}
    detailed |= {*[i for i in range(len(culprits)) if i not in first][: max(details - len(detailed), 0)]}
    for i, (spike, culprit) in enumerate(culprits):
        view.culprits.append(maker.culprit(spike, numbers[spike.index], culprit, i in detailed))
    view.ladders, view.strips = maker.ladders, maker.strips
    view.tables["terms"] = table_of("", TERMS, [culprit for _, culprit in culprits])
    if clips := view.tables.get("clips"):
        by_mini_batch = {spike.mini_batch: f"s{numbers[spike.index]}" for spike in spikes if spike.step is not None}
        rows = clipped_tokens(evidence.clips, len(clips.rows), by_mini_batch)
        clips.links = [
            by_mini_batch.get((row["global_step"], row["epoch"], row["mini_batch"]), "") if row["spike"] else ""
            for row in rows
        ]


def _span(evidence: Evidence) -> int:
    """How many steps the run has; without the number of any step, how many spikes."""
    found = [*(spike.step for spike in evidence.spikes), *(line["global_step"] for line in evidence.clips)]
    known = [step for step in found if step is not None]
    span = max(known) - min(known) + 1 if known else len(evidence.spikes)
    return max(span, len(evidence.known_steps()))


def _add_charts(
    view: View, evidence: Evidence, summary: Summary, spikes: Sequence[Spike], culprits: Sequence[tuple[Spike, Row]]
) -> None:
    """Adds the charts and what is said above them."""
    clips = summary["token_clip"]
    if _span(evidence) <= FEW_STEPS:
        return
    by_step = clips["by_step"] if clips else {}
    marked = heapq.nlargest(PAGE_ROWS, by_step, key=lambda step: by_step[step]["over"])
    marks = [{"global_step": step, **by_step[step]} for step in sorted(marked)]
    known = level(evidence.steps, evidence.since)
    if known is not None:
        view.charts["level"] = run_level(known, spikes, summary["drills"], marks, len(by_step))
        view.texts["level-hint"] = _level_hint(known, bool(spikes), len(marks), len(by_step))
    if clips is not None:
        rows = [{**row, "done": done_to(row)} for row in clips["largest_tokens"]]
        if (chart := clips_chart(rows)) is not None:
            view.charts["clips-chart"] = chart
    if spikes:
        view.charts["timeline"] = timeline(spikes, culprits, SOURCES)
        shown_are = ["Every culprit by the norm of its own gradient"] if culprits else []
        if any(not spike.event["culprits"] for spike in spikes):
            shown_are.append("bars are spikes without a culprit, at the norm that a single token would need")
        said = "; ".join(shown_are)
        view.texts["when"] = f"{said[:1].upper()}{said[1:]}. Select one to see it above."


def _level_hint(known: Row, spikes: bool, marks: int, clip_steps: int) -> str:
    said = "The largest token-equivalent norm of each step: the norm that a single token would need for it."
    if len(known["steps"]) < known["steps_in_all"]:
        said += f" Of {known['steps_in_all']:,} steps, the lowest and the highest of every few are drawn."
    if spikes:
        said += " Select a spike to see it above."
    if clip_steps:
        which = f", the {marks:,} with most of them" if marks < clip_steps else ""
        said += (
            f" Triangles are steps in which TokenClip found tokens{which}; filled where it cut all and no spike was "
        )
        said += "recorded."
    return said
