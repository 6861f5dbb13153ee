# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Appends events to spikes.jsonl within size limits, and lists the files written."""

import json
import logging
import math
import os
import re
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

from .schema import SCHEMA

logger = logging.getLogger(__name__)

# The limits of `record_events`.
EVENTS_PER_STEP = 16
CULPRITS_WITH_TEXT = 16
FILE_BYTES = 64 * 2**20
TOTAL_BYTES = 2**30
_TEXTS = ("prompt", "response", "response_tokens", "response_suspicion", "response_kl")


def record_events(directory: str, events: Sequence[Mapping[str, Any]]) -> None:
    """Appends each event as one line to `<directory>/spikes.jsonl`. A disk error is logged as a warning, not raised.

    The limits keep a run that has collapsed, with a spike in every mini-batch, from filling the disk. Only the first 16
    events of a step are written, because the cause comes before its consequences. Only the 16 largest culprits of an
    event keep their long texts. A file that would exceed 64 MiB is renamed to spikes.1.jsonl, spikes.2.jsonl and so on.
    When all files together would exceed 1 GiB, no more events are written. If something is left out, a `note` line in
    the file says so.

    Args:
        directory (str): Created if it does not exist. Files of an earlier run are continued.
        events (Sequence[Mapping]): All events of one step or of several steps, in order.
    """
    if not events:
        return
    by_step: dict[Any, list[Mapping[str, Any]]] = {}
    for event in events:
        by_step.setdefault(event.get("global_step"), []).append(event)
    lines = []
    for step, of_step in by_step.items():
        for event in of_step[:EVENTS_PER_STEP]:
            lines.append(_line(_without_texts(event)))
            if (bare := len(event.get("culprits", ())) - CULPRITS_WITH_TEXT) > 0:
                message = f"of a spike, the {bare} smallest culprits are written without their texts"
                lines.append(_note("text_limit", step, bare, message))
        if (dropped := len(of_step) - EVENTS_PER_STEP) > 0:
            message = f"{dropped} more spikes are not written: {EVENTS_PER_STEP} in a step are the limit"
            lines.append(_note("rate_limit", step, dropped, message))
    try:
        os.makedirs(directory, exist_ok=True)
        _append(directory, b"".join(lines), events)
    except OSError as error:
        path = os.path.join(directory, "spikes.jsonl")
        logger.warning("%d gradient spike(s) could not be written to %s: %s", len(events), path, error)


def evidence_files(directory: str) -> list[str]:
    """The files that `record_events` has written, oldest first."""
    names = [f"spikes.{number}.jsonl" for number in _rotated(directory)] + ["spikes.jsonl"]
    return [path for name in names if os.path.isfile(path := os.path.join(directory, name))]


def jsonable(value: Any) -> Any:
    """Converts a value to plain JSON types; NaN and infinities become "NaN", "Infinity" and "-Infinity"."""
    if isinstance(value, Mapping):
        return {str(key): jsonable(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [jsonable(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if hasattr(value, "tolist"):  # numpy and torch
        return jsonable(value.tolist())
    return str(value)


def _rotated(directory: str) -> list[int]:
    """The numbers of the renamed (full) files, in order."""
    names = (re.fullmatch(r"spikes\.([1-9]\d*)\.jsonl", name) for name in os.listdir(directory))
    return sorted(int(name[1]) for name in names if name)


def _append(directory: str, data: bytes, events: Sequence[Mapping[str, Any]]) -> None:
    path = os.path.join(directory, "spikes.jsonl")
    files = evidence_files(directory)
    size = os.path.getsize(path) if path in files else 0
    last_line = _last_line(path) if size else b"\n"
    if sum(map(os.path.getsize, files)) + len(data) > TOTAL_BYTES:
        message = f"events are not written from here on: the files have reached {TOTAL_BYTES} bytes; move some away"
        logger.warning("%d gradient spike(s) left out of %s: %s", len(events), directory, message)
        if b'"note": "size_limit"' in last_line:
            return
        data = _note("size_limit", events[0].get("global_step"), len(events), message)
    elif size and size + len(data) > FILE_BYTES:
        os.rename(path, os.path.join(directory, f"spikes.{max(_rotated(directory), default=0) + 1}.jsonl"))
        last_line = b"\n"
    # A killed run may have left an incomplete line: end it, so that the next event starts on a new line.
    line_break = b"" if last_line.endswith(b"\n") else b"\n"
    with open(path, "ab") as file:
        file.write(line_break + data)


def _last_line(path: str, most: int = 4096) -> bytes:
    """The last line of a file; only its last `most` bytes if it is longer."""
    with open(path, "rb") as file:
        file.seek(max(os.path.getsize(path) - most, 0))
        return file.read().splitlines(keepends=True)[-1]


def _line(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(jsonable(value), allow_nan=False) + "\n").encode()


def _note(kind: str, step: Any, count: int, message: str) -> bytes:
    now = datetime.now(timezone.utc).isoformat()
    note = {"schema": SCHEMA, "time": now, "global_step": step, "note": kind, "count": count, "message": message}
    return _line(note)


def _without_texts(event: Mapping[str, Any]) -> Mapping[str, Any]:
    """The event with long texts only for its first (largest) culprits."""
    culprits = event.get("culprits", ())
    if len(culprits) <= CULPRITS_WITH_TEXT:
        return event
    bare = [{**culprit, **dict.fromkeys(culprit.keys() & set(_TEXTS))} for culprit in culprits[CULPRITS_WITH_TEXT:]]
    return {**event, "culprits": [*culprits[:CULPRITS_WITH_TEXT], *bare]}
