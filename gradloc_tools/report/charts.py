# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""The charts of the page: the token norm over the run, the culprits over time, clipped tokens, and norms by layer."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .figures import count, number, short, shown, times, visible
from .spikes import Spike
from .view import Axis, Chart, Column, Series, Table, log_axis, log_ticks, whole_axis

Row = Mapping[str, Any]


def _polygon(*degrees: float, inner: float = 1.0) -> str:
    """A closed path through points at these angles from the top, every second one nearer by the factor `inner`."""
    points = []
    for i, angle in enumerate(degrees):
        radius = 1.25 * (inner if i % 2 else 1.0)  # as large to the eye as a circle
        points.append(f"{radius * math.sin(math.radians(angle)):.2f},{-radius * math.cos(math.radians(angle)):.2f}")
    return f"M{'L'.join(points)}Z"


CIRCLE = "M1,0A1,1 0 1 1 -1,0A1,1 0 1 1 1,0Z"
TICK = "M-1,0H1"
UP, DIAMOND = _polygon(0, 120, 240), _polygon(0, 90, 180, 270)
CROSS = _polygon(*range(45, 405, 45), inner=0.45)
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


def source_marks(source: str) -> dict[str, Any]:
    return {"kind": "marks", "color": source, "shape": SHAPES.get(source, CIRCLE), "open": source not in SHAPES}


def steps_or_numbers(spikes: Sequence[Spike]) -> tuple[str, dict[int, int]]:
    """Where spikes are over the run: "step" and their steps, or "event" and their numbers where a step is unknown."""
    if all(spike.step is not None for spike in spikes):
        return "step", {spike.index: spike.step for spike in spikes if spike.step is not None}
    return "event", {spike.index: number for number, spike in enumerate(spikes, 1)}


def timeline(spikes: Sequence[Spike], culprits: Sequence[tuple[Spike, Row]], sources: Iterable[str]) -> Chart:
    """Every culprit by the norm of its own gradient, and the spikes without one.

    Args:
        spikes (Sequence[Spike]): Those on the page.
        culprits (Sequence): The culprits of the table "culprits", each with its spike.
        sources (Iterable[str]): In the order of the legend.
    """
    what, places = steps_or_numbers(spikes)
    numbers = {spike.index: number for number, spike in enumerate(spikes)}
    size = 4.0 if len(spikes) > 150 else 5.5
    by_source: dict[str, list[tuple[int, Spike, Row]]] = defaultdict(list)
    for i, (spike, culprit) in enumerate(culprits):
        by_source[culprit["source"]].append((i, spike, culprit))
    bare = [spike for spike in spikes if not spike.event["culprits"]]
    line = sorted(spikes, key=lambda spike: places[spike.index])
    x = whole_axis(what, [*places.values()])
    thresholds = [number(spike.event["threshold"]) for spike in line]
    values = [*thresholds, *(number(culprit["grad_norm"]) for _, culprit in culprits), *(spike.size for spike in bare)]
    ends = [x.low, *(float(places[spike.index]) for spike in line), x.high]
    series = [_steps("threshold", ends, [thresholds[0], *thresholds, thresholds[-1]])]
    for source in sources:
        if mine := by_source.get(source):
            series.append(
                Series(
                    source,
                    **source_marks(source),
                    size=size,
                    x=[places[spike.index] for _, spike, _ in mine],
                    y=[number(culprit["grad_norm"]) for *_, culprit in mine],
                    tips=[i for i, *_ in mine],
                    links=[f"c{i}" for i, *_ in mine],
                )
            )
    if bare:
        series.append(
            Series(
                "no culprit found",
                "marks",
                "quiet",
                x=[places[spike.index] for spike in bare],
                y=[spike.size for spike in bare],
                tips=[
                    f"{without_culprit(spike)}\na single token would need norm {short(spike.size)}" for spike in bare
                ],
                links=[f"s{numbers[spike.index]}" for spike in bare],
                shape="M0,-1V1",
                open=True,
                size=size + 1,
            )
        )
    norms = [norm for _, culprit in culprits if math.isfinite(norm := number(culprit["grad_norm"]))]
    span = f", from {short(min(norms))} to {short(max(norms))}" if norms else ""
    label = (
        f"Chart: gradient norms of {count(len(culprits), 'culprit')} in {count(len(spikes), 'spike')}{span}. "
        "The list of spikes and the table of all culprits lead to the same places."
    )
    return Chart(label, x, log_axis("gradient norm of a token", values), series, "culprits")


