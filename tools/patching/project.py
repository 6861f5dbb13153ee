# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Where the project has what a patch is made of, and the two forms of it: in the project and in verl."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
from collections.abc import Iterator
from pathlib import Path

import apply_patch
from tools.patching import sources
from tools.patching.messages import Refused
from tools.patching.scratch_git import GitFailed, Scratch, git, line
from tools.patching.sources import Files, Source

ROOT = apply_patch.HERE
TARGET = apply_patch.TARGET
PATCH = TARGET / "gradloc.patch"
HOOKS = TARGET / "hooks.patch"


@dataclasses.dataclass(frozen=True)
class Pin:
    commit: str
    version: str


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


def remember(repo: Path, patch: bytes) -> None:
    """Notes the patch that this checkout was last brought together with."""
    folder = Path(line(git("rev-parse", "--absolute-git-dir", cwd=repo)))
    (folder / "gradloc-patch.sha256").write_text(f"{checksum(patch)}\n")
