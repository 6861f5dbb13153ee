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
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from ..evidence.schema import EVENT, EVENT_1, EVENT_2, NOTE, conforms
from ..evidence.writer import evidence_files
from .condensed import condensed_event, culprit_details, culprit_row
from .figures import severity

# How many culprits keep their details by default.
DETAILED = 500
# The maximum number of rows on the page, which would be slow with more; the largest are kept.
PAGE_ROWS = 5_000

# A culprit behind what it is sorted by: its size, and among equals the first; and behind the index of its event.
RankedCulprit = tuple[float, int, int, dict[str, Any]]


@dataclass
class Evidence:
    """What the files hold, as far as the report needs it.

    Attributes:
        path (str): The directory or file that it is from.
        top (int): How many culprits keep their texts and layers: the largest of each event, then others.
        since (int, optional): Events of earlier steps are left out.
        events (list[dict]): In the order in which they were written, condensed.
        notes (list[dict]): Of what was left out of the files.
        skipped (int): Lines that are no event of a known version.
        sources (Counter): Of all culprits, kept or not.
        tokens (Counter): Likewise; by the token, and its id if it is not known.
        largest (list[RankedCulprit]): The largest culprit of each event.
        others (list[RankedCulprit]): The largest of the other culprits, as many as the page may show; a heap.
    """

    path: str
    top: int = DETAILED
    since: int | None = None
    events: list[dict[str, Any]] = field(default_factory=list)
    notes: list[dict[str, Any]] = field(default_factory=list)
    skipped: int = 0
    sources: Counter[str] = field(default_factory=Counter)
    tokens: Counter[tuple[str | None, int | None]] = field(default_factory=Counter)
    largest: list[RankedCulprit] = field(default_factory=list)
    others: list[RankedCulprit] = field(default_factory=list)
    # A heap of those with details: whether it is its event's largest, its size, its order.
    _detailed: list[tuple[bool, float, int, dict[str, Any]]] = field(default_factory=list)

    def add(self, event: dict[str, Any]) -> None:
        """Adds an event, and the fields of its culprits that may be shown."""
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

    def culprits(self) -> list[RankedCulprit]:
        """The culprits that are kept, largest first."""
        return sorted(self.largest + self.others, reverse=True)


def read(path: str, since: int | None = None, top: int = DETAILED) -> Evidence:
    """Reads a directory with evidence, or a file; `spikes.jsonl` stands for the older files beside it as well.

    Args:
        path (str): The directory or file. A run's directory stands for the `bisect_dump` in it.
        since (int, optional): Leave out events of earlier steps, and those without a step.
        top (int): See `Evidence`.

    Raises:
        OSError: There is no such file, no evidence in the directory, or it cannot be read.
    """
    found = Evidence(path, top, since)
    for line, finished in _lines(path):
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            found.skipped += finished
            continue
        is_event = any(conforms(entry, form) for form in (EVENT, EVENT_2, EVENT_1))
        if not is_event and not conforms(entry, NOTE):
            found.skipped += 1
        elif since is None or (entry["global_step"] is not None and entry["global_step"] >= since):
            found.add(entry) if is_event else found.notes.append(entry)
    return found


def _lines(path: str) -> Iterator[tuple[bytes, bool]]:
    """All lines, and whether each is finished: the last one may still be being written."""
    files = _files(path)
    for index, file in enumerate(files):
        with open(file, "rb") as lines:
            for line in lines:
                yield line, line.endswith(b"\n") or index < len(files) - 1


def _files(path: str) -> list[str]:
    """The files that a path stands for, the oldest first."""
    if os.path.isdir(path):
        nested = os.path.join(path, "bisect_dump")
        files = evidence_files(path) or (evidence_files(nested) if os.path.isdir(nested) else [])
        if not files:
            raise FileNotFoundError(errno.ENOENT, "No spikes.jsonl, which a run makes with its first spike", path)
        return files
    if os.path.basename(path) == "spikes.jsonl":
        return evidence_files(os.path.dirname(path) or ".") or [path]
    return [path]