def without_culprit(spike: Spike) -> str:
    said = {"unsearched": "not searched", "under": "nothing over its threshold"}
    return said.get(spike.event["diagnosis"], "no culprit found")


def run_level(
    level: Mapping[str, Any], spikes: Sequence[Spike], drills: Sequence[Row], clips: Sequence[Row], clip_steps: int
) -> Chart:
    """The token norm of every step against its threshold, with marks of spikes, drills and TokenClip.

    Args:
        level (Mapping): What `steps.level` returned.
        spikes (Sequence[Spike]): Those on the page.
        drills (Sequence[Mapping]): What `drill_report` returned.
        clips (Sequence[Mapping]): The steps in which TokenClip found tokens, as far as they are marked.
        clip_steps (int): How many there are in all; 0 without TokenClip.
    """
    steps, norms, thresholds = level["steps"], level["norms"], level["thresholds"]
    with_step = [(i, spike) for i, spike in enumerate(spikes) if spike.step is not None]
    drills = [drill for drill in drills if drill["global_step"] is not None]
    # Of several spikes in a step, the line says the largest; it lies under the marks.
    marks = {drill["global_step"]: (drill["text"], "") for drill in drills}
    by_level = sorted(with_step, key=lambda pair: math.inf if math.isnan(pair[1].level) else pair[1].level)
    marks |= {spike.step: (_spike_tip(spike), f"s{i}") for i, spike in by_level}
    own = [
        marks.get(step) or (f"step {step}\ntoken norm {short(norm)}", "")
        for step, norm in zip(steps, norms, strict=True)
    ]
    y = log_axis(
        "token-equivalent norm",
        [*norms, *map(number, thresholds), *(spike.level for _, spike in with_step), *(d["level"] for d in drills)],
    )
    low = y.low * min(y.high / y.low, 1e300) ** 0.03
    places = [*steps, *(spike.step for _, spike in with_step), *(d["global_step"] for d in drills)]
    places += [clip["global_step"] for clip in clips]
    tips, links = zip(*own, strict=True)
    series = [
        Series("token norm", "line", "soft", steps, norms, tips=tips, links=links, size=2 if len(steps) < 60 else 0),
        _steps("threshold", steps, [*map(number, thresholds)]),
        Series(
            "spike",
            "marks",
            "accent",
            x=[spike.step for _, spike in with_step if spike.step is not None],
            y=[spike.level for _, spike in with_step],
            tips=[_spike_tip(spike) for _, spike in with_step],
            links=[f"s{i}" for i, _ in with_step],
            shape=CIRCLE,
        ),
    ]
    for name, found, shape, color in (
        ("drill, found", True, DIAMOND, "focus"),
        ("drill, FAILED", False, CROSS, "token"),
    ):
        mine = [drill for drill in drills if drill["found"] == found]
        x, levels, said = ([d[key] for d in mine] for key in ("global_step", "level", "text"))
        series.append(Series(name, "marks", color, x, levels, tips=said, shape=shape, open=found))
    for name, stopped, color in (
        ("stopped by TokenClip", True, "advantage"),
        ("found by TokenClip", False, "sequence"),
    ):
        at = [clip for clip in clips if clip["stopped"] == stopped]
        series.append(
            Series(
                name,
                "marks",
                color,
                x=[clip["global_step"] for clip in at],
                y=[low] * len(at),
                tips=[
                    f"{name} in step {clip['global_step']}\n{count(clip['over'], 'backward signal')} over the bounds, "
                    f"{clip['cut']:,} cut"
                    for clip in at
                ],
                links=["#h-clips"] * len(at),
                shape=UP,
                open=not stopped,
            )
        )
    label = (
        f"Chart: the token norm of {count(level['steps_in_all'], 'step')}, {steps[0]} to {steps[-1]}, "
        f"with {count(len(spikes), 'spike')} and {count(len(drills), 'drill')}"
    )
    label += f", and marks at {count(len(clips), 'step')} in which TokenClip found tokens." if clip_steps else "."
    return Chart(label, whole_axis("step", places), y, [part for part in series if part.x])


