# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Appends events to spikes.jsonl and steps to steps.jsonl within size limits, and lists the files written."""

import hashlib
import json
import logging
import math
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from .foreign_json import DEPTH, LINE_BYTES
from .patient_disk import PATIENCE, PatientDisk
from .schema import SCHEMA

logger = logging.getLogger(__name__)

# The limits of `record_events`.
EVENTS_PER_STEP = 16
CULPRITS_WITH_TEXT = 16
FILE_BYTES = 64 * 2**20
TOTAL_BYTES = 2**30

# The limits of `record_step`: some 200,000 steps.
STEP_FILE_BYTES = 16 * 2**20
STEP_TOTAL_BYTES = 64 * 2**20

# The metrics in steps.jsonl, without their prefix.
STEP_FIGURES = tuple(
    "threshold token_norm_max spike_margin ratio_max rollout_ratio_max unlikely_share misplaced_share triggered".split()
)
# Another run may write to the same directory, and rename a full file at the same moment.
_ATTEMPTS = 100
# The files at their limit of which a warning has been logged: one is enough for many steps.
_full: set[str] = set()

# By directory: a disk that hangs once is not waited for again.
_disks: dict[str, PatientDisk] = {}

# The fields of a culprit that only its largest ones keep.
LONG_TEXTS: tuple[str, ...] = ("prompt", "response", "response_tokens", "response_suspicion", "response_kl")


def record_events(directory: str, events: Sequence[Mapping[str, Any]]) -> None:
    """Appends each event as one line to `<directory>/spikes.jsonl`. A disk error is logged as a warning, not raised.

    The limits keep a run that has collapsed, with a spike in every mini-batch, from filling the disk. Only the first 16
    events and the first 16 clip lines of a step are written, because the cause comes before its consequences. Only the
    16 largest culprits of an event keep their long texts, and none if its line would exceed 16 MiB. A file that would
    exceed 64 MiB is renamed to spikes.1.jsonl, spikes.2.jsonl and so on. When all files together would exceed 1 GiB, no
    more events are written. If something is left out, a `note` line in the file says so.

    Args:
        directory (str): Created if it does not exist. Files of an earlier run are continued.
        events (Sequence[Mapping]): All events and clip lines of one step or of several steps, in order.
    """
    if not events:
        return
    by_step: dict[Any, list[Mapping[str, Any]]] = {}
    for event in events:
        by_step.setdefault(event.get("global_step"), []).append(event)
    lines = []
    for step, of_step in by_step.items():
        counts: Counter[str] = Counter()
        for event in of_step:
            kind = "lines of TokenClip" if "token_clip" in event else "spikes"
            counts[kind] += 1
            if counts[kind] <= EVENTS_PER_STEP:
                lines += _event_lines(event)
        lines += _rate_notes(step, counts)
    first_step = events[0].get("global_step")
    series = _Series(directory, "spikes", FILE_BYTES, TOTAL_BYTES)
    series.append(b"".join(lines), f"{len(events)} gradient spike(s)", "events", first_step, len(events))


def _rate_notes(step: Any, counts: Mapping[str, int]) -> list[bytes]:
    """A note for each kind of lines of which a step has more than are written."""
    limit = f"are not written: {EVENTS_PER_STEP} in a step are the limit"
    dropped = {kind: count - EVENTS_PER_STEP for kind, count in counts.items() if count > EVENTS_PER_STEP}
    return [_note("rate_limit", step, count, f"{count} more {kind} {limit}") for kind, count in dropped.items()]


def _event_lines(event: Mapping[str, Any]) -> list[bytes]:
    """The line of an event and a note on what it lacks; of one that cannot be written, the note alone."""
    step = event.get("global_step")
    try:
        line, bare = _line_and_bare(event)
    except Exception as error:  # whatever a ground truth is, training goes on
        message = f"a spike is not written: {type(error).__name__}: {str(error)[:200]}"
        logger.warning("step %s: %s", step, message)
        return [_note("unwritable", step, 1, message)]
    message = f"of a spike, the {bare} smallest culprits are written without their texts"
    return [line, _note("text_limit", step, bare, message)] if bare else [line]


def line_digest(line: bytes) -> str:
    """What a line that replaces this one has in `replaces`."""
    return hashlib.sha256(line.rstrip(b"\r\n")).hexdigest()


def event_line(event: Mapping[str, Any]) -> bytes:
    """An event as `record_events` writes it, without the note on what it lacks.

    Raises:
        ValueError: It is too long.
    """
    return _line_and_bare(event)[0]


