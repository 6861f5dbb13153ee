# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""--check: whether the patch is what the sources produce."""

from __future__ import annotations

from pathlib import Path

import apply_patch
from apply_patch import Target
from tools.patching import patch_text, sources
from tools.patching.messages import OutOfDate, Refused, say
from tools.patching.project import (
    ROOT,
    as_in_verl,
    checksum_line,
    hooks_file,
    project_files,
    read,
    target_of,
    work_tree,
)
from tools.patching.released_verl import NoWheel, fetch_wheel, unpacked
from tools.patching.scratch_git import GitFailed, Scratch
from tools.patching.sources import SOURCES, Files, Source

REGENERATE = "run make_patch.sh --repo on a development checkout"


def check(tree: Path | None, targets: list[Target], scratch: Scratch) -> None:
    """Checks every target's patch. The tree is the base of the target that it is of; without one, see `find_base`."""
    given = given_base(tree, targets) if tree is not None else None
    ours = {source: project_files(source, scratch) for source in SOURCES}
    unchecked = []
    for target in targets:
        try:
            check_target(target, tree if target == given else None, ours, scratch)
        except NoWheel as error:
            unchecked.append(str(error))
    if unchecked:
        raise Refused(
            f"checksum, sources and hooks are right, but the rest cannot be checked: {'; '.join(unchecked)}; "
            "give a tree with --base-tree"
        )


def given_base(tree: Path, targets: list[Target]) -> Target:
    if not (tree / "verl/__init__.py").is_file():
        raise Refused(f"{tree} has no verl/__init__.py; --base-tree takes an unpatched verl tree")
    target = target_of(tree, targets) or (targets[0] if len(targets) == 1 else None)
    if target is None:
        raise Refused(f"{tree} is not verl {apply_patch.versions(targets, 'or')}; say with --target which it is")
    return target


def check_target(target: Target, tree: Path | None, ours: dict[Source, Files], scratch: Scratch) -> None:
    """Raises NoWheel if the patch agrees with the sources, but there is no base to apply it to."""
    patch = read(target.patch)
    if not patch:
        raise OutOfDate(f"{target.patch} is missing or empty; {REGENERATE}")
    if read(Path(f"{target.patch}.sha256")) != checksum_line(patch, target.patch.name).encode():
        raise OutOfDate(
            f"{target.patch}.sha256 is not the checksum of the patch; regenerate both with make_patch.sh --repo"
        )
    try:
        base_tree = tree or find_base(target, scratch)
    except NoWheel:
        check_without_base(target, patch, ours, scratch)
        raise
    base = work_tree(scratch, base_tree, "verl", {})
    try:
        patched = scratch.apply(base, target.patch, "--whitespace=error-all")
    except GitFailed as error:
        raise OutOfDate(f"{target.patch} does not apply to {base_tree}: {error.lines[0]}") from None
    if bad := sources.broken_module(patched, base, scratch.read):
        raise OutOfDate(f"{target.patch} is broken: {bad}")
    rebuilt = patched
    for source, files in ours.items():
        wanted = as_in_verl(files, base, source, scratch)
        refuse_difference(target, sources.carried(patched, base, source), wanted, source)
        rebuilt = sources.put(rebuilt, base, source, wanted)
    if scratch.diff(scratch.tree(base), scratch.tree(rebuilt)) != patch:
        raise OutOfDate(
            f"{target.patch} says the same as the sources but in other bytes; it was not written by "
            "make_patch.sh --repo"
        )
    if not reverses(target, patched, base, scratch):
        raise OutOfDate(f"{target.patch} does not reverse to the base byte for byte")
    check_hooks(target, patch)
    say(f"{target.patch} is what the sources produce; it applies to verl {target.version} and reverses to it")


def find_base(target: Target, scratch: Scratch) -> Path:
    """The unpatched tree in build/, or the wheel's.

    Raises:
        NoWheel: if there is none, and none can be downloaded.
    """
    built = ROOT / "build" / target.version / "base"
    if (built / "verl").is_dir():
        return built
    place = scratch.folder / "bases" / target.version
    place.mkdir(parents=True)
    return unpacked(fetch_wheel(target, place), place)


def check_without_base(target: Target, patch: bytes, ours: dict[Source, Files], scratch: Scratch) -> None:
    for source, files in ours.items():
        try:
            found = patch_text.carried(patch, source, scratch.write)
        except apply_patch.Stop as stop:
            raise OutOfDate(f"{target.patch} cannot be read: {stop}") from None
        refuse_difference(target, found, as_in_verl(files, {}, source, scratch), source)
    check_hooks(target, patch)


def refuse_difference(target: Target, found: Files, wanted: Files, source: Source) -> None:
    differing = sorted(name for name in {*found, *wanted} if found.get(name) != wanted.get(name))
    if differing:
        names = " ".join(f"{source.place}/{name}" for name in differing)
        raise OutOfDate(
            f"the {source.place} of {target.patch} is not {source.folder}/ ({names} differ); run make_patch.sh --repo"
        )


def reverses(target: Target, patched: Files, base: Files, scratch: Scratch) -> bool:
    try:
        return scratch.apply(patched, target.patch, "-R") == base
    except GitFailed:
        return False


def check_hooks(target: Target, patch: bytes) -> None:
    if read(hooks_file(target)) != patch_text.hooks(patch, SOURCES):
        raise OutOfDate(f"{hooks_file(target)} is not the part of the patch that it should be; {REGENERATE}")
