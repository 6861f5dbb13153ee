#!/usr/bin/env python3
"""Apply, check or reverse the GradLoc patch on a verl source tree. Needs Python 3.10 and nothing else.

For each supported release of verl, a target, the patch has three parts, which are applied as one: the new files in
patches/files (the same for every release), patches/VERSION/hooks.patch (calls of the package gradloc, through one of
them) and patches/VERSION/fixes.patch (repairs of verl's own faults). Which target is taken:
  - what --target names;
  - with --installed: the one for the installed version;
  - with --repo: the one for the commit of HEAD; else the one that all the files it changes fit, patched or not; else
    the one for the version that verl/version/version says. --force and --reverse do not look at HEAD.
A verl of no target is refused: another version, or a target with other changes. Of verl 0.9 the plugin takes whatever
fits it (docs/use/plugin.md).

What is checked before anything is written:
  - each part has the required SHA-256, is a plain git diff with full blob hashes and changes files below verl/ only;
  - every file it changes has exactly the content the patch was made for, by blob hash. This also holds for trees
    without git, and --force does not skip it. Files that only a patched verl has may be there already (pip and git
    leave them when they restore verl), if they are exactly as the patch makes them;
  - in a git checkout: HEAD is the target's commit (in its PIN; where that has none, content decides), and no tracked
    file has local changes. --force skips this. A tree in a subfolder of another repository has no HEAD of its own and
    is decided by content alone. --reverse looks at content only;
  - with --installed: the verl that this Python would import has the target's version.

Then all files are replaced through a journal in verl/.gradloc_patch and read back. Whatever fails or interrupts,
every file is put back, after a kill -9 by the next run. A second run at the same time is refused. New files and
folders take owner and permissions from the folder they are in, whatever the umask; byte code of the changed files is
removed.

To upgrade: run --reverse with the version of this project that applied the patch, then apply the new one. Also run
--reverse before reinstalling verl: pip leaves the files that only a patched verl has.

exit codes:
   0  done, or nothing to do (already applied; with --reverse: not applied); with --check: applicable
   2  wrong usage
   3  refused: wrong input or tree, nothing was written
   4  failed or interrupted while working, every file was put back (the message says so if that failed too)
  10  --check: already applied
  11  --check: partly applied
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
import http.client
import importlib.util
import io
import ipaddress
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent
PATCHES = HERE / "patches"  # a folder for each target; a patch's checksum is beside it
FILES = PATCHES / "files"  # new files of every target
VENDORED = "verl/_vendored"  # where --vendor puts the package
PIN = "PIN"
STATE = "verl/.gradloc_patch"
TIME_LIMIT = 60  # seconds for one download, everything included
SIZE_LIMIT = 16 * 2**20
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
APPLIED, PARTLY, WRONG_BASE = 10, 11, 12


class Stop(Exception):
    """Ends the run with a sentence for the user and an exit code."""

    def __init__(self, message: str, code: int = 3):
        super().__init__(message)
        self.code = code


@dataclasses.dataclass
class Hunk:
    old_start: int
    old: list[bytes]
    new: list[bytes]
    new_start: int

    def reversed(self) -> Hunk:
        return Hunk(self.new_start, self.new, self.old, self.old_start)


@dataclasses.dataclass
class FilePatch:
    """The change of one file; a blob hash of None means that there is no such file."""

    path: str
    old: str | None
    new: str | None
    mode: int  # of a created file; otherwise the file keeps the mode it has
    parts: list[list[Hunk]]  # the hunks of each part of the patch that changes the file, in their order

    def reversed(self) -> FilePatch:
        parts = [[hunk.reversed() for hunk in hunks] for hunks in reversed(self.parts)]
        return FilePatch(self.path, self.new, self.old, self.mode, parts)

    def then(self, later: FilePatch) -> FilePatch:
        """This change and another of the same file after it, as one."""
        if self.new != later.old or self.old == later.new:
            raise Stop(f"the parts of the patch do not belong together: they contradict each other in {self.path}")
        return FilePatch(self.path, self.old, later.new, self.mode or later.mode, self.parts + later.parts)

    def result(self, content: bytes | None) -> bytes | None:
        """Applies the hunks without any tolerance and proves the result by its hash."""
        data = content or b""
        for hunks in self.parts:
            data = self._changed(hunks, data)
        result = None if self.new is None and not data else data
        if blob_hash(result) != self.new:
            raise Stop(f"the patch is inconsistent: its hunks do not produce the {self.path} that its hash says")
        return result

    def _changed(self, hunks: list[Hunk], data: bytes) -> bytes:
        lines = io.BytesIO(data).readlines()
        done: list[bytes] = []
        at = 0
        for hunk in hunks:
            start = hunk.old_start - 1 if hunk.old else hunk.old_start
            if start < at or lines[start : start + len(hunk.old)] != hunk.old:
                raise Stop(f"the patch is inconsistent: a hunk of {self.path} does not fit that file")
            done += lines[at:start] + hunk.new
            at = start + len(hunk.old)
        return b"".join(done + lines[at:])


@dataclasses.dataclass(frozen=True)
class Target:
    """A release of verl that there is a patch for."""

    folder: Path
    version: str
    commit: str | None  # None where it is not known

    @property
    def hooks(self) -> Path:
        return self.folder / "hooks.patch"

    @property
    def fixes(self) -> Path:
        return self.folder / "fixes.patch"

    @property
    def parts(self) -> list[Path]:
        """Its patches, in the order in which they are applied."""
        return [self.hooks, self.fixes]


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A target and what its patch, or the patch given instead, does to it."""

    target: Target
    patches: list[FilePatch]

    @property
    def name(self) -> str:
        return f"verl {self.target.version}"


