# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""How each of verl's loggers shows the spikes of a step, and what TokenClip found: one function for each.

A function takes what verl's `Tracking` holds for the logger, and a `StepSpikes`. It raises what the library raises.
"""

import html
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..judge.sentences import in_one_line

# Rows of a table, which some trackers get anew with each step.
TABLE_ROWS = 1000
# Of one event or clip line, so many of its largest tokens are in the table.
EVENT_ROWS = 20
# So many events of a step are told one by one.
_SENTENCES = 3
# Seconds between two alerts by e-mail or chat.
_ALERT_SECONDS = 600

# The columns of the tables: fields of a line, and of a culprit or of a token in a clip line.
_NUMBERS = ("grad_norm", "threshold", "share", "suspicion", "advantage", "ratio", "log_prob", "reward")
_CLIP_NUMBERS = ("multiple", "advantage", "log_prob", "old_log_prob", "rollout_log_prob", "reward")
_PLACE = ("rank", "micro_batch", "row", "position", "token_id")
COLUMNS = ("step", "diagnosis", "action", "source", "token", *_NUMBERS, *_PLACE)
CLIP_COLUMNS = ("step", "action", "boundary", "cut", "token", *_CLIP_NUMBERS, *_PLACE)
# They are sent only with texts.
TEXT_COLUMNS = ("context", "uid")


@dataclass
class Table:
    """A table that grows with the run, up to `TABLE_ROWS`."""

    name: str
    columns: Sequence[str]
    rows: list[list[Any]] = field(default_factory=list)  # those of the run so far
    new_rows: Sequence[list[Any]] = ()  # those of the last step

    @property
    def is_full(self) -> bool:
        return len(self.rows) == TABLE_ROWS

    def grow(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Adds the rows of another step's lines."""
        room = TABLE_ROWS - len(self.rows)
        self.new_rows = [row for line in lines for row in table_rows(line, self.columns)][:room]
        self.rows += self.new_rows


@dataclass(frozen=True)
class StepSpikes:
    """The spikes and drills of one step, and what TokenClip found in it, in the forms that trackers take."""

    step: int
    lines: Sequence[Mapping[str, Any]]  # the events and clip lines, as they are in the evidence
    tables: Sequence[Table] = ()  # those that have new rows
    page: Path | None = None  # the report as one HTML file, after some of the steps with such lines

    @property
    def spikes(self) -> list[Mapping[str, Any]]:
        """The events that are no drills."""
        return [line for line in self.lines if "token_clip" not in line and line.get("drill") is None]

    @property
    def clips(self) -> list[Mapping[str, Any]]:
        """The clip lines."""
        return [line for line in self.lines if "token_clip" in line]

    @property
    def alerting(self) -> "StepSpikes | None":
        """What to alert of: all but the clip lines of which everything was cut; None if nothing is left."""
        lines = []
        for line in self.lines:
            clip = line.get("token_clip")
            if clip is None or sum(clip["cut"].values()) < sum(clip["over"].values()):
                lines.append(line)
        return replace(self, lines=lines) if lines else None

    @property
    def title(self) -> str:
        if self.spikes:
            return "Gradient spike"
        return "Spike drill" if len(self.clips) < len(self.lines) else "Outlying tokens"

    @property
    def sentences(self) -> list[str]:
        """The first events, or clip lines where there are fewer, each in one line, and how many more there are."""
        lines = sorted(self.lines, key=lambda line: "token_clip" in line)
        told = [in_one_line(line) for line in lines[:_SENTENCES]]
        more = len(lines) - len(told)
        return told + [f"And {more} more: see the report."] * (more > 0)

    @property
    def text(self) -> str:
        return "\n".join([f"Step {self.step}: {self.sentences[0]}", *self.sentences[1:]])


def table_rows(line: Mapping[str, Any], columns: Sequence[str]) -> list[list[Any]]:
    """The rows of a line: an event's largest culprits or suspected tokens, a clip line's tokens furthest over."""
    clip = line.get("token_clip")
    tokens = line["culprits"] or line.get("suspected", ()) if clip is None else clip["tokens"]
    of_line = {"step": line["global_step"], "diagnosis": line.get("diagnosis"), "action": (clip or line)["action"]}
    return [
        [_cell(name, (of_line if name in of_line else token).get(name)) for name in columns]
        for token in tokens[:EVENT_ROWS]
    ]


def _cell(name: str, value: Any) -> Any:
    """A value as its column's type: in the evidence, NaN and infinities are strings."""
    return float(value) if name in (*_NUMBERS, *_CLIP_NUMBERS) and value is not None else value


def to_wandb(wandb: Any, spikes: StepSpikes) -> None:
    logged = {}
    for table in spikes.tables:
        # A table that was logged cannot grow: https://github.com/wandb/wandb/issues/2981
        logged[f"gradloc/{table.name}"] = wandb.Table(columns=list(table.columns), data=[*table.rows])
    if spikes.page is not None:
        logged["gradloc/report"] = wandb.Html(io.StringIO(spikes.page.read_text(encoding="utf-8")), inject=False)
    if logged:
        wandb.log(logged, step=spikes.step)
    alert = spikes.alerting
    if alert is not None:
        level = "INFO" if alert.title == "Spike drill" else "WARN"
        wandb.alert(title=alert.title, text=alert.text, level=level, wait_duration=_ALERT_SECONDS)


def to_mlflow(_adapter: Any, spikes: StepSpikes) -> None:
    import mlflow

    for table in spikes.tables:
        columns = zip(table.columns, zip(*table.new_rows, strict=True), strict=True)
        # This appends to the artifact.
        mlflow.log_table({column: list(values) for column, values in columns}, f"gradloc/{table.name}.json")
    mlflow.log_text(spikes.text, f"gradloc/step_{spikes.step}.txt")
    if spikes.page is not None:
        mlflow.log_artifact(str(spikes.page), "gradloc")


def to_swanlab(swanlab: Any, spikes: StepSpikes) -> None:
    logged: dict[str, Any] = {"gradloc/spikes": swanlab.Text(spikes.text)}
    for table in spikes.tables:
        shown = swanlab.echarts.Table()
        shown.add(headers=list(table.columns), rows=[*table.rows])
        logged[f"gradloc/{table.name}"] = shown
    if spikes.page is not None and hasattr(swanlab, "Html"):  # since 0.8
        logged["gradloc/report"] = swanlab.Html(spikes.page)
    swanlab.log(logged, step=spikes.step)


def to_tensorboard(adapter: Any, spikes: StepSpikes) -> None:
    writer = adapter.writer
    parts = [html.escape(sentence, quote=False) for sentence in spikes.sentences]
    for table in spikes.tables:
        cells = [[_markdown(value) for value in row] for row in (table.columns, *table.new_rows)]
        rows = [f"| {' | '.join(row)} |" for row in cells]
        parts.append("\n".join([rows[0], "|---" * len(table.columns) + "|", *rows[1:]]))
    writer.add_text("gradloc/spikes", "\n\n".join(parts), spikes.step)
    writer.flush()


def _markdown(value: Any) -> str:
    """A table's cell."""
    text = "" if value is None else f"{value:.5g}" if isinstance(value, float) else str(value)
    return html.escape(text, quote=False).replace("|", "&#124;").replace("\n", "⏎")


def to_clearml(adapter: Any, spikes: StepSpikes) -> None:
    for table in spikes.tables:
        import pandas

        adapter.log({f"gradloc/{table.name}": pandas.DataFrame(table.rows, columns=list(table.columns))}, spikes.step)
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
