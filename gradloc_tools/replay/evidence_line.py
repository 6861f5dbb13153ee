# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Finds the line of a bundle's spike in the evidence around the bundle, and adds one that readers take instead."""

import errno
import os
import stat
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import Any

from gradloc.bundles import limits
from gradloc.evidence.writer import FILE_BYTES, LINE_BYTES, event_line, evidence_files

from ..bundles.opening import Bundle
from ..foreign import NotPlainFileError, parse, read_plain_file
from ..report.reading import line_digest
from ..schema import EVENT, conforms
from .parts import same_number

_WHERE = ("global_step", "epoch", "mini_batch")


class NoLineError(ValueError):
    """Why there is no line that can be replaced; the message completes "spikes.jsonl is as it was: ..."."""


@dataclass(frozen=True)
class EvidenceLine:
    """The line of a spike.

    Args:
        event (dict): What it holds, or what the last line that replaces it holds.
        digest (str): Of the line itself.
    """

    path: Path
    event: dict[str, Any]
    digest: str


def find_line(bundle: Bundle, names: Collection[str]) -> EvidenceLine:
    """The line of a bundle's spike: that of its step, epoch and mini-batch, whose `replay` is one of some bundles.

    The rank that writes the evidence may have no bundle of a recorded spike. Where no line names one of the bundles,
    it is the line of a recorded spike that names none and has the same norm.

    Args:
        names (Collection[str]): The names of the folders of its parts.

    Raises:
        NoLineError: There is none, or more than one.
    """
    folder = bundle.path.resolve().parent
    if folder.name != limits.FOLDER:
        raise NoLineError(f"the bundle does not lie in a folder {limits.FOLDER}/ of any")
    replays = {f"{limits.FOLDER}/{name}" for name in names}
    found = []
    try:
        files = [Path(file) for file in evidence_files(str(folder.parent))]
        for file in files:
            for text in BytesIO(read_plain_file(file, FILE_BYTES + 2 * LINE_BYTES)):
                event = _event(text) if b'"replay"' in text else None
                if event is not None and _is_of(event, bundle.event, replays):
                    found.append(EvidenceLine(file, event, line_digest(text)))
    except (OSError, NotPlainFileError) as error:
        raise NoLineError(f"it cannot be read: {error}") from error
    if not files:
        raise NoLineError("there is none around the bundle")
    later = {line.event["replaces"]: line.event for line in found if "replaces" in line.event}
    written = [line for line in found if "replaces" not in line.event]
    written = [line for line in written if line.event.get("replay") is not None] or written
    if len(written) != 1:
        count = f"more than one line ({len(written)})" if written else "no line"
        raise NoLineError(f"{count} of it is of this spike")
    (line,) = written
    last = later.get(line.digest, line.event)
    return replace(line, event={name: value for name, value in last.items() if name != "replaces"})


def replace_line(line: EvidenceLine, event: Mapping[str, Any]) -> None:
    """Appends an event that readers take instead of a line.

    Nothing is rewritten: training may append to the file in the same moment.

    Raises:
        NoLineError: The event does not fit into a line.
        OSError: The file cannot be written.
    """
    try:
        text, _ = event_line({"replaces": line.digest, **event})
    except ValueError as error:
        raise NoLineError(str(error)) from error
    # Without O_CREAT: a file of another owner would keep training from writing.
    flags = os.O_RDWR | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(line.path, flags)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise NoLineError(f"{line.path.name} is not an ordinary file")
        # A killed run may have left an incomplete line.
        if found.st_size and os.pread(descriptor, 1, found.st_size - 1) != b"\n":
            text = b"\n" + text
        # In one piece, so that what training appends is before or after it.
        if os.write(descriptor, text) < len(text):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(line.path))
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _is_of(line: Mapping[str, Any], event: Mapping[str, Any], replays: Collection[str]) -> bool:
    """Whether a line may be that of a bundle's event, or replace it."""
    if any(line[name] != event[name] for name in _WHERE):
        return False
    if line.get("replay") is not None:
        return line["replay"] in replays
    return line["search"] == event["search"] == "recorded" and same_number(line["global_norm"], event["global_norm"])


def _event(line: bytes) -> dict[str, Any] | None:
    """The event of a finished line; None if it has none."""
    if len(line) > LINE_BYTES or not line.endswith(b"\n"):
        return None
    try:
        value = parse(line)
    except ValueError:
        return None
    return value if conforms(value, EVENT) and not isinstance(value.get("global_step"), bool) else None