def blob_hash(content: bytes | None) -> str | None:
    """The name git gives to this content."""
    if content is None:
        return None
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def check_path(path: str) -> None:
    parts = path.split("/")
    if (
        parts[0] != "verl"
        or len(parts) < 2
        or any(part in ("", ".", "..") or part.lower() == ".git" for part in parts)
        or not re.fullmatch(r"[\w.+@ /-]+", path)
        or f"{path}/".startswith(f"{STATE}/")
    ):
        raise Stop(f"the patch would write to {path!r}, but only plain files below verl/ may change; do not use it")


def parse_patch(data: bytes) -> list[FilePatch]:
    if not data.strip():
        raise Stop("the patch is empty; get it again, or write it with make_patch.sh")
    lines = data.split(b"\n")
    if lines[0].endswith(b"\r"):
        raise Stop("the patch has CRLF line endings, so something converted it; download it again as a binary file")
    if not data.startswith(b"diff --git "):
        raise Stop("the patch does not start with 'diff --git' (it is no git diff, or has text or a BOM before it)")
    if lines.pop():
        raise Stop("the patch ends in the middle of a line, so it is cut off; get it again")
    patches = []
    at = 0
    while at < len(lines):
        patch, at = parse_file(lines, at)
        patches.append(patch)
    refuse_twice([patch.path for patch in patches])
    return patches


def refuse_twice(paths: list[str]) -> None:
    for path in paths:
        if paths.count(path) > 1 or any(other.startswith(f"{path}/") for other in paths):
            raise Stop(f"the patch is damaged: it changes {path} twice")


def damaged(at: int, why: str) -> Stop:
    return Stop(f"the patch is damaged at line {at + 1}: {why}")


def text_at(lines: list[bytes], at: int) -> str:
    return lines[at].decode("utf-8", "replace") if at < len(lines) else ""


def parse_file(lines: list[bytes], at: int) -> tuple[FilePatch, int]:
    """Reads the section of one file; returns it and the number of the line after it."""
    names = text_at(lines, at).removeprefix("diff --git ")
    path = names[2 : (len(names) - 1) // 2]
    if text_at(lines, at) != f"diff --git a/{path} b/{path}":
        raise damaged(at, "expected 'diff --git' with the same plain path twice (renames are not supported)")
    check_path(path)
    at += 1

    created = deleted = hashes = None
    while at < len(lines) and not lines[at].startswith((b"diff --git ", b"--- ")):
        line = text_at(lines, at)
        if match := re.fullmatch(r"new file mode (100644|100755)", line):
            created = match[1]
        elif match := re.fullmatch(r"deleted file mode (100644|100755)", line):
            deleted = match[1]
        elif match := re.fullmatch(r"index ([0-9a-f]{40})\.\.([0-9a-f]{40})( 100644| 100755)?", line):
            hashes = match[1], match[2]
        elif re.match(r"rename |copy |similarity |GIT binary|Binary files |old mode |new mode ", line):
            raise damaged(at, f"{path}: renames, mode changes and binary files are not supported")
        else:
            raise damaged(at, f"unexpected {line!r} (symbolic links and abbreviated hashes are not supported)")
        at += 1
    if hashes is None:
        raise damaged(at, f"{path} has no full blob hashes; write it with make_patch.sh or git diff --full-index")
    old, new = (None if set(value) == {"0"} else value for value in hashes)
    if (old is None) != (created is not None) or (new is None) != (deleted is not None) or old == new:
        raise damaged(at, f"the hashes of {path} do not fit the kind of its change")

    hunks = []
    if at < len(lines) and lines[at].startswith(b"--- "):
        tail = "\t" if " " in path else ""
        before = "--- /dev/null" if old is None else f"--- a/{path}{tail}"
        after = "+++ /dev/null" if new is None else f"+++ b/{path}{tail}"
        if (text_at(lines, at), text_at(lines, at + 1)) != (before, after):
            raise damaged(at, f"the lines --- and +++ do not name {path}")
        at += 2
        while at < len(lines) and not lines[at].startswith(b"diff --git "):
            hunk, at = parse_hunk(lines, at, path)
            hunks.append(hunk)
    return FilePatch(path, old, new, int(created or deleted or "0", 8) & 0o777, [hunks]), at


def parse_hunk(lines: list[bytes], at: int, path: str) -> tuple[Hunk, int]:
    header = text_at(lines, at)
    match = re.fullmatch(r"@@ -(\d{1,9})(?:,(\d{1,9}))? \+(\d{1,9})(?:,(\d{1,9}))? @@(?: .*)?", header)
    if not match:
        raise damaged(at, f"expected a hunk of {path}, not {header!r}")
    left = [int(match[2] or 1), int(match[4] or 1)]
    old: list[bytes] = []
    new: list[bytes] = []
    sides: list[list[bytes]] = []
    at += 1
    while at < len(lines) and (left != [0, 0] or lines[at].startswith(b"\\")):
        tag, content = lines[at][:1], lines[at][1:]
        if tag == b"\\" and sides:  # "No newline at end of file" speaks of the line before it
            for side in sides:
                side[-1] = side[-1][:-1]
            sides = []
        elif tag in (b" ", b"-", b"+"):
            sides = {b" ": [old, new], b"-": [old], b"+": [new]}[tag]
            for side in sides:
                side.append(content + b"\n")
            left = [left[0] - (tag != b"+"), left[1] - (tag != b"-")]
        else:
            raise damaged(at, f"unexpected line in a hunk of {path}")
        at += 1
    if left != [0, 0]:
        raise damaged(at, f"a hunk of {path} does not have the number of lines that its header says")
    return Hunk(int(match[1]), old, new, int(match[3])), at


def is_loopback(host: str | None) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host or "").is_loopback
    except ValueError:
        return False