def _line_and_bare(event: Mapping[str, Any]) -> tuple[bytes, int]:
    """The line of an event, and how many tokens have no texts in it."""
    tokens = event.get("culprits") or event.get("suspected", ())
    bare = max(len(tokens) - CULPRITS_WITH_TEXT, 0)
    line = _line(_without_texts(event, CULPRITS_WITH_TEXT))
    if len(line) > LINE_BYTES:
        bare = len(tokens)
        line = _line(_without_texts(event, 0, (*LONG_TEXTS, "context", "ground_truth")))
    if len(line) > LINE_BYTES:
        raise ValueError(f"its line would take {len(line):,} bytes, and {LINE_BYTES:,} are the limit")
    return line, bare


def record_step(
    directory: str,
    global_step: int | None,
    figures: Mapping[str, float | None],
    warnings: Sequence[Mapping[str, str]] = (),
) -> None:
    """Appends one short line about a step to `<directory>/steps.jsonl`; its form is `STEP` in `schema`.

    A disk error is logged as a warning, not raised. A file that would exceed 16 MiB is renamed to steps.1.jsonl and so
    on. When all of them together would exceed 64 MiB, a note is written, and no more steps.

    Args:
        directory (str): Created if it does not exist. Files of an earlier run are continued.
        global_step (int, optional): The trainer's step.
        figures (Mapping): `STEP_FIGURES` by name; those that are missing are written as null.
        warnings (Sequence[Mapping]): What `RunChecks.warnings` returned.
    """
    line = {"schema": SCHEMA, "time": _now(), "global_step": global_step}
    line |= {name: figures.get(name) for name in STEP_FIGURES} | {"warnings": list(warnings)}
    series = _Series(directory, "steps", STEP_FILE_BYTES, STEP_TOTAL_BYTES)
    series.append(_line(line), f"the figures of step {global_step}", "steps", global_step, 1)


def record_critic(directory: str, global_step: int | None, spikes: Sequence[Mapping[str, Any]]) -> None:
    """Appends the spikes of a critic's update to `<directory>/critic.jsonl`; their form is `CRITIC` in `schema`.

    A disk error is logged as a warning, not raised. Only the first 16 of an update are written, and the file has the
    limits of steps.jsonl.

    Args:
        directory (str): Created if it does not exist. Files of an earlier run are continued.
        global_step (int, optional): The trainer's step.
        spikes (Sequence[Mapping]): `CriticWatch.spikes`, with the trainer's facts.
    """
    if not spikes:
        return
    lines = [*map(_line, spikes[:EVENTS_PER_STEP]), *_rate_notes(global_step, {"spikes": len(spikes)})]
    series = _Series(directory, "critic", STEP_FILE_BYTES, STEP_TOTAL_BYTES)
    series.append(b"".join(lines), f"{len(spikes)} spike(s) of the critic", "spikes", global_step, len(spikes))


def evidence_files(directory: str, name: str = "spikes") -> list[str]:
    """The files that a `record_…` function has written, oldest first; `name` is "spikes", "steps" or "critic"."""
    names = [f"{name}.{number}.jsonl" for number in _rotated(directory, name)] + [f"{name}.jsonl"]
    return [path for name in names if os.path.isfile(path := os.path.join(directory, name))]


def limit_texts(
    culprit: Mapping[str, Any], index: int, most: int = CULPRITS_WITH_TEXT, texts: Sequence[str] = LONG_TEXTS
) -> dict[str, Any]:
    """A culprit, whose texts are None unless it is among the largest.

    Args:
        culprit (Mapping): Its fields, or some of them.
        index (int): Its index in the event's culprits, which begin with the largest.
        most (int): How many of them keep their texts.
        texts (Sequence[str]): The fields that the others lose.
    """
    return dict(culprit) if index < most else {**culprit, **dict.fromkeys(culprit.keys() & set(texts))}


