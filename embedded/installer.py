# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Installs into a virtual environment: with uv where pip is unconfigured, otherwise, or where uv fails, with pip.

    python embedded/installer.py VENV/bin/python -r requirements.txt    # as for `pip install`

uv does not read pip's configuration: it would ignore a configured mirror, proxy or constraint.
"""

import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

# Options of pip that change what it says, asks or keeps, not what it installs, or from where.
_HARMLESS = frozenset(
    "break-system-packages cache-dir config-file default-timeout disable-pip-version-check exists-action log "
    "no-cache-dir no-color no-input no-python-version-warning no-warn-script-location prefer-binary progress-bar quiet "
    "require-virtualenv retries root-user-action timeout verbose".split()
)
_CONFIGURED = re.compile(r"(?:global|install|:env:)\.([^=]+)=")


def configured(listed: str) -> list[str]:
    """The options that `pip config list` prints and that uv would ignore. Only names: values may contain passwords."""
    names = {found[1] for line in listed.splitlines() if (found := _CONFIGURED.match(line))}
    return sorted(names - _HARMLESS)


class Installer:
    """Installs packages for one Python.

    Args:
        python: The Python of a virtual environment with pip.
    """

    def __init__(self, python: Path) -> None:
        self._pip = [str(python), "-m", "pip"]
        self._uv = python.parent / "uv"
        self._for_python = ["--python", str(python)]
        self._requirement_of_uv = Path(__file__).with_name("requirements-uv.txt").read_text().strip()
        self._uses_uv = self._has_uv()

    def install(self, *what: str) -> None:
        """Installs what the arguments of `pip install` name; raises CalledProcessError if pip fails, too."""
        self._install(what, for_uv=[], for_pip=[])

    def install_again(self, package: str) -> None:
        """Installs a package without its dependencies, also over an installed one, as copies and not links."""
        what = ["--no-deps", package]
        self._install(what, for_uv=["--reinstall", "--link-mode", "copy"], for_pip=["--force-reinstall"])

    def _install(self, what: Sequence[str], for_uv: Sequence[str], for_pip: Sequence[str]) -> None:
        if self._uses_uv:
            uv = [str(self._uv), "pip", "install", "--no-config", "--no-progress", *self._for_python]
            try:
                subprocess.run([*uv, *for_uv, *what], check=True)
                return
            except (OSError, subprocess.CalledProcessError):
                self._uses_uv = _falling_back("uv failed")
        subprocess.run([*self._pip, "install", "--quiet", "--quiet", *for_pip, *what], check=True)

    def _has_uv(self) -> bool:
        listed = subprocess.run([*self._pip, "config", "list"], stdout=subprocess.PIPE, text=True)
        if listed.returncode:
            return _falling_back("pip's configuration cannot be read")
        if names := configured(listed.stdout):
            return _falling_back(f"pip is configured with {', '.join(names)}")
        if self._uv.exists():
            return True
        if subprocess.run([*self._pip, "install", "--quiet", "--quiet", self._requirement_of_uv]).returncode:
            return _falling_back("uv cannot be installed")
        return True


def _falling_back(reason: str) -> bool:
    print(f"falling back to pip: {reason} (slower)", flush=True)
    return False


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    try:
        Installer(Path(sys.argv[1])).install(*sys.argv[2:])
    except subprocess.CalledProcessError as error:
        sys.exit(error.returncode)  # the command has said itself what is wrong
