# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""The verl that the patch is made for: in a clone, as a wheel, as a tree."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from tools.patching.messages import Refused
from tools.patching.project import ROOT, Pin, read
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


def pinned_revision(folder: Path, pin: Pin) -> str | None:
    """The revision that stands for the base."""
    return revision(folder, "refs/tags/gradloc-base") or revision(folder, pin.commit)


class NoWheel(Exception):
    """Says why the base could not be downloaded."""


def fetch_wheel(pin: Pin, scratch: Path) -> Path:
    """Downloads the wheel of the base, once, into build/."""
    wheel = ROOT / "build/wheel" / f"verl-{pin.version}-py3-none-any.whl"
    if wheel.is_file():
        return wheel
    command = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary", "verl", "-d", str(scratch / "wheel"), f"verl=={pin.version}"]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", stdin=subprocess.DEVNULL)
    if done.returncode:
        said = (done.stdout + done.stderr).strip().splitlines() or ["it says nothing"]
        raise NoWheel(f"verl {pin.version} could not be downloaded with pip ({said[-1]})")
    wheel.parent.mkdir(parents=True, exist_ok=True)
    shutil.move(scratch / "wheel" / wheel.name, wheel)
    return wheel


def unpack(source: Path, pin: Pin, target: Path, scratch: Path) -> None:
    """Copies the verl/ of a wheel or of a plain tree into the folder."""
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
    release = (read(tree / "verl/version/version") or b"").decode("utf-8", "replace").strip()
    if not re.fullmatch(re.escape(pin.version) + r"(\.dev[0-9A-Za-z.]*)?", release):
        raise Refused(f"{source} is not verl {pin.version}, which the patch is made for")
    shutil.copytree(tree / "verl", target / "verl", symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