def jsonable(value: Any, inside: tuple[int, ...] = ()) -> Any:
    """Converts a value to plain JSON types; NaN and infinities become "NaN", "Infinity" and "-Infinity".

    What nests too deep or contains itself is replaced by a text that says so.

    Args:
        value (Any): The value.
        inside (tuple[int, ...]): The `id` of each value that contains it.
    """
    if id(value) in inside:
        return "(contains itself)"
    if len(inside) > DEPTH // 2:
        return "(nests too deep)"
    within = (*inside, id(value))
    if isinstance(value, Mapping):
        return {str(key): jsonable(entry, within) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [jsonable(entry, within) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if hasattr(value, "tolist"):  # numpy and torch
        return jsonable(value.tolist(), within)
    return str(value)


def _rotated(directory: str, name: str) -> list[int]:
    """The numbers of the renamed (full) files, in order."""
    matches = (re.fullmatch(rf"{name}\.([1-9]\d*)\.jsonl", found) for found in os.listdir(directory))
    return sorted(int(match[1]) for match in matches if match)


@dataclass(frozen=True)
class _Series:
    """A file of lines, `<directory>/<name>.jsonl`, and the full ones before it.

    Args:
        directory (str): Where they are.
        name (str): "spikes", "steps" or "critic".
        file_bytes (int): At this size a file is renamed.
        total_bytes (int): At this size of all files together, nothing more is written.
    """

    directory: str
    name: str
    file_bytes: int
    total_bytes: int

    def append(self, data: bytes, what: str, kind: str, step: Any, count: int) -> None:
        """Appends lines. A disk error, or a disk that does not answer in time, is logged as a warning, not raised.

        Args:
            data (bytes): The lines.
            what (str): What they hold, for a warning.
            kind (str): The plural of what a line holds, for a note.
            step (Any): The first step of the lines, for a note.
            count (int): The number of events or steps in them, for a note.
        """

        def try_to_append() -> None:
            os.makedirs(self.directory, exist_ok=True)
            for attempt in range(_ATTEMPTS):
                try:
                    self._append(data, what, kind, step, count)
                    break
                except (FileNotFoundError, FileExistsError):  # another run has renamed the file
                    if attempt == _ATTEMPTS - 1:
                        raise

        try:
            _disks.setdefault(self.directory, PatientDisk(Path(self.directory))).run(try_to_append, PATIENCE)
        except OSError as error:  # a TimeoutError is one
            logger.warning("%s could not be written to %s: %s", what, self._path, error)

    @property
    def _path(self) -> str:
        return os.path.join(self.directory, f"{self.name}.jsonl")

    def _put_aside(self, path: str) -> None:
        """Renames a full file.

        The new name is made first, so that no other run that writes here takes it, too, and replaces this file.
        """
        number = max(_rotated(self.directory, self.name), default=0) + 1
        full = os.path.join(self.directory, f"{self.name}.{number}.jsonl")
        open(full, "xb").close()
        try:
            os.replace(path, full)
        except OSError:
            os.remove(full)
            raise

    def _append(self, data: bytes, what: str, kind: str, step: Any, count: int) -> None:
        path = self._path
        files = evidence_files(self.directory, self.name)
        size = os.path.getsize(path) if path in files else 0
        last_line = _last_line(path) if size else b"\n"
        if sum(map(os.path.getsize, files)) + len(data) <= self.total_bytes:
            _full.discard(path)
            if size and size + len(data) > self.file_bytes:
                self._put_aside(path)
                last_line = b"\n"
        else:
            message = (
                f"{kind} are not written from here on: the files have reached {self.total_bytes} bytes; move some away"
            )
            if path not in _full:
                logger.warning("%s left out of %s: %s", what, self.directory, message)
                _full.add(path)
            if b'"note": "size_limit"' in last_line:
                return
            data = _note("size_limit", step, count, message)
        # A killed run may have left an incomplete line: end it, so that the next event starts on a new line.
        line_break = b"" if last_line.endswith(b"\n") else b"\n"
        with open(path, "ab") as file:
            file.write(line_break + data)


def _last_line(path: str, most: int = 4096) -> bytes:
    """The last line of a file; only its last `most` bytes if it is longer."""
    with open(path, "rb") as file:
        file.seek(max(os.path.getsize(path) - most, 0))
        return (file.read().splitlines(keepends=True) or [b"\n"])[-1]


def _line(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(jsonable(value), allow_nan=False) + "\n").encode()


def _now() -> str:
    return datetime.now(timezone.utc).isoformat()


def _note(kind: str, step: Any, count: int, message: str) -> bytes:
    note = {"schema": SCHEMA, "time": _now(), "global_step": step, "note": kind, "count": count, "message": message}
    return _line(note)


def _without_texts(event: Mapping[str, Any], but: int, texts: Sequence[str] = LONG_TEXTS) -> Mapping[str, Any]:
    """The event with long texts only for its first (largest) culprits; the same for suspected tokens."""
    limited = {
        name: [limit_texts(token, i, but, texts) for i, token in enumerate(event[name])]
        for name in ("culprits", "suspected")
        if event.get(name)
    }
    return {**event, **limited}
