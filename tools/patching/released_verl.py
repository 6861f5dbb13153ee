# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""The verl that the patch is made for: in a clone, as a wheel, as a tree."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import apply_patch
from apply_patch import Target
from tools.patching.messages import Refused
from tools.patching.project import ROOT, checksum
from tools.patching.scratch_git import GitFailed, git, line


def git_folder(repo: Path) -> Path | None:
    """The git folder of a clone, bare or not; None for anything else."""
    if (repo / ".git").exists():
        return repo / ".git"
    try:
        return repo / line(git(f"--git-dir={repo}", "rev-parse", "--git-dir"))
    except GitFailed:
        return None


def refuse_sha256(repo: Path) -> None:
    """Refuses a repository whose objects the scratch repository cannot read."""
    if line(git(f"--git-dir={git_folder(repo)}", "rev-parse", "--show-object-format")) == "sha256":
        raise Refused(
            f"the objects of {repo} are of git's SHA-256 format, but a patch needs SHA-1; use a checkout of that format"
        )


def revision(folder: Path, name: str) -> str | None:
    """The commit of this name in a git folder; None if there is none."""
    try:
        return line(git(f"--git-dir={folder}", "rev-parse", "-q", "--verify", f"{name}^{{commit}}"))
    except GitFailed:
        return None


def pinned_revision(folder: Path, target: Target) -> str | None:
    """The revision that stands for the base."""
    tagged = revision(folder, "refs/tags/gradloc-base")
    if tagged and apply_patch.is_release(release_at(folder, tagged), target.version):
        return tagged
    return (revision(folder, target.commit) if target.commit else None) or tagged


def release_at(folder: Path, name: str) -> str | None:
    """What verl says its version is at a revision."""
    try:
        return line(git(f"--git-dir={folder}", "show", f"{name}:verl/version/version")).strip()
    except GitFailed:
        return None


class NoWheel(Exception):
    """Says why the base could not be downloaded."""


def fetch_wheel(target: Target, scratch: Path) -> Path:
    """Downloads the wheel of the base, once, into build/."""
    if target.wheel_sha256 is None:
        raise NoWheel(f"verl {target.version} is the commit {target.commit}, which was not released")
    wheel = ROOT / "build/wheel" / f"verl-{target.version}-py3-none-any.whl"
    if wheel.is_file():
        refuse_other_wheel(wheel, target)
        return wheel
    command = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary", "verl", "-d", str(scratch / "wheel"), f"verl=={target.version}"]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", stdin=subprocess.DEVNULL)
    if done.returncode:
        said = (done.stdout + done.stderr).strip().splitlines() or ["it says nothing"]
        raise NoWheel(f"verl {target.version} could not be downloaded with pip ({said[-1]})")
    refuse_other_wheel(scratch / "wheel" / wheel.name, target)
    wheel.parent.mkdir(parents=True, exist_ok=True)
    shutil.move(scratch / "wheel" / wheel.name, wheel)
    return wheel


def find_base(target: Target, scratch: Path) -> Path:
    """The unpatched tree in build/, or the wheel's.

    Raises:
        NoWheel: if there is none, and none can be downloaded.
    """
    built = ROOT / "build" / target.version / "base"
    if (built / "verl").is_dir():
        return built
    place = scratch / "bases" / target.version
    place.mkdir(parents=True)
    return unpacked(fetch_wheel(target, place), place)


def refuse_other_wheel(wheel: Path, target: Target) -> None:
    found = checksum(wheel.read_bytes())
    if found != target.wheel_sha256:
        raise Refused(f"{wheel} has SHA-256 {found}, not the {target.wheel_sha256} of the pin; delete it")


def unpacked(source: Path, scratch: Path) -> Path:
    """The tree of verl in a wheel, or the plain tree itself."""
    tree = source
    if source.is_file():
        tree = scratch / "unzipped"
        try:
            with zipfile.ZipFile(source) as archive:
                archive.extractall(tree)
        except (zipfile.BadZipFile, NotImplementedError, EOFError):
            raise Refused(f"{source} is not a wheel that can be unpacked") from None
    if not (tree / "verl/__init__.py").is_file():
        raise Refused(f"{source} has no verl/__init__.py; give a verl clone, wheel or tree")
    return tree


def copy_verl(tree: Path, place: Path) -> None:
    shutil.copytree(tree / "verl", place / "verl", symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
