#!/usr/bin/env python3
"""Patch a verl for GradLoc and give it the package; check or reverse that. Needs Python 3.10 and nothing else.

Where the wheel is installed, `gradloc patch` is the same as apply_patch.py.

  apply_patch.py --installed   the verl that this Python would import; pip installs this checkout beside it
  apply_patch.py CHECKOUT      a checkout or release tree of verl; pip installs into the Python that runs this
    --vendor                   writes the package into that verl instead, as verl/_vendored/gradloc: where a verl is
                               shared, or there is no pip. An older copy there is replaced, stale files included
    --no-install               leaves the package as it is
    --check                    only says how things stand: the patch, and the package that this Python would use
    --reverse                  takes out the patch and the package below verl/_vendored; one that pip installed stays

The patch of a release of verl, a target, has three parts, applied as one: the new files in patches/files (the same for
every target), patches/VERSION/hooks.patch (calls of the package, through verl/utils/spikes.py) and
patches/VERSION/fixes.patch (repairs of verl's own faults). The target is
  - what --target names;
  - with --installed: the installed version;
  - of a checkout: the commit of HEAD; else the one that all files fit, patched or not; else the version that
    verl/version/version says. --force and --reverse do not look at HEAD.
A verl of no target is refused: another version, or a target with other changes. Of verl 0.9 the plugin takes whatever
fits it (docs/use/plugin.md).

What is checked before anything is written:
  - hooks and fixes have the SHA-256 beside them, and are git diffs with full blob hashes of files below verl/;
  - every file is, by blob hash, as released or as the patch makes it, and a real file: no link, pipe or device. This
    also holds for trees without git, and --force does not skip it. Files that only a patched verl has may be there
    already: pip and git leave them when they restore verl;
  - in a git checkout: HEAD is the target's commit (in its PIN; where that has none, content decides), and no tracked
    file has local changes. --force skips this. A tree in a subfolder of another repository has no HEAD of its own.
    --reverse looks at content only;
  - with --installed: the verl that this Python would import has the target's version.

All is written beside its place, then renamed, then read back. What fails or is interrupted puts every file back. After
a kill -9, the next run finishes, or takes out with --reverse, and removes what was left beside the files. A second run
at the same time is refused. New files and folders take owner and permissions from the folder they are in, whatever
the umask; byte code of the changed files is removed.

The package comes last: without one, or with one for other calls (the number HOOKS of both), a patched verl trains as
released. One that is installed is used before one in verl/_vendored.

To upgrade: run --reverse with the version of this project that applied the patch, then apply the new one. Also run
--reverse before reinstalling verl: pip leaves the files that only a patched verl has.

exit codes:
   0  done, or nothing to do (already applied; with --reverse: not applied); with --check: applicable
   2  wrong usage
   3  refused: wrong input or tree, nothing was written
   4  failed or interrupted while working; every file was put back, or the message says which were not
   5  verl is patched, but there is no package for it; the message says what to do
  10  --check: already applied, with a package for it
  11  --check: partly applied, or without a package for it
  12  --check: wrong base
"""

from __future__ import annotations

import sys

if sys.version_info < (3, 10):  # noqa: UP036 - said before anything newer is used
    sys.exit("apply_patch: this needs Python 3.10 or newer; run it with another interpreter")

import argparse
import contextlib
import dataclasses
import errno
import fcntl
import functools
import hashlib
import importlib.util
import io
import os
import re
import shlex
import shutil
import signal
import site
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent
IN_WHEEL = Path(__file__).name == "command.py"  # as gradloc/patch/command.py
NAME = "gradloc patch" if IN_WHEEL else "apply_patch"
SOURCE = HERE.parent if IN_WHEEL else HERE / "gradloc"
ONLY_IN_WHEEL = ("patch/", "plugin/conf/gradloc/")  # folders of the package that no checkout has
PATCHES = HERE / "patches"  # a folder for each target; a patch's checksum is beside it
FILES = PATCHES / "files"  # new files of every target
CALLS = "verl/utils/spikes.py"  # the new file through which the hooks find the package
PACKAGE = "verl/_vendored/gradloc"  # where --vendor puts it
PACKAGE_TYPES = (".py", ".css", ".html", ".js", ".yaml", ".typed")
MARKER = "verl/_vendored/__init__.py"  # so that verl's own packaging takes what is in that folder
LICENCE = b"# SPDX-FileCopyrightText: 2026 The GradLoc Authors\n# SPDX-License-Identifier: Apache-2.0\n"
STAGED, REPLACED = "verl/_vendored/.gradloc-new", "verl/_vendored/.gradloc-old"  # while that is changed
OLDER = "verl/utils/gradloc"  # a package that older versions of this patch have
PIN = "PIN"
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
NO_PACKAGE = 5
APPLIED, PARTLY, WRONG_BASE = 10, 11, 12


class Stop(Exception):
    """Ends the run with a sentence for the user and an exit code."""

    def __init__(self, message: str, code: int = 3):
        super().__init__(message)
        self.code = code


