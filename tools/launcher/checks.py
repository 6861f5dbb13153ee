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
from .targets import find_verl, one_of, release_of, supported
from .values import Text

_HUGGING_FACE_ID = r"[A-Za-z0-9][A-Za-z0-9_.-]*(/[A-Za-z0-9_.-]+)?"
_APPLIED, _APPLICABLE = 10, 0  # exit codes of apply_patch.py --check


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


def check_verl(python: str, root: Path, environment: Mapping[str, str], target: str | None) -> None:
    """Raises Refused if the verl of this Python is not as the patch makes it, or not the target that is asked for."""
    if shutil.which(python, path=environment.get("PATH")) is None:
        raise Refused(f"there is no Python at {python}: name one with --python")
    found = find_verl(python, environment)
    if found is None:
        raise Refused(f"{python} does not run")
    apply_patch = [python, str(root / "apply_patch.py")]
    in_packages = not found or re.search(r"/(site|dist)-packages/verl\Z", found)
    patch_it = for_shell([*apply_patch, *(["--installed"] if in_packages else ["--repo", os.path.dirname(found)])])
    if not found:
        raise Refused(f"{python} has no verl: install verl {one_of(supported(root))} there and run: {patch_it}")
    if target is not None and (installed := release_of(found)) != target:
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
    if checked.returncode == _APPLICABLE:
        raise Refused(f"the verl in {found} is not patched: run {patch_it}")
    if checked.returncode != _APPLIED:
        said = os.fsdecode(checked.stdout).rstrip("\n").removeprefix("apply_patch: ")
        raise Refused(
            f"the verl in {found} is not as this patch makes it ({said}); "
            "to launch with it all the same, run what --dry-run prints"
        )
