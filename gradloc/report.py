# Copyright 2026 The GradLoc Authors
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""Shows the evidence of gradient spikes: a summary in the terminal, and one HTML file that opens offline.

The evidence may be read while training writes it. Rotated files are read as well; a line that is not finished is left
for the next time.
"""

import argparse
import errno
import heapq
import importlib
import json
import math
import os
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from .evidence.schema import EVENT, EVENT_1, NOTE, conforms
from .evidence.token_facts import window_start
from .evidence.writer import evidence_files, jsonable
from .report_page import page

# What `classify` says, for people.
SOURCES = {
    "token": "The token's importance ratio is far from 1: over 2 or under ½.",
    "sequence": "The response as a whole has drifted: its mean ratio is over 1.2 or under 1/1.2.",
    "layer": "The ratios are fine, but one layer carries over half of the squared norm.",
    "nonfinite": "The token's gradient is NaN or infinite.",
    "misaligned": "Most log-probs of the response differ from the rollout's by over a nat: a bug, not a spike.",
    "other": "None of the rules holds.",
}
# What `Investigation.diagnosis` says, for people: what it means, and what to look at.
DIAGNOSES = {
    "tokens": "Single tokens are over the threshold: look at what is wrong with each of them.",
    "diffuse": "No few tokens explain the spike, it is the sum of many: "
    "look at the responses in the parts listed, at their advantages and at repeated text.",
    "nonfinite": "NaN or Inf is in everything, not in the share of a token: "
    "look at the weights after the step before, then at rewards and advantages.",
    "overflow": "The scaled fp16 gradients overflowed, while log-probs and advantages are fine: "
    "the gradient scaler handles it; look at the loss scale if it happens again and again.",
    "incomplete": "The search ended before it had an answer: "
    "look at its error if there is one, or raise bisect_budget_steps.",
}
# What the actions did, and what came of those that could not be done.
APPLIED = {
    "log": "Training went on as usual.",
    "skip": "The optimizer step was skipped.",
    "drop": "The gradient of the culprits found was taken out of the step.",
}
NOT_APPLIED = {
    "log": "Training went on as usual.",
    "skip": "The step was left to the gradient scaler, which leaves it out after an overflow.",
    "drop": "No culprit's gradient could be taken out of the step: its gradient was left as it was.",
}
TABLE_ROWS, DETAILED = 20, 500
# Beyond these the page would be slow: it keeps the largest.
PAGE_ROWS = 5_000
PARTS = 20
TEXT_CHARACTERS = 4000
SPARK_BINS = 60

Event = dict[str, Any]
Culprit = dict[str, Any]
# A culprit with what it is sorted by: its size, and among equals the first; and with the index of its event.
Ranked = tuple[float, int, int, Culprit]


@dataclass
class Evidence:
    """What the files hold, as far as the report needs it: the files may be far larger than the memory.

    Attributes:
        top (int): So many culprits keep their texts and layers: the largest of each event, then others.
        since (int, optional): Events of earlier steps are left out.
        events (list[Event]): In the order in which they were written, as the page shows them.
        skipped (int): Lines that are no event of a known version.
        sources (Counter): Of all culprits, kept or not.
        tokens (Counter): Likewise; by the token, and its id if it is not known.
        largest (list[Ranked]): The largest culprit of each event.
        others (list[Ranked]): The largest of the other culprits, as many as the page may show; a heap.
    """

    path: str
    top: int = DETAILED
    since: int | None = None
    events: list[Event] = field(default_factory=list)
    notes: list[dict[str, Any]] = field(default_factory=list)
    skipped: int = 0
    sources: Counter[str] = field(default_factory=Counter)
    tokens: Counter[tuple[str | None, int | None]] = field(default_factory=Counter)
    largest: list[Ranked] = field(default_factory=list)
    others: list[Ranked] = field(default_factory=list)
    _detailed: list[tuple[bool, float, int, Culprit]] = field(default_factory=list)

    def add(self, event: Event) -> None:
        """Takes in an event, and of its culprits what may be shown."""
        largest = max(event["culprits"], key=lambda culprit: _size(culprit["grad_norm"]), default=None)
        index, before = len(self.events), self.sources.total()
        self.events.append(_event(event, largest))
        for order, culprit in enumerate(event["culprits"], before):
            token = culprit.get("token")
            self.sources[culprit["source"]] += 1
            self.tokens[token, culprit["token_id"] if token is None else None] += 1
            row = _row(event, culprit)
            ranked = (_size(culprit["grad_norm"]), -order, index, row)
            if culprit is largest:
                self.largest.append(ranked)
            else:
                heapq.heappush(self.others, ranked)
                if len(self.others) > max(PAGE_ROWS, self.top):
                    heapq.heappop(self.others)
            row["details"] = {name: culprit.get(name) for name in _DETAILS}
            heapq.heappush(self._detailed, (culprit is largest, *ranked[:2], row))
            if len(self._detailed) > self.top:
                del heapq.heappop(self._detailed)[-1]["details"]

    def culprits(self) -> list[Ranked]:
        """Those that are kept, the largest first."""
        return sorted(self.largest + self.others, reverse=True)


def read(path: str, since: int | None = None, top: int = DETAILED) -> Evidence:
    """Reads a directory with evidence, or a file; `spikes.jsonl` stands for the older files beside it as well.

    Args:
        path (str): The directory or file. A run's directory stands for the `bisect_dump` in it.
        since (int, optional): Leave out events of earlier steps, and those without a step.
        top (int): See `Evidence`.
    """
    found = Evidence(path, top, since)
    for line, finished in _lines(path):
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            found.skipped += finished
            continue
        is_event = conforms(entry, EVENT) or conforms(entry, EVENT_1)
        if not is_event and not conforms(entry, NOTE):
            found.skipped += 1
        elif since is None or (entry["global_step"] is not None and entry["global_step"] >= since):
            found.add(entry) if is_event else found.notes.append(entry)
    return found


def summarize(evidence: Evidence, top: int) -> dict[str, Any]:
    """The figures of the terminal's summary, ready for `jsonable`."""
    ranked = evidence.culprits()
    events = evidence.events
    steps = [event["global_step"] for event in events if event["global_step"] is not None]
    return {
        "path": evidence.path,
        "since": evidence.since,
        "events": len(events),
        "culprits": evidence.sources.total(),
        "first_step": min(steps, default=None),
        "last_step": max(steps, default=None),
        "events_by_step": dict(sorted(Counter(steps).items())),
        "thresholds": sorted({number(event["threshold"]) for event in events}),
        "largest_grad_norm": number(ranked[0][-1]["grad_norm"]) if ranked else None,
        "diagnoses": dict(Counter(event["diagnosis"] for event in events).most_common()),
        "largest_events": [
            {name: event[name] for name in _EVENT_SUMMARY} | {"culprits": event["culprits_in_all"]}
            for event in heapq.nlargest(top, events, key=lambda event: event["size"])
        ],
        "diffuse": _largest_parts(events, top),
        "sources": dict(evidence.sources.most_common()),
        "tokens": [
            {"token": _name({"token": token, "token_id": token_id}), "culprits": count}
            for (token, token_id), count in evidence.tokens.most_common(10)
        ],
        "incomplete_events": sum(event["ended_early"] for event in events),
        "not_applied": dict(Counter(event["action"] for event in events if not event["applied"])),
        "errors": dict(Counter(event["error"] for event in events if event["error"] is not None)),
        "passes": sum(event["passes"] for event in events),
        "seconds": sum(event["seconds"] for event in events),
        "largest_culprits": [
            _rounded({name: row[name] for name in row if name != "details"}) for *_, row in ranked[:top]
        ],
        "notes": _collapse(evidence.notes),
        "skipped_lines": evidence.skipped,
    }


