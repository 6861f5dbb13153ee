#!/usr/bin/env python3
# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Says which hooks and fixes of a patch fit another verl, and what upstream has changed where one does not.

python tools/which_hooks_fit.py ~/verl                  # a checkout (of main, say), or any other tree of verl
python tools/which_hooks_fit.py 0.9.0                   # a release; pip downloads its wheel, unless it is in build/
python tools/which_hooks_fit.py 0.9.0 --target 0.8.0    # with the patch for 0.8.0; default: the newest

For each place, a file and the line of a hunk in the patch: fits (where it was, or so many lines off), or rejected, with
what the hunk expects there (-) and what is there (+). apply_patch.py --unpinned takes a verl that every place fits.
Nothing is written.

For the plugin, `python -m gradloc_verl` says the same, in a Python that has the plugin and that verl.

Exit codes: 0 every place fits, 1 some do not, 2 usage, 3 there is no such verl.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import apply_patch
from apply_patch import Hunk, places

ROOT = apply_patch.HERE


@dataclasses.dataclass(frozen=True)
class Place:
    """A hunk in another verl.

    Args:
        path: The file.
        line: The line at which the hunk begins in the target's file.
        offset: By how many lines it is further down; None if it does not fit.
        why: For a hunk that does not fit: lines that say why.
    """

    path: str
    line: int
    offset: int | None
    why: list[str]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verl", metavar="PATH-or-VERSION")
    parser.add_argument("--target", metavar="VERSION", help="whose hooks and fixes (default: the newest)")
    asked = parser.parse_args(arguments)
    try:
        target = apply_patch.narrowed(apply_patch.read_targets(), asked.target)[-1]
        with tempfile.TemporaryDirectory() as scratch:
            tree = find(asked.verl, Path(scratch))
            release = apply_patch.release_of(tree) or "of unknown version"
            rejected = 0
            contents: dict[str, bytes | None] = {}
            for name, part in (("hooks", target.hooks), ("fixes", target.fixes)):
                print(f"The {name} for verl {target.version}, in the verl in {asked.verl} ({release}):")
                for place in fitted(part, tree, contents):
                    print(f"  {place.path}:{place.line}: {verdict(place.offset)}")
                    print("".join(f"      {line}\n" for line in place.why), end="")
                    rejected += place.offset is None
    except apply_patch.Stop as stop:
        print(f"which_hooks_fit.py: {stop}", file=sys.stderr)
        return 3
    print(f"{rejected} rejected." if rejected else "Every hook and fix fits.", end=" ")
    print("For the plugin: python -m gradloc_verl, with a Python that has it and that verl.")
    return 1 if rejected else 0


def verdict(offset: int | None) -> str:
    if offset is None:
        return "rejected"
    lines = "line" if abs(offset) == 1 else "lines"
    return f"fits, {abs(offset)} {lines} further {'down' if offset > 0 else 'up'}" if offset else "fits"


def find(verl: str, scratch: Path) -> Path:
    """The tree of verl that is meant.

    Raises:
        apply_patch.Stop: if there is none.
    """
    tree = Path(verl).expanduser()
    if not (tree / "verl/__init__.py").is_file():
        if tree.exists() or not re.fullmatch(r"\d[\w.]*", verl):
            raise apply_patch.Stop(f"{verl} is neither a tree with verl/__init__.py nor a version")
        tree = ROOT / "build" / verl / "base"
    if not (tree / "verl/__init__.py").is_file():
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary", "verl"]
        done = subprocess.run([*command, "-d", str(scratch), f"verl=={verl}"], capture_output=True, text=True)
        if done.returncode:
            said = (done.stdout + done.stderr).strip().splitlines()
            raise apply_patch.Stop(
                f"verl {verl} could not be downloaded with pip ({said[-1] if said else 'no reason'})"
            )
        tree = scratch / "tree"
        with zipfile.ZipFile(next(scratch.glob("*.whl"))) as wheel:
            wheel.extractall(tree)
    return tree


def fitted(part: Path, tree: Path, contents: dict[str, bytes | None]) -> Iterator[Place]:
    """Each hunk of a part of the patch in the tree.

    Args:
        contents: Files of the tree that have earlier parts already. Those that have this one are added.
    """
    for change in apply_patch.load_part(part):
        (hunks,) = change.parts
        content = contents.setdefault(change.path, apply_patch.read_target(tree, change.path))
        lines = (content or b"").splitlines(keepends=True)
        for hunk, start in zip(hunks, places(hunks, lines), strict=True):
            if start is not None:
                yield Place(change.path, hunk.old_start, start + bool(hunk.old) - hunk.old_start, [])
            elif content is None:
                yield Place(change.path, hunk.old_start, None, ["there is no such file"])
            else:
                yield Place(change.path, hunk.old_start, None, reason(hunk, lines))
        if content is not None and (moved := change.moved_to(content)):
            contents[change.path] = moved.result(content)


def reason(hunk: Hunk, lines: list[bytes]) -> list[str]:
    """Why a hunk does not fit a file: what it expects and what is there, or that the lines are there elsewhere."""
    length = len(hunk.old)
    where = [start + 1 for start in range(len(lines) - length + 1) if lines[start : start + length] == hunk.old]
    if where:
        found = f"line{'s' if len(where) > 1 else ''} {' and '.join(map(str, where))}"
        return [
            f"what it expects is at {found}: more than once, before an earlier hunk, or no longer at the file's end"
        ]
    if places([hunk.reversed()], lines) != [None]:
        return ["it is there already: this verl is patched"]
    if any(line.endswith(b"\r\n") for line in lines):
        return ["the file has CRLF line ends"]
    expected = [line.decode("utf-8", "replace").rstrip("\n") for line in hunk.old]
    present = [line.decode("utf-8", "replace").rstrip("\n") for line in lines]
    blocks = difflib.SequenceMatcher(None, expected, present, autojunk=False).get_matching_blocks()
    matched = [block for block in blocks if any(expected[block.a : block.a + block.size])]
    if not matched:
        return ["none of the lines that it expects is there:", *(f"- {line}" for line in expected)]
    # Around the longest block that is as expected, as far as the hunk reaches.
    longest = max(matched, key=lambda block: block.size)
    first = longest.b - longest.a
    around = present[max(first - 3, 0) : first + length + 3]
    differing = [line.rstrip() for line in difflib.ndiff(expected, around) if not line.startswith("?")]
    # Without what is there before and behind, but for what has taken the last line's place.
    own = [index for index, line in enumerate(differing) if not line.startswith("+")]
    last = own[-1] + 1
    while differing[own[-1]].startswith("-") and last < len(differing):
        last += 1
    return differing[own[0] : last]


if __name__ == "__main__":
    sys.exit(main())
