# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""A spike and its culprits, ready to print."""

import heapq
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any, get_type_hints

from .. import lines
from ..evidence.writer import WINDOW, window_start
from ..judge.rules import SOURCES
from ..tools.figures import (
    SHORT_CHARACTERS,
    clipped,
    count,
    excess,
    percent,
    quoted,
    ranges,
    severity,
    short,
    shown,
    times,
    visible,
)
from ..tools.spike import Spike
from .charts import layers_chart, without_culprit
from .summary import TOKENS, suspected_of, token_name
from .view import Cell, Column, Culprit, SpikeView, Strip, Table, View, drawn, sparkline
from .words import APPLIED, DIAGNOSES, FIGURES, NOT_APPLIED, brief, ended_early, explanation

Row = Mapping[str, Any]
# A column and what its cell has for a row.
Spec = tuple[Column, Callable[[Row], Cell]]

# How many parts of a diffuse spike are shown, and how many layers of a culprit.
PARTS, LAYERS = 20, 1024
# How many steps before a spike are shown.
STEPS_BEFORE = 20
# What the page calls a culprit's texts.
_TEXTS = {"prompt": "Prompt", "response": "Response", "ground_truth": "Ground truth"}


def figure(head: str, name: str, drop: int = 0) -> Spec:
    return Column(head, "num", drop), lambda row: short(row.get(name))


def index(head: str, name: str, drop: int = 0) -> Spec:
    return Column(head, "num", drop), lambda row: "–" if row.get(name) is None else str(row[name])


def token_cell(row: Row) -> Cell:
    """The token, and its context from shortly before it on: a column is narrow."""
    context = clipped(row.get("context"), 2 * SHORT_CHARACTERS) or ""
    start = max(context.find(f"«{row.get('token')}»") - 12, 0)
    name = quoted(str(clipped(token_name(row), SHORT_CHARACTERS)))
    return name, ("…" if start else "") + visible(context[start:])


def times_of(culprit: Row) -> str:
    """How often a culprit has the threshold."""
    return times(culprit["grad_norm"], culprit["threshold"])


def table_of(title: str, specs: Sequence[Spec], rows: Sequence[Row]) -> Table:
    return Table(title, [column for column, _ in specs], [[cell(row) for _, cell in specs] for row in rows])


# The types of fields, and the heads of those whose names do not serve as such.
_TYPES = {
    name: kind
    for of in (lines.InStep, lines.DiffusePart, lines.ClippedToken, lines.Culprit)
    for name, kind in get_type_hints(of).items()
}
_HEADS = {
    "global_step": "Step",
    "micro_batch": "Micro-batch",
    "grad_norm": "Norm",
    "log_prob": "log p",
    "old_log_prob": "Old log p",
    "rollout_log_prob": "Rollout log p",
    "ref_log_prob": "Reference log p",
    "coefficient": "∂L/∂log p",
    "weight": "Weight in the loss",
    "mismatch_turn": "Mismatch begins with turn",
    "multiple": "× usual",
}


def of_field(name: str, drop: int = 0) -> Spec:
    """The column of a field of `gradloc.lines`, whose cells are those of its type."""
    head, kind = _HEADS.get(name, name.replace("_", " ").capitalize()), _TYPES[name]
    if kind in (str, str | None):
        return Column(head, "", drop), lambda row: shown(row.get(name))
    return (index if kind in (int, int | None) else figure)(head, name, drop)


def of_fields(names: str) -> list[Spec]:
    """The columns of several, separated by blanks."""
    return [of_field(name) for name in names.split()]


TOKEN: Spec = (Column("Token in its context", "token"), token_cell)
_SOURCE: Spec = (Column("Source", "badge"), lambda row: str(row["source"]))

CULPRITS: Sequence[Spec] = (
    of_field("global_step"),
    TOKEN,
    of_field("grad_norm"),
    (Column("× threshold", "num"), times_of),
    _SOURCE,
    of_field("ratio", 6),
    of_field("rollout_ratio", 1),
    of_field("advantage", 5),
    of_field("log_prob", 2),
    of_field("reward", 3),
    of_field("rank", 4),
)
# A culprit's figures besides those.
TERMS: Sequence[Spec] = (
    *of_fields("sequence_ratio old_log_prob rollout_log_prob ref_log_prob entropy coefficient suspicion weight"),
    (Column("Share of the unit", "num"), lambda row: percent(row.get("share"))),
    (Column("Misaligned tokens", "num"), lambda row: percent(row.get("misaligned_share"))),
    *of_fields("turn mismatch_turn micro_batch row position token_id data_source uid"),
)

