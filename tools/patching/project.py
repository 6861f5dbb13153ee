# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Where the project has what a patch is made of, and the two forms of it: in the project and in verl."""

from __future__ import annotations

import contextlib
import hashlib
import shutil
from collections.abc import Iterator
from pathlib import Path

import apply_patch
from apply_patch import Target
from tools.patching import sources
from tools.patching.messages import Refused
from tools.patching.scratch_git import GitFailed, Scratch
from tools.patching.sources import Files, Source

ROOT = apply_patch.HERE
NOTES = "gradloc"  # a folder in the git folder of a checkout
DEFAULT = apply_patch.PATCHES / "DEFAULT"  # the version that is meant where nothing says which


def pin_file(target: Target) -> Path:
    return target.folder / apply_patch.PIN


def default_target(targets: list[Target]) -> Target:
    if len(targets) == 1:
        return targets[0]
    version = (read(DEFAULT) or b"").decode("utf-8", "replace").strip()
    for target in targets:
        if target.version == version:
            return target
    raise Refused(f"{DEFAULT} must hold one of {apply_patch.versions(targets)}; restore it")


def target_of(tree: Path, targets: list[Target]) -> Target | None:
    """The target that a verl tree is of, by its version."""
    release = apply_patch.release_of(tree)
    return next((target for target in targets if apply_patch.is_release(release, target.version)), None)


def noted_target(folder: Path, targets: list[Target]) -> Target | None:
    """The target that a development checkout, given by its git folder, was made for."""
    version = (read(folder / NOTES / "target") or b"").decode("utf-8", "replace").strip()
    return next((target for target in targets if target.version == version), None)


def checksum(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def checksum_line(data: bytes, name: str) -> str:
    return f"{checksum(data)}  {name}\n"


def read(path: Path) -> bytes | None:
    """A file's content; None if there is no such file."""
    try:
        return path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None


@contextlib.contextmanager
def new_beside(path: Path) -> Iterator[Path]:
    """A place for the new content of a file, which takes the file's place if nothing fails until then."""
    partial = path.with_name(f"{path.name}.tmp")
    try:
        yield partial
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def project_files(source: Source, scratch: Scratch) -> Files:
    """What the project's folder holds of a source."""
    folder = ROOT / source.folder
    return sources.without_readmes(work_tree(scratch, folder, ".", {})) if folder.is_dir() else {}


def work_tree(scratch: Scratch, folder: Path, path: str, seed: Files) -> Files:
    try:
        return scratch.work_tree(folder, path, seed)
    except GitFailed as error:
        raise Refused(f"the files of {folder}/{path} could not be read: {error.lines[0]}") from None


def as_in_verl(files: Files, base: Files, source: Source, scratch: Scratch) -> Files:
    """The project's files of a source as the patch makes them."""
    sources.check_ours(files, base, source)
    try:
        return sources.join_pages(files, scratch.read, scratch.write)
    except sources.Misplaced as error:
        raise Refused(f"{source.folder}/{error}") from None


def as_in_project(files: Files, source: Source, place: str, scratch: Scratch) -> Files:
    """What is carried of a source in verl as the files that the project has for it."""
    try:
        return sources.split_pages(files, scratch.read, scratch.write)
    except sources.Misplaced as error:
        raise Refused(f"{place}/{error}") from None


def remember(folder: Path, target: Target) -> None:
    """Notes, in the git folder of a checkout, its target and the patches that it was last brought together with."""
    notes = folder / NOTES
    shutil.rmtree(notes, ignore_errors=True)
    notes.mkdir()
    for part in target.parts:
        (notes / part.name).write_bytes(read(part) or b"")
    (notes / "target").write_text(f"{target.version}\n")


def remembered(folder: Path, part: Path) -> bytes | None:
    """A part of the patch as the checkout was last brought together with it; None if there is no note of it."""
    notes = folder / NOTES
    return read(notes / part.name) if (notes / "target").is_file() else None
