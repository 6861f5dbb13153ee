# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Sends the spikes of a run, and what TokenClip found, to the loggers of verl's `Tracking`, from the driver.

The evidence may be written by another process, so it is read back from the disk.
"""

import json
import os
import re
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ..evidence.writer import evidence_files
from ..guarded import warn_once
from ..judge.misfire import without_data_source
from .trackers import CLIP_COLUMNS, COLUMNS, TAKE_PAGE, TEXT_COLUMNS, TRACKERS, StepSpikes, Table

# verl's loggers that are no trackers: with these alone, `spike_log` is off unless it is set. The console has the
# summaries already, from the process that writes the evidence; RL-Insight takes figures only.
_NO_TRACKERS = frozenset({"console", "file", "rl_insight"})
# With more evidence than this, no page is made: the driver would wait for it too long.
_PAGE_BYTES = 64 * 2**20
# A field of each kind of line that is read.
_READ = ("culprits", "token_clip")


def add_spike_log(loggers: dict[str, Any], config: Mapping[str, Any] | None) -> None:
    """Adds a logger "gradloc" to those of a `Tracking`, if its run is to send its spikes or clipped tokens on."""
    actor = ((config or {}).get("actor_rollout_ref") or {}).get("actor") or {}
    if not (actor.get("spike_detection", False) or (actor.get("token_clip") or {}).get("enable", False)):
        return
    wanted = actor.get("spike_log")
    if wanted is None:
        wanted = not _NO_TRACKERS.issuperset(loggers)
    if wanted:
        loggers["gradloc"] = SpikeLog(dict(loggers), actor["bisect_dump_dir"], wanted == "texts")


class SpikeLog:
    """A logger that gives the others the spikes of the steps whose metrics they get. It never raises for a spike.

    Args:
        loggers (Mapping): verl's loggers by name.
        directory (str): Where the evidence is written.
        texts (bool): Whether they get the texts of samples as well. Without them, nothing that is sent is made from
            these texts.
    """

    def __init__(self, loggers: Mapping[str, Any], directory: str, texts: bool = False) -> None:
        self._loggers = loggers
        self._directory = directory
        self._texts = texts
        more = TEXT_COLUMNS if texts else ()
        self._tables = [Table("culprits", (*COLUMNS, *more)), Table("clipped_tokens", (*CLIP_COLUMNS, *more))]
        self._appended = AppendedEvents(directory)
        self._steps = 0
        self._said: set[str] = set()

    def log(self, data: Mapping[str, Any], step: int) -> None:
        """Sends the spikes of a step with these metrics."""
        counts = ("actor/gradloc/triggered", "actor/token_clip/over")
        if any(data.get(name, 0) > 0 for name in counts) or "actor/gradloc/drill_found" in data:
            self._guarded("the evidence", partial(self._send, step))

    def _send(self, step: int) -> None:
        try:
            lines = self._appended.read()
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
        if not self._texts:  # of what is sent, sentences alone may name what a sample is
            for line in lines:
                if line.get("verdict") is not None:
                    line["verdict"] = without_data_source(line["verdict"])
        self._steps += 1
        of_step = StepSpikes(step, lines)
        for table, of_table in zip(self._tables, (of_step.spikes, of_step.clips), strict=True):
            table.grow(of_table)
            if table.is_full:
                name = table.name.replace("_", " ")
                self._warn(
                    f"full {name}", f"the trackers' table of {name} has {len(table.rows)} rows, and gets no more."
                )
        with tempfile.TemporaryDirectory(prefix="gradloc-") as folder:
            page = self._page(Path(folder, "report.html"))
            spikes = replace(of_step, tables=[table for table in self._tables if table.new_rows], page=page)
            for name, tracker in self._loggers.items():
                if send := TRACKERS.get(name):
                    self._guarded(name, partial(send, tracker, spikes))
                elif name not in _NO_TRACKERS:
                    self._warn(name, f"the logger {name} gets no spikes: it is not one of {', '.join(TRACKERS)}.")

    def _page(self, path: Path) -> Path | None:
        """The report: after each of the first ten steps with spikes, then after the 20th, 30th, … 100th, 200th, …"""
        if not TAKE_PAGE.intersection(self._loggers) or self._steps % 10 ** (len(str(self._steps)) - 1):
            return None
        if sum(map(os.path.getsize, evidence_files(self._directory))) > _PAGE_BYTES:
            self._warn("page", "there is too much evidence for a page in the trackers.")
            return None
        try:
            # Of the package that reads evidence, which need not be installed where training runs.
            from gradloc_tools.report import read, write_page
        except ImportError:
            self._warn(
                "no page",
                "trackers get no page, as GradLoc's wheel is not installed beside the driver: pip install . in its "
                "checkout. They get all else.",
            )
            return None
        self._guarded("the page", lambda: write_page(read(self._directory, texts=self._texts), str(path)))
        return path if path.exists() else None

    def _guarded(self, name: str, action: Callable[[], None]) -> None:
        """Does something that must not take training down; the first time that it fails, a warning says so."""
        try:
            action()
        except Exception as error:  # its text may have secrets
            self._warn(name, f"{name}: spikes could not be sent ({type(error).__name__}: {_without_secrets(error)}).")

    def _warn(self, about: str, message: str) -> None:
        warn_once(self._said, f"spike_log (this warning appears once): {message}", about=about)


class AppendedEvents:
    """The events and clip lines of `<directory>/spikes.jsonl` that were appended since the last call of `read`.

    What is in the file at the start, as an earlier run has left it, is not read.
    """

    def __init__(self, directory: str) -> None:
        self.path = os.path.join(directory, "spikes.jsonl")
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
