# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""--init: a development checkout."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tools.patching.messages import Refused, say
from tools.patching.project import PATCH, ROOT, Pin, remember
from tools.patching.released_verl import NoWheel, fetch_wheel, git_folder, pinned_revision, refuse_sha256, unpack
from tools.patching.scratch_git import GitFailed, git, keep_bytes, plain_git


def init(target: Path, base: Path | None, pin: Pin, scratch: Path) -> None:
    if target.exists():
        if not target.is_dir() or any(target.iterdir()):
            raise Refused(f"{target} exists already; give a new directory")
        if target.samefile("."):
            raise Refused("the current directory cannot be replaced; go elsewhere and name it from there")
    parent = target.parent
    try:
        parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=".gradloc-init-", dir=parent))
    except OSError:
        raise Refused(f"{parent} cannot be written; give another directory") from None
    try:
        tree = partial / "tree"
        make_base(tree, base, pin, scratch)
        if PATCH.is_file():
            patch_tree(tree)
            remember(tree, PATCH.read_bytes())
        try:
            tree.rename(target)
        except OSError:
            raise Refused(f"{target} cannot be replaced; give a new directory") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    say(f"{target} is ready: edit it, then run make_patch.sh --repo {target}")


def make_base(tree: Path, base: Path | None, pin: Pin, scratch: Path) -> None:
    """A git tree of the base, tagged gradloc-base."""
    if base is not None and not base.exists():
        raise Refused(f"{base} does not exist; --base takes a clone, a wheel or a tree")
    folder = git_folder(base) if base is not None else None
    if base is not None and folder is not None:
        clone(base, folder, pin, tree)
    else:
        if base is None:
            say(f"fetching verl {pin.version}")
            try:
                base = fetch_wheel(pin, scratch)
            except NoWheel as error:
                raise Refused(f"{error}; give a clone or wheel with --base") from None
        unpack(base, pin, tree, scratch)
        commit(tree, pin)
    plain_git("config", "core.autocrlf", "false", cwd=tree)
    plain_git("tag", "-f", "gradloc-base", cwd=tree)


def clone(base: Path, folder: Path, pin: Pin, tree: Path) -> None:
    refuse_sha256(base)
    pinned = pinned_revision(folder, pin)
    if pinned is None:
        raise Refused(f"{base} has neither commit {pin.commit} nor a tag gradloc-base")
    try:
        git("clone", "-q", "--no-checkout", "--template=", str(base), str(tree))
    except GitFailed as error:
        raise Refused(f"{base} could not be cloned: {error.lines[-1]}") from None
    keep_bytes(tree / ".git")
    try:
        plain_git("-c", "advice.detachedHead=false", "checkout", "-q", "--detach", pinned, cwd=tree)
    except GitFailed as error:
        raise Refused(f"commit {pinned} of {base} could not be checked out: {error.lines[-1]}") from None


def commit(tree: Path, pin: Pin) -> None:
    """Makes the base's files a git tree whose commit is the same everywhere, by a fixed author and date."""
    plain_git("init", "-q", "--template=", cwd=tree)
    keep_bytes(tree / ".git")
    (tree / ".git/info/exclude").write_text("__pycache__/\n*.py[co]\n")
    plain_git("add", "-A", "-f", cwd=tree)
    person = {"NAME": "verl", "EMAIL": "verl@localhost", "DATE": "2026-01-01T00:00:00Z"}
    people = {f"GIT_{role}_{key}": value for role in ("AUTHOR", "COMMITTER") for key, value in person.items()}
    plain_git("commit", "-q", "-m", f"verl {pin.version} (upstream {pin.commit})", cwd=tree, also=people)


def patch_tree(tree: Path) -> None:
    command = [sys.executable, "-B", str(ROOT / "apply_patch.py"), "--repo", str(tree)]
    done = subprocess.run([*command, "--check"], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode:
        said = (done.stdout + done.stderr).strip().splitlines() or [f"exit {done.returncode}"]
        raise Refused(f"the patch does not apply to this base: {said[-1]}")
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode:
        raise Refused(f"the patch could not be applied: {done.stderr.strip()}")