def check_url(url: str) -> None:
    parts = urllib.parse.urlsplit(url)
    if "@" in parts.netloc:  # not shown: it may hold a password
        raise Stop("the URL names a user, which is not supported: use an https URL without it, or give a file")
    _ = parts.port  # raises ValueError if it is not a number
    if not parts.hostname or not (parts.scheme == "https" or parts.scheme == "http" and is_loopback(parts.hostname)):
        raise Stop(f"{url} is refused: use an https URL (http is for this machine only)")


class SafeRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, req, fp, code, msg, headers, newurl):
        check_url(newurl)
        if req.full_url.lower().startswith("https:") and not newurl.lower().startswith("https:"):
            raise Stop(f"{req.full_url} redirects from https to {newurl}; that is refused")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def download(url: str) -> bytes:
    def too_slow(*_: object) -> None:
        raise TimeoutError(f"no complete response within {TIME_LIMIT} seconds")

    # One alarm covers connecting, headers, redirects and body, however slowly the bytes drip in. It repeats because
    # the library takes a first one for a failed address and tries the next.
    before = signal.signal(signal.SIGALRM, too_slow)
    signal.setitimer(signal.ITIMER_REAL, TIME_LIMIT, 1)
    try:
        check_url(url)
        direct = [] if url.lower().startswith("https:") else [urllib.request.ProxyHandler({})]
        with urllib.request.build_opener(SafeRedirect, *direct).open(url, timeout=TIME_LIMIT) as response:
            data = response.read(SIZE_LIMIT + 1)
            announced = response.headers.get("Content-Length")
        if len(data) > SIZE_LIMIT:
            raise Stop(f"{url} is larger than {SIZE_LIMIT} bytes, so it is not the patch; check the URL")
        if announced is not None and announced.strip() != str(len(data)):
            raise Stop(f"{url} could not be downloaded: the response is truncated; try again")
        return data
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise Stop(f"{url} could not be downloaded ({one_line(error)}); check the URL and the network") from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def one_line(error: BaseException | str) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


