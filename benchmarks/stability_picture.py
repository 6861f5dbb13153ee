# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""The picture of docs/stability.md: the reward curves of stability.py, means over the seeds."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path
from statistics import mean

from grpo_run import Settings, Variant
from plotly.subplots import make_subplots
from seed_jobs import Results, key_of

COLORS = {
    "none": "#999999",
    "global": "#000000",
    "zscore": "#D55E00",
    "TokenClip": "#CC79A7",
    "both": "#0072B2",
    "adagc": "#009E73",
    "zclip": "#56B4E9",
    "skip": "#E69F00",
}
TITLES = {
    "layer": "one layer's gradient × 1000",
    "token": "one token's advantage 1000",
    "sequence": "one answer's advantages 1000",
    "blow": "one token's backward signal × 1000",
}


def draw(settings: Settings, results: Results, seeds: list[int], variants: list[Variant], picture: Path) -> None:
    """Draws the sampled runs of those variants that have a color, and has Chromium take their picture.

    Raises:
        FileNotFoundError: Chromium is not installed.
    """
    chromium = shutil.which("chromium")
    if chromium is None:
        raise FileNotFoundError("Chromium is not installed; on Debian: apt-get install chromium")
    options = {"shared_yaxes": "all", "shared_xaxes": "all", "vertical_spacing": 0.1}
    chart = make_subplots(2, 2, subplot_titles=list(TITLES.values()), **options)
    for i, kind in enumerate(TITLES):
        place = {"row": i // 2 + 1, "col": i % 2 + 1}
        for name in (variant.name for variant in variants if variant.name in COLORS):
            curves = [results.runs[key_of(seed, name)][kind]["rewards"] for seed in seeds]
            means = [mean(values) for values in zip(*curves, strict=True)]
            line = {"color": COLORS[name], "width": 1.5}
            chart.add_scatter(y=means, name=name, mode="lines", line=line, showlegend=i == 0, **place)
        for first, last in settings.events:
            shape = {"x0": first - 1, "x1": last, "fillcolor": "#d00000", "opacity": 0.15, "line_width": 0}
            chart.add_vrect(**shape, **place)
    chart.update_yaxes(title_text="reward", col=1)
    chart.update_xaxes(title_text="step", row=2)
    chart.update_layout(template="simple_white", width=1000, height=640, margin={"t": 40, "l": 60, "r": 20, "b": 50})
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "page.html"
        chart.write_html(page, include_plotlyjs=True, config={"displayModeBar": False})
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={folder}/user"]
        flags += ["--window-size=1020,660", "--virtual-time-budget=10000", f"--screenshot={picture.resolve()}"]
        subprocess.run([chromium, *flags, page.as_uri()], check=True, capture_output=True)
