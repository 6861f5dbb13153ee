# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""The package: what of the patch has its sources in folders of the project."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import NamedTuple

import apply_patch
from tools.patching.scratch_git import Files, Scratch

ROOT = apply_patch.HERE


class Refused(Exception):
    """Ends the run with a sentence for the user."""


class Source(NamedTuple):
    """A folder of the project whose files the patch carries into verl, beside those that verl itself has."""

    folder: str
    place: str  # in verl
    suffix: str = ".py"  # of its files


SOURCES = (
    Source("gradloc", "verl/utils/gradloc"),
    Source("rewards", "verl/utils/reward_score"),
    # verl's packaging takes the .yaml files of the folders in trainer/config, and none from further below.
    Source("config/gradloc", "verl/trainer/config/gradloc", ".yaml"),
)


def package(base: Files, scratch: Scratch) -> Files:
    """The files that the package adds to a base. READMEs are for readers of the sources alone.

    Raises:
        Refused: if a folder of the sources holds what cannot be carried into verl.
    """
    found: Files = {}
    for source in SOURCES:
        folder = ROOT / source.folder
        files = scratch.work_tree(folder, ".") if folder.is_dir() else {}
        files = {name: file for name, file in files.items() if PurePosixPath(name).name != "README.md"}
        check(files, base, source)
        found |= {f"{source.place}/{name}": file for name, file in files.items()}
    return found


def check(files: Files, base: Files, source: Source) -> None:
    for name, file in files.items():
        if not file.mode.startswith("100") or not name.endswith(source.suffix):
            raise Refused(
                f"{source.folder}/{name} does not belong in a folder of the patch, which holds {source.suffix} files "
                "only; move it away"
            )
        if f"{source.place}/{name}" in base:
            raise Refused(f"{source.folder}/{name} would replace a file of verl's own; rename it")
