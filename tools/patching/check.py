# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""--check: whether the patches are what the sources produce."""

from __future__ import annotations

from pathlib import Path

import apply_patch
from apply_patch import PACKAGE, Target
from tools.patching import parts, patch_text, sources
from tools.patching.messages import OutOfDate, Refused, say
from tools.patching.project import checksum_line, project_files, read, target_of, work_tree
from tools.patching.released_verl import NoWheel, find_base
from tools.patching.scratch_git import GitFailed, Scratch
from tools.patching.sources import SOURCES, Files, Source


def check(tree: Path | None, targets: list[Target], scratch: Scratch, named: bool = False) -> None:
    """Checks the package, and every target's hooks and fixes.

    Args:
        tree: the base of the target that it is of; without one, see `find_base`.
        named: whether the target was asked for by name, and so may not be left out.
    """
    given = given_base(tree, targets) if tree is not None else None
    ours = {source: project_files(source, scratch) for source in SOURCES}
    check_package(ours, scratch)
    unchecked = []
    for target in targets:
        patches = [whole(part) for part in target.parts]
        try:
            base_tree = tree if tree and target == given else find_base(target, scratch.folder)
        except NoWheel as error:
            if target.wheel_sha256 is None and not named:
                say(f"not checked beyond the checksums: {error}; give its tree with --base-tree")
            else:
                unchecked.append(str(error))
            continue
        check_target(target, base_tree, patches, ours, scratch)
    if unchecked:
        raise Refused(
            f"checksums and package are right, but the rest cannot be checked: {'; '.join(unchecked)}; "
            "give a tree with --base-tree"
        )


def given_base(tree: Path, targets: list[Target]) -> Target:
    if not (tree / "verl/__init__.py").is_file():
        raise Refused(f"{tree} has no verl/__init__.py; --base-tree takes an unpatched verl tree")
    target = target_of(tree, targets) or (targets[0] if len(targets) == 1 else None)
    if target is None:
        raise Refused(f"{tree} is not verl {apply_patch.versions(targets, 'or')}; say with --target which it is")
    return target


def whole(part: Path) -> bytes:
    """A part of the patch, if it is there and as its checksum says."""
    patch = read(part)
    if patch is None:
        way = "--sources" if part == PACKAGE else "--repo on a development checkout"
        raise OutOfDate(f"{part} is missing; run make_patch.sh {way}")
    if read(part.with_name(f"{part.name}.sha256")) != checksum_line(patch, part.name).encode():
        raise OutOfDate(f"{part}.sha256 is not the checksum of the patch; regenerate both with make_patch.sh")
    return patch


def check_package(ours: dict[Source, Files], scratch: Scratch) -> None:
    patch = whole(PACKAGE)
    wanted = parts.package(ours, {}, scratch)
    try:
        found = patch_text.new_files(patch, scratch.write)
    except apply_patch.Stop as stop:
        raise OutOfDate(f"{PACKAGE} cannot be read: {stop}") from None
    if differing := sorted(path for path in {*found, *wanted} if found.get(path) != wanted.get(path)):
        *folders, last = [f"{source.folder}/" for source in SOURCES]
        raise OutOfDate(
            f"{PACKAGE} is not {', '.join(folders)} and {last} ({' '.join(differing)} differ); "
            "run make_patch.sh --sources"
        )
    if parts.make_diff({}, wanted, scratch) != patch:
        raise OutOfDate(f"{PACKAGE} says the same as the sources but in other bytes; run make_patch.sh --sources")


def check_target(
    target: Target, base_tree: Path, patches: list[bytes], ours: dict[Source, Files], scratch: Scratch
) -> None:
    """Checks that the patches apply in their order, that make_patch.sh wrote them, and that they can be taken out."""
    base = work_tree(scratch, base_tree, "verl", {})
    parts.package(ours, base, scratch)  # refuses a file that would replace one of verl's own
    states = [base]
    for part, patch in zip(target.parts, patches, strict=True):
        try:
            states.append(parts.applied(states[-1], [patch], scratch, "--whitespace=error-all"))
        except GitFailed as error:
            raise OutOfDate(f"{part} does not apply to {base_tree}: {error.lines[0]}") from None
        if bad := sources.broken_module(states[-1], states[-2], scratch.read):
            raise OutOfDate(f"{part} is broken: {bad}")
        if scratch.diff(scratch.tree(states[-2]), scratch.tree(states[-1])) != patch:
            raise OutOfDate(f"{part} is in other bytes than make_patch.sh --repo would write it")
    files = states[-1]
    try:
        for patch in reversed(patches):
            files = parts.applied(files, [patch], scratch, "-R")
    except GitFailed:
        files = {}
    if files != base:
        raise OutOfDate(f"the patch for verl {target.version} does not reverse to the base byte for byte")
    say(f"the patch for verl {target.version} is what the sources produce; it applies to that and reverses to it")
