# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Appends events to spikes.jsonl and steps to steps.jsonl within size limits, and lists the files written."""

import errno
import json
import logging
import math
import os
import re
import socket
import stat
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timezone
from itertools import groupby
from pathlib import Path
from typing import Any

from ..guarded import PatientThread, warn_once
from ..judging import judged
from ..lines import SCHEMA, Answer

logger = logging.getLogger(__name__)

# A longer line of a file is not read, and none is written.
LINE_BYTES = 16 * 2**20
# A longer one has the long texts of as few culprits as makes it shorter.
_LONG_LINE = 2**20
# Deeper nesting would overflow the stack of recursive functions.
DEPTH = 64
# The limits of `record_events`.
EVENTS_PER_STEP = 16
CULPRITS_WITH_TEXT = 16
# The limit of each file.
FILE_BYTES = 64 * 2**20

# The metrics in steps.jsonl, without their prefix.
STEP_FIGURES = tuple(
    "threshold token_norm_max spike_margin ratio_max rollout_ratio_max unlikely_share misplaced_share triggered".split()
)
_FULL = "size_limit"
# Warnings that this process has given.
_said: set[str] = set()

# By directory: a disk that hangs once is not waited for again.
_disks: dict[str, PatientThread] = {}
# By path: the locks that this process holds for as long as it lives, as open files.
_locks: dict[str, int] = {}
# How the text of a lock begins.
_LOCK = re.compile(r"process (\d{1,9}) on \S+, since [^\n]*")

# The maximum number of tokens around a culprit whose values are kept.
WINDOW = 512
# The fields of a culprit that only its largest ones keep.
LONG_TEXTS: tuple[str, ...] = ("prompt", "response", "response_tokens", "response_suspicion", "response_kl")
# Those that none keeps if they make a line too long.
ALL_TEXTS = (*LONG_TEXTS, "context", "ground_truth")


def record_events(directory: str, events: Sequence[Mapping[str, Any]], name: str = "spikes") -> None:
    """Appends each event, judged, as one line to `<directory>/<name>.jsonl`. A disk error is logged, not raised.

    The limits keep a run that has collapsed, with a spike in every mini-batch, from filling the disk. Only the first 16
    events and the first 16 clip lines of a step are written, because the cause comes before its consequences. Only the
    16 largest culprits of an event keep their long texts; fewer do if its line would exceed 1 MiB, and none at 16 MiB.
    At 64 MiB, no more is written: spikes are then counted in steps.jsonl alone. If something is left out, a `note` line
    says so. Nothing is written where another process writes to the directory.

    Args:
        directory (str): Created if it does not exist. The file of an earlier run is continued.
        events (Sequence[Mapping]): All events and clip lines, or spikes of a critic, of one step or of several steps,
            in order. Those that are not are judged.
        name (str): "spikes", or "critic" for the spikes of one.
    """
    if not events:
        return
    lines = []
    for step, of_step in groupby(events, lambda event: event.get("global_step")):
        counts: Counter[str] = Counter()
        for event in of_step:
            what = "lines of TokenClip" if "token_clip" in event else "spikes"
            counts[what] += 1
            if counts[what] <= EVENTS_PER_STEP:
                lines += _event_lines(event)
        for what, count in counts.items():
            if (more := count - EVENTS_PER_STEP) > 0:
                limit = f"{more} more {what} are not written: {EVENTS_PER_STEP} in a step are the limit"
                lines.append(_note("rate_limit", step, more, limit))
    first_step = events[0].get("global_step")
    what = f"{len(events)} gradient spike(s)" + " of the critic" * (name == "critic")
    _append(directory, name, b"".join(lines), what, first_step, len(events))


def _event_lines(event: Mapping[str, Any]) -> list[bytes]:
    """The line of an event and a note on what it lacks; of one that cannot be written, the note alone."""
    step = event.get("global_step")
    try:
        line, bare = event_line(event if "summary" in event else judged(event))
    except Exception as error:  # whatever a ground truth is, training goes on
        message = f"a spike is not written: {type(error).__name__}: {str(error)[:200]}"
        logger.warning("step %s: %s", step, message)
        return [_note("unwritable", step, 1, message)]
    message = f"of a spike, the {bare} smallest culprits are written without their texts"
    return [line, _note("text_limit", step, bare, message)] if bare else [line]


def event_line(event: Mapping[str, Any]) -> tuple[bytes, int]:
    """The line of an event as `record_events` writes it, and how many tokens have no texts in it.

    Raises:
        ValueError: It is too long.
    """
    tokens = event.get("culprits") or event.get("suspected", ())
    wanted = [(most, LONG_TEXTS, _LONG_LINE) for most in (CULPRITS_WITH_TEXT, 8, 4, 2)]
    for most, texts, limit in (*wanted, (1, LONG_TEXTS, LINE_BYTES), (0, ALL_TEXTS, LINE_BYTES)):
        line = _line(_without_texts(event, most, texts))
        if len(line) <= min(limit, LINE_BYTES):
            return line, max(len(tokens) - most, 0)
    raise ValueError(f"its line would take {len(line):,} bytes, and {LINE_BYTES:,} are the limit")


