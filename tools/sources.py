# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""What of the patch has its sources in folders of the project, and how the two places of a folder come together.

Files are given as git sees them, by mode and blob, so that these functions need neither git nor a disk.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import PurePosixPath
from typing import NamedTuple


class File(NamedTuple):
    mode: str  # as in git: 100644, 100755, 120000 for a symbolic link, 160000 for a nested repository
    blob: str


Files = dict[str, File]  # by path
Write = Callable[[bytes], str]  # keeps a content; gives its blob


class Misplaced(ValueError):
    """Says in one sentence which file is not what it should be, and what to do."""


@dataclasses.dataclass(frozen=True)
class Source:
    """A folder of the project that the patch carries into verl: every file that verl itself has not."""

    folder: str
    place: str  # in verl
    replaced: frozenset[str] = frozenset()  # files of verl that ours replace as a whole, relative to the place


SOURCES = (
    Source("gradloc", "verl/utils/gradloc"),
    Source("rewards", "verl/utils/reward_score", frozenset({"math_verify.py"})),
)


def is_readme(path: str) -> bool:
    return PurePosixPath(path).name == "README.md"


def without_readmes(files: Files) -> Files:
    """Leaves out what explains the sources to their readers, and is no part of the patch."""
    return {path: file for path, file in files.items() if not is_readme(path)}


def carried(files: Files, base: Files, source: Source) -> Files:
    """Which files of a verl tree come from the source, relative to its place, READMEs included."""
    found = {}
    for path, file in files.items():
        name = path.removeprefix(f"{source.place}/")
        if name != path and (path not in base or name in source.replaced and file != base[path]):
            found[name] = file
    return found


def put(files: Files, base: Files, source: Source, content: Files) -> Files:
    """The verl tree with this content of the source. A file of verl that has no replacement is as in the base."""
    gone = {f"{source.place}/{name}" for name in carried(files, base, source)}
    own = {path: base[path] for name in source.replaced if (path := f"{source.place}/{name}") in base}
    ours = {f"{source.place}/{name}": file for name, file in content.items()}
    return {path: file for path, file in files.items() if path not in gone} | own | ours


def merge(ancestor: Files, theirs: Files, ours: Files) -> tuple[Files, list[str]]:
    """Takes each file from the side that changed it.

    Returns:
        The merged files, and the names that both sides changed in different ways.
    """
    merged: Files = {}
    conflicts = []
    for name in sorted({*ancestor, *theirs, *ours}):
        old, their, our = ancestor.get(name), theirs.get(name), ours.get(name)
        if their != our and old not in (their, our):
            conflicts.append(name)
        file = our if their == old else their
        if file is not None:
            merged[name] = file
    conflicts += [name for name in merged if any(str(parent) in merged for parent in PurePosixPath(name).parents)]
    return merged, conflicts


def check_ours(files: Files, base: Files, source: Source) -> None:
    """Refuses what cannot be carried from the project's folder into verl.

    Raises:
        Misplaced: names the first such file.
    """
    for name, file in files.items():
        if not file.mode.startswith("100") or not name.endswith(".py"):
            raise Misplaced(
                f"{source.folder}/{name} does not belong in a folder of the patch, which holds Python files only; "
                "move it away"
            )
        if f"{source.place}/{name}" in base and name not in source.replaced:
            raise Misplaced(f"{source.folder}/{name} would replace a file of verl's own; rename it")


def check_theirs(files: Files, source: Source) -> None:
    """Refuses what cannot be brought back from a checkout.

    Raises:
        Misplaced: names the first such file.
    """
    for name, file in files.items():
        if not file.mode.startswith("100") or not name.endswith(".py"):
            raise Misplaced(
                f"{source.place}/{name} does not belong in verl, which has Python files only there; move it away"
            )