def _spike_tip(spike: Spike) -> str:
    over = times({"norm": spike.level, "threshold": spike.event["threshold"]})
    return f"spike in step {spike.step}\ntoken norm {short(spike.level)}, {over} the threshold"


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
        mine = [(i, row) for i, row in kept if row["done"] == done]
        if mine:
            x, heights, own = zip(*((row["global_step"], number(row["multiple"]), i) for i, row in mine), strict=True)
            series.append(Series(done, "marks", color, x, heights, tips=own, shape=shape, open=done == "left"))
    label = (
        f"Chart: {count(len(kept), 'token')} over TokenClip's bounds, by step and by how many times the usual signal. "
        "The table has the same tokens."
    )
    axis = log_axis("times the usual signal", [number(row["multiple"]) for _, row in kept])
    return Chart(label, whole_axis("step", [row["global_step"] for _, row in kept]), axis, series, "clips")


def layers_chart(norms: Mapping[str, Any], ordinary: Mapping[str, Any] | None) -> tuple[Chart | None, Table]:
    """A culprit's norm by layer, beside an ordinary token's, and the figures; no chart without a finite norm."""
    rows = []
    for name, norm in norms.items():
        usual = None if ordinary is None or name not in ordinary else number(ordinary[name])
        rows.append((name, number(norm), usual))
    columns = (
        Column("Layer", "row"),
        Column("Culprit", "num"),
        Column("Ordinary token", "num"),
        Column("Ratio", "num"),
    )
    cells = [[shown(name), short(norm), short(usual), _ratio(norm, usual)] for name, norm, usual in rows]
    table = Table("The figures by layer", columns, cells)
    finite = [(i, norm) for i, (_, norm, _) in enumerate(rows) if _drawn(norm)]
    if not finite:
        return None, table
    compared = {i: value for i, (*_, value) in enumerate(rows) if value is not None and _drawn(value)}
    values = [*compared.values(), *(value for _, value in finite)]
    low, high = min(values) / 2, 2 * max(values)
    size = max(1.5, min(4.5, 90 / len(rows)))
    norms_of = dict(finite)
    alone = [i for i in compared if i not in norms_of]
    series = [
        Series(
            "an ordinary token",
            "marks",
            "soft",
            alone,
            [compared[i] for i in alone],
            tips=alone,
            shape=TICK,
            open=True,
            size=size,
        ),
        Series(
            "the culprit",
            "bars",
            "accent",
            [*norms_of],
            [*norms_of.values()],
            [compared.get(i) for i in norms_of],
            [*norms_of],
            shape=CIRCLE,
            size=size,
        ),
    ][not compared :]
    routers = any(name.endswith(".router") for name, *_ in rows)
    ticks = [(float(i), _layer_label(name)) for i, (name, *_) in enumerate(rows)]
    x = Axis("layer (r: its router)" if routers else "layer", -0.7, len(rows) - 0.3, ticks)
    top, norm = max(finite, key=lambda pair: pair[1])
    ratio = cells[top][3]
    label = (
        f"Chart: the culprit's gradient norm in each of {count(len(rows), 'layer')}. The largest is {short(norm)} in "
        f"{cells[top][0]}" + (f", {ratio} an ordinary token's." if ratio != "–" else ".")
    )
    y = Axis("gradient norm", low, high, log_ticks(low, high), log=True)
    return Chart(f"{label} All figures are in the table below it.", x, y, series, "layers"), table


def _drawn(norm: float) -> bool:
    return 1e-200 < norm < 1e200


def _ratio(norm: float, usual: float | None) -> str:
    return "–" if usual is None or not (_drawn(norm) and _drawn(usual)) else times({"norm": norm, "threshold": usual})


def _layer_label(name: str) -> str:
    known = {"embed_tokens": "embed", "lm_head": "head"}
    base = name.removesuffix(".router")
    digits = base[len(base.rstrip("0123456789")) :]
    return visible(known.get(name) or (digits + "r" * (base != name) if digits else name))[-8:]


def _steps(name: str, x: Sequence[float], y: Sequence[float]) -> Series:
    """A dashed line that keeps each value until the next."""
    xs, ys = [x[0]], [y[0]]
    for at, value in zip(x[1:], y[1:], strict=True):
        if value != ys[-1]:
            xs.append(at)
            ys.append(ys[-1])
        xs.append(at)
        ys.append(value)
    return Series(name, "dashes", "ink", xs, ys)
