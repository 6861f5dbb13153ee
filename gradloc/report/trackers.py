# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Sends the spikes of a run, what TokenClip found, and the identities to the loggers of verl's `Tracking`.

This is done by the driver, which reads the evidence back from the disk: another process may write it. The identities
come the same way, not as metrics of the actor: those are the same on every rank, and taken before rank 0 asks the
judge. Each logger has a function of its own, which takes what `Tracking` holds for it, and a `StepNews`. It raises what
the library raises.
"""

import html
import io
import json
import math
import os
import re
import tempfile
import time
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
from ..lines import ClippedToken, Culprit, IdentityState, Number
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
# Seconds between two alerts of one title by e-mail or chat.
_ALERT_SECONDS = 600
# An infinite residual, or a larger one, is sent as this: no panel could show what comes beside it.
_MOST_TIMES = 1e6

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
class IdentityNews:
    """An identity that has broken, or is no longer broken."""

    name: str
    is_broken: bool
    sentence: str


@dataclass(frozen=True)
class StepNews:
    """The news of one step, in the forms that trackers take."""

    step: int
    # Its spikes, its drill, and what TokenClip found in it: the events and clip lines, as they are in the evidence.
    lines: Sequence[Mapping[str, Any]] = ()
    tables: Sequence[Table] = ()  # those that have new rows
    page: Path | None = None  # the report as one HTML file, after some of the steps with such lines
    scalars: Mapping[str, float] = field(default_factory=dict)  # by name: see `identity_scalars`
    identities: Sequence[IdentityNews] = ()

    @property
    def spikes(self) -> list[Mapping[str, Any]]:
        """The events that are no drills."""
        return [line for line in self.lines if "token_clip" not in line and line.get("drill") is None]

    @property
    def clips(self) -> list[Mapping[str, Any]]:
        """The clip lines."""
        return [line for line in self.lines if "token_clip" in line]

    @property
    def alerting(self) -> "StepNews | None":
        """The news without clip lines of which everything was cut; None if nothing is left to alert of."""
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

    @property
    def identity_title(self) -> str:
        """A title for `identities`, which names only the broken ones if there are any."""
        broken = [each.name for each in self.identities if each.is_broken]
        if broken:
            return f"Broken identity: {', '.join(broken)}"
        return f"No longer broken: {', '.join(each.name for each in self.identities)}"

    @property
    def identity_text(self) -> str:
        return f"Step {self.step}: " + "\n".join(each.sentence for each in self.identities)

    @property
    def texts(self) -> dict[str, str]:
        """By name, those that there are."""
        texts = {"gradloc/spikes": self.text} if self.lines else {}
        return texts | ({"gradloc/identities/news": self.identity_text} if self.identities else {})


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


def identity_scalars(states: Mapping[str, IdentityState]) -> dict[str, float]:
    """By name, the residual of each identity that can be checked, in times of the usual, and how many are broken."""
    broken = _broken(states)
    scalars = {"gradloc/identities/broken": float(len(broken))}
    for name, each in states.items():
        if each["times"] is not None or name in broken:
            times = math.inf if each["times"] is None else float(each["times"])
            scalars[f"gradloc/identity/{name}"] = min(times, _MOST_TIMES)
    return scalars


def identity_news(line: Mapping[str, Any], before: Mapping[str, IdentityState]) -> list[IdentityNews]:
    """Which identities have broken, or are no longer broken, by a line of steps.jsonl and the states `before`."""
    states, was = line["identities"], _broken(before)
    warnings = {each["identity"]: each for each in line["warnings"]}
    news = []
    for name in _broken(states):
        if name not in was:
            news.append(IdentityNews(name, True, f"{warnings[name]['sentence']} {warnings[name]['check']}"))
    for name in was:
        if name in states and states[name]["state"] == "held":
            news.append(IdentityNews(name, False, f"The identity {name} holds again."))
        elif name in states and states[name]["state"] == "unchecked":
            why = f"which was broken, cannot be checked any more: {states[name]['missing']}."
            news.append(IdentityNews(name, False, f"The identity {name}, {why}"))
    return news


def _broken(states: Mapping[str, IdentityState]) -> list[str]:
    return [name for name, each in states.items() if each["state"] == "broken"]


def to_wandb(wandb: Any, news: StepNews) -> None:
    logged: dict[str, Any] = {**news.scalars}
    for table in news.tables:
        # A table that was logged cannot grow: https://github.com/wandb/wandb/issues/2981
        logged[f"gradloc/{table.name}"] = wandb.Table(columns=list(table.columns), data=[*table.rows])
    if news.page is not None:
        logged["gradloc/report"] = wandb.Html(io.StringIO(news.page.read_text(encoding="utf-8")), inject=False)
    if logged:
        wandb.log(logged, step=news.step)
    alert = news.alerting
    if alert is not None:
        level = "INFO" if alert.title == "Spike drill" else "WARN"
        wandb.alert(title=alert.title, text=alert.text, level=level, wait_duration=_ALERT_SECONDS)
    if news.identities:
        level = "WARN" if any(each.is_broken for each in news.identities) else "INFO"
        # The title names them: the wait of one does not keep back another.
        wandb.alert(title=news.identity_title, text=news.identity_text, level=level, wait_duration=_ALERT_SECONDS)


def to_mlflow(run: Any, news: StepNews) -> None:
    """`run` is the active one of the main thread: MLflow has one for each."""
    import mlflow

    client, run_id = mlflow.MlflowClient(), run.info.run_id
    if news.scalars:
        now = int(time.time() * 1000)
        metrics = [mlflow.entities.Metric(name, value, now, news.step) for name, value in news.scalars.items()]
        client.log_batch(run_id, metrics)
    for table in news.tables:
        columns = zip(table.columns, zip(*table.new_rows, strict=True), strict=True)
        # This appends to the artifact.
        client.log_table(run_id, {column: list(values) for column, values in columns}, f"gradloc/{table.name}.json")
    if news.texts:
        client.log_text(run_id, "\n".join(news.texts.values()), f"gradloc/step_{news.step}.txt")
    if news.page is not None:
        client.log_artifact(run_id, str(news.page), "gradloc")


def to_swanlab(swanlab: Any, news: StepNews) -> None:
    logged: dict[str, Any] = {**news.scalars, **{name: swanlab.Text(text) for name, text in news.texts.items()}}
    for table in news.tables:
        shown = swanlab.echarts.Table()
        shown.add(headers=list(table.columns), rows=[*table.rows])
        logged[f"gradloc/{table.name}"] = shown
    if news.page is not None and hasattr(swanlab, "Html"):  # since 0.8
        logged["gradloc/report"] = swanlab.Html(news.page)
    swanlab.log(logged, step=news.step)


def to_tensorboard(adapter: Any, news: StepNews) -> None:
    writer = adapter.writer
    for name, value in news.scalars.items():
        writer.add_scalar(name, value, news.step)
    if news.lines:
        parts = [html.escape(sentence, quote=False) for sentence in news.sentences]
        for table in news.tables:
            cells = [[_markdown(value) for value in row] for row in (table.columns, *table.new_rows)]
            rows = [f"| {' | '.join(row)} |" for row in cells]
            parts.append("\n".join([rows[0], "|---" * len(table.columns) + "|", *rows[1:]]))
        writer.add_text("gradloc/spikes", "\n\n".join(parts), news.step)
    if news.identities:
        sentences = [html.escape(each.sentence, quote=False) for each in news.identities]
        writer.add_text("gradloc/identities/news", "\n\n".join(sentences), news.step)
    if news.texts:
        writer.flush()


def _markdown(value: Any) -> str:
    """A table's cell."""
    text = "" if value is None else f"{value:.5g}" if isinstance(value, float) else str(value)
    return html.escape(text, quote=False).replace("|", "&#124;").replace("\n", "⏎")


