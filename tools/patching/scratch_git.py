# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""git whose answers depend on nothing but its input: not on settings, attributes or excludes of anybody."""

from __future__ import annotations

import subprocess
from pathlib import Path

import apply_patch
from tools.patching.sources import File, Files

# What editors and other tools leave in a tree is no edit.
LEFT_BEHIND = ("__pycache__/**", "*.py[co]", "*.orig", "*.rej", "*.sw[op]", "*~")
WITHOUT_SETTINGS = {
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_COUNT": "0",
    "GIT_CONFIG_PARAMETERS": "",
    "GIT_DEFAULT_HASH": "sha1",  # the blob hashes of a patch are SHA-1, whatever git makes by default
}
OPTIONS = (
    "core.autocrlf=false",
    "core.attributesFile=/dev/null",
    "core.excludesFile=/dev/null",
    "core.fileMode=true",
    "core.quotePath=true",
    "core.whitespace=blank-at-eol,space-before-tab,blank-at-eof",
)
# Every setting that shapes a diff. With two lines of context each hunk's lines are in their file once; with one not.
DIFF = (
    *("diff", "--full-index", "--no-renames", "--no-color", "--no-ext-diff", "--no-textconv", "--src-prefix=a/"),
    *("--dst-prefix=b/", "-U2", "--inter-hunk-context=0", "--diff-algorithm=histogram", "--indent-heuristic"),
    *("--no-relative", "--submodule=short"),
)


class GitFailed(Exception):
    """git ended with an error; `lines` are what it said, at least one."""

    def __init__(self, command: str, code: int, said: bytes):
        self.lines = said.decode("utf-8", "replace").strip().splitlines() or [f"exit {code}"]
        super().__init__(f"git {command} failed: {self.lines[-1]}")


def git(
    *arguments: str, cwd: Path | None = None, data: bytes | None = None, also: dict[str, str] | None = None
) -> bytes:
    """Runs git with the user's settings; `also` adds to the environment. Returns what it prints.

    Raises:
        GitFailed: if git's exit code is not 0.
    """
    done = subprocess.run(
        ["git", *arguments],
        cwd=cwd,
        input=data or b"",
        capture_output=True,
        env=apply_patch.git_environment() | (also or {}),
    )
    if done.returncode:
        command = next((word for word in arguments if word[:1] not in ("-", "/") and "=" not in word), "")
        raise GitFailed(command, done.returncode, done.stderr.strip() or done.stdout)
    return done.stdout


def plain_git(
    *arguments: str, cwd: Path | None = None, data: bytes | None = None, also: dict[str, str] | None = None
) -> bytes:
    """Runs git without the user's settings; otherwise as `git`."""
    return git("-c", "init.defaultBranch=main", *arguments, cwd=cwd, data=data, also=WITHOUT_SETTINGS | (also or {}))


def line(output: bytes) -> str:
    """git's one-line answer, or the first of its NUL-separated ones."""
    return output.decode("utf-8", "surrogateescape").partition("\0")[0].rstrip("\n")


def keep_bytes(git_folder: Path) -> None:
    """Makes a repository convert nothing: these attributes come before all others."""
    (git_folder / "info").mkdir(exist_ok=True)
    attributes = "* -text !eol !ident !filter !working-tree-encoding !diff !merge !whitespace\n"
    (git_folder / "info" / "attributes").write_text(attributes)


class Scratch:
    """A repository of our own in an empty folder, whose index is filled again for each question."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.repository = folder / "repo"
        plain_git("init", "-q", "--template=", str(folder / "work"))
        (folder / "work" / ".git").rename(self.repository)
        keep_bytes(self.repository)

    def git(self, *arguments: str, cwd: Path | None = None, data: bytes | None = None) -> bytes:
        settings = [word for option in OPTIONS for word in ("-c", option)]
        places = {"GIT_DIR": str(self.repository), "GIT_INDEX_FILE": str(self.folder / "index")}
        return plain_git(*settings, *arguments, cwd=cwd or self.folder, data=data, also=places)

    def borrow_objects(self, repo: Path) -> None:
        """Lets this repository see what is in that one."""
        objects = repo / line(git("-C", str(repo), "rev-parse", "--git-path", "objects"))
        (self.repository / "objects/info/alternates").write_bytes(bytes(objects.resolve()) + b"\n")

    def fill_index(self, files: Files) -> None:
        (self.folder / "index").unlink(missing_ok=True)
        entries = "".join(f"{file.mode} {file.blob}\t{path}\0" for path, file in files.items())
        self.git("update-index", "-z", "--index-info", data=entries.encode("utf-8", "surrogateescape"))

    def index(self) -> Files:
        entries = self.git("ls-files", "-s", "-z").decode("utf-8", "surrogateescape").split("\0")[:-1]
        found = {}
        for entry in entries:
            facts, _, path = entry.partition("\t")
            mode, blob, _ = facts.split()
            found[path] = File(mode, blob)
        return found

    def tree(self, files: Files) -> str:
        self.fill_index(files)
        return line(self.git("write-tree"))

    def revision(self, name: str) -> Files:
        """verl's files at a revision of the repository whose objects are borrowed."""
        self.fill_index({})
        self.git("read-tree", "--prefix=verl/", f"{name}:verl")
        return self.index()

    def work_tree(self, folder: Path, path: str, seed: Files) -> Files:
        """All files below a path of a folder, whatever .gitignore says, but for what tools leave.

        Args:
            seed: stays where the path has files that tools leave.
        """
        self.fill_index(seed)
        left = [f":(exclude,glob)**/{name}" for name in LEFT_BEHIND]
        self.git("--work-tree=.", "add", "-A", "-f", "--", path, *left, cwd=folder)
        return self.index()

    def apply(self, files: Files, patch: bytes, *options: str) -> Files:
        self.fill_index(files)
        self.git("apply", "--cached", *options, "-", data=patch)
        return self.index()

    def merged(self, ours: str, ancestor: str, theirs: str) -> str | None:
        """The blob that three blobs come together in; None if both sides changed the same lines."""
        places = [self.folder / name for name in ("ours", "ancestor", "theirs")]
        for place, blob in zip(places, (ours, ancestor, theirs), strict=True):
            place.write_bytes(self.read(blob))
        try:
            return self.write(self.git("merge-file", "-p", *map(str, places)))
        except GitFailed:
            return None

    def diff(self, old: str, new: str) -> bytes:
        """The difference of two trees, in bytes that depend on them only."""
        return self.git(*DIFF, old, new)

    def whitespace_error(self, old: str, new: str) -> str | None:
        """Place and kind of the first whitespace error that the new tree brings."""
        try:
            self.git("diff", "--check", "--no-renames", old, new)
        except GitFailed as error:
            return error.lines[0]
        return None

    def read(self, blob: str) -> bytes:
        return self.git("cat-file", "blob", blob)

    def write(self, content: bytes) -> str:
        return line(self.git("hash-object", "-w", "--stdin", data=content))

    def room_left(self) -> bool:
        """Whether the disk takes a file of a megabyte, so that git's failures were not for want of room."""
        probe = self.folder / "probe"
        try:
            probe.write_bytes(bytes(1_000_000))
        except OSError:
            return False
        probe.unlink()
        return True
