# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""The parts of a patch: the hooks, on the base; the fixes, on the hooks; beside them, new files and the package.

How they are made, written, put into one file (--release) and checked (--check).
"""

from __future__ import annotations

import functools
import hashlib
import re
from pathlib import Path

import apply_patch
from apply_patch import FILES, LICENCE, MARKER, PACKAGE, Stop, Target
from tools.patching.scratch_git import File, Files, GitFailed, Scratch

ROOT = apply_patch.HERE
OUT_OF_DATE = 1  # the exit code if something is not as the sources produce it
say = functools.partial(apply_patch.say, name="make_patch.sh")


def one(targets: list[Target]) -> Target:
    if len(targets) > 1:
        raise Stop(f"say with --target which verl it is: {apply_patch.versions(targets, 'or')}")
    return targets[0]


def find_base(target: Target, tree: Path | None) -> Path:
    """The unpatched verl of a target: the given tree, or the one in build/."""
    found = tree or ROOT / "build" / target.version / "base"
    if not (found / "verl/__init__.py").is_file():
        raise Stop(
            f"{found} has no verl/__init__.py; give an unpatched verl {target.version} with --base-tree, or run bash "
            "tests/run.sh, which puts it into build/"
        )
    return found


def make_diff(old: Files, new: Files, scratch: Scratch) -> bytes:
    """A patch, empty if nothing differs. Refuses what a patch cannot carry or CI would not take."""
    patch = scratch.diff(old, new)
    if changed := [path for path in old.keys() & new.keys() if old[path].mode != new[path].mode]:
        raise Stop(f"{changed[0]} has another mode, or is a symbolic link now, which the patch cannot carry; undo that")
    if bad := scratch.whitespace_error(old, new):
        raise Stop(f"whitespace error in {bad}; fix it first")
    if bad := unfinished_line(patch):
        raise Stop(f"{bad} lacks the newline at its end; add it")
    if bad := broken_module(new, old, scratch):
        raise Stop(f"{bad}; correct it first")
    return patch


def check_taken(patch: bytes, old: Files, new: Files, scratch: Scratch) -> None:
    """Refuses a patch of verl's own files that apply_patch.py would not take in and out, to the same bytes."""
    try:
        for change in apply_patch.parse_patch(patch):
            for step, files in ((change, old), (change.reversed(), new)):
                step.result(scratch.read(files[change.path].blob))
    except Stop as stop:
        raise Stop(f"apply_patch.py would not take the patch: {stop}") from None


def unfinished_line(patch: bytes) -> str | None:
    """The first file in which the patch leaves out the newline at the end."""
    name = ""
    for line in re.findall(rb"^\+\+\+ b/.+|^\+.*\n\\ No newline", patch, re.M):
        if line.endswith(b"\\ No newline"):
            return name
        name = line[6:].decode("utf-8", "replace")
    return None


def broken_module(files: Files, base: Files, scratch: Scratch) -> str | None:
    """What is wrong with the first changed module that Python cannot compile; None if there is none."""
    for path, file in sorted(files.items()):
        if path.endswith(".py") and base.get(path) != file:
            try:
                compile(scratch.read(file.blob), path, "exec", dont_inherit=True)
            except (SyntaxError, ValueError) as error:
                return f"Python cannot compile {path}: {error}"
    return None


def write(output: Path, patch: bytes) -> None:
    """Writes a patch and then its checksum, each in one step."""
    checksum = output.with_name(f"{output.name}.sha256")
    for place, content in ((output, patch), (checksum, checksum_line(patch, output.name))):
        partial = place.with_name(f"{place.name}.tmp")
        try:
            partial.write_bytes(content)
            partial.replace(place)
        finally:
            partial.unlink(missing_ok=True)
    say(f"wrote {output} and its .sha256")


def checksum_line(data: bytes, name: str) -> bytes:
    return f"{hashlib.sha256(data).hexdigest()}  {name}\n".encode()


def read(path: Path) -> bytes | None:
    """A file's content; None if there is no such file."""
    try:
        return path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None


def write_release(target: Target, tree: Path | None, scratch: Scratch) -> None:
    """Writes a target's patch with the package, as apply_patch.py --vendor leaves a verl, in one file."""
    apply_patch.load_target(target)  # refuses a part that is damaged
    base = files = scratch.work_tree(find_base(target, tree), "verl")
    for part in target.parts:
        files = scratch.apply(files, part.read_bytes())
    files = {**files, **new_files(base, scratch)}
    package = scratch.work_tree(ROOT, "gradloc")
    blobs = {f"{PACKAGE}/{name}": package[f"gradloc/{name}"].blob for name in apply_patch.package_files()}
    blobs[MARKER] = scratch.git("hash-object", "-w", "--stdin", data=LICENCE).decode().strip()
    files |= {path: File("100644", blob) for path, blob in blobs.items()}
    output = ROOT / "dist" / f"verl-{target.version}-gradloc.patch"
    output.parent.mkdir(exist_ok=True)
    write(output, make_diff(base, files, scratch))


def new_files(base: Files, scratch: Scratch) -> Files:
    """Those that every target gets."""
    there = scratch.work_tree(FILES, "verl")
    new = {change.path: there[change.path] for change in apply_patch.new_files()}
    for path in sorted(there):
        if path in base:
            raise Stop(f"{FILES}/{path} would replace a file of verl's own; rename it", OUT_OF_DATE)
        if path not in new:
            raise Stop(f"{FILES}/{path} is of a kind that the patch does not carry; move it away", OUT_OF_DATE)
    return new


def check(targets: list[Target], tree: Path | None, scratch: Scratch) -> None:
    """Checks the checksums, and then hooks and fixes of each target, which take its base."""
    if tree is not None:
        one(targets)
    patches = {target: [whole(part) for part in target.parts] for target in targets}
    for target in targets:
        check_target(target, find_base(target, tree), patches[target], scratch)


def whole(part: Path) -> bytes:
    """A part of the patch, if it is there and as its checksum says."""
    patch = read(part)
    if patch is None:
        raise Stop(f"{part} is missing; run make_patch.sh --repo on a development checkout", OUT_OF_DATE)
    if read(part.with_name(f"{part.name}.sha256")) != checksum_line(patch, part.name):
        raise Stop(f"{part}.sha256 is not the checksum of the patch; regenerate both with make_patch.sh", OUT_OF_DATE)
    return patch


def check_target(target: Target, tree: Path, patches: list[bytes], scratch: Scratch) -> None:
    """Checks that the patches apply in their order, that make_patch.sh wrote them, and that they can be taken out."""
    base = files = scratch.work_tree(tree, "verl")
    make_diff({}, new_files(base, scratch), scratch)  # refuses what a patch cannot carry
    for part, patch in zip(target.parts, patches, strict=True):
        before = files
        try:
            files = scratch.apply(before, patch, "--whitespace=error-all")
        except GitFailed as error:
            raise Stop(f"{part} does not apply to {tree}: {error.lines[0]}", OUT_OF_DATE) from None
        if bad := broken_module(files, before, scratch):
            raise Stop(f"{part} is broken: {bad}", OUT_OF_DATE)
        if scratch.diff(before, files) != patch:
            raise Stop(f"{part} is in other bytes than make_patch.sh --repo would write it", OUT_OF_DATE)
        check_taken(patch, before, files, scratch)
    say(f"the patch for verl {target.version} is as make_patch.sh writes it; it applies and reverses")