def print_summary(summary: Mapping[str, Any]) -> None:
    """Prints what `summarize` returns to the terminal."""
    _need("rich", "The terminal summary")
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False, width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else 140)
    console.print()
    if not summary["events"]:
        since = "" if summary["since"] is None else f" from step {summary['since']} on"
        console.print(f"No gradient spike in {visible(summary['path'])}{since}.", markup=False)
    else:
        first, last = summary["first_step"], summary["last_step"]
        where = "" if first is None else f" in step {first}" if first == last else f" in steps {first} to {last}"
        console.print(Text.assemble((_count(summary["events"], "gradient spike") + where, "bold")))
        lowest, highest = short(summary["thresholds"][0]), short(summary["thresholds"][-1])
        threshold = lowest if lowest == highest else f"{lowest} to {highest}"
        facts = [_count(summary["culprits"], "culprit token"), f"threshold {threshold}"]
        if summary["culprits"]:
            facts.append(f"largest token gradient {short(summary['largest_grad_norm'])}")
        facts.append(f"{_count(summary['passes'], 'extra pass', 'extra passes')}, {summary['seconds']:.1f} s")
        console.print(Text("   ".join(facts), style="dim"))
        if first != last:
            spark = _sparkline(summary["events_by_step"], SPARK_BINS)
            console.print(Text.assemble("\n", (f"{first} ", "dim"), (spark, "red"), (f" {last}", "dim")))

    def headed(title: str) -> Table:
        return Table(title=title, title_justify="left", title_style="bold", box=None, padding=(0, 2, 0, 0))

    if summary["events"]:
        table = headed("What was found")
        table.add_column("diagnosis", style="bold")
        table.add_column("spikes", justify="right")
        table.add_column("meaning", style="dim")
        for diagnosis, count in summary["diagnoses"].items():
            table.add_row(diagnosis, str(count), DIAGNOSES[diagnosis])
        console.print()
        console.print(table)

    if explanations := [event for event in summary["largest_events"] if event["explanation"] is not None]:
        every = len(explanations) == summary["events"]
        table = headed("What the culprits explain" if every else "What the culprits of the largest spikes explain")
        table.add_column("step", justify="right")
        table.add_column("")
        for event in explanations:
            table.add_row("–" if event["global_step"] is None else str(event["global_step"]), event["explanation"])
        console.print()
        console.print(table)

    if summary["diffuse"]:
        table = headed("The largest parts over their threshold that no few tokens explain")
        for name in ("step", "rank", "rows", "tokens", "norm", "× threshold"):
            table.add_column(name, justify="right")
        table.add_column("largest tokens measured (row, position: norm, share)", style="dim")
        for part in summary["diffuse"]:
            table.add_row(
                "–" if part["global_step"] is None else str(part["global_step"]),
                "several" if part["rank"] is None else str(part["rank"]),
                part["rows"],
                str(part["tokens"]),
                short(part["norm"]),
                short(_times(part)),
                "; ".join(
                    f"{t['row']}, {t['position']}: {short(t['grad_norm'])}"
                    + ("" if t.get("share") is None else f", {_percent(number(t['share']))}")
                    for t in part["largest_tokens"]
                ),
            )
        console.print()
        console.print(table)

    if summary["culprits"]:
        table = headed("What looks wrong")
        table.add_column("source", style="bold")
        table.add_column("culprits", justify="right")
        table.add_column("share", justify="right")
        table.add_column("rule", style="dim")
        for source, count in summary["sources"].items():
            table.add_row(source, str(count), f"{count / summary['culprits']:.0%}", SOURCES[source])
        console.print()
        console.print(table)

        title = "The culprits" if len(summary["largest_culprits"]) == summary["culprits"] else "The largest culprits"
        table = headed(title)
        for name in ("step", "rank"):
            table.add_column(name, justify="right", no_wrap=True)
        wide = console.width >= 110
        table.add_column("token in its context" if wide else "token", no_wrap=True)
        figures = ("ratio", "advantage", "reward") if console.width >= 80 else ()
        for name in ("norm", "× threshold", *figures):
            table.add_column(name, justify="right", no_wrap=True)
        table.add_column("source", no_wrap=True)
        for row in summary["largest_culprits"]:
            words = Text.assemble((quoted(_name(row)), "bold red"), visible(f"  {_around(row)}") if wide else "")
            # The figures need the rest.
            words.truncate(console.width - 85 if wide else 20 if figures else 14, overflow="ellipsis")
            table.add_row(
                "–" if row["global_step"] is None else str(row["global_step"]),
                str(row["rank"]),
                words,
                short(row["grad_norm"]),
                short(_times({"norm": row["grad_norm"], "threshold": row["threshold"]})),
                *(short(row[name]) for name in figures),
                row["source"],
            )
        console.print()
        console.print(table)

        if summary["tokens"][0]["culprits"] > 1:
            counts = [f"{quoted(entry['token'][:40])} ({entry['culprits']})" for entry in summary["tokens"]]
            console.print(Text.assemble("\n", ("Most frequent culprits  ", "bold"), "   ".join(counts)))

    warnings = [f"Note in the file: {visible(note)}." for note in summary["notes"]]
    if incomplete := summary["incomplete_events"]:
        warnings.append(f"{_count(incomplete, 'search', 'searches')} ended early: there may be more culprits.")
    for error, count in summary["errors"].items():
        warnings.append(f"{_count(count, 'search', 'searches')} met an error: {visible(error).rstrip('.')}.")
    for action, count in summary["not_applied"].items():
        warnings.append(f"{_count(count, 'spike')}, with spike_action={action}: {NOT_APPLIED[action]}")
    if summary["skipped_lines"]:
        warnings.append(f"{_count(summary['skipped_lines'], 'line')} skipped: malformed, or of another version.")
    if warnings:
        console.print(Text("\n" + "\n".join(warnings), style="yellow"))
    console.print()


