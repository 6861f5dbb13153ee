# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Sends the spikes of a run, and what TokenClip found, to the loggers of verl's `Tracking`, from the driver.

The evidence may be written by another process, so it is read back from the disk. Each logger has a function of its
own, which takes what `Tracking` holds for it, and a `StepSpikes`. It raises what the library raises.
"""

import html
import io
import json
import os
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from ..evidence.writer import evidence_files
from ..guarded import PatientThread, warn_once
from ..judging import in_one_line
from ..lines import ClippedToken, Culprit, Number
from ..tools.reading import read
from .page import write_page

# verl's loggers that are no trackers: with these alone, `spike_log` is off unless it is set. The console has the
# summaries already, from the process that writes the evidence; RL-Insight takes figures only.
NO_TRACKERS = frozenset({"console", "file", "rl_insight"})
# Rows of a table, which some trackers get anew with each step.
TABLE_ROWS = 1000
# Of one event or clip line, so many of its largest tokens are in the table.
EVENT_ROWS = 20
# So many events of a step are told one by one.
_SENTENCES = 3
# Seconds between two alerts by e-mail or chat.
_ALERT_SECONDS = 600

# The columns of the tables: fields of a line, and of a culprit or of a token in a clip line; and those that are floats.
_NUMBERS = ("grad_norm", "threshold", "share", "suspicion", "advantage", "ratio", "log_prob", "reward")
_CLIP_NUMBERS = ("multiple", "advantage", "log_prob", "old_log_prob", "rollout_log_prob", "reward")
_PLACE = ("rank", "micro_batch", "row", "position", "token_id")
COLUMNS = ("step", "diagnosis", "action", "source", "token", *_NUMBERS, *_PLACE)
CLIP_COLUMNS = ("step", "action", "boundary", "cut", "token", *_CLIP_NUMBERS, *_PLACE)
# They are sent only with texts.
TEXT_COLUMNS = ("context", "uid")
_TYPES = {**get_type_hints(Culprit), **get_type_hints(ClippedToken)}
_FLOATS = {name for name, kind in _TYPES.items() if kind in (float, Number)}


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
    return float(value) if name in _FLOATS and value is not None else value


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


def to_mlflow(run: Any, spikes: StepSpikes) -> None:
    """`run` is the active one of the main thread: MLflow has one for each."""
    import mlflow

    client, run_id = mlflow.MlflowClient(), run.info.run_id
    for table in spikes.tables:
        columns = zip(table.columns, zip(*table.new_rows, strict=True), strict=True)
        # This appends to the artifact.
        client.log_table(run_id, {column: list(values) for column, values in columns}, f"gradloc/{table.name}.json")
    client.log_text(run_id, spikes.text, f"gradloc/step_{spikes.step}.txt")
    if spikes.page is not None:
        client.log_artifact(run_id, str(spikes.page), "gradloc")


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
# With more evidence than this, no page is made: the driver would wait for it too long.
_PAGE_BYTES = 64 * 2**20
# A field of each kind of line that is read.
_READ = ("culprits", "token_clip")

_Value = TypeVar("_Value")


class SpikeLog:
    """A logger that gives the others the spikes of the steps whose metrics they get. It never raises for a spike.

    What may hang, the disk or a tracker, is waited for as `PatientThread` does.

    Args:
        loggers (Mapping): verl's loggers by name.
        directory (str): Where the evidence is written.
        texts (bool): Whether they get the texts of samples as well. Without them, nothing that is sent is made from
            these texts.
    """

    def __init__(self, loggers: Mapping[str, Any], directory: str, texts: bool = False) -> None:
        self._said: set[str] = set()
        self._threads: dict[str, PatientThread] = {}  # by what is waited for: what hangs once is not waited for again
        self._loggers = dict(loggers)
        if "mlflow" in loggers:
            self._loggers["mlflow"] = self._guarded("mlflow", lambda: import_module("mlflow").active_run())
        self._directory = directory
        self._texts = texts
        more = TEXT_COLUMNS if texts else ()
        self._tables = [Table("culprits", (*COLUMNS, *more)), Table("clipped_tokens", (*CLIP_COLUMNS, *more))]
        self._appended = AppendedEvents(directory)
        self._guarded("the evidence", partial(self._run, directory, self._appended.skip))
        self._steps = 0

    def log(self, data: Mapping[str, Any], step: int) -> None:
        """Sends the spikes of a step with these metrics."""
        counts = ("actor/gradloc/triggered", "actor/token_clip/over")
        if any(data.get(name, 0) > 0 for name in counts) or "actor/gradloc/drill_found" in data:
            self._guarded("the evidence", partial(self._send, step))

    def _send(self, step: int) -> None:
        try:
            lines = self._run(self._directory, self._appended.read)
        except FileNotFoundError:
            lines = []
        if not lines:
            self._warn(
                "no events",
                f"step {step} has a spike or outlying tokens, but {self._appended.path} has no new line: is "
                "bisect_dump_dir a directory that the driver and the actor's rank 0 share, with space left? Trackers "
                "get the metrics only.",
            )
            return
        self._steps += 1
        of_step = StepSpikes(step, lines)
        for table, of_table in zip(self._tables, (of_step.spikes, of_step.clips), strict=True):
            table.grow(of_table)
            if table.is_full:
                name = table.name.replace("_", " ")
                self._warn(
                    f"full {name}", f"the trackers' table of {name} has {len(table.rows)} rows, and gets no more."
                )
        # What is late may still write to the folder.
        with tempfile.TemporaryDirectory(prefix="gradloc-", ignore_cleanup_errors=True) as folder:
            page = self._page(Path(folder, "report.html"))
            spikes = replace(of_step, tables=[table for table in self._tables if table.new_rows], page=page)
            for name, tracker in self._loggers.items():
                if send := TRACKERS.get(name):
                    self._guarded(name, partial(self._run, name, partial(send, tracker, spikes)))
                elif name not in NO_TRACKERS:
                    self._warn(name, f"the logger {name} gets no spikes: it is not one of {', '.join(TRACKERS)}.")

    def _page(self, path: Path) -> Path | None:
        """The report: after each of the first ten steps with spikes, then after the 20th, 30th, … 100th, 200th, …"""
        if not TAKE_PAGE.intersection(self._loggers) or self._steps % 10 ** (len(str(self._steps)) - 1):
            return None

        def write() -> Path | None:
            if sum(map(os.path.getsize, evidence_files(self._directory))) > _PAGE_BYTES:
                self._warn("page", "there is too much evidence for a page in the trackers.")
                return None
            write_page(read(self._directory, texts=self._texts), str(path))
            return path

        return self._guarded("the page", partial(self._run, "the page", write))

    def _run(self, what: str, work: Callable[[], _Value]) -> _Value:
        """See `PatientThread.run`; `what` is waited for."""
        return self._threads.setdefault(what, PatientThread(what)).run(work)

    def _guarded(self, name: str, action: Callable[[], _Value]) -> _Value | None:
        """Does something that must not take training down; the first time that it fails, a warning says so."""
        try:
            return action()
        except Exception as error:  # its text may have secrets
            self._warn(name, f"{name}: spikes could not be sent ({type(error).__name__}: {_without_secrets(error)}).")
        return None

    def _warn(self, about: str, message: str) -> None:
        warn_once(self._said, f"spike_log (this warning appears once): {message}", about=about)


class AppendedEvents:
    """The events and clip lines of `<directory>/spikes.jsonl` that were appended since the last call of `read`."""

    def __init__(self, directory: str) -> None:
        self.path = os.path.join(directory, "spikes.jsonl")
        self._end = 0

    def skip(self) -> None:
        """Leaves out what is in the file, as an earlier run has left it."""
        self._end = os.path.getsize(self.path) if os.path.isfile(self.path) else 0

    def read(self) -> list[dict[str, Any]]:
        """The new events and clip lines, oldest first. A line that is still being written is left for the next call.

        Raises:
            OSError: There is no such file, or it cannot be read.
        """
        with open(self.path, "rb") as file:
            if os.fstat(file.fileno()).st_size < self._end:  # it was moved away, and begun anew
                self._end = 0
            file.seek(self._end)
            data = file.read()
        finished = data[: data.rfind(b"\n") + 1]
        self._end += len(finished)
        entries = []
        for line in finished.splitlines():
            with suppress(ValueError):  # the rest of a line that a killed run has left
                entries.append(json.loads(line))
        return [entry for entry in entries if isinstance(entry, dict) and not entry.keys().isdisjoint(_READ)]


def _without_secrets(error: Exception) -> str:
    """An error's message without passwords of addresses, and without what the environment's secrets hold."""
    text = re.sub(r"//[^/\s@]+@", "//…@", str(error))
    for name, value in os.environ.items():
        if re.search("KEY|TOKEN|SECRET|PASSW", name.upper()) and len(value) >= 8:
            text = text.replace(value, "…")
    return text
