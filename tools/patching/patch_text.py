# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""The text of a patch: its sections, the hooks among them, and what a patch should not hold."""

from __future__ import annotations

import re
from pathlib import PurePosixPath

import apply_patch
from tools.patching.sources import File, Files, Source, Write

HOOKS_PREAMBLE = b"""\
The hooks: what gradloc.patch changes in verl's own files, for reading. To patch verl, take gradloc.patch, which is
complete. make_patch.sh writes both.

"""


def sections(patch: bytes) -> list[bytes]:
    """The parts of a git diff, one a file; together they are the patch."""
    starts = [match.start() for match in re.finditer(rb"^diff --git ", patch, re.M)]
    return [patch[start:end] for start, end in zip(starts, [*starts[1:], len(patch)], strict=True)]


def path_of(section: bytes) -> str:
    path = re.match(r"diff --git a/(.*) b/\1$", section.partition(b"\n")[0].decode("utf-8", "replace"))
    return path[1] if path else ""


def is_from(section: bytes, sources: tuple[Source, ...]) -> bool:
    """Whether a section has its content from a source."""
    header, _, _ = section.partition(b"\n@@ ")
    name = path_of(section)
    created = b"\nnew file mode " in header
    for source in sources:
        inner = name.removeprefix(f"{source.place}/")
        if inner != name and (created or inner in source.replaced):
            return True
    return False


def is_hook(section: bytes, sources: tuple[Source, ...]) -> bool:
    """Whether a section changes verl by hand: it comes from no source, and verl's tools do not generate it."""
    generated = re.fullmatch(r"_generated_.*\.yaml", PurePosixPath(path_of(section)).name)
    return not generated and not is_from(section, sources)


def hooks(patch: bytes, sources: tuple[Source, ...]) -> bytes:
    """The part of a patch that a reviewer reads: its hunks in verl's own files."""
    return HOOKS_PREAMBLE + b"".join(hook_sections(patch, sources))


def hook_sections(patch: bytes, sources: tuple[Source, ...]) -> list[bytes]:
    return [section for section in sections(patch) if is_hook(section, sources)]


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
