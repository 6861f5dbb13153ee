# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Reads the evidence and keeps only what the report shows.

It may be read while training writes it. Rotated files are read as well; a line that is still being
written is left for the next time.
"""

import errno
import heapq
import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..bundles.results import read_results
from ..evidence.schema import EVENT, EVENT_1, EVENT_2, NOTE, STEP, conforms
from ..evidence.texts import without_texts
from ..evidence.writer import STEP_FIGURES, evidence_files
from .condensed import condensed_event, culprit_details, culprit_row
from .drills import condensed_drill
from .figures import number, severity

# How many culprits keep their details by default.
DETAILED = 500
# The maximum number of rows on the page, which would be slow with more; the largest are kept.
PAGE_ROWS = 5_000

# A culprit after what it is sorted by (its size; among equals, the first comes first) and the index of its event.
RankedCulprit = tuple[float, int, int, dict[str, Any]]


@dataclass
class Evidence:
    """What the files hold, as far as the report needs it.

    Attributes:
        path (str): The directory or file that it is from.
        top (int): How many culprits keep their texts and layers: the largest of each event, then others.
        since (int, optional): Events of earlier steps are left out.
        texts (bool): Whether it has the texts of samples, and the results of replays.
        events (list[dict]): The spikes in the order in which they were written, condensed; drills are no spikes.
        drills (list[dict]): Likewise.
        faults (list[str]): The names of faults that were planted in the run on purpose.
        steps (dict[int, dict]): The figures of each step, of its last line; None where there is no data.
        notes (list[dict]): Of what was left out of the files.
        replays (list[dict]): The results of replays, in the order of their events.
        skipped (int): Lines that are no event of a known version.
        sources (Counter): Of all culprits, kept or not.
        tokens (Counter): Likewise; by the token, and its id if it is not known.
        largest (list[RankedCulprit]): The largest culprit of each event.
        others (list[RankedCulprit]): The largest of the other culprits, as many as the page may show; a heap.
    """

    path: str
    top: int = DETAILED
    since: int | None = None
    texts: bool = True
    events: list[dict[str, Any]] = field(default_factory=list)
    drills: list[dict[str, Any]] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    steps: dict[int, dict[str, float | None]] = field(default_factory=dict)
    notes: list[dict[str, Any]] = field(default_factory=list)
    replays: list[dict[str, Any]] = field(default_factory=list)
    skipped: int = 0
    sources: Counter[str] = field(default_factory=Counter)
    tokens: Counter[tuple[str | None, int | None]] = field(default_factory=Counter)
    largest: list[RankedCulprit] = field(default_factory=list)
    others: list[RankedCulprit] = field(default_factory=list)
    # A heap of those with details: whether it is its event's largest, its size, its order.
    _detailed: list[tuple[bool, float, int, dict[str, Any]]] = field(default_factory=list)

    def add(self, event: dict[str, Any]) -> None:
        """Adds an event, and the fields of its culprits that may be shown."""
        if not self.texts:
            event = without_texts(event)
        fault = event.get("fault")
        if fault is not None and fault not in self.faults:
            self.faults.append(fault)
        if event.get("drill") is not None:
            self.drills.append(condensed_drill(event))
            return
        largest = max(event["culprits"], key=lambda culprit: severity(culprit["grad_norm"]), default=None)
        index, before = len(self.events), self.sources.total()
        self.events.append(condensed_event(event, largest))
        for order, culprit in enumerate(event["culprits"], before):
            token = culprit.get("token")
            self.sources[culprit["source"]] += 1
            self.tokens[token, culprit["token_id"] if token is None else None] += 1
            row = culprit_row(event, culprit)
            ranked = (severity(culprit["grad_norm"]), -order, index, row)
            if culprit is largest:
                self.largest.append(ranked)
            else:
                heapq.heappush(self.others, ranked)
                if len(self.others) > max(PAGE_ROWS, self.top):
                    heapq.heappop(self.others)
            row["details"] = culprit_details(culprit)
            heapq.heappush(self._detailed, (culprit is largest, *ranked[:2], row))
            if len(self._detailed) > self.top:
                del heapq.heappop(self._detailed)[-1]["details"]

    def add_step(self, step: dict[str, Any]) -> None:
        """Adds a line of steps.jsonl; of a step with several lines, as a resumed run leaves them, the last counts."""
        if step["global_step"] is not None:
            figures = {name: step[name] for name in STEP_FIGURES}
            self.steps[step["global_step"]] = {
                name: None if value is None else number(value) for name, value in figures.items()
            }

    def culprits(self) -> list[RankedCulprit]:
        """The culprits that are kept, largest first."""
        return sorted(self.largest + self.others, reverse=True)


def read(path: str, since: int | None = None, top: int = DETAILED, texts: bool = True) -> Evidence:
    """Reads a directory with evidence, or a file; `spikes.jsonl` and `steps.jsonl` stand for their directory.

    Args:
        path (str): The directory or file. A run's directory stands for the `bisect_dump` in it.
        since (int, optional): Leave out events of earlier steps, and those without a step. The figures of earlier
            steps are kept, for the ranges of later ones.
        top (int): See `Evidence`.
        texts (bool): See `Evidence`.

    Raises:
        OSError: There is no such file, no evidence in the directory, or it cannot be read.
    """
    found = Evidence(path, top, since, texts)
    events, steps = _files(path)
    for entry in _entries(found, events):
        is_event = any(conforms(entry, form) for form in (EVENT, EVENT_2, EVENT_1))
        if not is_event and not conforms(entry, NOTE):
            found.skipped += 1
        elif since is None or (entry["global_step"] is not None and entry["global_step"] >= since):
            found.add(entry) if is_event else found.notes.append(entry)
    for entry in _entries(found, steps):
        if conforms(entry, STEP):
            found.add_step(entry)
        elif conforms(entry, NOTE):
            found.notes.append(entry)
        else:
            found.skipped += 1
    results = read_results(os.path.dirname((events or steps)[0]) or ".") if texts else []
    found.replays = [result for result in results if since is None or (result["global_step"] or 0) >= since]
    return found


def _entries(found: Evidence, files: Sequence[str]) -> Iterator[Any]:
    """What the lines hold; lines that are malformed are counted as skipped."""
    for line, finished in _lines(files):
        try:
            yield json.loads(line)
        except (ValueError, RecursionError):
            found.skipped += finished


def _lines(files: Sequence[str]) -> Iterator[tuple[bytes, bool]]:
    """All lines, and whether each is finished: the last one may still be being written."""
    for index, file in enumerate(files):
        with open(file, "rb") as lines:
            for line in lines:
                yield line, line.endswith(b"\n") or index < len(files) - 1


def _files(path: str) -> tuple[list[str], list[str]]:
    """The files that a path stands for, those with events and those with steps, each the oldest first."""
    if os.path.isdir(path):
        for directory in (path, os.path.join(path, "bisect_dump")):
            if os.path.isdir(directory):
                events, steps = evidence_files(directory), evidence_files(directory, "steps")
                if events or steps:
                    return events, steps
        raise FileNotFoundError(errno.ENOENT, "No steps.jsonl or spikes.jsonl, which spike_detection writes", path)
    if os.path.basename(path) in ("spikes.jsonl", "steps.jsonl"):
        directory = os.path.dirname(path) or "."
        events, steps = evidence_files(directory), evidence_files(directory, "steps")
        if events or steps:
            return events, steps
    return [path], []
