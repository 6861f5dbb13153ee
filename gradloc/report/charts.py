# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""The charts of the page: token norm and culprits over the run, clipped tokens, and norms by layer."""

import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from itertools import chain
from typing import Any

from ..tools.figures import count, short, shown, times, visible
from ..tools.reading import Evidence
from ..tools.spike import Spike
from .view import CIRCLE, Axis, Chart, Column, Point, Series, Table, Tip, log_axis, whole_axis

Row = Mapping[str, Any]


def _polygon(*degrees: float, inner: float = 1.0) -> str:
    """A closed path through points at these angles from the top, every second one nearer by the factor `inner`."""
    points = []
    for i, angle in enumerate(degrees):
        radius = 1.25 * (inner if i % 2 else 1.0)  # as large to the eye as a circle
        points.append(f"{radius * math.sin(math.radians(angle)):.2f},{-radius * math.cos(math.radians(angle)):.2f}")
    return f"M{'L'.join(points)}Z"


TICK = "M-1,0H1"
UP, DIAMOND = _polygon(0, 120, 240), _polygon(0, 90, 180, 270)
CROSS = _polygon(*range(45, 405, 45), inner=0.45)
# How wide the chart of layers is, in pixels; on a small screen, every second label is left out.
_LAYERS_WIDTH = 420
# By source.
SHAPES = {
    "token": CIRCLE,
    "sequence": _polygon(45, 135, 225, 315),
    "layer": DIAMOND,
    "nonfinite": CROSS,
    "retokenized": _polygon(30, 150, 270),
    "misaligned": UP,
    "unsampled": _polygon(*range(0, 360, 36), inner=0.45),
    "advantage": _polygon(*range(0, 360, 60)),
    "weight": _polygon(*range(0, 360, 72)),
    "kl": _polygon(*range(0, 360, 45), inner=0.45),
    "entropy": _polygon(45, 225, 135, 315),
    "unlikely": _polygon(60, 180, 300),
    "punished": _polygon(90, 210, 330),
}
_LINE, _BARE = "gradient norm", "no culprit found"
_FOUND, _FAILED = "drill, found", "drill, FAILED"
# What TokenClip did to the steps that are marked: whether it cut all and no spike was recorded.
_CLIPPED = {True: "stopped by TokenClip", False: "found by TokenClip"}
# What is marked over the run: its colour, shape, and whether only the outline is drawn; in the order of the legend.
_MARKS: Mapping[str, tuple[str, str, bool]] = {
    **{source: (source, shape, False) for source, shape in SHAPES.items()},
    "other": ("other", CIRCLE, True),
    _BARE: ("quiet", "M0,-1V1", True),
    _FOUND: ("focus", DIAMOND, True),
    _FAILED: ("token", CROSS, False),
    _CLIPPED[True]: ("advantage", UP, False),
    _CLIPPED[False]: ("sequence", UP, True),
}
# What is said below the chart, by what it has of these.
HINTS: Mapping[str, Collection[str]] = {
    "The line is the largest gradient norm of a micro-batch in each step, scaled to that of a single token.": [_LINE],
    "Marks are culprits at the norm of their own gradient: select one to see it below.": [*SHAPES, "other"],
    "Bars are spikes without a culprit, at the norm that a single token would need.": [_BARE],
    "Triangles are steps in which TokenClip found tokens, filled where it cut all and no spike was recorded.": [
        *_CLIPPED.values()
    ],
}


def _tip(title: str, more: str) -> Tip:
    return title, [(more, "")]


def steps_or_numbers(spikes: Sequence[Spike]) -> tuple[str, dict[int, int]]:
    """The x-axis of spikes: "step" and their steps, or "event" and their numbers if a step is unknown."""
    if all(spike.step is not None for spike in spikes):
        return "step", {spike.index: spike.step for spike in spikes if spike.step is not None}
    return "event", {spike.index: number for number, spike in enumerate(spikes, 1)}


def without_culprit(spike: Spike) -> str:
    said = {"unsearched": "not searched", "under": "nothing over its threshold"}
    return said.get(spike.event["diagnosis"], "no culprit found")