def to_clearml(adapter: Any, news: StepNews) -> None:
    adapter.log(news.scalars, news.step)
    for table in news.tables:
        import pandas

        adapter.log({f"gradloc/{table.name}": pandas.DataFrame(table.rows, columns=list(table.columns))}, news.step)
    for text in news.texts.values():
        adapter._get_logger().report_text(text)
    if news.page is not None:
        adapter._task.upload_artifact("gradloc_report", news.page, wait_on_upload=True)


def to_file(adapter: Any, news: StepNews) -> None:
    adapter.log({**news.scalars, **news.texts}, news.step)


def to_another(logger: Any, news: StepNews) -> None:
    """To one of which no more is known than how `Tracking` calls it."""
    if news.scalars:
        logger.log(data={**news.scalars}, step=news.step)


# By verl's names for the loggers.
TRACKERS: Mapping[str, Callable[[Any, StepNews], None]] = {
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
# A field of each kind of line that is read, of spikes.jsonl and of steps.jsonl.
_OF_EVENTS = ("culprits", "token_clip")
_OF_STEPS = ("token_norm_max",)
# So much of what an earlier run has left in steps.jsonl is read: hundreds of steps, more than a resumed run repeats.
_TAIL_BYTES = 2**20
# Metrics that count what is in spikes.jsonl.
_COUNTS = ("actor/gradloc/triggered", "actor/token_clip/over")

_Value = TypeVar("_Value")


class SpikeLog:
    """A logger that gives the others the spikes and identities of the steps whose metrics they get.

    It never raises for them. What may hang, the disk or a tracker, is waited for as `PatientThread` does. What an
    earlier run has left in the directory is not sent.

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
        self._events = AppendedLines(directory, "spikes", _OF_EVENTS)
        self._steps = AppendedLines(directory, "steps", _OF_STEPS)
        self._sees_steps = False  # whether there was a line of a step since the start
        self._states: Mapping[str, IdentityState] = {}  # of the identities, in the last line that has them
        self._earlier: list[dict[str, Any]] = []  # the last lines of an earlier run, until this one has one
        self._spiked = 0  # the number of steps with events or clip lines
        self._guarded("the evidence", partial(self._run, directory, self._start))

    def _start(self) -> None:
        self._events.skip()
        self._steps.skip(_TAIL_BYTES)
        self._earlier = self._steps.read()

    def log(self, data: Mapping[str, Any], step: int) -> None:
        """Sends what is new in the evidence, after a step with these metrics."""
        self._guarded("the evidence", partial(self._send, data, step))

    def _send(self, data: Mapping[str, Any], step: int) -> None:
        has_events = any(data.get(name, 0) > 0 for name in _COUNTS) or "actor/gradloc/drill_found" in data
        lines, steps = self._run(
            self._directory, lambda: (self._events.read() if has_events else [], self._steps.read())
        )
        self._sees_steps = self._sees_steps or bool(steps)
        if has_events and not lines:
            self._warn_unseen(step, self._events.path)
        if "actor/gradloc/checked" in data and not self._sees_steps:
            self._warn_unseen(step, self._steps.path)
        scalars, identities = self._identities(steps)
        if not lines and not scalars:
            return
        news = StepNews(step, lines, scalars=scalars, identities=identities)
        for table, of_table in zip(self._tables, (news.spikes, news.clips), strict=True):
            table.grow(of_table)
            if table.is_full:
                name = table.name.replace("_", " ")
                self._warn(
                    f"full {name}", f"the trackers' table of {name} has {len(table.rows)} rows, and gets no more."
                )
        # What is late may still write to the folder.
        with tempfile.TemporaryDirectory(prefix="gradloc-", ignore_cleanup_errors=True) as folder:
            page = self._page(Path(folder, "report.html")) if lines else None
            news = replace(news, tables=[table for table in self._tables if table.new_rows], page=page)
            for name, tracker in self._loggers.items():
                if name != "console":
                    send = TRACKERS.get(name, to_another)
                    self._guarded(name, partial(self._run, name, partial(send, tracker, news)))
                if name not in TRACKERS and name not in NO_TRACKERS and (lines or identities):
                    self._warn(name, f"the logger {name} gets figures only: it is not one of {', '.join(TRACKERS)}.")

    def _identities(self, lines: Sequence[Mapping[str, Any]]) -> tuple[dict[str, float], list[IdentityNews]]:
        """The figures by the last line that has identities, and what has changed by each; older lines have none."""
        scalars: dict[str, float] = {}
        news = []
        for line in lines:
            if not (states := line.get("identities")):
                continue
            if self._earlier:  # it may have gone further than the checkpoint that this one resumes from
                self._states = _states_before(line["global_step"], self._earlier)
                self._earlier = []
            news += identity_news(line, self._states)
            scalars, self._states = identity_scalars(states), states
        return scalars, news

    def _page(self, path: Path) -> Path | None:
        """The report: after each of the first ten steps with spikes, then after the 20th, 30th, … 100th, 200th, …"""
        self._spiked += 1
        if not TAKE_PAGE.intersection(self._loggers) or self._spiked % 10 ** (len(str(self._spiked)) - 1):
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
            self._warn(
                name,
                f"{name}: spikes and identities could not be sent ({type(error).__name__}: {_without_secrets(error)}).",
            )
        return None

    def _warn_unseen(self, step: int, path: str) -> None:
        self._warn(
            "no lines",
            f"{path} has no new line after step {step}: is bisect_dump_dir a directory that the driver and the actor's "
            "rank 0 share, with space left? Trackers get the metrics only.",
        )

    def _warn(self, about: str, message: str) -> None:
        warn_once(self._said, f"spike_log (this warning appears once): {message}", about=about)


class AppendedLines:
    """The lines of `<directory>/<name>.jsonl` that were appended since the last call of `read`.

    Args:
        fields (Sequence[str]): Lines with one of these fields are read.
    """

    def __init__(self, directory: str, name: str, fields: Sequence[str]) -> None:
        self.path = os.path.join(directory, f"{name}.jsonl")
        self._fields = fields
        self._end = 0

    def skip(self, but: int = 0) -> None:
        """Leaves out what is in the file, as an earlier run has left it, but for its last bytes."""
        self._end = max(os.path.getsize(self.path) - but, 0) if os.path.isfile(self.path) else 0

    def read(self) -> list[dict[str, Any]]:
        """The new lines, oldest first; none without a file. One that is still being written is left for the next call.

        Raises:
            OSError: It cannot be read.
        """
        try:
            file = open(self.path, "rb")
        except FileNotFoundError:
            return []
        with file:
            if os.fstat(file.fileno()).st_size < self._end:  # it was moved away, and begun anew
                self._end = 0
            file.seek(self._end)
            data = file.read()
        finished = data[: data.rfind(b"\n") + 1]
        self._end += len(finished)
        entries = []
        for line in finished.splitlines():
            with suppress(ValueError):  # the rest of a line that was cut, or that a killed run has left
                entries.append(json.loads(line))
        return [entry for entry in entries if isinstance(entry, dict) and not entry.keys().isdisjoint(self._fields)]


def _states_before(step: int | None, lines: Sequence[Mapping[str, Any]]) -> Mapping[str, IdentityState]:
    """The states of the identities before a step, by lines of which later ones may repeat the steps of others."""
    for line in reversed(lines):
        known = None not in (step, line["global_step"]) and line["global_step"] < step
        if known and line.get("identities"):
            return line["identities"]
    return {}


def _without_secrets(error: Exception) -> str:
    """An error's message without passwords of addresses, and without what the environment's secrets hold."""
    text = re.sub(r"//[^/\s@]+@", "//…@", str(error))
    for name, value in os.environ.items():
        if re.search("KEY|TOKEN|SECRET|PASSW", name.upper()) and len(value) >= 8:
            text = text.replace(value, "…")
    return text