def write_page(evidence: Evidence, out: str) -> None:
    """Writes the HTML page; readers of an older one never see half of it."""
    offline = _need("plotly.offline", "The HTML report")
    data = json.dumps(jsonable(page_data(evidence)), allow_nan=False, separators=(",", ":"))
    unfinished = f"{out}.{os.getpid()}"
    os.makedirs(os.path.dirname(os.path.abspath(out)), exist_ok=True)
    try:
        with open(unfinished, "w", encoding="utf-8") as file:
            file.write(page(data, offline.get_plotlyjs()))
        os.replace(unfinished, out)
    finally:
        if os.path.exists(unfinished):
            os.remove(unfinished)


def page_data(evidence: Evidence) -> dict[str, Any]:
    """What the page shows, with everything that may be long kept to a bounded size; its totals are of everything.

    Of too many events those with the largest norms are left, and of too many culprits the largest of each event, then
    others.
    """
    kept = heapq.nlargest(PAGE_ROWS, range(len(evidence.events)), key=lambda i: evidence.events[i]["size"])
    indexes = {index: i for i, index in enumerate(sorted(kept))}
    shown = [*sorted(evidence.largest, reverse=True), *sorted(evidence.others, reverse=True)]
    shown = sorted([ranked for ranked in shown if ranked[2] in indexes][:PAGE_ROWS], reverse=True)
    strips: dict[tuple[int, ...], dict[str, Any]] = {}
    numbers: dict[tuple[int, ...], int] = {}
    culprits = []
    for _, _, index, row in shown:
        row = {**row, "event": indexes[index]}
        if details := row.pop("details", None):
            start = details["response_tokens_start"]
            start = window_start(row["position"]) if start is None else start
            heat = details["response_suspicion"]
            key = (index, row["rank"], row["row"], start)
            if heat is not None:
                strips.setdefault(key, {"start": start, "tokens": details["response_tokens"], "heat": heat})
            row |= {
                "strip": numbers.setdefault(key, len(numbers)) if key in strips else None,
                "layer_norms": _rounded(details["layer_norms"]),
                "prompt": _clipped(details["prompt"]),
                "response": None if key in strips else _clipped(details["response"]),
                "ground_truth": _clipped(details["ground_truth"]),
            }
        culprits.append(_rounded(row))
    summary = summarize(evidence, 0)
    totals = ("events", "culprits", "first_step", "last_step", "sources", "incomplete_events", "passes", "seconds")
    thresholds = summary["thresholds"]
    return {
        "top": evidence.top,
        "source_rules": SOURCES,
        "diagnoses": DIAGNOSES,
        "applied": APPLIED,
        "not_applied": NOT_APPLIED,
        "events": [evidence.events[index] for index in indexes],
        "culprits": culprits,
        "strips": list(strips.values()),
        "totals": {name: summary[name] for name in totals} | {"thresholds": [*thresholds[:1], *thresholds[-1:]]},
        "tokens": [
            {"token": token, "token_id": token_id, "count": count}
            for (token, token_id), count in evidence.tokens.most_common(8)
        ],
        "notes": summary["notes"],
        "skipped": evidence.skipped,
    }