def record_step(
    directory: str,
    global_step: int | None,
    figures: Mapping[str, float | None],
    answer: Answer | None = None,
) -> None:
    """Appends one short line about a step to `<directory>/steps.jsonl`; see `Step` in gradloc/lines.py.

    A disk error is logged as a warning, not raised. At 64 MiB (some 200,000 steps) a note is written, and no more
    steps.

    Args:
        directory (str): Created if it does not exist. The file of an earlier run is continued.
        figures (Mapping): `STEP_FIGURES` by name; those that are missing are written as null.
        answer (dict, optional): What the judge says of it; None if nothing has checked the run.
    """
    line = {"schema": SCHEMA, "time": now(), "global_step": global_step}
    line |= {name: figures.get(name) for name in STEP_FIGURES}
    line |= {name: answer[name] for name in ("identities", "warnings", "changes")} if answer else {}
    _append(directory, "steps", _line(line), f"the figures of step {global_step}", global_step, 1)


def evidence_files(directory: str, name: str = "spikes") -> list[str]:
    """The file that a `record_…` function has written, if there is one; `name` is "spikes", "steps" or "critic"."""
    path = os.path.join(directory, f"{name}.jsonl")
    return [path] if os.path.isfile(path) else []


def writer_of(directory: str) -> str | None:
    """Which other process of this or another host writes events to a directory, in words; None if none is known to."""
    import fcntl  # here: evidence is read where there is none

    def find() -> str | None:
        try:
            with open(os.path.join(directory, _lock_name("spikes")), "rb") as lock:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return _holder(os.path.join(directory, _lock_name("spikes")))
        except OSError:  # nobody has written there, or the file system has no locks
            pass
        return None

    try:
        return _disk(directory).run(find)
    except OSError as error:  # a TimeoutError is one
        logger.warning("whether another run writes its evidence to %s is not known: %s", directory, error)
        return None


