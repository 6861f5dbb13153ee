# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""--check: whether the patches are what the sources produce."""

from __future__ import annotations

from pathlib import Path

from apply_patch import PACKAGE, Target
from tools.patching import parts
from tools.patching.parts import find_base, one, read, say
from tools.patching.scratch_git import GitFailed, Scratch
from tools.patching.sources import package


class OutOfDate(Exception):
    """The verdict, with a sentence that says what is not as the sources produce it."""


def check(targets: list[Target], tree: Path | None, scratch: Scratch) -> None:
    """Checks the checksums and the package, and then hooks and fixes of each target, which take its base."""
    if tree is not None:
        one(targets)
    check_package(whole(PACKAGE), scratch)
    patches = {target: [whole(part) for part in target.parts] for target in targets}
    for target in targets:
        check_target(target, find_base(target, tree), patches[target], scratch)


def whole(part: Path) -> bytes:
    """A part of the patch, if it is there and as its checksum says."""
    patch = read(part)
    if patch is None:
        way = "--sources" if part == PACKAGE else "--repo on a development checkout"
        raise OutOfDate(f"{part} is missing; run make_patch.sh {way}")
    if read(part.with_name(f"{part.name}.sha256")) != parts.checksum_line(patch, part.name):
        raise OutOfDate(f"{part}.sha256 is not the checksum of the patch; regenerate both with make_patch.sh")
    return patch


def check_package(patch: bytes, scratch: Scratch) -> None:
    wanted = parts.make_diff({}, package({}, scratch), scratch)
    if patch != wanted:
        sections = set(patch.split(b"diff --git a/")) ^ set(wanted.split(b"diff --git a/"))
        names = sorted({section.split()[0].decode("utf-8", "replace") for section in sections if section.split()})
        raise OutOfDate(f"{PACKAGE} is not what the sources hold ({' '.join(names)}); run make_patch.sh --sources")


def check_target(target: Target, tree: Path, patches: list[bytes], scratch: Scratch) -> None:
    """Checks that the patches apply in their order, that make_patch.sh wrote them, and that they can be taken out."""
    base = files = scratch.work_tree(tree, "verl")
    package(base, scratch)  # refuses a file that would replace one of verl's own
    for part, patch in zip(target.parts, patches, strict=True):
        before = files
        try:
            files = scratch.apply(before, patch, "--whitespace=error-all")
        except GitFailed as error:
            raise OutOfDate(f"{part} does not apply to {tree}: {error.lines[0]}") from None
        if bad := parts.broken_module(files, before, scratch):
            raise OutOfDate(f"{part} is broken: {bad}")
        if scratch.diff(before, files) != patch:
            raise OutOfDate(f"{part} is in other bytes than make_patch.sh --repo would write it")
    try:
        for patch in reversed(patches):
            files = scratch.apply(files, patch, "-R")
    except GitFailed:
        files = {}
    if files != base:
        raise OutOfDate(f"the patch for verl {target.version} does not reverse to the base byte for byte")
    say(f"the patch for verl {target.version} is what the sources produce; it applies to that and reverses to it")