def read_limited(path: Path, advice: str) -> bytes:
    try:
        with open(path, "rb") as file:
            data = file.read(SIZE_LIMIT + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise Stop(f"{path} cannot be read ({reason}); {advice}") from None
    if len(data) > SIZE_LIMIT:
        raise Stop(f"{path} is larger than {SIZE_LIMIT} bytes, so it is not what is wanted; {advice}")
    return data


def parse_checksum(data: bytes, source: str, patch_name: str) -> str:
    """Reads one bare SHA-256, or the output of sha256sum (the patch's line, if there are several)."""
    entries = re.findall(r"^([0-9a-fA-F]{64})(?:[ \t]+\*?(.*?))?[ \t\r]*$", data.decode("utf-8", "replace"), re.M)
    found = {value.lower() for value, name in entries if len(entries) == 1 or name.rpartition("/")[2] == patch_name}
    if len(found) != 1:
        raise Stop(f"{source} does not hold one SHA-256 for {patch_name}; get it again")
    return found.pop()


def load_candidates(args: argparse.Namespace, targets: list[Target]) -> list[Candidate]:
    if args.patch_url or args.patch_file:
        patches = load_given(args)
        return [Candidate(target, patches) for target in targets]
    return [Candidate(target, load_target(target)) for target in targets]


def load_given(args: argparse.Namespace) -> list[FilePatch]:
    """The patch of --patch-file or --patch-url, in one file."""
    if args.patch_url:
        data, name = download(args.patch_url), urllib.parse.urlsplit(args.patch_url).path.rpartition("/")[2]
    else:
        data, name = read_limited(args.patch_file, "give another --patch-file"), args.patch_file.name
    source = args.sha256_file or f"{args.patch_file}.sha256"
    if args.patch_sha256:
        wanted = args.patch_sha256
    elif re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", source):
        wanted = parse_checksum(download(source), source, name)
    else:
        advice = "the patch's SHA-256 is required: give --patch-sha256 or --sha256-file"
        wanted = parse_checksum(read_limited(Path(source), advice), source, name)
    prove(data, wanted, "the patch")
    return parse_patch(data)


def prove(data: bytes, wanted: str, what: str) -> None:
    actual = hashlib.sha256(data).hexdigest()
    if actual != wanted:
        raise Stop(f"{what} has SHA-256 {actual}, not the required {wanted}; download it again from a trusted place")


def load_target(target: Target) -> list[FilePatch]:
    """A target's patch: one change for each file, whichever of the three parts it comes from."""
    changes = {change.path: change for change in new_files()}
    for part in target.parts:
        for change in load_part(part):
            earlier = changes.get(change.path)
            changes[change.path] = earlier.then(change) if earlier else change
    refuse_twice(list(changes))
    return list(changes.values())


@functools.cache
def new_files() -> list[FilePatch]:
    """The files that every target gets."""
    found = []
    for place in sorted(FILES.rglob("*")):
        if place.is_file() and place.suffix in (".py", ".yaml"):
            content = read_limited(place, "restore it from the project")
            path = place.relative_to(FILES).as_posix()
            check_path(path)
            hunk = Hunk(0, [], io.BytesIO(content).readlines(), 1)
            found.append(FilePatch(path, None, blob_hash(content), 0o644, [[hunk]]))
    if not found:
        raise Stop(f"{FILES} has no files; restore it from the project")
    return found


@functools.cache
def load_part(path: Path) -> list[FilePatch]:
    """The patch at this path, proven by the checksum beside it. One without a byte changes nothing."""
    sums = path.with_name(f"{path.name}.sha256")
    data = read_limited(path, "restore it from the project")
    prove(data, parse_checksum(read_limited(sums, "restore it from the project"), str(sums), path.name), str(path))
    try:
        return parse_patch(data) if data else []
    except Stop as stop:
        raise Stop(f"{path}: {stop}", stop.code) from None


def read_targets() -> list[Target]:
    """All targets, the oldest release first."""
    targets = [read_pin(pin) for pin in PATCHES.glob(f"*/{PIN}")]
    if not targets:
        raise Stop(f"{PATCHES} has no file VERSION/{PIN}; restore it from the project")
    return sorted(targets, key=lambda target: [int(number) for number in re.findall(r"\d+", target.version)])


def read_pin(path: Path) -> Target:
    text = read_limited(path, "restore it from the project").decode("utf-8", "replace")
    lines = dict(line.partition("=")[::2] for line in text.splitlines())
    version, commit, wheel = (lines.get(key, "") for key in ("VERSION", "COMMIT", "WHEEL_SHA256"))
    if (
        len(lines) != len(text.splitlines())
        or version != path.parent.name
        or not re.fullmatch(r"[0-9][0-9A-Za-z.]*", version)
        or not re.fullmatch(r"[0-9a-f]{64}", wheel)
        or "COMMIT" in lines
        and not re.fullmatch(r"[0-9a-f]{40}", commit)
    ):
        raise Stop(
            f"{path} must hold the lines VERSION={path.parent.name}, WHEEL_SHA256=<64 hex digits> and, where it is "
            "known, COMMIT=<40 hex digits>; restore it"
        )
    return Target(path.parent, version, commit or None)


def narrowed(targets: list[Target], version: str | None) -> list[Target]:
    """The target of this version only, where one is named."""
    found = [target for target in targets if version in (None, target.version)]
    if not found:
        raise Stop(f"there is no patch for verl {version}; --target takes {versions(targets, 'or')}")
    return found


def versions(targets: list[Target], last: str = "and") -> str:
    *others, end = [target.version for target in targets]
    return f"{', '.join(others)} {last} {end}" if others else end


def find_installed() -> Path:
    """Finds the verl this Python would import, without importing it."""
    before = list(sys.path)
    if Path(sys.path[0]).resolve() == HERE:
        del sys.path[0]  # Python put this script's own folder there
    try:
        spec = importlib.util.find_spec("verl")
    except (ImportError, ValueError):
        spec = None
    finally:
        sys.path[:] = before
    if spec is None or not spec.origin or Path(spec.origin).name != "__init__.py":
        raise Stop(f"{sys.executable} has no verl installed; run this with the Python that trains, or use --repo")
    package = Path(spec.origin).absolute().parent
    here = Path.cwd() / "verl"
    if (here / "__init__.py").is_file() and here.resolve() != package.resolve():
        raise Stop(f"Python started here would import {here}, not {package}; go elsewhere, or use --repo")
    return package.parent


def find_tree(args: argparse.Namespace) -> Path:
    tree = find_installed() if args.installed else args.repo
    try:
        if not tree.is_dir():
            raise Stop(f"{tree} is not a directory; give the top of a verl checkout")
        tree = tree.resolve()
        if not (tree / "verl" / "__init__.py").is_file():
            raise Stop(f"{tree} has no verl/__init__.py; give the top of a verl checkout")
    except (OSError, RuntimeError, ValueError) as error:
        raise Stop(f"{tree} cannot be read ({one_line(error)})") from None
    return tree


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
    crlf: list[str]
    created: set[str]  # those that only a patched verl has

    @property
    def left_behind(self) -> bool:
        """Whether verl's own files are as in the base, but some are there that only a patched verl has."""
        return bool(self.patched or self.other) and self.created.issuperset(self.patched + self.other)

    @property
    def unknown(self) -> bool:
        """Whether verl's own files are of neither side of the patch."""
        return self.created.issuperset(self.patched) and not self.created.issuperset(self.other)


def survey(tree: Path, patches: list[FilePatch]) -> Situation:
    found = Situation([], [], [], [], {patch.path for patch in patches if patch.old is None})
    for patch in patches:
        content = read_target(tree, patch.path)
        value = blob_hash(content)
        if value in (patch.old, patch.new):
            (found.base if value == patch.old else found.patched).append(patch.path)
            continue
        found.other.append(patch.path)
        if content is not None and blob_hash(content.replace(b"\r\n", b"\n")) in (patch.old, patch.new):
            found.crlf.append(patch.path)
    return found


def listing(paths: list[str]) -> str:
    return ", ".join(paths[:5]) + (f" and {len(paths) - 5} more" if len(paths) > 5 else "")


def clean_up(tree: Path, paths: list[str]) -> str:
    """The command that removes these files, by whole folders where these hold nothing else."""

    def only_these(folder: Path) -> bool:
        files = (file for file in folder.rglob("*") if file.is_symlink() or not file.is_dir())
        return all(file.suffix == ".pyc" or str(file.relative_to(tree)) in paths for file in files)

    places = set()
    for path in paths:
        folders = [tree / parent for parent in Path(path).parents[:-2] if only_these(tree / parent)]
        places.add(str(folders[-1] if folders else tree / path))
    return shlex.join(["rm", "-r", *sorted(places)])


def release_of(tree: Path) -> str | None:
    """What a verl says its version is."""
    try:
        return (tree / "verl" / "version" / "version").read_text().strip()
    except (OSError, ValueError):
        return None


def is_release(release: str | None, version: str) -> bool:
    # A commit may have .dev where the wheel made of it has the release.
    return release is not None and (release == version or release.startswith(f"{version}.dev"))


def choose(args: argparse.Namespace, tree: Path, candidates: list[Candidate]) -> tuple[Candidate, Situation]:
    """The target that the tree is of, and how its files stand.

    Raises:
        Stop: if it is of none, or of several by content and of none by its version.
    """
    found = [(candidate, survey(tree, candidate.patches)) for candidate in candidates]
    if len(found) == 1:
        return found[0]
    if not args.installed:
        head = None if args.force or args.reverse else head_of(tree)
        if at_head := [entry for entry in found if head and head == entry[0].target.commit]:
            return at_head[0]
    release = release_of(tree)
    fitting = [] if args.installed else [entry for entry in found if not entry[1].other]
    if of_release := [entry for entry in fitting or found if is_release(release, entry[0].target.version)]:
        return of_release[0]
    if len(fitting) == 1 or fitting and all(candidate.patches is fitting[0][0].patches for candidate, _ in fitting):
        return fitting[0]
    if fitting:
        fits = versions([candidate.target for candidate, _ in fitting])
        raise Stop(f"{tree} fits the patches for {fits}; say with --target which verl it is", WRONG_BASE)
    raise no_target(tree, found)


def refuse_another_target(tree: Path, named: str) -> None:
    """Refuses a verl that has the patch of another target than the one that was named.

    Raises:
        Stop: if that patch is in verl's own files.
    """
    for target in read_targets():
        if target.version == named:
            continue
        try:
            at = survey(tree, load_target(target))
        except Stop:
            continue  # a damaged patch that nobody asked for says nothing
        if at.created.issuperset(at.other) and not at.created.issuperset(at.patched):
            raise Stop(
                f"the verl in {tree} is patched for {target.version}, not for {named}; leave --target out", WRONG_BASE
            )


def no_target(tree: Path, found: list[tuple[Candidate, Situation]]) -> Stop:
    """Says which verl is there and which ones there are patches for; also how to remove what a patched one left."""
    targets = [candidate.target for candidate, _ in found]
    release = release_of(tree)
    if any(is_release(release, target.version) for target in read_targets() if target not in targets):
        asked = f"--target asks for the patch for {versions(targets)}"
        return Stop(
            f"the verl in {tree} is {release}, but {asked}; leave --target out: there is a patch for {release}",
            WRONG_BASE,
        )
    if left := sorted({path for _, at in found for path in at.patched + at.other if path in at.created}):
        command = clean_up(tree, left)
        say_once(f"a patched verl left files in {tree}; if they hold no work of yours, delete them: {command}")
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


def check_content(tree: Path, found: Situation, reverse: bool) -> None:
    """Refuses a tree in which not every file is at the same side of the patch, but for files left behind."""
    if found.crlf:
        raise Stop(f"CRLF line ends: {listing(found.crlf)}; check out again with core.autocrlf=false", WRONG_BASE)
    if found.left_behind:
        if found.other:
            raise Stop(
                f"{tree} is as in the base, but a patched verl left {listing(found.other)} there, which are not as "
                "this patch makes them; if they hold no work of yours, delete them and run again: "
                f"{clean_up(tree, found.other)}",
                PARTLY,
            )
        return
    if found.other and (found.patched or not found.created.isdisjoint(found.other)):
        raise Stop(
            f"{tree} is patched, but not as by this patch ({listing(found.other)}); if an older version of the patch "
            "is in it, take that out with the project it came from (apply_patch.py --reverse); if you changed these "
            "files, restore all of verl from git or by reinstalling it; then run again",
            PARTLY,
        )
    if found.patched and found.base:
        raise Stop(
            f"{tree} is partly patched (still as in the base: {listing(found.base)}); restore all of verl from git or "
            "by reinstalling it, and run again",
            PARTLY,
        )
    if found.other and reverse:
        raise Stop(f"the patch is not applied to {tree} ({listing(found.other)} differ), so it cannot be reversed")
    if found.other:
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


def head_of(tree: Path) -> str | None:
    """The commit of a checkout; None where there is none, and where git cannot tell, which check_head reports."""
    if not os.path.lexists(tree / ".git"):
        return None
    with contextlib.suppress(Stop):
        return git(tree, "rev-parse", "HEAD^{commit}").strip()
    return None


def check_head(tree: Path, commit: str | None, told: bool) -> bool:
    """Refuses a checkout at another commit, where that is known. Returns whether the tree is a git checkout at all.

    With `told`, it says where the tree lies in another repository, which an installed verl may well do.
    """
    if not os.path.lexists(tree / ".git"):
        outer = next((parent for parent in tree.parents if os.path.lexists(parent / ".git")), None)
        if outer and told:
            say_once(
                f"{tree} is a subfolder of the repository {outer}, whose HEAD says nothing here; content alone decides"
            )
        return False
    if not shutil.which("git"):
        raise Stop(f"{tree} is a git checkout but git is not on PATH; install git, or pass --force to skip this check")
    top, _, head = git(tree, "rev-parse", "--show-toplevel", "HEAD^{commit}").strip().rpartition("\n")
    if Path(top).resolve() != tree:
        raise Stop(f"{tree}/.git is not a repository of its own (git finds {top} instead); repair or remove it")
    if commit is not None and head != commit:
        raise Stop(
            f"HEAD of {tree} is {head}, not the base commit {commit}; check that out, or pass --force", WRONG_BASE
        )
    return True


def check_clean(tree: Path, known: list[str]) -> None:
    """Refuses a checkout with local changes to tracked files, the known ones aside; content decides on the others."""
    exclude = [f":(exclude,literal){path}" for path in [STATE, *known]]
    dirty = git(tree, "status", "--porcelain", "-z", "--untracked-files=no", "--", ".", *exclude)
    if dirty:
        raise Stop(f"{tree} has local changes ({dirty.split(chr(0))[0][3:]}); commit or stash them, or pass --force")


def hold_signals() -> None:
    """Blocks signals for the rest of the run: it ends within moments, and they would only tear a change apart."""
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)


