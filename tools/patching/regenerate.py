# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""--repo and --sources: the patches from a development checkout and the sources."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import apply_patch
from apply_patch import PACKAGE, Target
from tools.patching import parts, patch_text, sources
from tools.patching.messages import Refused, say
from tools.patching.project import (
    ROOT,
    as_in_project,
    as_in_verl,
    new_beside,
    noted_target,
    pin_file,
    project_files,
    read,
    remember,
    remembered,
    work_tree,
)
from tools.patching.released_verl import pinned_revision, refuse_sha256, release_at, revision
from tools.patching.scratch_git import GitFailed, Scratch, git, line
from tools.patching.sources import SOURCES, Files, Source


@dataclasses.dataclass(frozen=True)
class Checkout:
    """A development checkout and the two revisions that the patch is made from; head is None for the working tree."""

    target: Target
    repo: Path
    folder: Path  # of git
    base: str
    head: str | None


def find_checkout(
    repo: Path, base: str | None, head: str | None, targets: list[Target], version: str | None
) -> Checkout:
    """The checkout, of the target of this version; without one, of the one that it was made from."""
    if not repo.is_dir():
        raise Refused(f"{repo} is not a directory; --repo takes a verl checkout")
    repo = repo.resolve()
    try:
        top = line(git("rev-parse", "--show-toplevel", cwd=repo))
    except GitFailed as error:
        raise Refused(f"{repo} is not a usable git checkout: {error.lines[0]}") from None
    if Path(top).resolve() != repo:
        raise Refused(f"{repo} lies inside the repository {top}; give the top of a verl checkout")
    refuse_sha256(repo)
    folder = Path(line(git("rev-parse", "--absolute-git-dir", cwd=repo)))
    target = target_of_checkout(repo, folder, base, apply_patch.narrowed(targets, version))
    if base is not None:
        start = revision(folder, base)
        if start is None:
            raise Refused(f"{base} is not a revision of {repo}")
    else:
        start = pinned_revision(folder, target)
        if start is None:
            commit = f"commit {target.commit}" if target.commit else f"a known commit of verl {target.version}"
            raise Refused(f"{repo} has neither a tag gradloc-base nor {commit}; name the base with --base")
    try:
        git("rev-parse", "-q", "--verify", f"{start}:verl", cwd=repo)
    except GitFailed:
        raise Refused(f"{start} of {repo} has no directory verl") from None
    release = release_at(folder, start)
    others = [each for each in targets if each != target and apply_patch.is_release(release, each.version)]
    if others:
        raise Refused(f"{repo} is made from verl {others[0].version}, not {target.version}; leave out --target")
    end = None
    if head is not None:
        end = revision(folder, head)
        if end is None:
            raise Refused(f"{head} is not a revision of {repo}")
    elif not (repo / "verl").is_dir():
        raise Refused(f"{repo} has no directory verl")
    return Checkout(target, repo, folder, start, end)


def target_of_checkout(repo: Path, folder: Path, base: str | None, targets: list[Target]) -> Target:
    if len(targets) == 1:
        return targets[0]
    if noted := noted_target(folder, targets):
        return noted
    start = revision(folder, base or "refs/tags/gradloc-base") or revision(folder, "HEAD")
    release = release_at(folder, start) if start else None
    for target in targets:
        if start is not None and start == target.commit or apply_patch.is_release(release, target.version):
            return target
    raise Refused(
        f"{repo} does not say which verl it is made from; give --target ({apply_patch.versions(targets, 'or')})"
    )


def refuse_changes_outside(checkout: Checkout) -> None:
    """The patch is about verl/; says so where new files are elsewhere, and refuses changed ones."""
    elsewhere = ("--", ".", ":(exclude,top)verl")
    revisions = [checkout.base, checkout.head] if checkout.head else [checkout.base]
    changed = line(git("diff", "--name-only", "-z", *revisions, *elsewhere, cwd=checkout.repo))
    if changed:
        raise Refused(f"{changed} differs from the base, but the patch changes nothing outside verl/; undo that")
    new = line(git("ls-files", "-z", "--others", "--exclude-standard", *elsewhere, cwd=checkout.repo))
    if new:
        say(f"note: {new} and other new files outside verl/ are not part of the patch")


@contextlib.contextmanager
def locked(file: Path, place: Path) -> Iterator[None]:
    """No other run changes the place until this one ends."""
    try:
        descriptor = os.open(file, os.O_RDWR)
    except PermissionError:
        raise Refused(f"{place} cannot be written; use an account with write permission") from None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Refused(f"another make_patch.sh is at work on {place}; wait until it has ended") from None
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def locked_project(targets: list[Target]) -> Iterator[None]:
    with contextlib.ExitStack() as locks:
        for target in targets:
            locks.enter_context(locked(pin_file(target), ROOT))
        yield


def from_sources(targets: list[Target], scratch: Scratch) -> None:
    """Writes the package, which needs no checkout."""
    with locked_project(targets):
        ours = {source: project_files(source, scratch) for source in SOURCES}
        parts.write(PACKAGE, parts.make_diff({}, parts.package(ours, {}, scratch), scratch))


