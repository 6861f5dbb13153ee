# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""The parts of a patch: the package, made from the sources alone; the hooks, on the base; the fixes, on the hooks."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from pathlib import Path

import apply_patch
from apply_patch import Target
from tools.patching import patch_text, sources
from tools.patching.messages import Refused, say
from tools.patching.project import as_in_verl, checksum_line, new_beside
from tools.patching.scratch_git import GitFailed, Scratch
from tools.patching.sources import Files, Source


def package(ours: dict[Source, Files], base: Files, scratch: Scratch) -> Files:
    """The files that the package adds to a base, made of the project's files of each source."""
    return {
        f"{source.place}/{name}": file
        for source, files in ours.items()
        for name, file in as_in_verl(files, base, source, scratch).items()
    }


def applied(files: Files, patches: Sequence[bytes], scratch: Scratch, *options: str) -> Files:
    """The files with these patches in their order, of which one may be empty.

    Raises:
        GitFailed: if one does not apply.
    """
    for patch in patches:
        if patch:
            files = scratch.apply(files, patch, *options)
    return files


def without_fixes(base: Files, edited: Files, hooks: bytes, fixes: bytes, scratch: Scratch) -> Files:
    """verl's own files as edited, less the fixes: every edit beside these counts as a hook.

    Args:
        hooks: the patch that the edits began with.
        fixes: likewise.
    """
    if not fixes:
        return edited
    hooked = applied_or_refused(base, [hooks], scratch)
    fixed = applied_or_refused(hooked, [fixes], scratch)
    found = dict(edited)
    for path in {path for path in {*hooked, *fixed} if hooked.get(path) != fixed.get(path)}:
        before, after, now = hooked.get(path), fixed.get(path), edited.get(path)
        if now == after:
            found.pop(path, None)
            found |= {path: before} if before else {}
        elif now != before:
            merged = scratch.merged(now.blob, after.blob, before.blob) if now and after and before else None
            if now is None or merged is None:
                raise Refused(
                    f"an edit of {path} cannot be told from the fix in it; pass --fixes if it changes the fix, else "
                    "take the fix out, run this, put the fix back, and run this with --fixes"
                )
            found[path] = now._replace(blob=merged)
    return found


def applied_or_refused(files: Files, patches: Sequence[bytes], scratch: Scratch) -> Files:
    try:
        return applied(files, patches, scratch)
    except GitFailed as error:
        raise Refused(
            f"the present hooks and fixes do not apply to this base ({error.lines[0]}); delete hooks.patch and "
            "fixes.patch, and make them again: the hooks first, then the fixes with --fixes"
        ) from None


def make_diff(old: Files, new: Files, scratch: Scratch) -> bytes:
    """A patch, empty if nothing differs. Refuses what the patch format or CI would not take."""
    trees = scratch.tree(old), scratch.tree(new)
    patch = scratch.diff(*trees)
    for path, file in new.items():
        before = old.get(path)
        if file != before and file.mode.startswith(("12", "16")):
            raise Refused(f"{path} is a symbolic link or a nested repository, which the patch cannot carry")
        if before is not None and file.mode != before.mode:
            raise Refused(f"the mode of {path} changed, which the patch cannot carry; undo that with chmod")
    if binary := re.search(rb"^Binary files (.*) differ$", patch, re.M):
        raise Refused(f"a binary file changed ({binary[1].decode('utf-8', 'replace')}), which the patch cannot carry")
    if bad := scratch.whitespace_error(*trees):
        raise Refused(f"whitespace error in {bad}; fix it first")
    if bad := patch_text.unfinished_line(patch):
        raise Refused(f"{bad} lacks the newline at its end; add it")
    try:
        if patch:
            apply_patch.parse_patch(patch)
    except apply_patch.Stop as stop:
        raise Refused(f"apply_patch.py would not take the patch: {stop}") from None
    if bad := sources.broken_module(new, old, scratch.read):
        raise Refused(f"{bad}; correct it first")
    return patch


def write(output: Path, patch: bytes) -> None:
    """Writes a patch and its checksum."""
    if not output.parent.is_dir() or output.is_dir():
        raise Refused(f"{output} is not a file in an existing directory")
    with contextlib.ExitStack() as stack:
        # Left in the opposite order: the patch takes its place first.
        sums = stack.enter_context(new_beside(output.with_name(f"{output.name}.sha256")))
        sums.write_text(checksum_line(patch, output.name))
        stack.enter_context(new_beside(output)).write_bytes(patch)
    say(f"wrote {output} and its .sha256")


def release(target: Target, base: Files, scratch: Scratch) -> bytes:
    """A target's patch in one file."""
    apply_patch.load_target(target)  # refuses a part that is damaged
    patches = [part.read_bytes() for part in target.parts]
    return make_diff(base, applied_or_refused(base, patches, scratch), scratch)
