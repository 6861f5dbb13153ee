# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""The text of a patch: which files it makes, and what it should not hold."""

from __future__ import annotations

import apply_patch
from tools.patching.sources import File, Files, Write


def new_files(patch: bytes, write: Write) -> Files:
    """The files that a patch makes, by their paths in verl.

    Raises:
        apply_patch.Stop: if the patch is damaged.
    """
    found: Files = {}
    for change in apply_patch.parse_patch(patch) if patch else []:
        if change.old is None:
            found[change.path] = File(f"100{change.mode:o}", write(change.result(None) or b""))
    return found


def unfinished_line(patch: bytes) -> str | None:
    """The first file in which the patch leaves out the newline at the end."""
    name, before = "", b""
    for line in patch.split(b"\n"):
        if line.startswith(b"+++ "):
            name = line[6:].decode("utf-8", "replace")
        elif line.startswith(b"\\ No newline") and before.startswith(b"+"):
            return name
        before = line
    return None
