# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""--check: whether the patch is what the sources produce."""

from __future__ import annotations

from pathlib import Path

import apply_patch
from tools.patching import patch_text, sources
from tools.patching.messages import OutOfDate, Refused, say
from tools.patching.project import (
    HOOKS,
    PATCH,
    ROOT,
    TARGET,
    Pin,
    as_in_verl,
    checksum_line,
    project_files,
    read,
    work_tree,
)
from tools.patching.released_verl import NoWheel, fetch_wheel, unpack
from tools.patching.scratch_git import GitFailed, Scratch
from tools.patching.sources import SOURCES, Files, Source

REGENERATE = "run make_patch.sh --repo on a development checkout"


def check(tree: Path | None, pin: Pin, scratch: Scratch) -> None:
    patch = read(PATCH)
    if not patch:
        raise OutOfDate(f"{PATCH} is missing or empty; {REGENERATE}")
    if read(TARGET / f"{PATCH.name}.sha256") != checksum_line(patch, PATCH.name).encode():
        raise OutOfDate(f"{PATCH}.sha256 is not the checksum of the patch; regenerate both with make_patch.sh --repo")
    ours = {source: project_files(source, scratch) for source in SOURCES}
    try:
        base_tree = find_base(tree, pin, scratch)
    except NoWheel as error:
        check_without_base(patch, ours, scratch)
        raise Refused(
            f"checksum, sources and hooks are right, but the rest cannot be checked: {error}; "
            "give a tree with --base-tree"
        ) from None
    base = work_tree(scratch, base_tree, "verl", {})
    try:
        patched = scratch.apply(base, PATCH, "--whitespace=error-all")
    except GitFailed as error:
        raise OutOfDate(f"the patch does not apply to {base_tree}: {error.lines[0]}") from None
    rebuilt = patched
    for source, files in ours.items():
        wanted = as_in_verl(files, base, source, scratch)
        refuse_difference(sources.carried(patched, base, source), wanted, source)
        rebuilt = sources.put(rebuilt, base, source, wanted)
    if scratch.diff(scratch.tree(base), scratch.tree(rebuilt)) != patch:
        raise OutOfDate(
            "the patch says the same as the sources but in other bytes; it was not written by make_patch.sh --repo"
        )
    if not reverses(patched, base, scratch):
        raise OutOfDate("the patch does not reverse to the base byte for byte")
    check_hooks(patch)
    say("patches/ is what the sources produce; it applies to the base and reverses to it")


def find_base(tree: Path | None, pin: Pin, scratch: Scratch) -> Path:
    """An unpatched tree of verl.

    Raises:
        NoWheel: if none is given or there, and none can be downloaded.
    """
    if tree is not None:
        if not (tree / "verl/__init__.py").is_file():
            raise Refused(f"{tree} has no verl/__init__.py; --base-tree takes an unpatched verl tree")
        return tree
    if (ROOT / "build/base/verl").is_dir():
        return ROOT / "build/base"
    wheel = fetch_wheel(pin, scratch.folder)
    (scratch.folder / "base").mkdir()
    unpack(wheel, pin, scratch.folder / "base", scratch.folder)
    return scratch.folder / "base"


def check_without_base(patch: bytes, ours: dict[Source, Files], scratch: Scratch) -> None:
    for source, files in ours.items():
        try:
            found = patch_text.carried(patch, source, scratch.write)
        except apply_patch.Stop as stop:
            raise OutOfDate(f"the patch cannot be read: {stop}") from None
        refuse_difference(found, as_in_verl(files, {}, source, scratch), source)
    check_hooks(patch)


def refuse_difference(found: Files, wanted: Files, source: Source) -> None:
    differing = sorted(name for name in {*found, *wanted} if found.get(name) != wanted.get(name))
    if differing:
        names = " ".join(f"{source.place}/{name}" for name in differing)
        raise OutOfDate(
            f"the patch's {source.place} is not {source.folder}/ ({names} differ); run make_patch.sh --repo"
        )


def reverses(patched: Files, base: Files, scratch: Scratch) -> bool:
    try:
        return scratch.apply(patched, PATCH, "-R") == base
    except GitFailed:
        return False


def check_hooks(patch: bytes) -> None:
    if read(HOOKS) != patch_text.hooks(patch, SOURCES):
        raise OutOfDate(f"{HOOKS} is not the part of the patch that it should be; {REGENERATE}")
