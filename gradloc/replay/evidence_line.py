# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Finds the line of a bundle's spike in the evidence around the bundle, and replaces it."""

import os
import secrets
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..bundles import layout
from ..bundles.opening import Bundle
from ..bundles.plain_file import NotPlainFileError, read_plain_file
from ..evidence.foreign_json import LINE_BYTES, parse
from ..evidence.schema import EVENT, conforms
from ..evidence.writer import FILE_BYTES, event_line, evidence_files
from .parts import same_number

_WHERE = ("global_step", "epoch", "mini_batch")
# Training may append to the file in the same moment.
_ATTEMPTS = 10


class NoLineError(ValueError):
    """Why there is no line that can be replaced; the message completes "spikes.jsonl is as it was: ..."."""


@dataclass(frozen=True)
class EvidenceLine:
    """The line of a spike.

    Args:
        path (Path): Its file.
        event (dict): What it holds.
        start (int): Where it begins in the file.
        stop (int): Where the next one begins.
    """

    path: Path
    event: dict[str, Any]
    start: int
    stop: int


def find_line(bundle: Bundle, names: Collection[str]) -> EvidenceLine:
    """The line of a bundle's spike: that of its step, epoch and mini-batch, whose `replay` is one of some bundles.

    The rank that writes the evidence may have no bundle of a recorded spike. Where no line names one of the bundles,
    it is the line of a recorded spike that names none and has the same norm.

    Args:
        bundle (Bundle): The bundle.
        names (Collection[str]): The names of the folders of its parts.

    Raises:
        NoLineError: There is none, or more than one.
    """
    folder = bundle.path.resolve().parent
    if folder.name != layout.FOLDER:
        raise NoLineError(f"the bundle does not lie in a folder {layout.FOLDER}/ of any")
    replays = {f"{layout.FOLDER}/{name}" for name in names}
    found = []
    try:
        files = evidence_files(str(folder.parent))
        for file in files:
            found += _lines_of(Path(file), bundle.event, replays)
    except (OSError, NotPlainFileError) as error:
        raise NoLineError(f"it cannot be read: {error}") from error
    if not files:
        raise NoLineError("there is none around the bundle")
    named = [line for line in found if line.event.get("replay") is not None]
    found = named or found
    if len(found) != 1:
        raise NoLineError(f"{'no line' if not found else f'more than one line ({len(found)})'} of it is of this spike")
    return found[0]


def replace_line(bundle: Bundle, names: Collection[str], event: Mapping[str, Any]) -> Path:
    """Replaces the line that `find_line` finds, and nothing else, and returns its file.

    A reader sees the file before or after it.

    Raises:
        NoLineError: There is no such line, or the event does not fit into one.
        OSError: The file cannot be written.
    """
    try:
        text = event_line(event)
    except ValueError as error:
        raise NoLineError(str(error)) from error
    for _ in range(_ATTEMPTS):
        line = find_line(bundle, names)
        try:
            if _replace(line, text):
                return line.path
        except NotPlainFileError as error:
            raise NoLineError(str(error)) from error
    raise NoLineError("it changes all the time; try again when training does not write to it")


def _replace(line: EvidenceLine, text: bytes) -> bool:
    """Replaces a line unless the file has changed since it was found."""
    before = os.stat(line.path, follow_symlinks=False)
    data = _read(line.path)
    # The line itself is the one that was found only if it still has the same bytes.
    if len(data) < line.stop or _event(data[line.start : line.stop]) != line.event:
        return False
    # A name that nobody can guess and O_EXCL, so that a link in this folder is not followed.
    unfinished = line.path.with_name(f".{secrets.token_hex(8)}.unfinished")
    descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with open(descriptor, "wb") as file:
            file.writelines([data[: line.start], text, data[line.stop :]])
            try:
                os.fchown(file.fileno(), before.st_uid, before.st_gid)
            except PermissionError:
                pass  # only root may give files away; the file is then that of whoever searches
            os.fchmod(file.fileno(), before.st_mode & 0o777)
        after = os.stat(line.path, follow_symlinks=False)
        same = all(getattr(before, name) == getattr(after, name) for name in ("st_ino", "st_size", "st_mtime_ns"))
        if same:
            os.replace(unfinished, line.path)
            return True
        os.remove(unfinished)
        return False
    except BaseException:
        if unfinished.exists():
            os.remove(unfinished)
        raise


def _lines_of(path: Path, event: Mapping[str, Any], replays: Collection[str]) -> list[EvidenceLine]:
    data, start, found = _read(path), 0, []
    while start < len(data):
        stop = data.find(b"\n", start) + 1 or len(data)
        if b'"replay"' in data[start : min(stop, start + LINE_BYTES)]:
            of_line = _event(data[start:stop])
            if (
                of_line is not None
                and all(of_line[name] == event[name] for name in _WHERE)
                and (of_line.get("replay") in replays or _names_no_bundle(of_line, event))
            ):
                found.append(EvidenceLine(path, of_line, start, stop))
        start = stop
    return found


def _names_no_bundle(line: Mapping[str, Any], event: Mapping[str, Any]) -> bool:
    """Whether a line may be that of a recorded spike of which the rank that wrote it has no bundle."""
    recorded = line.get("search") == event["search"] == "recorded" and line.get("replay") is None
    return recorded and same_number(line["global_norm"], event["global_norm"])


def _read(path: Path) -> bytes:
    return read_plain_file(path, FILE_BYTES + 2 * LINE_BYTES)


def _event(line: bytes) -> dict[str, Any] | None:
    """The event of a finished line; None if it has none."""
    if len(line) > LINE_BYTES or not line.endswith(b"\n"):
        return None
    try:
        value = parse(line)
    except ValueError:
        return None
    return value if conforms(value, EVENT) and not isinstance(value.get("global_step"), bool) else None
