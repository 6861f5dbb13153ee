# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""The report, ready to print: texts, tables, and charts as data. Terminal and page draw it.

Texts of the evidence are visible and cut in it. `json_of` gives its form for the page, whose script knows these types
and no field of the evidence.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple

from ..tools.figures import short

# A text, or a pair as the kind of its column says.
Cell = str | tuple[str, str]
# What is said at a point of a chart: a title, and names with values.
Tip = tuple[str, Sequence[tuple[str, str]]]
# What is to be seen first: a sentence, what to do, and "change", or for a drill "found" or "failed".
Remark = tuple[str, Sequence[str], str]
# The shape of a mark.
CIRCLE = "M1,0A1,1 0 1 1 -1,0A1,1 0 1 1 1,0Z"


@dataclass(frozen=True)
class Column:
    """A column.

    Attributes:
        name (str): Its head.
        kind (str): "num" for numbers, "token" for a token and its context from shortly before it on, "badge" for a
            source, "row" for the row's own head, with what belongs to it, "code" for what is to be copied, "spark" for
            points of a line and the last of them, "link" for a text and where it leads to; else a text.
        drop (int): In a narrow terminal columns are left out in this order; 0 stays.
    """

    name: str
    kind: str = ""
    drop: int = 0


@dataclass
class Table:
    """A table; `more` says what it leaves out."""

    title: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]
    more: str = ""


@dataclass(frozen=True)
class Axis:
    """A scale of values, linear or logarithmic, with its ticks.

    On a logarithmic one, values that are not finite have the place `beyond`, and zero has none.
    """

    title: str
    low: float
    high: float
    ticks: Sequence[tuple[float, str]]
    log: bool = False
    beyond: float = math.nan

    def place(self, value: float | None) -> int | None:
        """The place of a value on the axis, from 0 to 1000."""
        if value is None or (self.log and value <= 0):
            return None
        if not math.isfinite(value):
            value = self.beyond
        value = min(max(value, self.low), self.high)
        low, high, at = map(math.log10, (self.low, self.high, value)) if self.log else (self.low, self.high, value)
        return round(1000 * (at - low) / (high - low))


class Point(NamedTuple):
    """A point of a chart.

    Attributes:
        x, y (float): Its values.
        tip (Tip | int, optional): What is said of it: a tip, or the number of a row of the chart's table.
        link (str): Where it leads to, if anywhere.
        base (float, optional): Where its bar begins; None without one.
    """

    x: float
    y: float
    tip: Tip | int | None = None
    link: str = ""
    base: float | None = None


@dataclass
class Series:
    """Points of a chart as marks, a line or bars.

    Attributes:
        name (str): What the legend says; "" for none.
        color (str): The name of a colour of the page's style.
        shape (str): Of marks, and of those at the ends of bars, as an SVG path around the origin with a radius of 1.
        open (bool): Whether only the outline of a mark is drawn.
        size (float): Of marks their radius, in pixels; of the points of a line likewise, 0 for none.
        kind (str): "marks", "line", "dashes" or "bars".
    """

    name: str
    color: str
    points: Sequence[Point]
    shape: str = CIRCLE
    open: bool = False
    size: float = 5.0
    kind: str = "marks"


@dataclass
class Chart:
    """A chart: `label` says it in words; `table` names the table that numbers among the tips refer to."""

    label: str
    x: Axis
    y: Axis
    series: Sequence[Series]
    table: str = ""

    def placed(self) -> dict[str, Any]:
        """The same with places from the left and from the top in place of values, without points that have none."""
        axes = [
            {"title": axis.title, "ticks": [[place(value), text] for value, text in axis.ticks]}
            for axis, place in ((self.x, self.x.place), (self.y, self._from_top))
        ]
        series = [vars(each) | {"points": [*filter(None, map(self._placed, each.points))]} for each in self.series]
        return {"label": self.label, "axes": axes, "series": series, "table": self.table}

    def _from_top(self, value: float | None) -> int | None:
        place = self.y.place(value)
        return None if place is None else 1000 - place

    def _placed(self, point: Point) -> list[Any] | None:
        top = self._from_top(point.y)
        return None if top is None else [self.x.place(point.x), top, *point[2:4], self._from_top(point.base)]


@dataclass
class Strip:
    """A response token by token: texts, shades of suspicion from 0 to 100, the suspicion as text, and its culprits.

    `culprits` has the number of each culprit by its position; `start` is the position of the first token.
    """

    start: int
    tokens: Sequence[str]
    shades: Sequence[int]
    figures: Sequence[str]
    culprits: Mapping[int, int]


@dataclass
class Culprit:
    """A culprit on the page, beside its rows in the tables "culprits" and "terms".

    Attributes:
        spike (int): The number of its spike.
        reasons (Sequence[str]): The rules that hold for it.
        content (dict): Texts, tables, and titled texts that are shown as they are, by the id of their place.
        strip (int, optional): The number of its strip.
        layers (Chart, optional): Its norm by layer.
    """

    spike: int
    reasons: Sequence[str]
    content: dict[str, Any]
    strip: int | None = None
    layers: Chart | None = None


