# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""--init: a development checkout; --repo: the patches from it."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import apply_patch
from apply_patch import FILES, Stop, Target
from tools.patching import parts
from tools.patching.parts import ROOT, find_base, read, say
from tools.patching.scratch_git import GitFailed, Scratch, git, keep_bytes

NOTES = ".git/gradloc"  # of a checkout: its target, and the hooks and fixes that it last had in common with the project


def init(place: Path, target: Target, tree: Path | None) -> None:
    """Makes a checkout of the base in the place, with the target's patch."""
    base = find_base(target, tree)
    if place.exists() and (not place.is_dir() or any(place.iterdir())):
        raise Stop(f"{place} exists already; give a new directory")
    place.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=".gradloc-init-", dir=place.parent))
    try:
        made = partial / "tree"
        shutil.copytree(base / "verl", made / "verl", symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        commit(made, target)
        for part in target.parts:
            if part.is_file() and apply_patch.load_part(part):
                try:
                    git("apply", str(part), cwd=made)
                except GitFailed as error:
                    raise Stop(f"{part} does not apply to {base}: {error.lines[0]}") from None
        for name, source in links().items():
            (made / name).parent.mkdir(parents=True, exist_ok=True)
            (made / name).symlink_to(source)
        remember(made, target)
        made.rename(place)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    say(f"{place} is ready, with verl {target.version}: edit it, then run make_patch.sh --repo {place}")


def commit(tree: Path, target: Target) -> None:
    """Makes the base's files a git tree, tagged, whose commit is the same everywhere, by a fixed author and date."""
    git("init", "-q", "--template=", cwd=tree)
    keep_bytes(tree / ".git")
    (tree / ".git/info/exclude").write_text("__pycache__/\n*.py[co]\n" + "".join(f"/{name}\n" for name in links()))
    git("config", "core.autocrlf", "false", cwd=tree)
    git("add", "-A", "-f", cwd=tree)
    person = {"NAME": "verl", "EMAIL": "verl@localhost", "DATE": "2026-01-01T00:00:00Z"}
    people = {f"GIT_{role}_{key}": value for role in ("AUTHOR", "COMMITTER") for key, value in person.items()}
    git("commit", "-q", "-m", f"verl {target.version}", cwd=tree, also=people)
    git("tag", "gradloc-base", cwd=tree)


def links() -> dict[str, Path]:
    """The new files of the patch, which a checkout has as links."""
    return {change.path: FILES / change.path for change in apply_patch.new_files()}


def remember(tree: Path, target: Target) -> None:
    notes = tree / NOTES
    notes.mkdir(exist_ok=True)
    for part in target.parts:
        (notes / part.name).write_bytes(read(part) or b"")
    (notes / "target").write_text(f"{target.version}\n")


def regenerate(repo: Path, targets: list[Target], tree: Path | None, edit_fixes: bool, scratch: Scratch) -> None:
    """Writes the hooks and fixes of the checkout's target; with edit_fixes, new edits are fixes."""
    version = read(repo / NOTES / "target")
    if version is None:
        raise Stop(f"{repo} is not the top of a checkout that make_patch.sh --init made; make one and edit it there")
    target = parts.one(apply_patch.narrowed(targets, version.decode().strip()))
    busy = f"another make_patch.sh is at work on {ROOT}; wait until it has ended"
    with apply_patch.locked(apply_patch.PATCHES, busy):
        base = scratch.work_tree(find_base(target, tree), "verl")
        files = links()
        edited = {path: file for path, file in scratch.work_tree(repo, "verl").items() if path not in files}
        if gone := sorted(base.keys() - edited.keys()):
            raise Stop(f"{repo} lacks {gone[0]}, but a patch removes no file of verl's own; bring it back")
        if new := sorted(edited.keys() - base.keys()):
            raise Stop(
                f"{repo}/{new[0]} is a new file, but hooks and fixes change verl's own: move it to {FILES}, which all "
                "targets get"
            )
        noted = {part: read(repo / NOTES / part.name) or b"" for part in target.parts}
        if edited == base and any(noted.values()):
            raise Stop(f"all edits of verl's own files are gone from {repo}; bring them back, as with git stash pop")
        try:
            if edit_fixes:
                hooked = scratch.apply(base, noted[target.hooks])
            else:
                hooked = scratch.apply(edited, noted[target.fixes], "-R")
        except GitFailed as error:
            raise Stop(
                f"edits cannot be told from the fixes ({error.lines[0]}): pass --fixes if they change a fix; else take "
                "that fix out of the checkout, run this with --fixes, make the edit, run this, put the fix back"
            ) from None
        patches = {
            target.hooks: parts.make_diff(base, hooked, scratch),
            target.fixes: parts.make_diff(hooked, edited, scratch),
        }
        for part, before in noted.items():
            if (read(part) or b"") not in (before, patches[part]):
                raise Stop(
                    f"{part} has changed since {repo} was last brought together with it, and those changes would be "
                    "lost; make a new checkout with --init and redo your edits there"
                )
        parts.check_taken(patches[target.hooks], base, hooked, scratch)
        parts.check_taken(patches[target.fixes], hooked, edited, scratch)
        # The note in the checkout comes last, so an interrupted run can simply be repeated.
        for place, patch in patches.items():
            parts.write(place, patch)
        remember(repo, target)