Hunk = tuple[int, list[bytes], int, list[bytes]]  # where which lines are, and what takes their place


@dataclasses.dataclass
class FilePatch:
    """The change of one file; a blob hash of None means that there is no such file."""

    path: str
    old: str | None
    new: str | None
    parts: list[list[Hunk]]  # of each part of the patch that changes the file, in their order

    def reversed(self) -> FilePatch:
        parts = [[hunk[2:] + hunk[:2] for hunk in hunks] for hunks in reversed(self.parts)]
        return FilePatch(self.path, self.new, self.old, parts)

    def then(self, later: FilePatch) -> FilePatch:
        """This change and another of the same file after it, as one."""
        if self.new != later.old or self.old == later.new:
            raise Stop(f"the parts of the patch do not belong together: they contradict each other in {self.path}")
        return FilePatch(self.path, self.old, later.new, self.parts + later.parts)

    def result(self, content: bytes | None) -> bytes | None:
        """Applies the hunks without any tolerance and proves the result by its hash."""
        lines = io.BytesIO(content or b"").readlines()
        for hunks in self.parts:
            for at, old, _, new in reversed(hunks):  # so that the numbers of those before it stay
                if lines[at : at + len(old)] != old:
                    raise Stop(f"the patch is inconsistent: a hunk of {self.path} does not fit that file")
                lines[at : at + len(old)] = new
        result = b"".join(lines) if lines or self.new else None
        if blob_hash(result) != self.new:
            raise Stop(f"the patch is inconsistent: its hunks do not produce the {self.path} that its hash says")
        return result


@dataclasses.dataclass(frozen=True)
class Target:
    """A release of verl that there is a patch for."""

    version: str
    commit: str | None  # None where it is not known
    hooks: Path
    fixes: Path

    @property
    def parts(self) -> list[Path]:
        """Its patches, in the order in which they are applied."""
        return [self.hooks, self.fixes]


def blob_hash(content: bytes | None) -> str | None:
    """The name git gives to this content."""
    if content is None:
        return None
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def check_path(path: str) -> None:
    parts = path.split("/")
    plain = re.fullmatch(r"verl/[\w.+@ /-]+", path)
    if not plain or any(part in ("", ".", "..") or part.lower() == ".git" for part in parts):
        raise Stop(f"the patch would write to {path!r}, but only plain files below verl/ may change; do not use it")


HEADER = re.compile(
    rb"diff --git a/(?P<path>.+) b/(?P=path)\nindex ([0-9a-f]{40})\.\.([0-9a-f]{40}) 100(?:644|755)\n"
    rb"--- a/(?P=path)\t?\n\+\+\+ b/(?P=path)\t?\n"
)
HUNK = re.compile(rb"@@ -(\d{1,9})(?:,(\d{1,9}))? \+(\d{1,9})(?:,(\d{1,9}))? @@(?: .*)?\n((?:[ +-].*\n(?:\\ .*\n)?)+)")


def parse_patch(data: bytes) -> list[FilePatch]:
    """The changes of a git diff with full blob hashes; it creates, removes and renames nothing."""
    found: dict[str, FilePatch] = {}
    at = 0
    while at < len(data):
        header = HEADER.match(data, at)
        if not header or header[2] == header[3]:
            raise damaged(data, at, "expected the change of a plain text file that stays, with full blob hashes")
        path, at = header["path"].decode("utf-8", "replace"), header.end()
        check_path(path)
        hunks = []
        while match := HUNK.match(data, at):
            lines = re.findall(rb"([ +-])(.*\n)(\\ .*\n)?", match[5])  # a backslash: the line before it has no end
            texts = [(tag, line[:-1] if unfinished else line) for tag, line, unfinished in lines]
            old, new = ([line for tag, line in texts if tag in (b" ", side)] for side in (b"-", b"+"))
            starts = [int(match[1]) - bool(old), int(match[3]) - bool(new)]
            if [len(old), len(new)] != [int(number or 1) for number in match.group(2, 4)]:
                raise damaged(data, at, f"a hunk of {path} does not have the number of lines that its header says")
            hunks.append((starts[0], old, starts[1], new))
            at = match.end()
        if not hunks or path in found:
            raise damaged(data, at, f"{path} has no hunk, or is changed twice")
        found[path] = FilePatch(path, header[2].decode(), header[3].decode(), [hunks])
    return list(found.values())


def damaged(data: bytes, at: int, why: str) -> Stop:
    number, line = data.count(b"\n", 0, at) + 1, data[at:].partition(b"\n")[0].decode("utf-8", "replace")
    return Stop(f"the patch is damaged at line {number} ({line[:80]!r}): {why}")


def one_line(error: BaseException | str) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


@functools.cache
def load_target(target: Target) -> list[FilePatch]:
    """A target's patch: one change for each file, whichever of the three parts it comes from."""
    changes = {change.path: change for change in new_files()}
    for part in target.parts:
        for change in load_part(part):
            earlier = changes.get(change.path)
            changes[change.path] = earlier.then(change) if earlier else change
    return list(changes.values())