@dataclass
class SpikeView:
    """A spike: `name` in the list of spikes, texts and tables by the id of their place, and its culprits' numbers."""

    name: str
    content: dict[str, Any]
    culprits: Sequence[int]


@dataclass
class View:
    """The whole report.

    Attributes:
        title (str): How many spikes there are, and where.
        opening (Sequence[str]): What the terminal says first: what the spikes come from, and what to do.
        identities (Sequence[str]): How many hold and which are broken; then of some what is to be said besides.
        alarms (Sequence[str]): Faults that were planted on purpose, and spikes that are missing.
        warnings, drills (Sequence[Remark]): Each with how to check it, or what to look at; changes after warnings.
        facts (Sequence): The totals, each a name, a value and what belongs to it.
        notes (Sequence[str]): What was left out or ended early.
        tables (dict[str, Table]): By name, in the order of the terminal. "terms" has more of each culprit.
        charts (dict[str, Chart]): By name.
        texts (dict[str, str]): Further texts by name.
        spikes (list[SpikeView]): In the order in which they were written.
        culprits (list[Culprit]): The largest first.
        strips: What culprits share.
        replays (Sequence): Each a title, where it was computed, sentences, tables and notes.
        rules (dict): By source, its rule and what to do; in the order of the legend.
        help (Sequence): Further terms and what they mean.
    """

    title: str
    opening: Sequence[str] = ()
    identities: Sequence[str] = ()
    alarms: Sequence[str] = ()
    warnings: Sequence[Remark] = ()
    drills: Sequence[Remark] = ()
    facts: Sequence[tuple[str, str, str]] = ()
    notes: Sequence[str] = ()
    tables: dict[str, Table] = field(default_factory=dict)
    charts: dict[str, Chart] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    spikes: list[SpikeView] = field(default_factory=list)
    culprits: list[Culprit] = field(default_factory=list)
    strips: list[Strip] = field(default_factory=list)
    replays: Sequence[dict[str, Any]] = ()
    rules: dict[str, tuple[str, str]] = field(default_factory=dict)
    help: Sequence[tuple[str, str]] = ()


def json_of(view: View) -> str:
    """The view as JSON, each part a list or an object of its fields."""
    return json.dumps(view, default=_plain, allow_nan=False, separators=(",", ":"))


def _plain(part: Any) -> Any:
    return part.placed() if isinstance(part, Chart) else vars(part)


def whole_axis(title: str, places: Sequence[int], most: int = 10) -> Axis:
    """An axis of steps, with a margin for the marks at its ends, and ticks at whole steps only."""
    first, last = min(places), max(places)
    margin = max((last - first) * 0.03, 1)
    sizes = (digit * 10**power for power in count() for digit in (1, 2, 5))
    size = next(size for size in sizes if (last - first) / size <= most)
    ticks = [(float(at), str(at)) for at in range(-(-first // size) * size, last + 1, size)]
    return Axis(title, first - margin, last + margin, ticks)


def drawn(values: Sequence[float | None]) -> list[float]:
    """The values that have a place of their own on a log scale."""
    return [value for value in values if value is not None and math.isfinite(value) and value > 0]


def sparkline(values: Sequence[float | None], own: bool, low: float, high: float) -> Cell:
    """Values as points of a line, 220 by 40, on a log scale from `low` to at least `high`; the last one if `own`."""
    high = max([high, *drawn(values)])
    axis = Axis("", low, high, (), log=True, beyond=high)
    width = 210 / max(len(values) - 1, 1)
    points = [
        f"{5 + i * width:.1f},{35 - 0.03 * (axis.place(value) or 0):.1f}"
        for i, value in enumerate(values)
        if value is not None
    ]
    return " ".join(points), points[-1] if own and values[-1] is not None else ""


def log_axis(title: str, values: Sequence[float | None]) -> Axis:
    """A logarithmic axis for values. Those that are not finite get a place of their own above the others."""
    known = [value for value in values if value is not None]
    finite = [min(max(value, 1e-200), 1e200) for value in known if math.isfinite(value) and value > 0] or [1.0]
    low = min(finite) / 1.6
    # Room for the largest mark, however many decades there are.
    margin = max(1.8, 10 ** (0.08 * (math.log10(max(finite)) - math.log10(low))))
    top = max(finite) * margin
    ticks = log_ticks(low, top)
    if all(map(math.isfinite, known)):
        return Axis(title, low, top, ticks, log=True)
    return Axis(title, low, top * margin**2, [*ticks, (top * margin, "NaN, ∞")], log=True, beyond=top * margin)


def log_ticks(low: float, high: float) -> list[tuple[float, str]]:
    digits = (1,) if math.log10(high / low) > 1.3 else (1, 2, 5)
    powers = range(math.floor(math.log10(low)), math.floor(math.log10(high)) + 1)
    values = [digit * 10.0**power for power in powers for digit in digits]
    # At most so many that they can be read.
    values = [value for value in values if low <= value <= high]
    values = values[:: math.ceil(len(values) / 9) or 1]
    return [(value, short(value)) for value in values]