SUSPECTED: Sequence[Spec] = (
    of_field("global_step"),
    TOKEN,
    of_field("suspicion"),
    of_field("ratio", 4),
    of_field("advantage", 3),
    of_field("reward", 1),
    of_field("rank", 2),
    *of_fields("row position"),
    _SOURCE,
)

PART_SPECS: Sequence[Spec] = (
    of_field("global_step"),
    (Column("Rank", "num"), lambda part: "several" if part["rank"] is None else str(part["rank"])),
    of_field("micro_batch", 1),
    (Column("Rows"), lambda part: part["rows"] if isinstance(part["rows"], str) else ranges(part["rows"])),
    (Column("Tokens", "num"), lambda part: f"{part['tokens']:,}"),
    of_field("norm"),
    of_field("threshold", 2),
    (Column("× threshold", "num"), lambda part: times(part["norm"], part["threshold"])),
    (Column("Largest tokens measured"), lambda part: "\n".join(map(_measured, part["largest_tokens"][:TOKENS]))),
)
# From the whole gradient down to a token.
LADDER: Sequence[Spec] = ((Column("Gradient of", "row"), lambda part: part["of"]), *PART_SPECS[5:8])

# The columns of a list of spikes, each with its largest culprit.
_SPIKES = (
    *(Column("Step", "num"), TOKEN[0], Column("Norm", "num"), Column("× threshold", "num"), Column("Culprits", "num")),
    *(Column("Diagnosis"), Column("Cause", "badge")),
)


def spikes_table(title: str, spikes: Sequence[Spike]) -> Table:
    """A line for each spike."""
    rows: list[Sequence[Cell]] = []
    for spike in spikes:
        largest, event = _largest(spike), spike.event
        token = ("–", without_culprit(spike)) if largest is None else token_cell(largest)
        factor = times(spike.level, event["threshold"]) if largest is None else times_of(largest)
        cause = "–" if spike.verdict is None else shown(spike.verdict["cause"])
        many = f"{len(event['culprits']):,}"
        rows.append([shown(spike.step), token, short(spike.size), factor, many, event["diagnosis"], cause])
    return Table(title, _SPIKES, rows)


def _largest(spike: Spike) -> Row | None:
    """Its largest culprit."""
    return max(spike.event["culprits"], key=lambda culprit: severity(culprit["grad_norm"]), default=None)


def _measured(token: Row) -> str:
    share = percent(token["share"])
    carried = "" if share == "–" else f", {share} of the norm"
    return f"token {token['position']} of row {token['row']}: {short(token['grad_norm'])}{carried}"


def spike_view(
    spike: Spike, place: str, clipped_said: str | None, then: str, steps: Mapping[int, Row], culprits: Sequence[int]
) -> SpikeView:
    """A spike for the page.

    Args:
        spike (Spike): The spike.
        place (str): Its step, or its number.
        clipped_said (str, optional): What is said of TokenClip beside it.
        then (str): What to do next.
        steps (Mapping): The figures by step, where those before it are to be shown.
        culprits (Sequence[int]): The numbers of its culprits on the page, the largest first.
    """
    event = spike.event
    epoch, mini_batch = event["epoch"], event["mini_batch"]
    title = f"{place}, mini-batch {mini_batch}" if epoch or mini_batch else place
    title += f" of epoch {epoch}" if epoch else ""
    largest = _largest(spike)
    found = without_culprit(spike) if largest is None else f"{token_cell(largest)[0][:20]}  {times_of(largest)}"
    left = len(event["culprits"]) - len(culprits)
    parts = heapq.nlargest(PARTS, event["diffuse"], key=excess)
    suspected = suspected_of(spike)
    part_table = table_of("Parts over their threshold that no small set of tokens explains", PART_SPECS[1:], parts)
    if more := len(event["diffuse"]) + event.get("more_diffuse", 0) - len(parts):
        part_table.more = f"{count(more, 'smaller part')} left out here."
    content = {
        "spike": title,
        **told(spike, then),
        "summary": "" if spike.verdict is None else visible(spike.summary),
        "story": visible(story(spike)),
        "clipped": clipped_said or "",
        "kind": f"Diagnosis: {event['diagnosis']}.",
        "explanation": visible(explanation(event) or ""),
        "before": _before(spike, steps),
        "parts": part_table if parts else None,
        "suspected": table_of(spike.suspected_title, SUSPECTED[1:], suspected) if suspected else None,
        "left": f"The page leaves out {count(left, 'smaller culprit')} of this spike." if left else "",
    }
    return SpikeView(f"{title}: {found}", content, culprits)


