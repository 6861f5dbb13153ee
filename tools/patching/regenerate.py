# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""--repo: the patch from a development checkout and the sources."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import re
from collections.abc import Iterator
from pathlib import Path

import apply_patch
from apply_patch import Target
from tools.patching import other_targets, patch_text, sources
from tools.patching.messages import Refused, say
from tools.patching.project import (
    ROOT,
    as_in_project,
    as_in_verl,
    checksum,
    checksum_line,
    hooks_file,
    new_beside,
    noted_target,
    pin_file,
    project_files,
    read,
    remember,
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
        raise Refused(f"{place} cannot be written; use an account that may") from None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Refused(f"another make_patch.sh is at work on {place}; wait until it has ended") from None
        yield
    finally:
        os.close(descriptor)


def regenerate(checkout: Checkout, targets: list[Target], force: bool, scratch: Scratch) -> None:
    """Brings the sources and the checkout together, and writes its target's patch and those of the others."""
    with contextlib.ExitStack() as locks:
        for target in targets:
            locks.enter_context(locked(pin_file(target), ROOT))
        locks.enter_context(locked(checkout.folder / "HEAD", checkout.repo))
        base, edited = read_checkout(checkout, scratch)
        final = edited
        updates: list[tuple[Source, Files, Files]] = []
        wanted: dict[Source, Files] = {}
        for source in SOURCES:
            ours = project_files(source, scratch)
            place = f"{checkout.repo}/{source.place}"
            in_verl = sources.carried(edited, base, source)
            sources.check_theirs(in_verl, source)
            theirs = as_in_project(in_verl, source, place, scratch)
            merged = bring_together(theirs, ours, source, checkout, scratch)
            wanted[source] = as_in_verl(merged, base, source, scratch)
            final = sources.put(final, base, source, wanted[source])
            if checkout.head is not None and merged != theirs:
                raise Refused(
                    f"{source.folder}/ has changes that {checkout.head} lacks; leave out --head, "
                    "or write to another file with --output"
                )
            updates.append((source, ours, merged))
        patch, summary = make_diff(base, final, scratch)
        refuse_lost_changes(checkout, patch, force)
        refuse_lost_hooks(checkout, patch, force)
        earlier = replaced_files(checkout.target, base, scratch)
        others = {}
        for other in targets:
            if other != checkout.target and (present := read(other.patch)):
                others[other] = other_targets.renewed(present, wanted, earlier, scratch)
        # The checkout's patch comes last: it is the common ancestor, so an interrupted run can simply be repeated.
        for source, ours, merged in updates:
            update(ROOT / source.folder, ours, merged, scratch)
        if checkout.head is None:
            update(checkout.repo, edited, final, scratch)
        for other, renewed in others.items():
            write_target(other, renewed)
        write_target(checkout.target, patch)
        remember(checkout.repo, checkout.target, patch)
    say_written(summary, [*(other.patch for other in others), checkout.target.patch])


def replaced_files(target: Target, base: Files, scratch: Scratch) -> dict[str, bytes]:
    """What a target's present patch makes of the files of verl that a source replaces, by path."""
    paths = {f"{source.place}/{name}" for source in SOURCES for name in source.replaced}
    found = {}
    for change in apply_patch.parse_patch(read(target.patch) or b"") if target.patch.is_file() else []:
        if change.path in paths and change.path in base:
            found[change.path] = change.result(scratch.read(base[change.path].blob)) or b""
    return found


def write_target(target: Target, patch: bytes) -> None:
    write_patch(target.patch, patch, (hooks_file(target), patch_text.hooks(patch, SOURCES)))


def write_elsewhere(checkout: Checkout, output: Path, scratch: Scratch) -> None:
    """Writes the checkout's difference as it is to another file."""
    base, edited = read_checkout(checkout, scratch)
    patch, summary = make_diff(base, edited, scratch)
    write_patch(output, patch, None)
    say_written(summary, [output])


def say_written(summary: str, outputs: list[Path]) -> None:
    with contextlib.suppress(OSError):
        print(summary, flush=True)
    for output in outputs:
        say(f"wrote {output} and its .sha256")


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


def bring_together(theirs: Files, ours: Files, source: Source, checkout: Checkout, scratch: Scratch) -> Files:
    """Merges the project's and the checkout's files of a source; its target's present patch is the common ancestor."""
    ancestor: Files = {}
    repo, present = checkout.repo, checkout.target.patch
    if (patch := read(present)) is not None:
        try:
            in_patch = patch_text.carried(patch, source, scratch.write)
        except apply_patch.Stop as stop:
            raise Refused(f"the present {present} cannot be read ({stop}); restore it") from None
        ancestor = as_in_project(in_patch, source, f"{present}: {source.place}", scratch)
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


def make_diff(base: Files, final: Files, scratch: Scratch) -> tuple[bytes, str]:
    """The patch and a summary of it. Refuses what the patch format or CI would not take."""
    trees = scratch.tree(base), scratch.tree(final)
    patch = scratch.diff(*trees)
    if not patch:
        raise Refused("nothing differs from the base, so there is no patch to write")
    for path, file in final.items():
        old = base.get(path)
        if file != old and file.mode.startswith(("12", "16")):
            raise Refused(f"{path} is a symbolic link or a nested repository, which the patch cannot carry")
        if old is not None and file.mode != old.mode:
            raise Refused(f"the mode of {path} changed, which the patch cannot carry; undo that with chmod")
    if binary := re.search(rb"^Binary files (.*) differ$", patch, re.M):
        raise Refused(f"a binary file changed ({binary[1].decode('utf-8', 'replace')}), which the patch cannot carry")
    if bad := scratch.whitespace_error(*trees):
        raise Refused(f"whitespace error in {bad}; fix it first")
    if bad := patch_text.unfinished_line(patch):
        raise Refused(f"{bad} lacks the newline at its end; add it")
    try:
        apply_patch.parse_patch(patch)
    except apply_patch.Stop as stop:
        raise Refused(f"apply_patch.py would not take the patch: {stop}") from None
    if bad := sources.broken_module(final, base, scratch.read):
        raise Refused(f"{bad}; correct it first")
    return patch, scratch.summary(*trees)


def refuse_lost_changes(checkout: Checkout, patch: bytes, force: bool) -> None:
    """Refuses to undo what another checkout brought into the patch since this one was brought together with it."""
    synced = (read(checkout.folder / "gradloc-patch.sha256") or b"").decode("utf-8", "replace").strip()
    present = read(checkout.target.patch)
    if force or not synced or present is None or patch == present or synced == checksum(present):
        return
    raise Refused(
        f"the patch has changed since {checkout.repo} was last brought together with it, and those changes would be "
        "lost; make a new checkout with --init and redo your edits there, or pass --force"
    )


def refuse_lost_hooks(checkout: Checkout, patch: bytes, force: bool) -> None:
    """Refuses a checkout whose edits of verl's own files are all gone, as after `git checkout .`."""
    present = read(checkout.target.patch)
    if force or present is None or not patch_text.hook_sections(present, SOURCES):
        return
    if not patch_text.hook_sections(patch, SOURCES):
        raise Refused(
            f"all edits of verl's own files are gone from {checkout.repo}, as after git checkout or git stash; bring "
            "them back (apply_patch.py does), or pass --force to write a patch without them"
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


def write_patch(output: Path, patch: bytes, hooks: tuple[Path, bytes] | None) -> None:
    """Writes a patch, its checksum and, for the project's own, its hooks."""
    if not output.parent.is_dir() or output.is_dir():
        raise Refused(f"{output} is not a file in an existing directory")
    with contextlib.ExitStack() as stack:
        # Left in the opposite order: the patch takes its place first.
        if hooks is not None:
            stack.enter_context(new_beside(hooks[0])).write_bytes(hooks[1])
        sums = stack.enter_context(new_beside(output.with_name(f"{output.name}.sha256")))
        sums.write_text(checksum_line(patch, output.name))
        stack.enter_context(new_beside(output)).write_bytes(patch)