def levels(evidence: Evidence) -> list[tuple[int, float, float]]:
    """The steps with a token norm: each with the norm and its threshold."""
    known = ((step, evidence.steps[step]) for step in evidence.known_steps())
    return [
        (step, norm, threshold)
        for step, of in known
        if (norm := of["token_norm_max"]) is not None and (threshold := of["threshold"]) is not None
    ]


def run_chart(
    evidence: Evidence, culprits: Sequence[tuple[Spike, Row]], drills: Sequence[Row], clips: Mapping[int, Row]
) -> Chart | None:
    """The token norm of every step against its threshold, and every culprit by the norm of its own gradient.

    Spikes without a culprit, drills and what TokenClip did are marked, too. None where all is in one step.

    Args:
        evidence (Evidence): The run.
        culprits (Sequence): The culprits of the table "culprits", each with its spike.
        drills (Sequence[Mapping]): What `drill_report` returned.
        clips (Mapping[int, Mapping]): By step, what TokenClip found.
    """
    known = levels(evidence)
    what, places = steps_or_numbers(evidence.spikes)
    if known or drills or clips:  # what has no step is left out
        what, places = "step", {spike.index: spike.step for spike in evidence.spikes if spike.step is not None}
    spikes = sorted((spike for spike in evidence.spikes if spike.index in places), key=lambda spike: spike.size)
    links = {spike.step: f"s{spike.index}" for spike in spikes}  # of several, that of the largest
    line = []
    for step, norm, limit in known:
        tip = _tip(f"step {step}", f"token norm {short(norm)}, {times(norm, limit)} the threshold")
        line.append(Point(step, norm, tip, links.get(step, "")))
    of_spikes = sorted((places[spike.index], float(spike.event["threshold"])) for spike in spikes)
    threshold = _threshold([(step, limit) for step, _, limit in known] or of_spikes)
    marks: dict[str, list[Point]] = defaultdict(list)
    for i, (spike, culprit) in enumerate(culprits):
        if spike.index in places:
            marks[culprit["source"]].append(Point(places[spike.index], float(culprit["grad_norm"]), i, f"c{i}"))
    for spike in spikes:
        if not spike.event["culprits"]:
            tip = _tip(without_culprit(spike), f"a single token would need norm {short(spike.size)}")
            marks[_BARE].append(Point(places[spike.index], spike.size, tip, f"s{spike.index}"))
    for drill in drills:
        if drill["global_step"] is not None:
            point = Point(drill["global_step"], drill["level"], (drill["text"], ()))
            marks[_FOUND if drill["found"] else _FAILED].append(point)
    points = (*line, *threshold.points, *chain.from_iterable(marks.values()))
    if not points:
        return None
    y = log_axis("gradient norm of a token", [point.y for point in points])
    low = y.low * min(y.high / y.low, 1e300) ** 0.03
    for step, clip in clips.items():
        name = _CLIPPED[clip["stopped"]]
        over = f"{count(clip['over'], 'backward signal')} over the bounds, {clip['cut']:,} cut"
        marks[name].append(Point(step, low, _tip(f"{name} in step {step}", over), "#h-clips"))
    size = 4.0 if len(spikes) > 150 else 5.5
    of_run = [Series(_LINE, "soft", line, size=2 if len(line) < 60 else 0, kind="line"), threshold]
    of_marks = [Series(name, color, marks[name], shape, open, size) for name, (color, shape, open) in _MARKS.items()]
    series = [each for each in (*of_run, *of_marks) if each.points]
    found = [int(point.x) for each in series for point in each.points]
    if len({*found}) < 2:
        return None
    shown = ((len(known), "step"), (len(spikes), "spike"), (len(culprits), "culprit"), (len(drills), "drill"))
    label = f"Chart: gradient norms of {', '.join(count(n, noun) for n, noun in shown if n)}."
    return Chart(label, whole_axis(what, found), y, series, "culprits")


