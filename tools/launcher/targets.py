# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Which verl a run is for."""

import os
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

from .errors import Refused

_FIND_VERL = """
import importlib.util as util
spec = util.find_spec("verl")
print(spec.submodule_search_locations[0] if spec else "")
"""


def number(version: str) -> tuple[int, ...]:
    """The version, for comparisons."""
    return tuple(map(int, re.findall(r"\d+", version)))


def supported(root: Path) -> list[str]:
    """The versions that there is a patch for, the oldest first."""
    return sorted((pin.parent.name for pin in root.glob("patches/*/PIN")), key=number)


def default_version(root: Path) -> str:
    """The version that is meant where nothing says which."""
    return (root / "patches/DEFAULT").read_text().strip()


def requirements_of(version: str, root: Path) -> str:
    """The version whose requirement files hold for this one, which its PIN names; itself where it names none."""
    pin = dict(line.partition("=")[::2] for line in (root / f"patches/{version}/PIN").read_text().splitlines())
    return pin.get("REQUIREMENTS", version)


def released(version: str, root: Path) -> bool:
    """Whether pip can install this verl: a commit that was not released has no wheel."""
    return "WHEEL_SHA256=" in (root / f"patches/{version}/PIN").read_text()


def check(version: str, root: Path) -> None:
    """Raises Refused if there is no patch for this verl."""
    versions = supported(root)
    if version not in versions:
        raise Refused(f"there is no patch for verl {version}: give --target {one_of(versions)}")


def one_of(versions: list[str]) -> str:
    return " or ".join(filter(None, [", ".join(versions[:-1]), versions[-1]]))


def choose(asked: str | None, python: str | None, root: Path, environment: Mapping[str, str]) -> str:
    """The version that is asked for, or that this Python would import, or the default one."""
    if asked is not None:
        return asked
    installed = None if python is None else release_of(find_verl(python, environment))
    return installed if installed in supported(root) else default_version(root)


def find_verl(python: str, environment: Mapping[str, str]) -> str | None:
    """The directory of the verl that this Python would import, "" if it has none, None if the Python does not run."""
    try:
        done = subprocess.run(
            [python, "-c", _FIND_VERL], env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
    except OSError:
        return None
    return os.fsdecode(done.stdout).rstrip("\n") if done.returncode == 0 else None


def release_of(verl: str | None) -> str | None:
    """The version of the verl in this directory; None if that cannot be told."""
    try:
        return Path(verl, "version/version").read_text().strip() if verl else None
    except (OSError, ValueError):
        return None