def window_start(position: int) -> int:
    """The index in the response at which a culprit's `response_…` lists begin."""
    return max(position - WINDOW // 2, 0)


def limit_texts(
    culprit: Mapping[str, Any], index: int, most: int = CULPRITS_WITH_TEXT, texts: Sequence[str] = LONG_TEXTS
) -> dict[str, Any]:
    """A culprit, whose texts are None unless it is among the largest.

    Args:
        index (int): Its index in the event's culprits, which begin with the largest.
        most (int): How many of them keep their texts.
        texts (Sequence[str]): The fields that the others lose.
    """
    return dict(culprit) if index < most else {**culprit, **dict.fromkeys(culprit.keys() & set(texts))}


def jsonable(value: Any, inside: tuple[int, ...] = ()) -> Any:
    """Converts a value to plain JSON types; NaN and infinities become "NaN", "Infinity" and "-Infinity".

    What nests too deep or contains itself is replaced by a text that says so: `inside` has the `id` of each value that
    contains it.
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


def _append(directory: str, name: str, data: bytes, what: str, step: Any, count: int) -> None:
    """Appends lines to `<directory>/<name>.jsonl`.

    A disk error, or a disk that does not answer in time, is logged as a warning, not raised.

    Args:
        data (bytes): The lines.
        what (str): What they hold, for a warning.
        step (Any): The first step of the lines, for a note, as the next.
        count (int): The number of events or steps in them.
    """
    path = os.path.join(directory, f"{name}.jsonl")

    def append() -> None:
        os.makedirs(directory, exist_ok=True)
        if (holder := _lock(os.path.join(directory, _lock_name(name)))) is not None:
            others = f"{holder} writes to {directory}"
            warn_once(_said, f"{what} and all later ones are not written: {others}", about=directory)
            return
        size = os.path.getsize(path) if os.path.exists(path) else 0
        last_line, lines = _last_line(path) if size else b"\n", data
        is_full = f'"note": "{_FULL}"'.encode() in last_line
        if is_full or size + len(data) > FILE_BYTES:
            kind = "steps" if name == "steps" else "events"
            message = f"{kind} are not written from here on: the file has reached {FILE_BYTES} bytes"
            warn_once(_said, f"{what} left out of {directory}: {message}", about=path)
            if is_full:
                return
            lines = _note(_FULL, step, count, message)
        # A killed run may have left an incomplete line: end it, so that the next event starts on a new line.
        with open(path, "ab") as file:
            file.write((b"" if last_line.endswith(b"\n") else b"\n") + lines)

    try:
        _disk(directory).run(append)
    except OSError as error:  # a TimeoutError is one
        logger.warning("%s could not be written to %s: %s", what, path, error)


def _disk(directory: str) -> PatientThread:
    return _disks.setdefault(directory, PatientThread(directory))


def _lock_name(name: str) -> str:
    """The file that is locked by the process that writes; a critic may have a process of its own."""
    return ".critic.lock" if name == "critic" else ".run.lock"


def _forget_locks() -> None:
    """In a forked child: it would keep the locks of a run that has ended."""
    for lock in _locks.values():
        os.close(lock)
    _locks.clear()


if hasattr(os, "register_at_fork"):  # evidence is read where there is none
    os.register_at_fork(after_in_child=_forget_locks)


def _lock(path: str) -> str | None:
    """Locks a file until this process ends, unless it has it; which process has it instead, None if none is known to.

    Where the file cannot be locked, evidence is written all the same, with a warning: a second run in the directory is
    rare, and a spike that is not written is lost.
    """
    holder = None
    try:
        if path in _locks and not _is_at(path, _locks[path]):  # removed: another run may have locked a new one
            os.close(_locks.pop(path))
        if path in _locks or _has_locked(path) or (holder := _holder(path)) is not None:
            return holder
        with suppress(FileNotFoundError):
            os.unlink(path)  # a child that a dead run has left holds it
        return None if _has_locked(path) else _holder(path)
    except OSError as error:
        why = "it is a link" if error.errno == errno.ELOOP else error.strerror
        unlocked = f"{path} cannot be locked ({why}), so that lines of a second run may come between this one's"
        warn_once(_said, f"{unlocked}: remove that file, or set another bisect_dump_dir", about=path)
        return None


def _has_locked(path: str) -> bool:
    """Locks a file that this process does not have, unless another one has.

    Raises:
        OSError: It is not a lock, or cannot be written.
    """
    import fcntl

    lock, _ = _open_lock(path, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return False
    except OSError:  # a file system without locks
        pass
    _locks[path] = lock
    text = f"process {os.getpid()} on {socket.gethostname()}, since {now()}\n{_place()} {_start()}".encode()
    os.ftruncate(lock, os.pwrite(lock, text, 0))
    return True


def _open_lock(path: str, flags: int) -> tuple[int, str]:
    """Opens a lock, and gives its text, empty if it is new.

    Raises:
        OSError: It is anything else, or cannot be opened.
    """
    lock = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    if stat.S_ISREG(os.fstat(lock).st_mode):
        text = os.read(lock, 400).decode(errors="replace")
        if not text or _LOCK.match(text):
            return lock, text
    os.close(lock)
    raise OSError(errno.EEXIST, "it is not a lock of a run")


def _is_at(path: str, file: int) -> bool:
    """Whether an open file is still the one at a path."""
    try:
        return os.path.samestat(os.lstat(path), os.fstat(file))
    except FileNotFoundError:
        return False


def _holder(path: str) -> str | None:
    """Which process has a lock, in words; None if it has ended, and a child that it has left holds the file."""
    text = ""
    with suppress(OSError):
        lock, text = _open_lock(path, os.O_RDONLY)
        os.close(lock)
    return None if _has_ended(text) else f"another run ({text.partition(chr(10))[0] or 'it does not say which'})"


def _has_ended(text: str) -> bool:
    """Whether the process of a lock's text has ended; False if this one cannot know.

    Its number alone does not tell: in another container, even one of the same host name, it has another meaning, and a
    later process may have it again. So the second line says where it counts, and when the process started.
    """
    process, (place, _, start) = _LOCK.match(text), text.rpartition("\n")[2].rpartition(" ")
    if process is None or not (place and start) or place != _place():
        return False
    try:
        os.kill(int(process[1]), 0)
        return _start(process[1]) not in ("", start)
    except ProcessLookupError:
        return True
    except PermissionError:  # another user's
        return False


def _place() -> str:
    """This boot of the host, and the namespace of process numbers; empty if unknown."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    return ""


def _start(process: str = "self") -> str:
    """When a process started, by its host's clock; "ended" of a zombie; empty if unknown."""
    with suppress(OSError):
        state, *fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        return "ended" if state in "ZX" else fields[18]
    return ""


def _last_line(path: str, most: int = 4096) -> bytes:
    """The last line of a file; only its last `most` bytes if it is longer."""
    with open(path, "rb") as file:
        file.seek(max(os.path.getsize(path) - most, 0))
        return (file.read().splitlines(keepends=True) or [b"\n"])[-1]


def _line(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(jsonable(value), allow_nan=False) + "\n").encode()


def now() -> str:
    """The time as lines have it."""
    return datetime.now(timezone.utc).isoformat()


def _note(kind: str, step: Any, count: int, message: str) -> bytes:
    note = {"schema": SCHEMA, "time": now(), "global_step": step, "note": kind, "count": count, "message": message}
    return _line(note)


def _without_texts(event: Mapping[str, Any], but: int, texts: Sequence[str]) -> Mapping[str, Any]:
    """The event with long texts only for its first (largest) culprits; the same for suspected tokens."""
    limited = {
        name: [limit_texts(token, i, but, texts) for i, token in enumerate(event[name])]
        for name in ("culprits", "suspected")
        if event.get(name)
    }
    return {**event, **limited}