def clips_chart(rows: Sequence[Row]) -> Chart | None:
    """Every clipped token by how far it was over what is usual; None where all are in one step.

    Args:
        rows (Sequence[Mapping]): Those of the table "clips", each with what was `done` to it.
    """
    kept = [(i, row) for i, row in enumerate(rows) if row["global_step"] is not None]
    if len({row["global_step"] for _, row in kept}) < 2:
        return None
    series = []
    for done, shape, color in (
        ("dropped", UP, "advantage"),
        ("reduced", SHAPES["unlikely"], "misaligned"),
        ("left", UP, "sequence"),
    ):
        points = [Point(row["global_step"], float(row["multiple"]), i) for i, row in kept if row["done"] == done]
        if points:
            series.append(Series(done, color, points, shape, open=done == "left"))
    label = (
        f"Chart: {count(len(kept), 'token')} over TokenClip's bounds, by step and by how many times the usual signal. "
        "The table has the same tokens."
    )
    axis = log_axis("times the usual signal", [float(row["multiple"]) for _, row in kept])
    return Chart(label, whole_axis("step", [row["global_step"] for _, row in kept]), axis, series, "clips")


def layers_chart(norms: Mapping[str, Any], ordinary: Mapping[str, Any] | None) -> tuple[Chart | None, Table]:
    """A culprit's norm by layer, beside an ordinary token's, and the figures; no chart without a finite norm."""
    rows = []
    for name, norm in norms.items():
        usual = None if ordinary is None or name not in ordinary else float(ordinary[name])
        rows.append((name, float(norm), usual))
    columns = (
        Column("Layer", "row"),
        Column("Culprit", "num"),
        Column("Ordinary token", "num"),
        Column("Ratio", "num"),
    )
    cells = [[shown(name), short(norm), short(usual), _ratio(norm, usual)] for name, norm, usual in rows]
    table = Table("The figures by layer", columns, cells)
    norms_of = {i: norm for i, (_, norm, _) in enumerate(rows) if _drawn(norm)}
    if not norms_of:
        return None, table
    compared = {i: value for i, (*_, value) in enumerate(rows) if value is not None and _drawn(value)}
    size = max(1.5, min(4.5, 90 / len(rows)))
    bars = [Point(i, norm, i, base=compared.get(i)) for i, norm in norms_of.items()]
    series = [Series("the culprit", "accent", bars, size=size, kind="bars")]
    if compared:
        alone = [Point(i, value, i) for i, value in compared.items() if i not in norms_of]
        series.insert(0, Series("an ordinary token", "soft", alone, TICK, open=True, size=size))
    routers = any(name.endswith(".router") for name, *_ in rows)
    labels = [_layer_label(name) for name, *_ in rows]
    every = -(-len(rows) * (8 * max(map(len, labels)) + 8) // _LAYERS_WIDTH)
    ticks = [(float(i), label) for i, label in enumerate(labels) if i % every == 0]
    x = Axis("layer (r: its router)" if routers else "layer", -0.7, len(rows) - 0.3, ticks)
    top, norm = max(norms_of.items(), key=lambda pair: pair[1])
    ratio = cells[top][3]
    label = (
        f"Chart: the culprit's gradient norm in each of {count(len(rows), 'layer')}. The largest is {short(norm)} in "
        f"{cells[top][0]}" + (f", {ratio} an ordinary token's." if ratio != "–" else ".")
    )
    y = log_axis("gradient norm", [*compared.values(), *norms_of.values()])
    return Chart(f"{label} All figures are in the table below it.", x, y, series, "layers"), table


def _drawn(norm: float) -> bool:
    return 1e-200 < norm < 1e200


def _ratio(norm: float, usual: float | None) -> str:
    return "–" if usual is None or not (_drawn(norm) and _drawn(usual)) else times(norm, usual)


def _layer_label(name: str) -> str:
    known = {"embed_tokens": "embed", "lm_head": "head"}
    base = name.removesuffix(".router")
    digits = base[len(base.rstrip("0123456789")) :]
    return visible(known.get(name) or (digits + "r" * (base != name) if digits else name))[-8:]


def _threshold(values: Sequence[tuple[float, float]]) -> Series:
    """A dashed line through places and values that keeps each value until the next."""
    points: list[Point] = []
    for x, y in values:
        if points and y != points[-1].y:
            points.append(Point(x, points[-1].y))
        points.append(Point(x, y))
    return Series("threshold", "ink", points, size=0, kind="dashes")
