# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""What of the patch has its sources in folders of the project, and how the two places of a folder come together.

Files are given as git sees them, by mode and blob, so that these functions need neither git nor a disk.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from pathlib import PurePosixPath
from typing import NamedTuple

from tools.patching import page_files


class File(NamedTuple):
    mode: str  # as in git: 100644, 100755, 120000 for a symbolic link, 160000 for a nested repository
    blob: str


Files = dict[str, File]  # by path
Read = Callable[[str], bytes]  # a blob's content
Write = Callable[[bytes], str]  # keeps a content; gives its blob


class Misplaced(ValueError):
    """Says in one sentence which file is not what it should be, and what to do."""


@dataclasses.dataclass(frozen=True)
class Source:
    """A folder of the project that the patch carries into verl: every file that verl itself has not."""

    folder: str
    place: str  # in verl
    suffix: str = ".py"  # of its files

    @property
    def only(self) -> str:
        """Which files it holds, in words."""
        return f"{'Python' if self.suffix == '.py' else self.suffix} files only"


SOURCES = (
    Source("gradloc", "verl/utils/gradloc"),
    Source("rewards", "verl/utils/reward_score"),
    # verl's packaging takes the .yaml files of the folders in trainer/config, and none from further below.
    Source("config/gradloc", "verl/trainer/config/gradloc", ".yaml"),
)


def is_readme(path: str) -> bool:
    return PurePosixPath(path).name == "README.md"


def without_readmes(files: Files) -> Files:
    """Leaves out what explains the sources to their readers, and is no part of the patch."""
    return {path: file for path, file in files.items() if not is_readme(path)}


def carried(files: Files, base: Files, source: Source) -> Files:
    """Which files of a verl tree come from the source, relative to its place, READMEs included."""
    start = f"{source.place}/"
    return {
        path.removeprefix(start): file for path, file in files.items() if path.startswith(start) and path not in base
    }


def put(files: Files, base: Files, source: Source, content: Files) -> Files:
    """The verl tree with this content of the source."""
    gone = {f"{source.place}/{name}" for name in carried(files, base, source)}
    ours = {f"{source.place}/{name}": file for name, file in content.items()}
    return {path: file for path, file in files.items() if path not in gone} | ours


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
        if PurePosixPath(name).name == page_files.MODULE:
            raise Misplaced(f"{source.folder}/{name} is a name for what the patch generates; rename it")
        is_page = source.suffix == ".py" and page_files.is_page_file(name)
        if not file.mode.startswith("100") or not (name.endswith(source.suffix) or is_page):
            also = f" (and {' '.join(page_files.SUFFIXES)} files, as a module)" if source.suffix == ".py" else ""
            raise Misplaced(
                f"{source.folder}/{name} does not belong in a folder of the patch, which holds {source.only}{also}; "
                "move it away"
            )
        if f"{source.place}/{name}" in base:
            raise Misplaced(f"{source.folder}/{name} would replace a file of verl's own; rename it")


def check_theirs(files: Files, source: Source) -> None:
    """Refuses what cannot be brought back from a checkout.

    Raises:
        Misplaced: names the first such file.
    """
    for name, file in files.items():
        if not file.mode.startswith("100") or not name.endswith(source.suffix):
            is_page = source.suffix == ".py" and page_files.is_page_file(name)
            advice = f"edit it in {page_files.MODULE}" if is_page else "move it away"
            raise Misplaced(f"{source.place}/{name} does not belong in verl, which has {source.only} there; {advice}")


def broken_module(files: Files, base: Files, read: Read) -> str | None:
    """What is wrong with the first changed module that Python cannot compile; None if there is none."""
    for path, file in sorted(files.items()):
        if path.endswith(".py") and base.get(path) != file:
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    compile(read(file.blob), path, "exec", dont_inherit=True)
            except (SyntaxError, ValueError) as error:
                return f"Python cannot compile {path}: {error}"
    return None


def join_pages(files: Files, read: Read, write: Write) -> Files:
    """The files as they are in verl: those of web pages as one module a folder.

    Raises:
        Misplaced: begins with the name of a file that cannot be part of a module.
    """
    joined = {name: file for name, file in files.items() if not page_files.is_page_file(name)}
    folders: dict[PurePosixPath, dict[str, bytes]] = {}
    for name in files.keys() - joined.keys():
        path = PurePosixPath(name)
        folders.setdefault(path.parent, {})[path.name] = read(files[name].blob)
    for folder, texts in sorted(folders.items()):
        try:
            joined[str(folder / page_files.MODULE)] = File("100644", write(page_files.join(texts)))
        except page_files.Unfit as error:
            raise Misplaced(f"{folder}/{error}".removeprefix("./")) from None
    return joined


def split_pages(files: Files, read: Read, write: Write) -> Files:
    """The files as they are in the project: the inverse of `join_pages`.

    Raises:
        Misplaced: begins with the name of a module that does not hold files.
    """
    found: Files = {}
    for name, file in files.items():
        path = PurePosixPath(name)
        if path.name != page_files.MODULE:
            found[name] = file
            continue
        try:
            texts = page_files.split(read(file.blob))
        except page_files.Unfit as error:
            raise Misplaced(f"{name}: {error}") from None
        found |= {str(path.parent / text): File("100644", write(content)) for text, content in texts.items()}
    return found
