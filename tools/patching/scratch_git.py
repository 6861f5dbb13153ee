# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""git whose answers depend on nothing but its input: not on settings, attributes or excludes of anybody."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import NamedTuple

import apply_patch

# Files that editors and other tools leave in a tree do not count as edits.
LEFT_BEHIND = ("__pycache__/**", "*.py[co]", "*.orig", "*.rej", "*.sw[op]", "*~")
WITHOUT_SETTINGS = {
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_COUNT": "0",
    "GIT_CONFIG_PARAMETERS": "",
    "GIT_DEFAULT_HASH": "sha1",  # the blob hashes of a patch are SHA-1, whatever git makes by default
}
OPTIONS = (
    "init.defaultBranch=main",
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


class File(NamedTuple):
    mode: str  # as in git: 100644, 100755, 120000 for a symbolic link, 160000 for a nested repository
    blob: str


Files = dict[str, File]  # by path


class GitFailed(apply_patch.Stop):
    """git ended with an error; `lines` are what it said, at least one."""

    def __init__(self, command: str, code: int, said: bytes):
        self.lines = said.decode("utf-8", "replace").strip().splitlines() or [f"exit {code}"]
        super().__init__(f"git {command} failed: {self.lines[-1]}")


def git(*arguments: str, cwd: Path, data: bytes = b"", also: dict[str, str] | None = None) -> bytes:
    """Runs git and returns what it prints, or raises GitFailed; `also` adds to the environment."""
    done = subprocess.run(
        ["git", *(word for option in OPTIONS for word in ("-c", option)), *arguments],
        cwd=cwd,
        input=data,
        capture_output=True,
        env=apply_patch.git_environment() | WITHOUT_SETTINGS | (also or {}),
    )
    if done.returncode:
        command = next(word for word in arguments if word[:1] not in ("-", "/"))
        raise GitFailed(command, done.returncode, done.stderr.strip() or done.stdout)
    return done.stdout


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
        git("init", "-q", "--template=", str(folder / "work"), cwd=folder)
        (folder / "work" / ".git").rename(self.repository)
        keep_bytes(self.repository)

    def git(self, *arguments: str, cwd: Path | None = None, data: bytes = b"") -> bytes:
        places = {"GIT_DIR": str(self.repository), "GIT_INDEX_FILE": str(self.folder / "index")}
        return git(*arguments, cwd=cwd or self.folder, data=data, also=places)

    def fill_index(self, files: Files) -> None:
        (self.folder / "index").unlink(missing_ok=True)
        entries = "".join(f"{file.mode} {file.blob}\t{path}\0" for path, file in files.items())
        self.git("update-index", "-z", "--index-info", data=entries.encode("utf-8", "surrogateescape"))

    def index(self) -> Files:
        found = {}
        for entry in self.git("ls-files", "-s", "-z").decode("utf-8", "surrogateescape").split("\0")[:-1]:
            facts, _, path = entry.partition("\t")
            mode, blob, _ = facts.split()
            found[path] = File(mode, blob)
        return found

    def tree(self, files: Files) -> str:
        self.fill_index(files)
        return self.git("write-tree").decode().strip()

    def work_tree(self, folder: Path, path: str) -> Files:
        """All files below a path of a folder, whatever .gitignore says, but for what tools leave."""
        self.fill_index({})
        left = [f":(exclude,glob)**/{name}" for name in LEFT_BEHIND]
        self.git("--work-tree=.", "add", "-A", "-f", "--", path, *left, cwd=folder)
        return self.index()

    def apply(self, files: Files, patch: bytes, *options: str) -> Files:
        """The files with a patch, which may be empty."""
        if not patch:
            return files
        self.fill_index(files)
        self.git("apply", "--cached", *options, "-", data=patch)
        return self.index()

    def diff(self, old: Files, new: Files) -> bytes:
        """The difference, in bytes that depend on the files only."""
        return self.git(*DIFF, self.tree(old), self.tree(new))

    def whitespace_error(self, old: Files, new: Files) -> str | None:
        """Place and kind of the first whitespace error that the new files bring."""
        try:
            self.git("diff", "--check", "--no-renames", self.tree(old), self.tree(new))
        except GitFailed as error:
            return error.lines[0]
        return None

    def read(self, blob: str) -> bytes:
        return self.git("cat-file", "blob", blob)