@contextlib.contextmanager
def locked(tree: Path) -> Iterator[Path]:
    """Holds the tree for this run, puts back what an interrupted run left, and leaves nothing behind."""
    state = tree / STATE
    handle = take_lock(tree, state)
    try:
        if (state / "journal.json").exists():
            roll_back(tree, state)
            say("an earlier run was interrupted; every file was put back as it was before that run")
        clear(state)
        yield state
    finally:
        if not (state / "journal.json").exists():
            clear(state)
            (state / "lock").unlink()
            with contextlib.suppress(OSError):
                state.rmdir()
        os.close(handle)


def take_lock(tree: Path, state: Path) -> int:
    lock = state / "lock"
    if state.is_symlink() or lock.is_symlink():
        raise Stop(f"{state} is not a real folder; remove it")
    for _ in range(100):
        try:
            state.mkdir(exist_ok=True)
            handle = os.open(lock, os.O_RDWR | os.O_CREAT, 0o600)
        except FileNotFoundError:
            continue  # the run that held it has just removed the folder
        except OSError as error:
            raise Stop(
                f"{tree}/verl cannot be written ({error.strerror}); use an account with write permission"
            ) from None
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(handle).st_ino == lock.stat().st_ino:
                return handle
        except FileNotFoundError:
            pass
        except OSError as error:
            os.close(handle)
            if error.errno in (errno.EAGAIN, errno.EACCES):
                raise Stop(f"another run is patching {tree}; wait until it is done") from None
            raise Stop(f"{lock} cannot be locked ({error.strerror})") from None
        os.close(handle)
    raise Stop(f"{lock} could not be taken; is {tree} being removed?")


