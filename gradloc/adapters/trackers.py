# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""How each of verl's loggers shows the spikes of a step: one function for each, with the calls of its library.

A function takes what verl's `Tracking` holds for the logger, and a `StepSpikes`. It raises what the library raises.
"""

import html
import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..report.figures import threshold_factor

# Rows of the table of culprits, which some trackers get anew with each spike.
TABLE_ROWS = 1000
# Of one event, so many of its largest culprits are in the table.
EVENT_ROWS = 20
# So many events of a step are told one by one.
_SENTENCES = 3
# Seconds between two alerts by e-mail or chat.
_ALERT_SECONDS = 600

# The columns of the table. Those after the first three are fields of a culprit; the last ones are sent only with texts.
_NUMBERS = ("grad_norm", "threshold", "share", "advantage", "ratio", "log_prob", "reward")
COLUMNS = (
    *("step", "diagnosis", "action", "source", "token"),
    *_NUMBERS,
    *("rank", "micro_batch", "row", "position", "token_id"),
)
COLUMNS_WITH_TEXTS = (*COLUMNS, "context", "uid")


@dataclass(frozen=True)
class StepSpikes:
    """The spikes and drills of one step, in the forms that trackers take.

    Args:
        step (int): The trainer's step.
        events (Sequence[Mapping]): The events, as they are in the evidence.
        columns (Sequence[str]): The names of the table's columns.
        new_rows (Sequence[Sequence]): Their rows of the table.
        rows (Sequence[Sequence]): All rows of the run up to this step.
        page (Path, optional): The report as one HTML file. Only after some of the steps with spikes.
    """

    step: int
    events: Sequence[Mapping[str, Any]]
    columns: Sequence[str]
    new_rows: Sequence[Sequence[Any]]
    rows: Sequence[Sequence[Any]]
    page: Path | None

    @property
    def spikes(self) -> list[Mapping[str, Any]]:
        """The events that are no drills."""
        return [event for event in self.events if event.get("drill") is None]

    @property
    def title(self) -> str:
        return "Gradient spike" if self.spikes else "Spike drill"

    @property
    def sentences(self) -> list[str]:
        """The summaries of the first events, and how many more there are."""
        told = [str(event.get("summary", "")) for event in self.events[:_SENTENCES]]
        more = len(self.events) - len(told)
        return told + [f"And {more} more: see the report."] * (more > 0)

    @property
    def text(self) -> str:
        return "\n".join([f"Step {self.step}: {self.sentences[0]}", *self.sentences[1:]])

    @property
    def threshold_factor(self) -> float | None:
        """The largest finite norm of a trigger divided by its threshold; None if there is none."""
        factors = (threshold_factor(event["trigger"]) for event in self.spikes)
        return max(filter(math.isfinite, factors), default=None)


def table_rows(event: Mapping[str, Any], columns: Sequence[str]) -> list[list[Any]]:
    """The rows of an event's largest culprits with these columns; none for a drill."""
    if event.get("drill") is not None:
        return []
    of_event = {"step": event["global_step"], "diagnosis": event["diagnosis"], "action": event["action"]}
    return [
        [_cell(name, (of_event if name in of_event else culprit).get(name)) for name in columns]
        for culprit in event["culprits"][:EVENT_ROWS]
    ]


def _cell(name: str, value: Any) -> Any:
    """A value as its column's type: in the evidence, NaN and infinities are strings."""
    return float(value) if name in _NUMBERS and value is not None else value


def to_wandb(wandb: Any, spikes: StepSpikes) -> None:
    logged: dict[str, Any] = {}
    if spikes.new_rows:
        # A table that was logged cannot grow: https://github.com/wandb/wandb/issues/2981
        logged["gradloc/culprits"] = wandb.Table(columns=list(spikes.columns), data=[list(row) for row in spikes.rows])
    if spikes.page is not None:
        logged["gradloc/report"] = wandb.Html(io.StringIO(spikes.page.read_text(encoding="utf-8")), inject=False)
    if logged:
        wandb.log(logged, step=spikes.step)
    level = "WARN" if spikes.spikes else "INFO"
    wandb.alert(title=spikes.title, text=spikes.text, level=level, wait_duration=_ALERT_SECONDS)


def to_mlflow(_adapter: Any, spikes: StepSpikes) -> None:
    import mlflow

    if spikes.new_rows:
        columns = zip(spikes.columns, zip(*spikes.new_rows, strict=True), strict=True)
        # This appends to the artifact.
        mlflow.log_table({name: list(values) for name, values in columns}, "gradloc/culprits.json")
    mlflow.log_text(spikes.text, f"gradloc/step_{spikes.step}.txt")
    if spikes.page is not None:
        mlflow.log_artifact(str(spikes.page), "gradloc")


def to_swanlab(swanlab: Any, spikes: StepSpikes) -> None:
    logged: dict[str, Any] = {"gradloc/spikes": swanlab.Text(spikes.text)}
    if spikes.new_rows:
        table = swanlab.echarts.Table()
        table.add(headers=list(spikes.columns), rows=[list(row) for row in spikes.rows])
        logged["gradloc/table"] = table
    if spikes.threshold_factor is not None:
        logged["gradloc/threshold_factor"] = spikes.threshold_factor
    if spikes.page is not None and hasattr(swanlab, "Html"):  # since 0.8
        logged["gradloc/report"] = swanlab.Html(spikes.page)
    swanlab.log(logged, step=spikes.step)


def to_tensorboard(adapter: Any, spikes: StepSpikes) -> None:
    writer = adapter.writer
    lines = [html.escape(sentence, quote=False) for sentence in spikes.sentences]
    if spikes.new_rows:
        cells = [[_markdown(value) for value in row] for row in (spikes.columns, *spikes.new_rows)]
        rows = [f"| {' | '.join(row)} |" for row in cells]
        lines.append("\n".join([rows[0], "|---" * len(spikes.columns) + "|", *rows[1:]]))
    writer.add_text("gradloc/spikes", "\n\n".join(lines), spikes.step)
    if spikes.threshold_factor is not None:
        writer.add_scalar("gradloc/threshold_factor", spikes.threshold_factor, spikes.step)
    writer.flush()


def _markdown(value: Any) -> str:
    """A table's cell."""
    text = "" if value is None else f"{value:.5g}" if isinstance(value, float) else str(value)
    return html.escape(text, quote=False).replace("|", "&#124;").replace("\n", "⏎")


def to_clearml(adapter: Any, spikes: StepSpikes) -> None:
    if spikes.new_rows:
        import pandas

        adapter.log({"gradloc/culprits": pandas.DataFrame(spikes.rows, columns=list(spikes.columns))}, spikes.step)
    adapter._get_logger().report_text(spikes.text)
    if spikes.page is not None:
        adapter._task.upload_artifact("gradloc_report", spikes.page, wait_on_upload=True)


def to_file(adapter: Any, spikes: StepSpikes) -> None:
    adapter.log({"gradloc/spikes": spikes.text}, spikes.step)


# By verl's names for the loggers.
TRACKERS: Mapping[str, Callable[[Any, StepSpikes], None]] = {
    "wandb": to_wandb,
    "mlflow": to_mlflow,
    "swanlab": to_swanlab,
    "tensorboard": to_tensorboard,
    "clearml": to_clearml,
    "file": to_file,
}
# Those that show the report.
TAKE_PAGE = frozenset({"wandb", "mlflow", "swanlab", "clearml"})