def regenerate(checkout: Checkout, targets: list[Target], edit_fixes: bool, force: bool, scratch: Scratch) -> None:
    """Brings the sources and the checkout together, and writes the package and its target's hooks and fixes.

    Args:
        targets: all of the project.
        edit_fixes: take edits of verl's own files for fixes, not for hooks.
        force: go on although edits of verl's own files seem to be lost.
    """
    target = checkout.target
    with locked_project(targets), locked(checkout.folder / "HEAD", checkout.repo):
        base, edited = read_checkout(checkout, scratch)
        final = own = edited
        ours = {source: project_files(source, scratch) for source in SOURCES}
        merged: dict[Source, Files] = {}
        for source in SOURCES:
            in_verl = sources.carried(edited, base, source)
            sources.check_theirs(in_verl, source)
            theirs = as_in_project(in_verl, source, f"{checkout.repo}/{source.place}", scratch)
            merged[source] = bring_together(theirs, ours[source], source, checkout, scratch)
            final = sources.put(final, base, source, as_in_verl(merged[source], base, source, scratch))
            own = sources.put(own, base, source, {})
            if checkout.head is not None and merged[source] != theirs:
                raise Refused(
                    f"{source.folder}/ has changes that {checkout.head} lacks; leave out --head, "
                    "or write to another file with --output"
                )
        if final == base:
            raise Refused("nothing differs from the base, so there is no patch to write")
        hooks, fixes = (in_common(checkout, part) or b"" for part in (target.hooks, target.fixes))
        if own == base and (hooks or fixes) and not force:
            raise Refused(
                f"all edits of verl's own files are gone from {checkout.repo}, as after git checkout or git stash; "
                "bring them back (apply_patch.py does), or pass --force to write a patch without them"
            )
        if edit_fixes:
            hooked = parts.applied_or_refused(base, [hooks], scratch)
        else:
            hooked = parts.without_fixes(base, own, hooks, fixes, scratch)
        patches = {
            PACKAGE: parts.make_diff({}, parts.package(merged, base, scratch), scratch),
            target.hooks: parts.make_diff(base, hooked, scratch),
            target.fixes: parts.make_diff(hooked, own, scratch),
        }
        if not force:
            refuse_lost_changes(checkout, patches)
        # The note in the checkout comes last: it is the common ancestor, so an interrupted run can simply be repeated.
        for source in SOURCES:
            update(ROOT / source.folder, ours[source], merged[source], scratch)
        if checkout.head is None:
            update(checkout.repo, edited, final, scratch)
        for place, patch in patches.items():
            parts.write(place, patch)
        remember(checkout.folder, target)


def write_elsewhere(checkout: Checkout, output: Path, scratch: Scratch) -> None:
    """Writes the checkout's difference as it is to another file."""
    base, edited = read_checkout(checkout, scratch)
    if base == edited:
        raise Refused("nothing differs from the base, so there is no patch to write")
    parts.write(output, parts.make_diff(base, edited, scratch))


def read_checkout(checkout: Checkout, scratch: Scratch) -> tuple[Files, Files]:
    """verl's files in the base, and as edited; without READMEs of ours."""
    scratch.borrow_objects(checkout.repo)
    base = scratch.revision(checkout.base)
    if checkout.head is not None:
        edited = scratch.revision(checkout.head)
    else:
        edited = work_tree(scratch, checkout.repo, "verl", base)
    for source in SOURCES:
        content = sources.without_readmes(sources.carried(edited, base, source))
        if content != sources.carried(edited, base, source):
            edited = sources.put(edited, base, source, content)
    return base, edited


def in_common(checkout: Checkout, part: Path) -> bytes | None:
    """A part of the patch as the checkout and the project last had it in common; else the present one."""
    noted = remembered(checkout.folder, part)
    return read(part) if noted is None else noted


def bring_together(theirs: Files, ours: Files, source: Source, checkout: Checkout, scratch: Scratch) -> Files:
    """Merges the project's and the checkout's files of a source; what they last had in common is the ancestor."""
    ancestor: Files = {}
    repo = checkout.repo
    if (present := in_common(checkout, PACKAGE)) is not None:
        try:
            in_patch = sources.carried(patch_text.new_files(present, scratch.write), {}, source)
        except apply_patch.Stop as stop:
            raise Refused(f"the present {PACKAGE} cannot be read ({stop}); restore it") from None
        ancestor = as_in_project(in_patch, source, f"{PACKAGE}: {source.place}", scratch)
    # An empty side is a checkout without the patch, or half a clone: not a wish to delete the sources.
    if ancestor and not theirs:
        raise Refused(f"{repo} has no {source.place} of ours; apply the patch to it first (apply_patch.py)")
    if ancestor and not ours:
        raise Refused(f"the project's {source.folder}/ is empty; restore it from version control")
    merged, conflicts = sources.merge(ancestor, theirs, ours)
    if conflicts:
        names = " ".join(conflicts)
        raise Refused(
            f"changed both in {source.folder}/ and in {repo}/{source.place}: {names}; "
            "make both the same, then run again"
        )
    return merged


def refuse_lost_changes(checkout: Checkout, patches: dict[Path, bytes]) -> None:
    """Refuses to undo what another checkout has changed in hooks or fixes meanwhile."""
    for part in (checkout.target.hooks, checkout.target.fixes):
        synced, present = remembered(checkout.folder, part), read(part)
        if synced is not None and present is not None and present not in (synced, patches[part]):
            raise Refused(
                f"{part} has changed since {checkout.repo} was last brought together with it, and those changes would "
                "be lost; make a new checkout with --init and redo your edits there, or pass --force"
            )


def update(folder: Path, old: Files, new: Files, scratch: Scratch) -> None:
    """Brings the files of a folder from one state to another, each in one step."""
    for name in sorted(old.keys() - new.keys()):
        place = folder / name
        place.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # a folder that holds something else stays
            for parent in list(Path(name).parents)[:-1]:
                (folder / parent).rmdir()
        say(f"removed {place}")
    for name in sorted(name for name in new if new[name] != old.get(name)):
        place = folder / name
        place.parent.mkdir(parents=True, exist_ok=True)
        with new_beside(place) as partial:
            partial.write_bytes(scratch.read(new[name].blob))
            if new[name].mode == "100755":
                partial.chmod(partial.stat().st_mode | 0o111)
        say(f"updated {place}")
