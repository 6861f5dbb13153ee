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

from .evidence import evidence_files, jsonable, window_start
from .report_page import page
from .schema import EVENT, NOTE, conforms

# What `evidence.classify` says, for people.
SOURCES = {
    "token": "The token's importance ratio is far from 1: over 2 or under ½.",
    "sequence": "The response as a whole has drifted: its mean ratio is over 1.2 or under 1/1.2.",
    "layer": "The ratios are fine, but one layer carries over half of the squared norm.",
    "nonfinite": "The token's gradient is NaN or infinite.",
    "misaligned": "Most log-probs of the response differ from the rollout's by over a nat: a bug, not a spike.",
    "other": "None of the rules holds.",
}
TABLE_ROWS, DETAILED = 20, 500
# Beyond these the page would be slow: it keeps the largest.
PAGE_ROWS = 5_000
TEXT_CHARACTERS = 4000
SPARK_BINS = 60

Event = dict[str, Any]
Culprit = dict[str, Any]


@dataclass
class Evidence:
    """What the files hold, in the order in which it was written.

    Attributes:
        skipped (int): Lines that are no event of this version.
    """

    path: str
    events: list[Event] = field(default_factory=list)
    notes: list[dict[str, Any]] = field(default_factory=list)
    skipped: int = 0

    @property
    def culprits(self) -> list[tuple[Event, Culprit]]:
        """All culprits with their events, the largest first."""
        pairs = [(event, culprit) for event in self.events for culprit in event["culprits"]]
        return sorted(pairs, key=lambda pair: -_severity(pair[1]))


def read(path: str, since: int | None = None) -> Evidence:
    """Reads a directory with evidence, or a file; `spikes.jsonl` stands for the older files beside it as well.

    Args:
        path (str): The directory or file.
        since (int, optional): Leave out events of earlier steps, and those without a step.
    """
    found = Evidence(path)
    for line in _lines(path):
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            entry = None
        target = found.events if conforms(entry, EVENT) else found.notes if conforms(entry, NOTE) else None
        if target is None:
            found.skipped += 1
        elif since is None or (entry["global_step"] is not None and entry["global_step"] >= since):
            target.append(entry)
    return found