@functools.cache
def new_files() -> list[FilePatch]:
    """The files that every target gets."""
    found = []
    for place in sorted({FILES / CALLS, *FILES.rglob("*.py"), *FILES.rglob("*.yaml")}):
        content, path = read_own(place), place.relative_to(FILES).as_posix()
        check_path(path)
        found.append(FilePatch(path, None, blob_hash(content), [[(0, [], 0, io.BytesIO(content).readlines())]]))
    return found


@functools.cache
def load_part(path: Path) -> list[FilePatch]:
    """The patch at this path, proven by the checksum beside it. One without a byte changes nothing."""
    sums = path.with_name(f"{path.name}.sha256")
    data, wanted = read_own(path), read_own(sums).decode("utf-8", "replace")
    if not re.fullmatch(rf"[0-9a-f]{{64}}  {re.escape(path.name)}\n", wanted):
        raise Stop(f"{sums} does not hold the SHA-256 of {path.name}; restore it from the project")
    if (actual := hashlib.sha256(data).hexdigest()) != wanted[:64]:
        raise Stop(f"{path} has SHA-256 {actual}, not the required {wanted[:64]}; restore it from the project")
    try:
        return parse_patch(data) if data else []
    except Stop as stop:
        raise Stop(f"{path}: {stop}", stop.code) from None


@functools.cache
def package_files() -> dict[str, bytes]:
    """The package as --vendor writes it: every file by its path below the package."""
    names = (place.relative_to(SOURCE).as_posix() for place in sorted(SOURCE.rglob("*")))
    wanted = (name for name in names if name.endswith(PACKAGE_TYPES) and "/." not in f"/{name}")
    found = {name: read_own(SOURCE / name) for name in wanted if not name.startswith(ONLY_IN_WHEEL)}
    for name in ("__init__.py", "version.py"):
        if name not in found:
            raise Stop(f"{SOURCE} has no {name}; restore it from the project")
    return found


def hooks_number(text: bytes) -> int:
    """Which calls the patch has, or the package is for; 0 where nothing says so, as in an older one."""
    match = re.search(rb"^HOOKS = (\d+)$", text, re.M)
    return int(match[1]) if match else 0


def read_file(place: Path) -> bytes:
    """A file's content. What would be waited for, as a pipe, is refused."""
    if not stat.S_ISREG(place.stat().st_mode):
        raise Stop(f"{place} is not a regular file; move it away")
    return place.read_bytes()


def read_own(path: Path) -> bytes:
    """A file of the project."""
    try:
        return read_file(path)
    except OSError as error:
        raise Stop(f"{path} cannot be read ({error.strerror}); restore it from the project") from None


def read_targets() -> list[Target]:
    """All targets, the oldest release first."""
    targets = [read_pin(pin) for pin in PATCHES.glob(f"*/{PIN}")]
    if not targets:
        raise Stop(f"{PATCHES} has no file VERSION/{PIN}; restore it from the project")
    return sorted(targets, key=lambda target: [int(number) for number in re.findall(r"\d+", target.version)])


def read_pin(path: Path) -> Target:
    text = read_own(path).decode("utf-8", "replace")
    version, commit = path.parent.name, r"(?:COMMIT=([0-9a-f]{40})\n)?"
    wanted = rf"VERSION={re.escape(version)}\n{commit}WHEEL_SHA256=[0-9a-f]{{64}}\n(?:REQUIREMENTS=[0-9.]+\n)?"
    if not (match := re.fullmatch(wanted, text)):
        raise Stop(
            f"{path} must hold the lines VERSION={version}, COMMIT=<40 hex digits> where that is known, "
            "WHEEL_SHA256=<64 hex digits> and REQUIREMENTS=VERSION where it shares those; restore it"
        )
    return Target(version, match[1], path.with_name("hooks.patch"), path.with_name("fixes.patch"))


def narrowed(targets: list[Target], version: str | None) -> list[Target]:
    """The target of this version only, where one is named."""
    found = [target for target in targets if version in (None, target.version)]
    if not found:
        raise Stop(f"there is no patch for verl {version}; --target takes {versions(targets, 'or')}")
    return found


def versions(targets: list[Target], last: str = "and") -> str:
    *others, end = [target.version for target in targets]
    return f"{', '.join(others)} {last} {end}" if others else end


def located(name: str) -> Path | None:
    """The folder of the package that this Python would import, which is not imported."""
    before = list(sys.path)
    if Path(sys.path[0]).resolve() == HERE:
        del sys.path[0]  # Python put this script's own folder there
    if site.ENABLE_USER_SITE and (own := site.getusersitepackages()) not in sys.path:
        sys.path.append(own)  # which pip may just have made
    importlib.invalidate_caches()
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        spec = None
    finally:
        sys.path[:] = before
    if spec is None or not spec.origin or Path(spec.origin).name != "__init__.py":
        return None
    return Path(spec.origin).absolute().parent


