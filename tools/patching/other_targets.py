# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""The patches of targets that a run of --repo has no checkout of: the package in them changes, their hooks do not."""

from __future__ import annotations

import re

import apply_patch
from tools.patching import patch_text
from tools.patching.messages import Refused
from tools.patching.scratch_git import Scratch
from tools.patching.sources import File, Files, Source


def renewed(patch: bytes, wanted: dict[Source, Files], earlier: dict[str, bytes], scratch: Scratch) -> bytes:
    """A target's patch with what the sources hold now.

    Where a source replaces a file of verl's own, the difference needs that file. It is what the present patch makes of
    it, taken back.

    Args:
        patch: the target's present one.
        wanted: the sources' files as they are in verl.
        earlier: by path, what the present patches make of the files that are replaced.

    Raises:
        Refused: if the present patch makes something else of a replaced file.
        apply_patch.Stop: if the present patch is damaged.
    """
    final = {f"{source.place}/{name}": file for source, files in wanted.items() for name, file in files.items()}
    base: Files = {}
    kept: list[bytes] = []
    for section in patch_text.sections(patch):
        if not patch_text.is_from(section, tuple(wanted)):
            kept.append(section)
            continue
        (change,) = apply_patch.parse_patch(section)
        if change.old is not None:
            present = [scratch.read(final[change.path].blob)] if change.path in final else []
            original = _taken_back(change, [*([earlier[change.path]] if change.path in earlier else []), *present])
            mode = re.search(rb"^index \S+ (\d+)$", section, re.M)
            base[change.path] = File(mode[1].decode() if mode else "100644", scratch.write(original))
    # A file that is replaced no longer is verl's own again.
    made = patch_text.sections(scratch.diff(scratch.tree(base), scratch.tree(base | final)))
    parts = sorted([*kept, *made], key=patch_text.path_of)
    return b"".join(parts)


def _taken_back(change: apply_patch.FilePatch, candidates: list[bytes]) -> bytes:
    """The file before the change, from whichever candidate is the one after it."""
    for content in candidates:
        if apply_patch.blob_hash(content) == change.new:
            return change.reversed().result(content) or b""
    raise Refused(
        f"a patch of another target makes something else of {change.path} than this one; restore patches/ from version "
        "control, and run again"
    )
