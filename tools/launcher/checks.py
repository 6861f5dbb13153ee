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
from .values import Text

_HUGGING_FACE_ID = r"[A-Za-z0-9][A-Za-z0-9_.-]*(/[A-Za-z0-9_.-]+)?"
_FIND_VERL = """
import importlib.util as util
spec = util.find_spec("verl")
print(spec.submodule_search_locations[0] if spec else "")
"""
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


def check_verl(python: str, root: Path, environment: Mapping[str, str], values: Mapping[str, str]) -> None:
    """Raises Refused if the verl of this Python is not as the patch makes it, or lacks what a setting needs."""
    if shutil.which(python, path=environment.get("PATH")) is None:
        raise Refused(f"there is no Python at {python}: name one with --python")
    asked = subprocess.run([python, "-c", _FIND_VERL], env=environment, stdout=subprocess.PIPE)
    if asked.returncode:
        raise Refused(f"{python} does not run")
    found = os.fsdecode(asked.stdout).rstrip("\n")
    apply_patch = [python, str(root / "apply_patch.py")]
    installed = not found or re.search(r"/(site|dist)-packages/verl\Z", found)
    patch_it = for_shell([*apply_patch, *(["--installed"] if installed else ["--repo", os.path.dirname(found)])])
    if not found:
        versions = " or ".join(sorted(pin.parent.name for pin in root.glob("patches/*/PIN")))
        raise Refused(f"{python} has no verl: install verl {versions} there and run: {patch_it}")
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
    clip = values["SEQUENCE_CLIP"]
    if not (BY_NAME["SEQUENCE_CLIP"].is_off(clip) or has_geometric_clip(tree)):
        raise Refused(
            f"SEQUENCE_CLIP={clip} is rollout_rs=geometric, which the verl in {found} does not have: "
            "give SEQUENCE_CLIP=off, and set what it has as Hydra overrides (docs/support.md)"
        )


def has_geometric_clip(tree: str) -> bool:
    """Whether the verl in this directory knows rollout_rs=geometric; 0.7.1 has seq_mean_k1 instead."""
    code = Path(tree, "verl", "trainer", "ppo", "rollout_corr_helper.py")
    return not code.is_file() or '"geometric"' in code.read_text(errors="replace")