def clear(state: Path) -> None:
    for file in state.iterdir():
        if re.fullmatch(r"\d+\.(old|new)|journal\.tmp", file.name):
            file.unlink()


def save(path: Path, content: bytes, mode: int, like: os.stat_result | None = None) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)
        take_place(file.fileno(), mode, like)
        file.flush()
        os.fsync(file.fileno())


def take_place(target: int | Path, mode: int, like: os.stat_result | None) -> None:
    """Gives a new file or folder its mode and, where allowed, the owner of another."""
    if like and (like.st_uid, like.st_gid) != (os.geteuid(), os.getegid()):
        with contextlib.suppress(OSError):
            os.chown(target, like.st_uid, like.st_gid)
    os.chmod(target, mode & 0o7777)


def folder_of(place: Path) -> Path:
    """The nearest folder above that exists."""
    return next(parent for parent in place.parents if parent.exists())


def make_folders(folder: Path) -> None:
    """Makes missing folders, each with owner and permissions of the one it is in."""
    if not folder.exists():
        make_folders(folder.parent)
        folder.mkdir()
        like = folder.parent.stat()
        take_place(folder, like.st_mode, like)


def byte_code(place: Path) -> list[Path]:
    """What Python compiled from a file."""
    return list((place.parent / "__pycache__").glob(f"{place.stem}.*.pyc"))


def is_unchecked(byte_code: Path) -> bool:
    """Whether Python runs it without a look at the source, by its flags (PEP 552)."""
    return byte_code.read_bytes()[4:8] == b"\1\0\0\0"


def drop_byte_code(place: Path) -> None:
    for file in byte_code(place):
        try:
            file.unlink(missing_ok=True)
        except OSError:
            if is_unchecked(file):
                raise