def summarize(evidence: Evidence, top: int) -> dict[str, Any]:
    """The figures of the terminal's summary, ready for `jsonable`."""
    pairs = evidence.culprits
    events = evidence.events
    steps = [event["global_step"] for event in events if event["global_step"] is not None]
    tokens = Counter(_name(culprit) for _, culprit in pairs)
    return {
        "path": evidence.path,
        "events": len(events),
        "culprits": len(pairs),
        "first_step": min(steps, default=None),
        "last_step": max(steps, default=None),
        "events_by_step": dict(sorted(Counter(steps).items())),
        "thresholds": sorted({number(event["threshold"]) for event in events}),
        "largest_grad_norm": number(pairs[0][1]["grad_norm"]) if pairs else None,
        "sources": dict(Counter(culprit["source"] for _, culprit in pairs).most_common()),
        "tokens": [{"token": token, "culprits": count} for token, count in tokens.most_common(10)],
        "incomplete_events": sum(not event["complete"] for event in events),
        "passes": sum(event["passes"] for event in events),
        "seconds": sum(event["seconds"] for event in events),
        "largest_culprits": [_row(event, culprit) for event, culprit in pairs[:top]],
        "notes": [note["message"] for note in evidence.notes],
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
        console.print(f"No gradient spike in {visible(summary['path'])}.", markup=False)
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

    if summary["culprits"]:
        table = Table(
            title="What looks wrong", title_justify="left", title_style="bold", box=None, padding=(0, 2, 0, 0)
        )
        table.add_column("source", style="bold")
        table.add_column("culprits", justify="right")
        table.add_column("share", justify="right")
        table.add_column("rule", style="dim")
        for source, count in summary["sources"].items():
            table.add_row(source, str(count), f"{count / summary['culprits']:.0%}", SOURCES[source])
        console.print()
        console.print(table)

        title = "The culprits" if len(summary["largest_culprits"]) == summary["culprits"] else "The largest culprits"
        table = Table(title=title, title_justify="left", title_style="bold", box=None, padding=(0, 2, 0, 0))
        for name in ("step", "rank"):
            table.add_column(name, justify="right", no_wrap=True)
        wide = console.width >= 110
        table.add_column("token in its context" if wide else "token", no_wrap=True)
        for name in ("norm", "× threshold", "ratio", "advantage", "reward"):
            table.add_column(name, justify="right", no_wrap=True)
        table.add_column("source", no_wrap=True)
        for row in summary["largest_culprits"]:
            table.add_row(
                "–" if row["global_step"] is None else str(row["global_step"]),
                str(row["rank"]),
                Text.assemble((quoted(_name(row)), "bold red"), visible(f"  {_around(row)}") if wide else ""),
                short(row["grad_norm"]),
                short(number(row["grad_norm"]) / number(row["threshold"])),
                *(short(row[name]) for name in ("ratio", "advantage", "reward")),
                row["source"],
            )
        console.print()
        console.print(table)

        if summary["tokens"][0]["culprits"] > 1:
            counts = [f"{quoted(entry['token'])} ({entry['culprits']})" for entry in summary["tokens"]]
            console.print(Text.assemble("\n", ("Most frequent culprits  ", "bold"), "   ".join(counts)))

    warnings = [f"Note in the file: {visible(note)}." for note in _collapse(summary["notes"])]
    if incomplete := summary["incomplete_events"]:
        warnings.append(f"{_count(incomplete, 'search', 'searches')} ended early: there may be more culprits.")
    if summary["skipped_lines"]:
        warnings.append(f"{_count(summary['skipped_lines'], 'line')} skipped: malformed, or of another version.")
    if warnings:
        console.print(Text("\n" + "\n".join(warnings), style="yellow"))
    console.print()


def write_page(evidence: Evidence, out: str, top: int) -> None:
    """Writes the HTML page; readers of an older one never see half of it."""
    offline = _need("plotly.offline", "The HTML report")
    data = json.dumps(jsonable(page_data(evidence, top)), allow_nan=False, separators=(",", ":"))
    unfinished = f"{out}.{os.getpid()}"
    os.makedirs(os.path.dirname(os.path.abspath(out)), exist_ok=True)
    try:
        with open(unfinished, "w", encoding="utf-8") as file:
            file.write(page(data, offline.get_plotlyjs()))
        os.replace(unfinished, out)
    finally:
        if os.path.exists(unfinished):
            os.remove(unfinished)


def page_data(evidence: Evidence, top: int) -> dict[str, Any]:
    """What the page shows, with everything that may be long kept to a bounded size.

    Args:
        evidence (Evidence): What `read` returns.
        top (int): So many culprits are shown with their response and layers: the largest of each event, then others.
    """
    pairs = evidence.culprits
    events = evidence.events
    if len(events) > PAGE_ROWS:
        kept = {id(event) for event, _ in pairs[:PAGE_ROWS]}
        events = [event for event in events if id(event) in kept]
    indexes = {id(event): i for i, event in enumerate(events)}
    largest_of_event = set({id(event): id(culprit) for event, culprit in reversed(pairs)}.values())
    # Sorting keeps the order by size among equals.
    in_turn = sorted((id(culprit) for _, culprit in pairs), key=lambda culprit: culprit not in largest_of_event)
    detailed = set(in_turn[:top])
    strips: dict[tuple[int, ...], dict[str, Any]] = {}
    numbers: dict[tuple[int, ...], int] = {}
    culprits = []
    for event, culprit in pairs[:PAGE_ROWS]:
        shown = {**_row(event, culprit), "event": indexes[id(event)]}
        if id(culprit) in detailed:
            start = culprit.get("response_tokens_start", window_start(culprit["position"]))
            heat = culprit["response_suspicion"]
            key = (indexes[id(event)], culprit["rank"], culprit["row"], start)
            if heat is not None:
                strips.setdefault(key, {"start": start, "tokens": culprit.get("response_tokens"), "heat": heat})
            shown |= {
                "strip": numbers.setdefault(key, len(numbers)) if key in strips else None,
                "layer_norms": _rounded(culprit["layer_norms"]),
                "prompt": _clipped(culprit.get("prompt")),
                "response": None if key in strips else _clipped(culprit.get("response")),
                "ground_truth": _clipped(culprit.get("ground_truth")),
            }
        culprits.append(shown)
    return {
        "top": top,
        "sources": SOURCES,
        "events": [_event(event) for event in events],
        "culprits": culprits,
        "strips": list(strips.values()),
        "events_in_all": len(evidence.events),
        "culprits_in_all": len(pairs),
        "notes": _collapse(note["message"] for note in evidence.notes),
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
    return "–" if value is None else f"{number(value):.4g}".replace("nan", "NaN").replace("inf", "∞")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="report", description=__doc__)
    parser.add_argument("path", metavar="PATH", help="the directory with spikes.jsonl, or a file")
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
        evidence = read(options.path, options.since)
        summary = summarize(evidence, options.top or TABLE_ROWS)
        if options.json:
            print(json.dumps(jsonable(summary), indent=2, allow_nan=False))
        else:
            print_summary(summary)
        if options.html:
            write_page(evidence, options.html, options.top or DETAILED)
            print(f"The report: {options.html}", file=sys.stderr if options.json else sys.stdout)
    except BrokenPipeError:  # the reader of the output, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        print(f"{error.strerror}: {error.filename}", file=sys.stderr)
        return 2
    return 0


def _lines(path: str) -> Iterable[bytes]:
    """All lines but one that is still being written."""
    directory = path if os.path.isdir(path) else os.path.dirname(path) or "."
    if path != directory and os.path.basename(path) != "spikes.jsonl":
        files = [path]
    else:
        files = evidence_files(directory)
        if path != directory and not files:
            files = [path]
    for index, file in enumerate(files):
        with open(file, "rb") as lines:
            for line in lines:
                if line.endswith(b"\n") or index < len(files) - 1 or _is_json(line):
                    yield line


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True


def _severity(culprit: Culprit) -> float:
    norm = number(culprit["grad_norm"])
    return math.inf if math.isnan(norm) else norm


def _name(culprit: Mapping[str, Any]) -> str:
    token = culprit.get("token")
    return f"id {culprit['token_id']}" if token is None else token


def _around(culprit: Mapping[str, Any], before: int = 12) -> str:
    """The context from shortly before the culprit on: a column is narrow."""
    context = culprit["context"] or ""
    start = max(context.find(f"«{culprit['token']}»") - before, 0)
    return ("…" if start else "") + context[start:]


def _row(event: Event, culprit: Culprit) -> dict[str, Any]:
    """A culprit as one row of a table."""
    names = ("rank", "micro_batch", "row", "position", "token_id", "token", "context", "grad_norm", "threshold")
    names += ("weight", "coefficient", "suspicion", "share", "advantage", "log_prob", "old_log_prob", "ratio")
    names += ("ref_log_prob", "entropy", "rollout_log_prob", "rollout_ratio", "sequence_ratio", "misaligned_share")
    names += ("source", "reward", "data_source", "uid")
    where = {name: event[name] for name in ("global_step", "epoch", "mini_batch")}
    return where | _rounded({name: culprit.get(name) for name in names})


def _event(event: Event) -> dict[str, Any]:
    """An event without its culprits and without the layers of its units."""
    names = ("global_step", "epoch", "mini_batch", "trigger", "threshold", "global_norm", "global_threshold")
    names += ("passes", "complete", "action", "seconds", "world_size", "error")
    ordinary = event["ordinary_layer_norms"]
    return {
        **_rounded({name: event[name] for name in names}),
        "ordinary_layer_norms": None if ordinary is None else _rounded(ordinary),
        "units": [_rounded({key: unit[key] for key in unit if key != "layer_norms"}) for unit in event["units"]],
        "open_tokens": sum(segment["tokens"] for segment in event["open_segments"]),
    }


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


def _collapse(notes: Iterable[str]) -> list[str]:
    """The notes, each text once with the number of times that it occurs."""
    return [text if count == 1 else f"{text} ({count} times)" for text, count in Counter(notes).items()]


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