def find_tree(args: argparse.Namespace) -> Path:
    """The folder of the verl that this Python would import, or of the checkout."""
    tree: Path | None = args.checkout
    if args.installed:
        if (package := located("verl")) is None:
            why = f"{sys.executable} has no verl installed"
            raise Stop(f"{why}; run this with the Python that trains, or give a CHECKOUT")
        here, tree = Path.cwd() / "verl", package.parent
        if (here / "__init__.py").is_file() and here.resolve() != package.resolve():
            raise Stop(f"Python started here would import {here}, not {package}; go elsewhere, or give that CHECKOUT")
    if tree is None or not (tree / "verl" / "__init__.py").is_file():
        raise Stop(f"{tree} has no verl/__init__.py; give the top of a verl checkout")
    return tree.resolve()


def read_target(tree: Path, path: str) -> bytes | None:
    """Reads a file of the tree; None if it does not exist. Symbolic links are refused: they may lead anywhere."""
    place = tree
    try:
        for part in path.split("/"):
            place /= part
            if place.is_symlink():
                raise Stop(f"{place} is a symbolic link; the patch needs real files below {tree}")
            wanted, fits = ("a file", place.is_file()) if place == tree / path else ("a folder", place.is_dir())
            if place.exists() and not fits:
                raise Stop(f"{place} exists and is not {wanted}; move it away")
        return place.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise Stop(f"{place} cannot be read ({error.strerror})") from None


@dataclasses.dataclass
class Situation:
    """Where the patch's files stand, by content."""

    base: list[str]
    patched: list[str]
    other: list[str]
    created: set[str]  # those that only a patched verl has

    @property
    def left_behind(self) -> bool:
        """Whether verl's own files are as in the base, but some are there that only a patched verl has."""
        return bool(self.patched or self.other) and self.created.issuperset(self.patched + self.other)


def survey(tree: Path, patches: list[FilePatch]) -> Situation:
    found = Situation([], [], [], {patch.path for patch in patches if patch.old is None})
    for patch in patches:
        value = blob_hash(read_target(tree, patch.path))
        {patch.old: found.base, patch.new: found.patched}.get(value, found.other).append(patch.path)
    return found


def listing(paths: list[str]) -> str:
    return ", ".join(paths[:5]) + (f" and {len(paths) - 5} more" if len(paths) > 5 else "")


def clean_up(tree: Path, paths: list[str]) -> str:
    """The command that removes these files."""
    older = [str(tree / OLDER)] if older_files(tree) else []
    return shlex.join(["rm", "-r", *(str(tree / path) for path in paths), *older])


def release_of(tree: Path) -> str | None:
    """What a verl says its version is."""
    try:
        return read_file(tree / "verl/version/version").decode("utf-8", "replace").strip()
    except OSError:
        return None


def is_release(release: str | None, version: str) -> bool:
    # A commit may have .dev where the wheel made of it has the release.
    return release is not None and (release == version or release.startswith(f"{version}.dev"))


def choose(args: argparse.Namespace, tree: Path, targets: list[Target]) -> tuple[Target, Situation]:
    """The target that the tree is of, and how its files stand.

    Raises:
        Stop: if it is of none, or of several by content and of none by its version, or of another than is named.
    """
    if args.target:
        (named,) = narrowed(targets, args.target)
        situation = survey(tree, load_target(named))
        if (situation.other or args.installed) and (seen := find_target(args, tree, targets)[0]) != named:
            raise Stop(f"the verl in {tree} is {seen.version}, not {named.version}; leave --target out", WRONG_BASE)
        return named, situation
    return find_target(args, tree, targets)


def find_target(args: argparse.Namespace, tree: Path, targets: list[Target]) -> tuple[Target, Situation]:
    release = release_of(tree)
    of_release = [target for target in targets if is_release(release, target.version)]
    # For an installed verl, only the patch that is needed has to be whole.
    found = [(target, survey(tree, load_target(target))) for target in args.installed and of_release or targets]
    if len(found) == 1:
        return found[0]
    if not (args.installed or args.force or args.reverse) and os.path.lexists(tree / ".git"):
        with contextlib.suppress(Stop):  # check_head says what is wrong with it
            head = git(tree, "rev-parse", "HEAD^{commit}").strip()
            if at_head := [entry for entry in found if entry[0].commit == head]:
                return at_head[0]
    fitting = [] if args.installed else [entry for entry in found if not entry[1].other]
    if by_release := [entry for entry in fitting or found if entry[0] in of_release]:
        return by_release[0]
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        fits = versions([target for target, _ in fitting])
        raise Stop(f"{tree} fits the patches for {fits}; say with --target which verl it is", WRONG_BASE)
    raise no_target(tree, [at for _, at in found])