def replace_files(tree: Path, state: Path, patches: list[FilePatch]) -> None:
    """Changes all files or none: first copies and a journal, then one atomic step a file, then a look at the disk."""
    for patch in patches:
        place = tree / patch.path
        needed = [folder_of(place), *(file.parent for file in byte_code(place) if is_unchecked(file))]
        if place.exists():
            needed.append(place)
        for target in needed:
            if not os.access(target, os.W_OK | os.X_OK if target.is_dir() else os.W_OK):
                raise Stop(
                    f"{target} cannot be written; use an account with write permission, or change its permissions"
                )
    contents = [(old := read_target(tree, patch.path), patch.result(old)) for patch in patches]
    try:
        for number, (patch, (old, new)) in enumerate(zip(patches, contents, strict=True)):
            place = tree / patch.path
            if old is None:
                like = folder_of(place).stat()
                mode = like.st_mode & (0o777 if patch.mode & 0o111 else 0o666)
            else:
                like = place.stat()
                mode = like.st_mode
                save(state / f"{number}.old", old, mode, like)
            if new is not None:
                save(state / f"{number}.new", new, mode, like)
        journal = [{"path": patch.path, "old": patch.old, "new": patch.new} for patch in patches]
        save(state / "journal.tmp", json.dumps(journal).encode(), 0o600)
        hold_signals()
        os.replace(state / "journal.tmp", state / "journal.json")
        for number, patch in enumerate(patches):
            place = tree / patch.path
            if patch.new is None:
                os.unlink(place)
            else:
                make_folders(place.parent)
                os.replace(state / f"{number}.new", place)
            drop_byte_code(place)
        for patch in patches:
            if blob_hash(read_target(tree, patch.path)) != patch.new:
                raise Stop(f"{patch.path} does not read back as it was written")
    except Exception as error:
        if (state / "journal.json").exists():
            roll_back(tree, state)
        raise Stop(f"failed while writing ({one_line(error)}); every file was put back", 4) from None
    (state / "journal.json").unlink()
    for patch in patches:
        if patch.new is None:
            prune(tree, patch.path)


def prune(tree: Path, path: str) -> None:
    """Removes folders that became empty with a removed file."""
    place = tree / path
    folders = list(place.relative_to(tree / "verl").parents)[:-1]
    with contextlib.suppress(OSError):  # a folder that holds something else stays
        for folder in [folders[0] / "__pycache__", *folders] if folders else []:
            with contextlib.suppress(FileNotFoundError):
                (tree / "verl" / folder).rmdir()


def roll_back(tree: Path, state: Path) -> None:
    """Puts every file back as the journal says; does not trust the journal."""
    hold_signals()
    entries = read_journal(state / "journal.json")
    try:
        foreign = []
        for number, (path, old, new) in enumerate(entries):
            place, copy = tree / path, state / f"{number}.old"
            current = blob_hash(read_target(tree, path))
            if current == old:
                continue
            if current not in (new, None):
                foreign.append(path)
            elif old is None:
                os.unlink(place)
            elif copy.is_symlink() or not copy.is_file() or blob_hash(copy.read_bytes()) != old:
                raise Stop(f"{copy} is missing or damaged")
            else:
                make_folders(place.parent)
                os.replace(copy, place)
        if foreign:
            raise Stop(f"something else changed {listing(foreign)} meanwhile")
        for path, old, _ in entries:
            if blob_hash(read_target(tree, path)) != old:
                raise Stop(f"{path} does not read back as it was")
    except (OSError, Stop) as error:
        advice = f"restore verl from git or by reinstalling it, delete {state}, and run again"
        raise Stop(f"an interrupted change could not be put back ({one_line(error)}); {advice}", 4) from None
    for path, old, _ in entries:
        with contextlib.suppress(OSError):
            drop_byte_code(tree / path)
        if old is None:
            prune(tree, path)
    (state / "journal.json").unlink()


def read_journal(journal: Path) -> list[tuple[str, str | None, str | None]]:
    def is_hash(value: object) -> bool:
        return value is None or isinstance(value, str) and re.fullmatch(r"[0-9a-f]{40}", value) is not None

    try:
        if journal.is_symlink():
            raise ValueError
        entries = [(entry["path"], entry["old"], entry["new"]) for entry in json.loads(journal.read_bytes())]
        for path, old, new in entries:
            check_path(path)
            if old == new or not is_hash(old) or not is_hash(new):
                raise ValueError
        return entries
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError, Stop):
        advice = f"restore verl from git or by reinstalling it, delete {journal.parent}, and run again"
        raise Stop(f"{journal} of an interrupted run is damaged; {advice}") from None


def say(message: str) -> None:
    with contextlib.suppress(OSError):  # a closed pipe must not turn success into failure
        print(f"apply_patch: {message}", flush=True)


