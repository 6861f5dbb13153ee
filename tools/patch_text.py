# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""The text of a patch: what it makes, and what it should not hold."""

from __future__ import annotations

import apply_patch
from tools.sources import File, Files, Source, Write


def carried(patch: bytes, source: Source, write: Write) -> Files:
    """Which files of a source the patch makes, as they are in verl, whatever base it is for.

    The content of a file that replaces one of verl's is not written: the patch has only its difference.

    Raises:
        apply_patch.Stop: if the patch is damaged.
    """
    found: Files = {}
    for change in apply_patch.parse_patch(patch):
        name = change.path.removeprefix(f"{source.place}/")
        if name == change.path or change.new is None or change.old is not None and name not in source.replaced:
            continue
        if change.old is None:
            write(change.result(None) or b"")
        found[name] = File(f"100{change.mode or 0o644:o}", change.new)
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