def told(spike: Spike, then: str) -> dict[str, str]:
    """The verdict on a spike or its summary; apart from it, how to repair what is broken; what to look at; what `then`.

    In the order in which they are said; what is empty is not.
    """
    verdict, said, advice = spike.verdict, spike.opening, ""
    if verdict is not None and verdict["cause"] is not None and said.startswith(brief(verdict)):
        advice = said.removeprefix(brief(verdict)).lstrip(":. ")
        said, advice = f"{brief(verdict)}.", advice[:1].upper() + advice[1:]
    look = DIAGNOSES[spike.event["diagnosis"]]
    texts = {"verdict": said, "advice": advice, "check": spike.check, "look": look, "then": then}
    return {name: visible(text) for name, text in texts.items()}


def story(spike: Spike) -> str:
    """How a spike was found, and what was done."""
    event, trigger = spike.event, spike.event["trigger"]
    cause = "The gradient of all ranks" if trigger["kind"] == "global" else "A micro-batch's gradient"
    over = ", over its threshold of" if spike.is_spike else "; its threshold is"
    sentences = [f"{cause} had norm {short(trigger['norm'])}{over} {short(trigger['threshold'])}."]
    if event["diagnosis"] not in ("unsearched", "under"):  # the summary says these
        passes = f"{count(event['passes'], 'extra pass', 'extra passes')} ({short(round(event['seconds'], 2))} s)"
        not_seen = sum(tokens["tokens"] for tokens in event["open_segments"])
        left = f"; {count(not_seen, 'token')} not looked at" if ended_early(event) and not_seen else ""
        sentences.append(f"{passes} found {count(len(event['culprits']), 'culprit')}{left}.")
    if event["error"] is not None:
        sentences.append(f"The search failed with an error: {str(clipped(event['error'])).rstrip('.')}.")
    sentences.append((APPLIED if event["applied"] else NOT_APPLIED)[event["action"]])
    return " ".join(sentences)


def _before(spike: Spike, steps: Mapping[int, Row]) -> Table | None:
    """The figures of the steps before a spike; None where no step before it is known."""
    numbers = [] if spike.step is None else [n for n in range(spike.step - STEPS_BEFORE, spike.step + 1) if n in steps]
    own = bool(numbers) and numbers[-1] == spike.step
    earlier = len(numbers) - own
    if not earlier:
        return None
    rows = []
    for name, (title, _) in FIGURES.items():
        values = [steps[n][name] for n in numbers]
        if any(value is not None for value in values):
            known = [value for value in values[:earlier] if value is not None]
            usual = _figure(name, statistics.median(known) if known else None)
            last = _figure(name, values[-1] if own else None)
            sizes = [_size(name, value) for value in values]
            low = min(drawn(sizes), default=1.0)
            # At least a factor of 2, so that small changes look small.
            rows.append([(title, name), sparkline(sizes, own, low, 2 * low), usual, last])
    columns = (Column("Figure", "row"), Column("Up to the spike", "spark"), Column("Usual", "num"))
    return Table(f"The {count(earlier, 'step')} before", (*columns, Column("In its step", "num")), rows)


def _figure(name: str, value: float | None) -> str:
    return f"{float(f'{100 * value:.3g}'):g}%" if name == "unlikely_share" and value is not None else short(value)


def _size(name: str, value: float | None) -> float | None:
    """The value that is drawn: of a ratio, its logarithm."""
    return math.log(max(value, 1.0)) if value is not None and "ratio" in name else value