say_once = functools.cache(say)


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    def sha256(value: str) -> str:
        if not re.fullmatch(r"[0-9a-fA-F]{64}", value):
            raise argparse.ArgumentTypeError("a SHA-256 has 64 hexadecimal digits")
        return value.lower()

    def given(value: str) -> str:
        if not value:
            raise argparse.ArgumentTypeError("the value is empty")
        return value

    def expanded(value: str) -> str:
        return os.path.expanduser(given(value))  # shells leave the ~ of --repo=~/verl as it is

    def path(value: str) -> Path:
        return Path(expanded(value))

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    place = parser.add_mutually_exclusive_group(required=True)
    place.add_argument("--repo", metavar="DIR", type=path, help="the verl checkout or release tree to patch")
    place.add_argument("--installed", action="store_true", help="patch the verl that this Python would import")
    parser.add_argument(
        "--target", metavar="VERSION", type=given, help="the patch for this verl; default: by what is there"
    )
    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        "--patch-file", metavar="FILE", type=path, help="a patch in one file, instead of those in patches/"
    )
    source.add_argument(
        "--patch-url", metavar="URL", type=given, help="https; http for this machine only; needs a SHA-256"
    )
    checksum = parser.add_mutually_exclusive_group()
    checksum.add_argument("--patch-sha256", metavar="HEX", type=sha256, help="the SHA-256 the patch must have")
    checksum.add_argument(
        "--sha256-file", metavar="FILE|URL", type=expanded, help="where it is written; default: PATCH.sha256"
    )
    parser.add_argument("--check", action="store_true", help="only report the state of the tree; write nothing")
    parser.add_argument("--reverse", action="store_true", help="remove the patch")
    parser.add_argument("--force", action="store_true", help="skip the check of git HEAD and clean tree (only that)")
    args = parser.parse_args(arguments)
    if args.check and args.reverse:
        parser.exit(
            2,
            "apply_patch: --check writes nothing, so it does not go with --reverse; --check alone says whether the "
            f"patch can be taken out (exit code {APPLIED}: it is in)\n",
        )
    if args.patch_url and not (args.patch_sha256 or args.sha256_file):
        parser.error("--patch-url needs --patch-sha256 or --sha256-file")
    if (args.patch_sha256 or args.sha256_file) and not (args.patch_url or args.patch_file):
        parser.error("--patch-sha256 and --sha256-file belong to --patch-file and --patch-url")
    return args


def inspect(args: argparse.Namespace, tree: Path, candidates: list[Candidate]) -> tuple[Candidate, Situation]:
    """Finds the target. Raises Stop unless its patch can be applied (or reversed), or already is."""
    chosen, found = choose(args, tree, candidates)
    target = chosen.target
    if args.target and found.other:
        refuse_another_target(tree, args.target)
    if (args.installed or found.unknown) and not is_release(release_of(tree), target.version):
        raise no_target(tree, [(chosen, found)])
    done = found.base if args.reverse else found.patched
    if len(done) == len(chosen.patches):
        return chosen, found
    start = found.left_behind or not found.patched  # with other files patched, that is what there is to say
    checkout = (
        not args.reverse and not args.force and start and check_head(tree, target.commit, told=not args.installed)
    )
    check_content(tree, found, args.reverse)
    if checkout:
        check_clean(tree, found.patched)
    if found.left_behind:
        say_once(f"{tree} has files that a patched verl left there, as this patch makes them: {listing(found.patched)}")
    return chosen, found


def check(args: argparse.Namespace, tree: Path, candidates: list[Candidate]) -> int:
    if (tree / STATE / "journal.json").exists():
        raise Stop(f"{tree}: a run is at work or was interrupted; run again without --check to put it right", PARTLY)
    chosen, found = inspect(args, tree, candidates)
    if not found.base:
        say(f"already applied to {tree} ({chosen.name})")
        return APPLIED
    for patch in chosen.patches:
        if patch.path in found.base:
            patch.result(read_target(tree, patch.path))
    say(f"applicable to {tree} ({chosen.name}, {len(found.base)} files)")
    return 0


def change(args: argparse.Namespace, tree: Path, candidates: list[Candidate]) -> int:
    def pending() -> tuple[str, list[FilePatch]]:
        chosen, found = inspect(args, tree, candidates)
        paths = found.patched if args.reverse else found.base
        if not paths:
            say(f"not applied to {tree}; nothing to reverse" if args.reverse else f"already applied to {tree}")
        return chosen.name, [patch for patch in chosen.patches if patch.path in paths]

    # A first look, so that a refused or needless run does not touch the tree, which may be read-only.
    if not (tree / STATE).exists() and not pending()[1]:
        return 0
    with locked(tree) as state:
        name, todo = pending()
        if todo:
            replace_files(tree, state, [patch.reversed() for patch in todo] if args.reverse else todo)
            done = "reversed in" if args.reverse else "applied to"
            say(f"{done} {tree} ({name}, {len(todo)} files, all verified)")
            if not args.reverse:
                say(f"verdicts in training, and the command `gradloc report DIR`, come with `pip install .` in {HERE}")
    return 0


def main(arguments: list[str] | None = None) -> int:
    args = parse_arguments(arguments)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    os.umask(0o022)  # of the state folder; all else is given its permissions
    if isinstance(sys.stdout, io.TextIOWrapper):  # with its descriptor closed (>&-), there is none
        sys.stdout.reconfigure(errors="backslashreplace")
    for number in SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, interrupt)
    try:
        targets = narrowed(read_targets(), args.target)
        tree = find_tree(args)
        if args.installed:
            # Only the patch that is needed has to be whole. Without one for this version, all are named.
            release = release_of(tree)
            targets = [target for target in targets if is_release(release, target.version)] or targets
        return (check if args.check else change)(args, tree, load_candidates(args, targets))
    except Stop as stop:
        print(f"apply_patch: {stop}", file=sys.stderr)
        if args.check or stop.code not in (PARTLY, WRONG_BASE):
            return stop.code
        return 3
    except OSError as error:
        print(f"apply_patch: failed ({one_line(error)}); solve that and run again", file=sys.stderr)
        return 4
    except KeyboardInterrupt:
        print("apply_patch: interrupted; nothing was changed", file=sys.stderr)
        return 4


if __name__ == "__main__":
    sys.exit(main())