def no_target(tree: Path, found: list[Situation]) -> Stop:
    """Says which verl is there and which ones there are patches for; also how to remove what a patched one left."""
    if left := sorted({path for at in found for path in at.patched + at.other if path in at.created}):
        command = clean_up(tree, left)
        say(f"a patched verl left files in {tree}; if they hold no work of yours, delete them: {command}")
    return not_taken(tree, [])


def not_taken(tree: Path, changed: list[str]) -> Stop:
    """One sentence of at most 200 characters, for a verl that is no target, or has changes where its patch has some."""
    found = (release_of(tree) or "(no version)")[:12]
    if changed:
        file = changed[0] if len(changed[0]) <= 36 else f"…{changed[0][-35:]}"
        found += f" with changes in {file}" + (f" and {len(changed) - 1} more" if changed[1:] else "")
    return Stop(
        f"found verl {found}; the patch takes {versions(read_targets())} as released, and 0.9 has the plugin "
        "(docs/use/plugin.md)",
        WRONG_BASE,
    )


def older_files(tree: Path) -> list[str]:
    """The package that older versions of this patch have in verl's own folder."""
    files = (file for file in (tree / OLDER).rglob("*") if file.suffix != ".pyc" and not file.is_dir())
    return sorted(file.relative_to(tree).as_posix() for file in files)


def check_content(tree: Path, found: Situation) -> None:
    """Refuses a tree in which a file is at neither side of the patch, and says how to get out."""
    if found.left_behind and not found.other:
        say(f"{tree} has files that a patched verl left there, as this patch makes them: {listing(found.patched)}")
    elif found.left_behind:
        raise Stop(
            f"{tree} is as released, but a patched verl left {listing(found.other)} there, which are not as this patch "
            f"makes them; if they hold no work of yours, delete them and run again: {clean_up(tree, found.other)}",
            PARTLY,
        )
    elif found.other and (older := older_files(tree)):
        raise Stop(
            f"{tree} has an older version of this patch ({older[0]}); take that out with the checkout that applied it "
            f"(apply_patch.py --reverse there), or reinstall verl and delete {tree / OLDER}; then run again",
            PARTLY,
        )
    elif found.other and (found.patched or not found.created.isdisjoint(found.other)):
        raise Stop(
            f"{tree} is patched, but not as by this patch ({listing(found.other)}); if another version of the patch "
            "is in it, take that out with the project it came from (apply_patch.py --reverse); if you changed these "
            "files, restore all of verl from git or by reinstalling it; then run again",
            PARTLY,
        )
    elif found.other:
        raise not_taken(tree, found.other)


def git_environment() -> dict[str, str]:
    """The environment without what would change git's answers: a caller's GIT_DIR (as in a git hook) and the like.

    The user's settings count: they may say that a tree of another account is safe.
    """
    kept = {key: value for key, value in os.environ.items() if not re.match("GIT_(?!EXEC_PATH$|CONFIG_)", key)}
    return kept | {"LC_ALL": "C", "GIT_OPTIONAL_LOCKS": "0"}


def git(tree: Path, *arguments: str) -> str:
    command = ["git", "-C", str(tree), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, env=git_environment(), stdin=subprocess.DEVNULL)
    except OSError as error:
        raise Stop(f"git could not be run ({error.strerror})") from None
    if done.returncode:
        why = one_line(done.stderr.decode("utf-8", "replace").strip().partition("\n")[0] or f"exit {done.returncode}")
        raise Stop(f"git cannot tell the HEAD of {tree} ({why}); fix that, or pass --force to decide by content alone")
    return done.stdout.decode("utf-8", "surrogateescape")


def check_checkout(tree: Path, target: Target, told: bool) -> None:
    """Refuses a checkout at another commit, where that is known, or with changes of files that the patch leaves alone.

    With `told`, it says where the tree lies in another repository, which an installed verl may well do.
    """
    if not os.path.lexists(tree / ".git"):
        outer = next((parent for parent in tree.parents if os.path.lexists(parent / ".git")), None)
        if outer and told:
            say(f"{tree} is a subfolder of the repository {outer}, whose HEAD says nothing here; content alone decides")
        return
    if not shutil.which("git"):
        raise Stop(f"{tree} is a git checkout but git is not on PATH; install git, or pass --force to skip this check")
    top, _, head = git(tree, "rev-parse", "--show-toplevel", "HEAD^{commit}").strip().rpartition("\n")
    if Path(top).resolve() != tree:
        raise Stop(f"{tree}/.git is not a repository of its own (git finds {top} instead); repair or remove it")
    if target.commit not in (None, head):
        why = f"HEAD of {tree} is {head}, not the base commit {target.commit}"
        raise Stop(f"{why}; check that out, or pass --force", WRONG_BASE)
    exclude = [f":(exclude,literal){patch.path}" for patch in load_target(target)]
    dirty = git(tree, "status", "--porcelain", "-z", "--untracked-files=no", "--", ".", *exclude)
    if dirty:
        raise Stop(f"{tree} has local changes ({dirty.split(chr(0))[0][3:]}); commit or stash them, or pass --force")


