# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""The charts of the page: the token norm over the run, the culprits over time, clipped tokens, and norms by layer."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..tools.figures import count, severity, short, shown, times, visible
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
# What TokenClip did to the steps that are marked: whether it cut all and no spike was recorded.
_CLIPPED = {True: "stopped by TokenClip", False: "found by TokenClip"}
# By source; in the order in which they are drawn.
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


def _tip(title: str, more: str) -> Tip:
    return title, [(more, "")]


def steps_or_numbers(spikes: Sequence[Spike]) -> tuple[str, dict[int, int]]:
    """The x-axis of spikes: "step" and their steps, or "event" and their numbers if a step is unknown."""
    if all(spike.step is not None for spike in spikes):
        return "step", {spike.index: spike.step for spike in spikes if spike.step is not None}
    return "event", {spike.index: number for number, spike in enumerate(spikes, 1)}


def timeline(spikes: Sequence[Spike], culprits: Sequence[tuple[Spike, Row]], sources: Iterable[str]) -> Chart:
    """Every culprit by the norm of its own gradient, and the spikes without one.

    Args:
        spikes (Sequence[Spike]): All of the run.
        culprits (Sequence): The culprits of the table "culprits", each with its spike.
        sources (Iterable[str]): In the order of the legend.
    """
    what, places = steps_or_numbers(spikes)
    size = 4.0 if len(spikes) > 150 else 5.5
    by_source: dict[str, list[Point]] = defaultdict(list)
    for i, (spike, culprit) in enumerate(culprits):
        by_source[culprit["source"]].append(Point(places[spike.index], float(culprit["grad_norm"]), i, f"c{i}"))
    bare = [
        Point(
            places[spike.index],
            spike.size,
            _tip(without_culprit(spike), f"a single token would need norm {short(spike.size)}"),
            f"s{spike.index}",
        )
        for spike in spikes
        if not spike.event["culprits"]
    ]
    line = sorted(spikes, key=lambda spike: places[spike.index])
    x = whole_axis(what, [*places.values()])
    steps = [(float(places[spike.index]), float(spike.event["threshold"])) for spike in line]
    series = [_threshold([(x.low, steps[0][1]), *steps, (x.high, steps[-1][1])])]
    for source in filter(by_source.get, sources):
        shape = SHAPES.get(source, CIRCLE)
        series.append(Series(source, source, by_source[source], shape, source not in SHAPES, size))
    if bare:
        series.append(Series("no culprit found", "quiet", bare, "M0,-1V1", True, size + 1))
    values = [point.y for each in series for point in each.points]
    norms = [norm for _, culprit in culprits if math.isfinite(norm := float(culprit["grad_norm"]))]
    span = f", from {short(min(norms))} to {short(max(norms))}" if norms else ""
    label = (
        f"Chart: gradient norms of {count(len(culprits), 'culprit')} in {count(len(spikes), 'spike')}{span}. "
        "The list of spikes and the table of all culprits lead to the same places."
    )
    return Chart(label, x, log_axis("gradient norm of a token", values), series, "culprits")


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


def run_level(evidence: Evidence, drills: Sequence[Row], clips: Mapping[int, Row]) -> Chart:
    """The token norm of every step against its threshold, with marks of spikes, drills and TokenClip.

    Args:
        evidence (Evidence): The run.
        drills (Sequence[Mapping]): What `drill_report` returned.
        clips (Mapping[int, Mapping]): By step, what TokenClip found.
    """
    known = levels(evidence)
    drills = [drill for drill in drills if drill["global_step"] is not None]
    at_spikes = [
        Point(spike.step, spike.level, _spike_tip(spike), f"s{spike.index}")
        for spike in evidence.spikes
        if spike.step is not None
    ]
    at_drills: dict[bool, list[Point]] = {True: [], False: []}
    for drill in drills:
        at_drills[drill["found"]].append(Point(drill["global_step"], drill["level"], (drill["text"], ())))
    # Of several spikes in a step, the line says the largest; it lies under the marks.
    ascending = sorted(at_spikes, key=lambda point: severity(point.y))
    said = {point.x: point for point in (*at_drills[True], *at_drills[False], *ascending)}
    line = []
    for step, norm, _ in known:
        own = said.get(step, Point(step, norm, _tip(f"step {step}", f"token norm {short(norm)}")))
        line.append(own._replace(y=norm))
    threshold = _threshold([(step, limit) for step, _, limit in known])
    marks = [*at_spikes, *at_drills[True], *at_drills[False]]
    y = log_axis("gradient norm of a token", [point.y for point in (*line, *threshold.points, *marks)])
    low = y.low * min(y.high / y.low, 1e300) ** 0.03
    at_clips: dict[bool, list[Point]] = {True: [], False: []}
    for step, clip in clips.items():
        name = _CLIPPED[clip["stopped"]]
        over = f"{count(clip['over'], 'backward signal')} over the bounds, {clip['cut']:,} cut"
        at_clips[clip["stopped"]].append(Point(step, low, _tip(f"{name} in step {step}", over), "#h-clips"))
    series = [
        Series("gradient norm", "soft", line, size=2 if len(line) < 60 else 0, kind="line"),
        threshold,
        Series("spike", "accent", at_spikes),
        Series("drill, found", "focus", at_drills[True], DIAMOND, open=True),
        Series("drill, FAILED", "token", at_drills[False], CROSS),
        Series(_CLIPPED[True], "advantage", at_clips[True], UP),
        Series(_CLIPPED[False], "sequence", at_clips[False], UP, open=True),
    ]
    label = (
        f"Chart: the token norm of {count(len(known), 'step')}, {known[0][0]} to {known[-1][0]}, "
        f"with {count(len(evidence.spikes), 'spike')} and {count(len(drills), 'drill')}"
    )
    label += f", and marks at {count(len(clips), 'step')} in which TokenClip found tokens." if clips else "."
    series = [each for each in series if each.points]
    places = [int(point.x) for each in series for point in each.points]
    return Chart(label, whole_axis("step", places), y, series)


def _spike_tip(spike: Spike) -> Tip:
    over = times(spike.level, spike.event["threshold"])
    return _tip(f"spike in step {spike.step}", f"token norm {short(spike.level)}, {over} the threshold")


def clips_chart(rows: Sequence[Row]) -> Chart | None:
    """Every clipped token by how far it was over what is usual; `rows` are those of the table "clips"."""
    kept = [(i, row) for i, row in enumerate(rows) if row["global_step"] is not None]
    if not kept:
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