class Details:
    """Makes the culprits of a view; what several share, strips, is added to it once."""

    def __init__(self, view: View, texts: bool, top: int) -> None:
        self._view, self._texts, self._top = view, texts, top
        self._strips: dict[tuple[int, int, int, int], int] = {}
        # By spike, rank and row: the number of each culprit by its position.
        self._in_row: dict[tuple[int, int, int], dict[int, int]] = defaultdict(dict)

    def culprit(self, i: int, spike: Spike, row: Row, detailed: bool) -> Culprit:
        """A culprit, with the number `i`; `detailed` for one with its response, texts and layers."""
        factor = times_of(row)
        self._in_row[spike.index, row["rank"], row["row"]][row["position"]] = i
        strip, ladder, layers, table, hint, texts = None, None, None, None, "", {}
        edge = f"The page has the responses of {count(self._top, 'culprit')}, the largest first; --top sets how many."
        if detailed:
            norms = dict(islice(row["layer_norms"].items(), LAYERS))
            layers, table = layers_chart(norms, spike.event["ordinary_layer_norms"])
            hint = _layer_hint(layers is not None, spike)
            ladder = _ladder(spike.event, row)
            strip = self._strip(spike, row)
            edge = "The response is not in the evidence."
            texts = {name: clipped(row.get(name)) for name in _TEXTS}
        if not self._texts:
            edge = "The response is not on this page."
        if strip is not None:
            start = self._view.strips[strip].start
            edge = f"{start} tokens before " if start else ""
            texts["response"] = None
        shown = {name: None if texts.get(name) is None else (title, texts[name]) for name, title in _TEXTS.items()}
        times_it = "" if factor == "not finite" else f", {factor} the threshold"
        norm = f"gradient norm {short(row['grad_norm'])}{times_it}"
        return Culprit(
            spike=spike.index,
            reasons=row["sources"][: len(SOURCES)],
            content={
                **{"norm": norm, "edge": edge, "ladder": ladder},
                **{"layers-hint": hint, "layers-figures": layers and table, **shown},
            },
            strip=strip,
            layers=layers,
        )

    def _strip(self, spike: Spike, row: Row) -> int | None:
        """The number of a culprit's strip; None where the evidence has none."""
        start = row.get("response_tokens_start")
        start = window_start(row["position"]) if start is None else start
        key, heat = (spike.index, row["rank"], row["row"], start), row["response_suspicion"]
        if key not in self._strips and heat is not None:
            values, tokens = [float(value) for value in heat[:WINDOW]], row.get("response_tokens")
            hottest = max([0.0, *filter(math.isfinite, values)])
            length = max(len(values), 0 if tokens is None else len(tokens[:WINDOW]))
            texts = ["▪"] * length if tokens is None else [_piece(text) for text in tokens[:length]]
            self._strips[key] = len(self._view.strips)
            shades, figures = [_shade(v, hottest) for v in values], [*map(short, values)]
            self._view.strips.append(Strip(start, texts, shades, figures, self._in_row[key[:3]]))
        return self._strips.get(key)


def _piece(text: str) -> str:
    """A token's text, with what cannot be seen as signs; a line break is kept behind its sign."""
    return (visible(str(clipped(text, SHORT_CHARACTERS))) or "∅") + "\n" * text.endswith("\n")


def _shade(suspicion: float, hottest: float) -> int:
    """From 0 to 100. The square root keeps the smaller ones apart; the culprit would outshine all else."""
    return round(100 * math.sqrt(max(suspicion, 0.0) / hottest)) if math.isfinite(suspicion) and hottest > 0 else 100


def _ladder(event: Mapping[str, Any], row: Row) -> Table:
    """How far over its threshold a culprit is, and so is each part of the gradient that has it."""
    units = [unit for unit in event["units"] if unit["micro_batch"] == row["micro_batch"]]
    whole = {"norm": event["global_norm"], "threshold": event["global_threshold"]}
    parts: list[Row] = [whole | {"of": ("All ranks", "the reduced gradient")}]
    if units:
        worst: Row = max(units, key=excess)
        least = "at least " if event.get("more_units") else ""
        more = f"over on {least}{len(units)} of {count(event['world_size'], 'rank')}"
        parts.append({**worst, "of": (f"Micro-batch {row['micro_batch']}", more)})
    for own in [unit for unit in units if unit["rank"] == row["rank"]][:1]:
        more = f"{count(own['tokens'], 'token')} in {count(own['rows'], 'response')}"
        parts.append({**own, "of": (f"Rank {row['rank']}", more)})
    token = {"norm": row["grad_norm"], "threshold": row["threshold"]}
    parts.append(token | {"of": (f"Token {row['position']}", f"of row {row['row']}")})
    return table_of("How far over the threshold, from the whole gradient down to the token", LADDER, parts)


def _layer_hint(drawn: bool, spike: Spike) -> str:
    if not drawn:
        return "There are no finite norms by layer to show for this culprit."
    if not spike.event["ordinary_layer_norms"]:
        return "No mini-batch so far had a micro-batch under its threshold: there is no ordinary token to compare with."
    return "Each bar goes from an ordinary token (of the micro-batches under their thresholds) to the culprit."
