# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Reads the events and clip lines that are appended to spikes.jsonl while a run goes on."""

import os
from typing import Any, BinaryIO

from .foreign_json import parse

# A field of each kind of line that is read.
_KINDS = ("culprits", "token_clip")
# How many of the bytes that were read last are compared.
_TAIL = 4096


class AppendedEvents:
    """The events and clip lines of `<directory>/spikes.jsonl` that were appended since the last call of `read`.

    What is in the file at the start, as an earlier run has left it, is not read, nor is what the search of a bundle
    appends: its spike was read before.
    """

    def __init__(self, directory: str) -> None:
        self.path = os.path.join(directory or ".", "spikes.jsonl")
        self._end = 0
        self._inode: int | None = None
        self._tail = b""
        if os.path.isfile(self.path):
            with open(self.path, "rb") as file:
                self._advance(file, file.read())

    def read(self) -> list[dict[str, Any]]:
        """The new events and clip lines, oldest first. A line that is still being written is left for the next call.

        Raises:
            OSError: There is no such file, or it cannot be read.
        """
        with open(self.path, "rb") as file:
            if not self._is_continued(file):
                self._end, self._tail = 0, b""
            file.seek(self._end)
            data = file.read()
            finished = data[: data.rfind(b"\n") + 1]
            self._advance(file, finished)
        entries = [entry for line in finished.splitlines() if isinstance(entry := _parsed(line), dict)]
        return [entry for entry in entries if "replaces" not in entry and not entry.keys().isdisjoint(_KINDS)]

    def _is_continued(self, file: BinaryIO) -> bool:
        """Whether a file is the one that was read, with what was read in its place."""
        # The number of a file that was removed may be given to another one.
        file.seek(self._end - len(self._tail))
        return os.fstat(file.fileno()).st_ino == self._inode and file.read(len(self._tail)) == self._tail

    def _advance(self, file: BinaryIO, data: bytes) -> None:
        """Counts data as read."""
        self._inode = os.fstat(file.fileno()).st_ino
        self._end += len(data)
        self._tail = (self._tail + data[-_TAIL:])[-_TAIL:]


def _parsed(line: bytes) -> Any:
    """What a line holds; None for the rest of a line that a killed run has left."""
    try:
        return parse(line)
    except ValueError:
        return None
