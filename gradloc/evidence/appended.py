# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Reads the events and clip lines that are appended to spikes.jsonl while a run goes on."""

import os
from typing import Any

from .foreign_json import parse

# A field of each kind of line that is read.
_KINDS = ("culprits", "token_clip")


class AppendedEvents:
    """The events and clip lines of `<directory>/spikes.jsonl` that were appended since the last call of `read`.

    What is in the file at the start, as an earlier run has left it, is not read, nor is what the search of a bundle
    appends: its spike was read before.
    """

    def __init__(self, directory: str) -> None:
        self.path = os.path.join(directory or ".", "spikes.jsonl")
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
        entries = [entry for line in finished.splitlines() if isinstance(entry := _parsed(line), dict)]
        return [entry for entry in entries if "replaces" not in entry and not entry.keys().isdisjoint(_KINDS)]


def _parsed(line: bytes) -> Any:
    """What a line holds; None for the rest of a line that a killed run has left."""
    try:
        return parse(line)
    except ValueError:
        return None
