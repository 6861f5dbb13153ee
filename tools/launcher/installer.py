# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Installs into a virtual environment: with uv where pip is unconfigured, otherwise, or where uv fails, with pip.

uv does not read pip's configuration: it would ignore a configured mirror, proxy or constraint.
"""

import functools
import re
import subprocess
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

from .log import say
from .processes import step

# Options of pip that change what it says, asks or keeps, not what it installs, or from where.
_HARMLESS = frozenset(
    "break-system-packages cache-dir config-file default-timeout disable-pip-version-check exists-action log "
    "no-cache-dir no-color no-input no-python-version-warning no-warn-script-location prefer-binary progress-bar quiet "
    "require-virtualenv retries root-user-action timeout verbose".split()
)
_CONFIGURED = re.compile(r"(?:global|install|:env:)\.([^=]+)=")
# What pip says for each package of each configured location that it does not take. An index in a folder is one for
# each package, so this matters only where pip fails.
_IGNORED = re.compile(
    r"WARNING: (?:Location '(?P<path>.+)' is ignored|The repository located at (?P<host>\S+) .*is being ignored)"
)
# How many ignored locations are named.
_NAMED = 3
# How many of a failed command's last lines are shown.
_LAST_LINES = 40


def configured(listed: str) -> list[str]:
    """The options that `pip config list` prints and that uv would ignore. Only names: values may contain passwords."""
    names = {found[1] for line in listed.splitlines() if (found := _CONFIGURED.match(line))}
    return sorted(names - _HARMLESS)


class Installer:
    """Installs packages for one Python.

    Args:
        python: The Python of a virtual environment with pip.
        uv: The requirement of uv, with its version.
        environment: The environment variables of pip and uv.
    """

    def __init__(self, python: Path, uv: str, environment: Mapping[str, str]) -> None:
        self._pip = [str(python), "-m", "pip"]
        self._uv = python.parent / "uv"
        self._for_python = ["--python", str(python)]
        self._requirement_of_uv = uv
        self._environment = environment

    def install(self, *what: str) -> None:
        """Installs what the arguments of `pip install` name; raises CalledProcessError if pip fails, too."""
        self._install(what, for_uv=[], for_pip=[])

    def install_again(self, pin: str) -> None:
        """Installs a package without its dependencies, also where it is there. Its files are no links into a cache."""
        what = ["--no-deps", pin]
        self._install(what, for_uv=["--reinstall", "--link-mode", "copy"], for_pip=["--force-reinstall"])

    def _install(self, what: Sequence[str], for_uv: Sequence[str], for_pip: Sequence[str]) -> None:
        if self._reason_for_pip is None:
            try:
                options = ["--no-config", "--no-progress", *self._for_python]
                return self._run([str(self._uv), "pip", "install", *options, *for_uv, *what])
            except (OSError, subprocess.CalledProcessError):
                say("falling back to pip: uv failed (slower)")
                self._reason_for_pip = "uv failed"
        self._run([*self._pip, "install", "--progress-bar", "off", *for_pip, *what])

    @functools.cached_property
    def _reason_for_pip(self) -> str | None:
        """Why pip installs; None where uv does, which is then there."""
        reason = self._find_reason_for_pip()
        if reason is not None:
            say(f"falling back to pip: {reason} (slower)")
        return reason

    def _find_reason_for_pip(self) -> str | None:
        listed = subprocess.run(
            [*self._pip, "config", "list"], env=self._environment, stdout=subprocess.PIPE, text=True
        )
        if listed.returncode:
            return "pip's configuration cannot be read"
        if names := configured(listed.stdout):
            return f"pip is configured with {', '.join(names)}"
        if not self._uv.exists():
            try:
                self._run([*self._pip, "install", "--quiet", self._requirement_of_uv])
            except subprocess.CalledProcessError:
                return "uv cannot be installed"
        return None

    def _run(self, command: Sequence[str]) -> None:
        """Runs pip or uv and shows its progress and warnings; if it fails, what it said last."""
        said: deque[str] = deque(maxlen=_LAST_LINES)
        ignored: set[str] = set()
        packages = 0
        try:
            with step(command, self._environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
                assert process.stdout is not None
                for line in process.stdout:
                    if found := _IGNORED.match(line):
                        ignored.add(found["path"] or found["host"])
                        continue
                    said.append(line)
                    packages += line.startswith("Collecting ")
                    if line.startswith("Collecting ") and packages % 20 == 0:
                        print(f"  {packages} packages", flush=True)
                    elif line.startswith("Installing collected"):
                        print("  writing them to disk", flush=True)
                    elif line.startswith(("WARNING", "Resolved", "Prepared", "Installed")):
                        print(f"  {line}", end="", flush=True)
        except subprocess.CalledProcessError:
            print("".join(said), end="", flush=True)
            _tell(ignored)
            raise


def _tell(ignored: set[str]) -> None:
    if ignored:
        named = sorted(ignored)[:_NAMED]
        more = f" and {len(ignored) - _NAMED} more locations" if len(ignored) > _NAMED else ""
        say(f"pip ignores {', '.join(named)}{more} that its configuration gives (pip config list)")