@contextlib.contextmanager
def locked(folder: Path, busy: str) -> Iterator[None]:
    """Holds a folder for this run, without a file; while another one does, `busy` is said."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            os.close(handle)
            raise Stop(busy) from None
        say(f"{folder} cannot be locked ({error.strerror}); see that no other run changes it")
    try:
        yield
    finally:
        os.close(handle)


@dataclasses.dataclass
class Edit:
    """What becomes of a file; None is no file."""

    path: str
    old: bytes | None
    new: bytes | None


def temporary(place: Path) -> Path:
    """Where a file is written before it takes its place."""
    return place.with_name(f".{place.name}.gradloc")


def stage(tree: Path, path: str, old: bytes | None, new: bytes) -> None:
    """Writes what is to take the place of a file beside it."""
    place = tree / path
    make_folders(place.parent)
    like = (place.parent if old is None else place).stat()
    with open(os.open(temporary(place), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(new)
        take_place(file.fileno(), like.st_mode & 0o666 if old is None else like.st_mode, like)
        file.flush()
        os.fsync(file.fileno())


def stage_package(tree: Path) -> None:
    for name, content in package_files().items():
        stage(tree, f"{STAGED}/{name}", None, content)
        os.replace(temporary(tree / STAGED / name), tree / STAGED / name)
    if not is_package(tree / STAGED):
        raise Stop(f"{tree / STAGED} does not read back as it was written")


def is_package(folder: Path) -> bool:
    """Whether a folder has the package of this checkout, and nothing else but byte code."""
    files = (file for file in folder.rglob("*") if file.suffix != ".pyc" and not file.is_dir())
    return is_installed(folder) and {file.relative_to(folder).as_posix() for file in files} == package_files().keys()


def is_installed(folder: Path | None) -> bool:
    """Whether a folder has the package of this checkout; pip may have put other files there, too."""
    places = {folder / name: content for name, content in package_files().items()} if folder else {}
    return bool(places) and all(place.is_file() and read_file(place) == content for place, content in places.items())


def take_place(target: int | Path, mode: int, like: os.stat_result) -> None:
    """Gives a new file or folder its mode and, where allowed, the owner of another."""
    if (like.st_uid, like.st_gid) != (os.geteuid(), os.getegid()):
        with contextlib.suppress(OSError):
            os.chown(target, like.st_uid, like.st_gid)
    os.chmod(target, mode & 0o7777)


def make_folders(folder: Path) -> None:
    """Makes missing folders, each with owner and permissions of the one it is in."""
    if not folder.exists():
        make_folders(folder.parent)
        folder.mkdir()
        like = folder.parent.stat()
        take_place(folder, like.st_mode, like)


def drop_byte_code(place: Path) -> None:
    """Removes what Python compiled from a file; surely where it would be run without a look at the source (PEP 552)."""
    for file in (place.parent / "__pycache__").glob(f"{place.stem}.*.pyc"):
        try:
            file.unlink(missing_ok=True)
        except OSError:
            if read_file(file)[4:8] == b"\1\0\0\0":
                raise


def left_over(tree: Path, paths: list[str]) -> list[str]:
    """What a run that was killed has left beside the files of these paths."""
    beside = [str(temporary(Path(path))) for path in [*paths, MARKER]]
    return [path for path in [*beside, STAGED, REPLACED] if os.path.lexists(tree / path)]


def tidy(tree: Path, paths: list[str]) -> None:
    """Removes what is left over, and empty folders; a package that was about to be replaced is put back."""
    if (tree / REPLACED).exists() and not (tree / PACKAGE).exists():
        os.replace(tree / REPLACED, tree / PACKAGE)
    for path in left_over(tree, paths):
        if path in (STAGED, REPLACED):
            shutil.rmtree(tree / path)
        elif read_target(tree, path) is not None:
            (tree / path).unlink()
    for path in [*paths, MARKER]:
        if not os.path.lexists(tree / path):
            prune(tree, path)


def change_files(tree: Path, edits: list[Edit], package: str | None) -> None:
    """Changes all files or none, and writes or removes the package below verl/_vendored.

    First all is written beside its place, then renamed, then read back. The package comes last, in one step.
    """
    paths = [edit.path for edit in edits]
    undo = contextlib.ExitStack()
    undo.callback(tidy, tree, paths)
    try:
        for edit in edits:
            if edit.new is not None:
                stage(tree, edit.path, edit.old, edit.new)
        if package == "written":
            stage_package(tree)
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # what is left takes moments: it is finished, or put back
        for edit in edits:
            undo.callback(put_back, tree, edit)
            replace(tree / edit.path, gone=edit.new is None)
        if wrong := [edit.path for edit in edits if read_target(tree, edit.path) != edit.new]:
            raise Stop(f"{listing(wrong)} does not read back as it was written")
        if package == "removed":
            os.replace(tree / PACKAGE, tree / STAGED)
        elif package == "written":
            if (tree / PACKAGE).exists():
                os.replace(tree / PACKAGE, tree / REPLACED)
            os.replace(tree / STAGED, tree / PACKAGE)
    except BaseException as error:
        with contextlib.suppress(OSError, Stop):  # what it leaves is looked for next
            undo.close()
        if not isinstance(error, Exception):
            raise
        changed = [edit.path for edit in edits if read_target(tree, edit.path) != edit.old]
        how = f"{listing(changed)} could not be put back: run again to finish, or with --reverse" if changed else ""
        raise Stop(f"failed while writing ({one_line(error)}); {how or 'every file was put back'}", 4) from None
    try:
        tidy(tree, paths)
    except OSError as error:
        why = f"what was beside them could not be removed ({one_line(error)}); run again"
        raise Stop(f"all files were changed, but {why}", 4) from None


def replace(place: Path, gone: bool) -> None:
    """Gives a file its place, or removes the one that is there; and what Python compiled from that."""
    drop_byte_code(place)  # first: were it killed in between, it would never go
    if gone:
        place.unlink()
    else:
        os.replace(temporary(place), place)
    drop_byte_code(place)


def put_back(tree: Path, edit: Edit) -> None:
    now, place = read_target(tree, edit.path), tree / edit.path
    if now not in (edit.old, edit.new):
        raise Stop(f"something else changed {edit.path} meanwhile")
    if now != edit.old:
        if edit.old is not None:
            stage(tree, edit.path, edit.new, edit.old)
        replace(place, gone=edit.old is None)


def prune(tree: Path, path: str) -> None:
    """Removes folders that are empty without this file."""
    place = tree / path
    for folder in [place.parent / "__pycache__", *place.parents]:
        if folder == tree / "verl" or folder.is_dir() and any(folder.iterdir()):
            return
        if folder.is_dir():
            folder.rmdir()


def say(message: str, name: str = NAME) -> None:
    with contextlib.suppress(OSError):  # a closed pipe must not turn success into failure
        print(f"{name}: {message}", flush=True)


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=NAME if IN_WHEEL else f"{NAME}.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    place = parser.add_mutually_exclusive_group(required=True)
    place.add_argument("checkout", metavar="CHECKOUT", nargs="?", type=Path, help="see above")
    place.add_argument("--installed", action="store_true", help="see above")
    parser.add_argument("--target", metavar="VERSION", help="the patch for this verl")
    for group in (("--vendor", "--no-install"), ("--check", "--reverse")):
        options = parser.add_mutually_exclusive_group()
        for option in group:
            options.add_argument(option, action="store_true", help="see above")
    parser.add_argument("--force", action="store_true", help="skip the check of git HEAD and clean tree (only that)")
    args = parser.parse_args(arguments)
    if "" in (sys.argv[1:] if arguments is None else arguments):
        parser.error("a value is empty")
    if args.vendor and (args.check or args.reverse) or args.no_install and args.reverse:
        parser.error("--vendor and --no-install say what to apply; of others, --check takes --no-install: verl alone")
    return args


def inspect(args: argparse.Namespace, tree: Path, targets: list[Target]) -> tuple[Target, Situation]:
    """Finds the target. Raises Stop unless its patch can be applied (or reversed), or already is."""
    vendored(tree)  # refuses links and pipes
    target, found = choose(args, tree, targets)
    unknown = found.created.issuperset(found.patched) and not found.created.issuperset(found.other)
    if (args.installed or unknown) and not is_release(release_of(tree), target.version):
        raise no_target(tree, [found])
    if found.other or (found.patched if args.reverse else found.base):
        # With other files patched, that is what there is to say.
        if not args.reverse and not args.force and (found.left_behind or not found.patched):
            check_checkout(tree, target, told=not args.installed)
        check_content(tree, found)
    return target, found


def vendored(tree: Path) -> Path | None:
    """The package below verl/_vendored. Links and pipes there are refused."""
    for path in (MARKER, f"{PACKAGE}/__init__.py"):
        read_target(tree, path)
    for place in (tree / PACKAGE).rglob("*"):
        if place.is_symlink() or not (place.is_dir() or place.is_file()):
            raise Stop(f"{place} is a link or no file; move it away")
    return tree / PACKAGE if (tree / PACKAGE).is_dir() else None


def package_trouble(tree: Path) -> str | None:
    """Why a patched verl would not use a package; None where it would."""
    used = located("gradloc") or vendored(tree)
    if used is None:
        return f"{sys.executable} has no package gradloc"
    wanted, version = hooks_number(read_own(FILES / CALLS)), used / "version.py"
    found = hooks_number(read_file(version)) if version.exists() else 0
    return None if found == wanted else f"the package in {used} is for hooks {found}, not {wanted}"


def pip_install() -> list[str]:
    bare = ["--no-deps"] if located("rich") else []
    return [sys.executable, "-m", "pip", "install", *bare, "gradloc-verl" if IN_WHEEL else str(HERE)]


def install() -> str | None:
    """Installs this checkout; returns why that failed."""
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        done = subprocess.run(pip_install(), stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace")
    except KeyboardInterrupt:
        return "pip was interrupted"
    except OSError as error:
        return f"pip could not be run ({error.strerror})"
    finally:
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    if not done.returncode:
        found = located("gradloc")
        return None if is_installed(found) else f"pip installed it, but {sys.executable} imports {found or 'none'}"
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()] or [f"exit code {done.returncode}"]
    return f"pip failed ({one_line(next((line for line in lines if line.startswith('ERROR')), lines[-1]))})"


def check(args: argparse.Namespace, tree: Path, targets: list[Target]) -> int:
    target, found = inspect(args, tree, targets)
    patches = load_target(target)
    again = "run again without --check to finish, or with --reverse to take it out"
    if left := left_over(tree, [patch.path for patch in patches]):
        raise Stop(f"an interrupted run left {listing(left)} in {tree}; {again}", PARTLY)
    if found.patched and found.base and not found.left_behind:
        raise Stop(f"{tree} is partly patched (as released: {listing(found.base)}); {again}", PARTLY)
    if not found.base:
        if not args.no_install and (why := package_trouble(tree)):
            raise Stop(f"{tree} is patched, but {why}; run this without --check", PARTLY)
        say(f"already applied to {tree} (verl {target.version})")
        return APPLIED
    for patch in patches:
        if patch.path in found.base:
            patch.result(read_target(tree, patch.path))
    say(f"applicable to {tree} (verl {target.version}, {len(found.base)} files)")
    return 0


def change(args: argparse.Namespace, tree: Path, targets: list[Target]) -> int:
    with locked(tree / "verl", f"another run is patching {tree}; wait until it is done"):
        target, found = inspect(args, tree, targets)
        tidy(tree, [patch.path for patch in load_target(target)])
        pending = found.patched if args.reverse else found.base
        edits = []
        for patch in (patch for patch in load_target(target) if patch.path in pending):
            old = read_target(tree, patch.path)
            edits.append(Edit(patch.path, old, (patch.reversed() if args.reverse else patch).result(old)))
        package, marked = vendored(tree), read_target(tree, MARKER)
        todo = "removed" if args.reverse and package else None
        if args.vendor and not is_package(tree / PACKAGE):
            todo = "written"
        if args.reverse and marked == LICENCE or args.vendor and marked is None:
            edits.append(Edit(MARKER, marked, None if args.reverse else LICENCE))
        if edits or todo:
            change_files(tree, edits, todo)
        if pending:
            done = "reversed in" if args.reverse else "applied to"
            say(f"{done} {tree} (verl {target.version}, {len(pending)} files, all verified)")
        else:
            say(f"not applied to {tree}; nothing to reverse" if args.reverse else f"already applied to {tree}")
    if not args.reverse:
        return settle_package(args, tree, todo)
    if todo:
        say(f"the package is removed from {tree / PACKAGE}")
    if installed := located("gradloc"):
        say(f"the package in {installed} stays; to remove it: {sys.executable} -m pip uninstall gradloc-verl")
    return 0


def settle_package(args: argparse.Namespace, tree: Path, todo: str | None) -> int:
    """Says where the package is, after installing it where that is asked."""
    how, failed = "written to" if todo else "already in", None
    if not (args.vendor or args.no_install or is_installed(located("gradloc"))):
        how, failed = "installed in", install()
    installed, inside, trouble = located("gradloc"), vendored(tree), package_trouble(tree)
    if failed or trouble:
        until = "verl trains as released" if trouble else f"the package in {installed or inside} is used"
        sentence = f"verl is patched, but {failed or trouble}; until this is fixed, {until}: run "
        sentence += shlex.join(pip_install()) + ("" if installed or args.vendor else ", or this with --vendor")
        if not args.no_install:
            raise Stop(sentence, NO_PACKAGE)
        say(sentence)
    else:
        say(f"the package is {how} {inside if args.vendor else installed or inside}")
    if installed and inside:
        say(f"{inside} is not used while {sys.executable} has the package in {installed}")
    return 0


def main(arguments: list[str] | None = None) -> int:
    args = parse_arguments(arguments)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    if isinstance(sys.stdout, io.TextIOWrapper):  # with its descriptor closed (>&-), there is none
        sys.stdout.reconfigure(errors="backslashreplace")
    for number in SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, interrupt)
    try:
        return (check if args.check else change)(args, find_tree(args), read_targets())
    except Stop as stop:
        print(f"{NAME}: {stop}", file=sys.stderr)
        if args.check or stop.code not in (PARTLY, WRONG_BASE):
            return stop.code
        return 3
    except OSError as error:
        print(f"{NAME}: failed ({one_line(error)}); solve that and run again", file=sys.stderr)
        return 4
    except KeyboardInterrupt:
        print(f"{NAME}: interrupted; nothing was changed", file=sys.stderr)
        return 4


if __name__ == "__main__":
    sys.exit(main())
