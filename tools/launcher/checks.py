# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""What has to be there before training starts: the model, the data, and a verl with this patch."""

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from .command import for_shell
from .errors import Refused
from .hydra import split_list
from .settings import BY_NAME
from .targets import find_verl, one_of, release_of, requirements_of, supported
from .values import Text

_HUGGING_FACE_ID = r"[A-Za-z0-9][A-Za-z0-9_.-]*(/[A-Za-z0-9_.-]+)?"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_PRINT_MISSING = """
import sys
from importlib import metadata
for name in sys.argv[1:]:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        print(name)
"""
_APPLIED, _PARTLY, _APPLICABLE = 10, 11, 0  # exit codes of apply_patch.py --check


def missing_paths(values: Mapping[str, str], prepared: Path | None) -> list[str]:
    """The paths that do not exist, as NAME=path. What is under `prepared` will be made.

    Addresses (hdfs://...) and Hugging Face ids are left for verl to find.
    """
    missing = []
    for name in ("MODEL_PATH", "TRAIN_FILES", "VAL_FILES"):
        value = values[name]
        for path in split_list(value) if BY_NAME[name].allowed is Text.LIST else [value]:
            elsewhere = "://" in path or (name == "MODEL_PATH" and re.fullmatch(_HUGGING_FACE_ID, path))
            made = prepared is not None and path.startswith(f"{prepared}/")
            if not (elsewhere or made or os.path.exists(path)):
                missing.append(f"{name}={path}")
    return missing


_IS_PLUGIN_THERE = """
import importlib.metadata as metadata, sys
points = metadata.entry_points(group="verl.plugins")
sys.exit(not any(point.value == "gradloc_verl" for point in points))
"""


def check_verl(
    python: str, root: Path, environment: Mapping[str, str], target: str | None, plugin: bool = False
) -> None:
    """Raises Refused if the verl of this Python is not as the patch makes it, or not the target that is asked for.

    With `plugin`, if it is patched, or this Python lacks the plugin, which itself looks whether it fits another verl.
    """
    if shutil.which(python, path=environment.get("PATH")) is None:
        raise Refused(f"there is no Python at {python}: give one with --python")
    found = find_verl(python, environment)
    if found is None:
        raise Refused(f"{python} does not run")
    apply_patch = [python, str(root / "apply_patch.py")]
    in_packages = not found or re.search(r"/(site|dist)-packages/verl\Z", found)
    patch_it = for_shell([*apply_patch, *(["--installed"] if in_packages else ["--repo", os.path.dirname(found)])])
    if not found:
        raise Refused(f"{python} has no verl: install verl {one_of(supported(root))} there and run: {patch_it}")
    if target is not None and not plugin and (installed := release_of(found)) != target:
        raise Refused(
            f"--target is {target}, and the verl in {found} is {installed}: leave --target out, "
            "or name another Python with --python"
        )
    # By content: folders and words stay when pip or git restore verl, and an older patch has them, too.
    tree = os.path.dirname(os.path.realpath(found))
    checked = subprocess.run(
        [*apply_patch, "--check", "--force", "--repo", tree],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    if plugin:
        _check_plugin(python, root, environment, found, patched=checked.returncode in (_APPLIED, _PARTLY))
        return
    if checked.returncode == _APPLICABLE:
        raise Refused(f"the verl in {found} is not patched: run {patch_it}")
    if checked.returncode != _APPLIED:
        said = os.fsdecode(checked.stdout).rstrip("\n").removeprefix("apply_patch: ")
        raise Refused(
            f"the verl in {found} differs from what this patch writes ({said}); "
            "to launch it anyway, run what --dry-run prints"
        )


def _check_plugin(python: str, root: Path, environment: Mapping[str, str], verl: str, patched: bool) -> None:
    if patched:
        raise Refused(f"the verl in {verl} is patched: give --plugin one that is not")
    if subprocess.run([python, "-c", _IS_PLUGIN_THERE], env=environment).returncode:
        install = for_shell([python, "-m", "pip", "install", str(root)])
        raise Refused(f"{python} has no plugin of GradLoc: run {install}")


def check_packages(python: str, root: Path, environment: Mapping[str, str], target: str) -> None:
    """Raises Refused if this Python, of the user's, lacks a package that the embedded profile needs."""
    embedded = root / "embedded"
    release = requirements_of(target, root)
    files = (embedded / f"requirements-{release}.in", embedded / "requirements-no-deps.txt")
    lines = [line for file in files for line in file.read_text().splitlines()]
    # verl has been checked, and a checkout of it need not be installed.
    needed = [name[0] for line in lines if (name := _NAME.match(line)) and name[0] != "verl"]
    command = [python, "-c", _PRINT_MISSING, *needed]
    found = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    if missing := found.stdout.split():
        raise Refused(
            f"{python} lacks packages that --embedded needs: {', '.join(missing)}. Install them there (versions that "
            f"work: embedded/requirements-{release}.txt, and with --no-deps embedded/requirements-no-deps.txt), or "
            "leave --python out"
        )