def quoted(token: str) -> str:
    """A token whose spaces at the ends can be seen."""
    text = visible(token)
    bare = text.strip(" ")
    start = text.index(bare) if bare else len(text)
    return "␣" * start + bare + "␣" * (len(text) - start - len(bare))


def visible(text: str) -> str:
    """The text with control characters and the like escaped: it comes from a model and goes to a terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)


def number(value: float | str) -> float:
    """A number of the evidence, where NaN and infinities are strings."""
    return float(value)


def short(value: float | str | None) -> str:
    """Four digits, or the whole number where that is longer but can be read."""
    if value is None:
        return "–"
    text = f"{number(value):,.0f}" if 1e4 <= abs(number(value)) < 1e7 else f"{number(value):.4g}"
    return text.replace("nan", "NaN").replace("inf", "∞")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog=f"python -m {__spec__.name}", description=__doc__)
    parser.add_argument("path", metavar="PATH", help="the directory with spikes.jsonl, or a file; or a run's directory")
    parser.add_argument("--html", metavar="OUT", help="write a page for the browser to OUT")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")
    parser.add_argument("--since", metavar="STEP", type=int, help="leave out earlier steps")
    parser.add_argument(
        "--top",
        metavar="K",
        type=_positive,
        help=f"the K largest culprits in the summary ({TABLE_ROWS}), and with all details on the page ({DETAILED})",
    )
    options = parser.parse_args(arguments)
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a terminal that lacks a character must not end the report
    if options.html:
        _need("plotly.offline", "The HTML report")
    try:
        evidence = read(options.path, options.since, options.top or (DETAILED if options.html else TABLE_ROWS))
        summary = summarize(evidence, options.top or TABLE_ROWS)
        if options.json:
            print(json.dumps(jsonable(summary), indent=2, allow_nan=False))
        else:
            print_summary(summary)
        if options.html:
            write_page(evidence, options.html)
            print(f"The report: {options.html}", file=sys.stderr if options.json else sys.stdout)
    except BrokenPipeError:  # the reader of the output, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        print(f"{error.strerror}: {error.filename2 or error.filename}", file=sys.stderr)
        return 2
    return 0


def _lines(path: str) -> Iterable[tuple[bytes, bool]]:
    """All lines, and whether each is finished: the last one may still be being written."""
    if os.path.isdir(path):
        files = evidence_files(path)
        nested = os.path.join(path, "bisect_dump")
        if not files and os.path.isdir(nested):
            files = evidence_files(nested)
        if not files:
            raise FileNotFoundError(errno.ENOENT, "No spikes.jsonl, which a run makes with its first spike", path)
    elif os.path.basename(path) == "spikes.jsonl":
        files = evidence_files(os.path.dirname(path) or ".") or [path]
    else:
        files = [path]
    for index, file in enumerate(files):
        with open(file, "rb") as lines:
            for line in lines:
                yield line, line.endswith(b"\n") or index < len(files) - 1


def _size(norm: float | str) -> float:
    """A norm to sort by: NaN is worse than any number."""
    value = number(norm)
    return math.inf if math.isnan(value) else value


def _name(culprit: Mapping[str, Any]) -> str:
    token = culprit.get("token")
    return f"id {culprit['token_id']}" if token is None else token


def _around(culprit: Mapping[str, Any], before: int = 12) -> str:
    """The context from shortly before the culprit on: a column is narrow."""
    context = culprit["context"] or ""
    start = max(context.find(f"«{culprit['token']}»") - before, 0)
    return ("…" if start else "") + context[start:]


_ROW = ("rank", "micro_batch", "row", "position", "token_id", "token", "context", "grad_norm", "threshold")
_ROW += ("weight", "coefficient", "suspicion", "share", "advantage", "log_prob", "old_log_prob", "ratio")
_ROW += ("ref_log_prob", "entropy", "rollout_log_prob", "rollout_ratio", "sequence_ratio", "misaligned_share")
_ROW += ("source", "reward", "data_source", "uid")
_DETAILS = ("response_tokens", "response_tokens_start", "response_suspicion", "layer_norms")
_DETAILS += ("prompt", "response", "ground_truth")
_EVENT_SUMMARY = ("global_step", "epoch", "mini_batch", "diagnosis")
_EVENT_SUMMARY += ("until", "explained", "more_tokens", "explanation")


def _row(event: Event, culprit: Culprit) -> dict[str, Any]:
    """A culprit as one row of a table."""
    where = {name: event[name] for name in ("global_step", "epoch", "mini_batch")}
    return where | {name: culprit.get(name) for name in _ROW}


def _event(event: Event, largest: Culprit | None) -> Event:
    """An event without its culprits and without the layers of its units."""
    names = ("global_step", "epoch", "mini_batch", "trigger", "threshold", "global_norm", "global_threshold")
    names += ("passes", "action", "applied", "diagnosis", "seconds", "world_size", "error")
    names += ("until", "explained", "more_tokens")
    ordinary = event["ordinary_layer_norms"]
    left_out = ("layer_norms", "rest")
    units = [_rounded({key: unit[key] for key in unit if key not in left_out}) for unit in event["units"]]
    # What a single token would have to have; the units may not be known.
    trigger = number(event["threshold"]) * _times(event["trigger"])
    norms = [trigger, *(unit["token_equivalent"] for unit in units)] if largest is None else [largest["grad_norm"]]
    parts = sorted(event["diffuse"], key=_by_times)
    return {
        **_rounded({name: event.get(name) for name in names}),
        "ordinary_layer_norms": None if ordinary is None else _rounded(ordinary),
        "units": units,
        "open_tokens": sum(segment["tokens"] for segment in event["open_segments"]),
        "culprits_in_all": len(event["culprits"]),
        "ended_early": _ended_early(event),
        "explanation": _explanation(event),
        "size": max(map(_size, norms), default=0.0),
        "diffuse": [_part(part) for part in parts[:PARTS]],
        "diffuse_in_all": len(parts),
    }


def _ended_early(event: Event) -> bool:
    """Whether the search ended without an answer. That no few tokens explain the spike is one."""
    answered = event.get("until") == "explained" and event["diagnosis"] in ("diffuse", "nonfinite", "overflow")
    return not event["complete"] and not answered


def _explanation(event: Event) -> str | None:
    """Whether the culprits explain the spike, in a sentence; None where no token is looked for, or in version 1."""
    until, diagnosis, culprits = event.get("until"), event["diagnosis"], event["culprits"]
    if until is None or diagnosis in ("nonfinite", "overflow"):
        return None
    measured = [unit for unit in event["units"] if unit.get("rest") is not None] if culprits else []
    worst = max(measured, key=lambda unit: _size(_times(unit["rest"])), default=None)
    these, them = ("this token", "it") if len(culprits) == 1 else (f"these {len(culprits):,} tokens", "them")
    rest = [f"without {these} {_unit(worst)} is {_rest(worst, them)}"] if worst else []
    if diagnosis == "diffuse":
        none = "no few tokens explain it" if until == "explained" else "no single token is over τ"
        facts = [f"Diffuse: {none}", *_likeliest(event, worst)]
    elif until == "exhaustive":
        found = f"{_count(len(culprits), 'token') if culprits else 'no token'} over τ"
        settled = f"everything over its threshold was settled, with {found}"
        cut = f"the search ended early, with {found} so far"
        facts = [f"Exhaustive: {cut if _ended_early(event) else settled}", *rest]
    elif _ended_early(event):
        facts = ["Not explained: the search ended early", *rest]
    elif not event["explained"]:
        facts = ["Whether the culprits explain it could not be measured", *rest]
    elif worst and len(event["units"]) == 1:
        facts = [f"Explained: {rest[0]}"]
    else:
        facts = [f"Explained: without {these} every micro-batch is under its threshold"]
        facts += [f"the highest, {_unit(worst)}, is {_rest(worst, them)}"] if worst else []
    if (more := event.get("more_tokens")) is not None:
        facts.append(f"about {_count(more, 'more token')} may be over τ" if more else "no more seem to be over τ")
    return "; ".join(facts) + "."


def _likeliest(event: Event, unit: Mapping[str, Any] | None) -> list[str]:
    """What the likeliest tokens of a diffuse spike come to: culprits of the unit, or others that were measured."""
    named = unit or next(iter(event["culprits"]), None)
    mine = [c for c in event["culprits"] if all(c[key] == named[key] for key in ("rank", "micro_batch"))]
    parts = sorted(event["diffuse"], key=_by_times) if not mine else []
    tokens = mine or (parts[0]["largest_tokens"] if parts else [])
    if not tokens:
        return []
    what, many = "likeliest" if mine else "largest measured", len(tokens) > 1
    which, them = (f"the {len(tokens)} {what}", "them") if many else (f"the {what}", "it")
    rest = _rest(unit, them) if mine and unit else None
    shares = [token.get("share") for token in tokens]
    # As in the thresholds, tokens count as independent.
    share = math.nan if None in shares else math.hypot(*map(number, shares))
    if not math.isfinite(share):
        return [f"without {which} {_unit(unit)} is {rest}"] if rest else []
    carry = f"{which} {'carry' if many else 'carries'} {_percent(share)} of the norm"
    return [carry, f"without {them} {_unit(unit)} is {rest}"] if rest else [carry]


def _unit(unit: Mapping[str, Any]) -> str:
    return f"micro-batch {unit['micro_batch']} of rank {unit['rank']}"


def _rest(unit: Mapping[str, Any], them: str) -> str:
    """How far a unit is over its threshold without its culprits, and with them."""
    still = "" if _times(unit["rest"]) <= 1 else "still "
    return f"{still}at {_factor(unit['rest'])} of its threshold ({_factor(unit)} with {them})"


def _factor(part: Mapping[str, Any]) -> str:
    """`_times` in short, with as many digits as it takes to tell it from 1."""
    times = _times(part)
    return f"{times:.2f}" if times < 10 and abs(times - 1) >= 0.005 else short(times)


def _percent(share: float) -> str:
    return "under 1%" if 0 < share < 0.01 else f"{share:.0%}"


def _times(part: Mapping[str, Any]) -> float:
    """How far a norm is over its threshold, which may be zero in a file by another hand."""
    threshold = number(part["threshold"])
    return number(part["norm"]) / threshold if threshold else math.inf


def _by_times(part: Mapping[str, Any]) -> float:
    """What parts are sorted by, the one farthest over its threshold first."""
    return -_size(_times(part))


def _largest_parts(events: Sequence[Event], most: int) -> list[dict[str, Any]]:
    """The parts of diffuse events that are farthest over their thresholds."""
    parts = [{"global_step": event["global_step"], **part} for event in events for part in event["diffuse"]]
    return heapq.nlargest(most, parts, key=lambda part: _size(_times(part)))


def _part(part: Mapping[str, Any]) -> dict[str, Any]:
    """A part of an event without culprits, with its rows in words."""
    tokens = [_rounded(token) for token in part["largest_tokens"]]
    return {**_rounded(part), "rows": _ranges(part["rows"]), "largest_tokens": tokens}


def _ranges(numbers: Sequence[int], most: int = 8) -> str:
    """Ascending numbers as "0 to 3, 7"."""
    ranges: list[list[int]] = []
    for n in numbers:
        if ranges and n == ranges[-1][-1] + 1:
            ranges[-1][1:] = [n]
        else:
            ranges.append([n])
    texts = [" to ".join(map(str, ends)) for ends in ranges[:most]]
    return ", ".join(texts + ["…"] * (len(ranges) > most))


def _rounded(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: float(f"{value:.5g}") if isinstance(value, float) and math.isfinite(value) else value
        for name, value in values.items()
    }


def _clipped(text: Any) -> str | None:
    if text is None:
        return None
    text = text if isinstance(text, str) else json.dumps(text, ensure_ascii=False)
    half = TEXT_CHARACTERS // 2
    if len(text) <= TEXT_CHARACTERS:
        return text
    return f"{text[:half]}\n[… {len(text) - 2 * half} characters …]\n{text[-half:]}"


def _collapse(notes: Iterable[Mapping[str, Any]]) -> list[str]:
    """The notes' messages, each once, with the steps that it is of."""
    steps: dict[str, list[int]] = {}
    for note in notes:
        steps.setdefault(note["message"], []).append(note["global_step"])
    texts = []
    for message, of in steps.items():
        known = sorted({step for step in of if step is not None})
        where = f"in step{'s' * (len(known) > 1)} {_ranges(known)}: " if known else ""
        texts.append(where + message)
    return texts


def _sparkline(counts: Mapping[int, int], bins: int) -> str:
    first, last = min(counts), max(counts)
    bins = min(bins, last - first + 1)
    heights = [0] * bins
    for step, count in counts.items():
        heights[(step - first) * bins // (last - first + 1)] += count
    return "".join("·" if not h else "▁▂▃▄▅▆▇█"[math.ceil(8 * h / max(heights)) - 1] for h in heights)


def _count(n: int, noun: str, plural: str | None = None) -> str:
    return f"{n:,} {noun if n == 1 else plural or noun + 's'}"


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def _need(module: str, what: str) -> ModuleType:
    package = module.split(".")[0]
    try:
        return importlib.import_module(module)
    except ImportError:
        sys.exit(f"{what} needs {package}, which is not installed: pip install {package}")


if __name__ == "__main__":
    sys.exit(main())
