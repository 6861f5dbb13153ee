# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""--init: a development checkout."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import apply_patch
from apply_patch import Target
from tools.patching.messages import Refused, say
from tools.patching.project import default_target, noted_target, read, remember, target_of
from tools.patching.released_verl import (
    NoWheel,
    copy_verl,
    fetch_wheel,
    git_folder,
    pinned_revision,
    refuse_sha256,
    release_at,
    revision,
    unpacked,
)
from tools.patching.scratch_git import GitFailed, git, keep_bytes, plain_git


def init(place: Path, base: Path | None, targets: list[Target], scratch: Path) -> None:
    """Makes a checkout in the place, of the only target or of the one that the base is of."""
    if place.exists():
        if not place.is_dir() or any(place.iterdir()):
            raise Refused(f"{place} exists already; give a new directory")
        if place.samefile("."):
            raise Refused("the current directory cannot be replaced; go elsewhere and name it from there")
    parent = place.parent
    try:
        parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=".gradloc-init-", dir=parent))
    except OSError:
        raise Refused(f"{parent} cannot be written; give another directory") from None
    try:
        tree = partial / "tree"
        target = make_base(tree, base, targets, scratch)
        for part in target.parts:
            apply_part(tree, part)
        remember(tree / ".git", target)
        try:
            tree.rename(place)
        except OSError:
            raise Refused(f"{place} cannot be replaced; give a new directory") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    say(f"{place} is ready, with verl {target.version}: edit it, then run make_patch.sh --repo {place}")


def make_base(tree: Path, base: Path | None, targets: list[Target], scratch: Path) -> Target:
    """A git tree of the base, tagged gradloc-base."""
    if base is not None and not base.exists():
        raise Refused(f"{base} does not exist; --base takes a clone, a wheel or a tree")
    folder = git_folder(base) if base is not None else None
    if base is not None and folder is not None:
        target = target_of_clone(folder, targets)
        clone(base, folder, target, tree)
    else:
        found = None
        if base is None:
            found = default_target(targets)
            say(f"fetching verl {found.version}")
            try:
                base = fetch_wheel(found, scratch)
            except NoWheel as error:
                raise Refused(f"{error}; give a clone or wheel with --base") from None
        release = unpacked(base, scratch)
        found = found or target_of(release, targets)
        if found is None:
            raise Refused(f"{base} is not verl {apply_patch.versions(targets, 'or')}, which there is a patch for")
        target = found
        copy_verl(release, tree)
        commit(tree, target)
    plain_git("config", "core.autocrlf", "false", cwd=tree)
    plain_git("tag", "-f", "gradloc-base", cwd=tree)
    return target


def target_of_clone(folder: Path, targets: list[Target]) -> Target:
    """What a development checkout was made for; for any other clone, a target whose commit it has."""
    default = default_target(targets)
    if len(targets) == 1:
        return default
    if noted := noted_target(folder, targets):
        return noted
    tagged = release_at(folder, "refs/tags/gradloc-base")
    of_tag = [target for target in targets if apply_patch.is_release(tagged, target.version)]
    there = [target for target in targets if target.commit and revision(folder, target.commit)]
    return next(iter([*of_tag, *(each for each in there if each == default), *there]), default)


def clone(base: Path, folder: Path, target: Target, tree: Path) -> None:
    refuse_sha256(base)
    pinned = pinned_revision(folder, target)
    if pinned is None:
        commit = f"commit {target.commit}" if target.commit else f"a known commit of verl {target.version}"
        raise Refused(f"{base} has neither {commit} nor a tag gradloc-base")
    try:
        git("clone", "-q", "--no-checkout", "--template=", str(base), str(tree))
    except GitFailed as error:
        raise Refused(f"{base} could not be cloned: {error.lines[-1]}") from None
    keep_bytes(tree / ".git")
    try:
        plain_git("-c", "advice.detachedHead=false", "checkout", "-q", "--detach", pinned, cwd=tree)
    except GitFailed as error:
        raise Refused(f"commit {pinned} of {base} could not be checked out: {error.lines[-1]}") from None


def commit(tree: Path, target: Target) -> None:
    """Makes the base's files a git tree whose commit is the same everywhere, by a fixed author and date."""
    plain_git("init", "-q", "--template=", cwd=tree)
    keep_bytes(tree / ".git")
    (tree / ".git/info/exclude").write_text("__pycache__/\n*.py[co]\n")
    plain_git("add", "-A", "-f", cwd=tree)
    person = {"NAME": "verl", "EMAIL": "verl@localhost", "DATE": "2026-01-01T00:00:00Z"}
    people = {f"GIT_{role}_{key}": value for role in ("AUTHOR", "COMMITTER") for key, value in person.items()}
    upstream = f" (upstream {target.commit})" if target.commit else ""
    plain_git("commit", "-q", "-m", f"verl {target.version}{upstream}", cwd=tree, also=people)


def apply_part(tree: Path, part: Path) -> None:
    if read(part) is not None and apply_patch.load_part(part):
        try:
            plain_git("apply", str(part), cwd=tree)
        except GitFailed as error:
            raise Refused(f"{part} does not apply to this base: {error.lines[0]}") from None
