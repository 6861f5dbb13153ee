# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Installs into a virtual environment with uv, and with pip where uv is not to be had, or fails.

uv does not read pip's configuration, so its environment variables are made from that: URLs may contain passwords, and
all users of a machine can read command lines. If something is configured that uv would not do alike, pip does
everything.
"""

import ast
import contextlib
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from .log import say
from .processes import step

# What pip's options (of its configuration files and variables) are for uv.
_VARIABLES = {
    "index-url": ("UV_DEFAULT_INDEX",),
    "cert": ("SSL_CERT_FILE",),
    "proxy": ("HTTP_PROXY", "HTTPS_PROXY"),
    "timeout": ("UV_HTTP_TIMEOUT",),
    "default-timeout": ("UV_HTTP_TIMEOUT",),
}
# Options that take lists, which pip separates by white space, and uv by the sign given here.
_LISTS = {
    "extra-index-url": ("UV_EXTRA_INDEX_URL", " "),
    "find-links": ("UV_FIND_LINKS", ","),
    "trusted-host": ("UV_INSECURE_HOST", " "),
}
# These change what pip says, asks or keeps, not what it installs.
_WITHOUT_EFFECT = frozenset(
    "break-system-packages cache-dir disable-pip-version-check exists-action log no-cache-dir no-color no-input "
    "no-python-version-warning no-warn-script-location prefer-binary progress-bar quiet require-virtualenv retries "
    "root-user-action verbose".split()
)
# What pip says for each package of each configured location that it does not take.
_IGNORED = re.compile(
    r"WARNING: (?:Location '(?P<path>.+)' is ignored|The repository located at (?P<host>\S+) .*is being ignored)"
)
# How long to wait for what a finished pip has said, since a process that it has left may still write.
_LAST_WORDS_SECONDS = 60.0
# How many ignored locations are named.
_NAMED = 3


class NotForUv(Exception):
    """uv cannot do what pip is configured to do. The message names the option."""


def translated(listed: str) -> dict[str, str]:
    """What `pip config list` prints, as uv's variables; raises NotForUv for an option that uv has no equal of."""
    # As in pip: a variable wins over a section of `pip install`, and that over the global section.
    values: dict[str, str] = {}
    for section in ("global.", "install.", ":env:."):
        for line in listed.splitlines():
            if line.startswith(section):
                name, _, value = line.removeprefix(section).partition("=")
                values[name] = str(ast.literal_eval(value))
    variables: dict[str, str] = {}
    for name, value in values.items():
        if name in _LISTS:
            variable, separator = _LISTS[name]
            items = value.split()
            if any(separator in item for item in items):
                raise NotForUv(f"{name} with '{separator}' in it")
            variables[variable] = separator.join(items)
        elif name in _VARIABLES:
            variables |= dict.fromkeys(_VARIABLES[name], value)
        elif name not in _WITHOUT_EFFECT:
            raise NotForUv(name)
    return variables


class Installer:
    """Installs packages for one Python.

    Args:
        python: The Python of a virtual environment with pip.
        uv: The requirement of uv, with its version.
        environment: The environment variables of pip and uv.
    """

    def __init__(self, python: Path, uv: str, environment: Mapping[str, str]) -> None:
        self._python = python
        self._uv = uv
        self._environment = environment
        self._configured: dict[str, str] | None = None
        self._asked = False

    def install(self, *what: str) -> None:
        """Installs what the arguments of `pip install` name; raises CalledProcessError if pip fails, too."""
        self._install(what, for_uv=[], for_pip=[])

    def install_again(self, pin: str) -> None:
        """Installs a package without its dependencies, also where it is there. Its files are no links into a cache."""
        what = ["--no-deps", pin]
        self._install(what, for_uv=["--reinstall", "--link-mode", "copy"], for_pip=["--force-reinstall"])

    def _install(self, what: Sequence[str], for_uv: Sequence[str], for_pip: Sequence[str]) -> None:
        configured = self._for_uv()
        if configured is not None:
            command = [str(self._python.parent / "uv"), "pip", "install", "--no-config", "--no-progress"]
            # pip, too, takes the best version of all indexes.
            command += ["--python", str(self._python), "--index-strategy", "unsafe-best-match"]
            if self._tried([*command, *for_uv, *what], {**self._environment, **configured}):
                return
            say("uv failed; pip takes its place (slower)")
            self._configured = None
        self._pip([*for_pip, *what])

    def _for_uv(self) -> dict[str, str] | None:
        if not self._asked:
            self._asked = True
            self._configured = self._find_uv()
        return self._configured

    def _find_uv(self) -> dict[str, str] | None:
        pip = [str(self._python), "-m", "pip"]
        listed = subprocess.run([*pip, "config", "list"], env=self._environment, stdout=subprocess.PIPE, text=True)
        try:
            configured = translated(listed.stdout if listed.returncode == 0 else "")
        except NotForUv as error:
            say(f"pip is configured with {error}, which uv does not have: pip installs the packages (slower)")
            return None
        if (self._python.parent / "uv").exists() or self._tried(
            [*pip, "install", "--quiet", self._uv], self._environment
        ):
            return configured
        say("uv is not to be had here: pip installs the packages (slower)")
        return None

    def _tried(self, command: Sequence[str], environment: Mapping[str, str]) -> bool:
        """Runs a command that may fail, and tells what it said if it did; otherwise only uv's totals."""
        said: list[str] = []
        try:
            with step(command, environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
                assert process.stdout is not None
                for line in process.stdout:
                    said.append(line)
                    if line.startswith(("Resolved", "Prepared", "Installed")):
                        print(f"  {line}", end="", flush=True)
        except (OSError, subprocess.CalledProcessError):
            ignored: set[str] = set()
            print("".join(_without_ignored(said, ignored)), end="", flush=True)
            _tell(ignored)
            return False
        return True

    def _pip(self, arguments: Sequence[str]) -> None:
        command = [str(self._python), "-m", "pip", "install", "--progress-bar", "off", *arguments]
        packages = 0
        with (
            _passing_on_warnings() as stderr,
            step(command, self._environment, stdout=subprocess.PIPE, stderr=stderr) as pip,
        ):
            assert pip.stdout is not None
            for line in pip.stdout:
                if line.startswith("Collecting"):
                    packages += 1
                    if packages % 20 == 0:
                        print(f"  {packages} packages", flush=True)
                elif line.startswith("Installing collected"):
                    print("  writing them to disk", flush=True)


@contextlib.contextmanager
def _passing_on_warnings() -> Iterator[int]:
    """Gives pip a file for its stderr: what it writes there is printed at once, but ignored locations at the end."""
    reading, writing = os.pipe()
    ignored: set[str] = set()

    def pass_on() -> None:
        with open(reading, errors="surrogateescape") as lines:
            for line in _without_ignored(lines, ignored):
                print(line, end="", file=sys.stderr, flush=True)

    reader = threading.Thread(target=pass_on, daemon=True)
    reader.start()
    try:
        yield writing
    finally:
        os.close(writing)
        reader.join(_LAST_WORDS_SECONDS)
        _tell(ignored)


def _without_ignored(lines: Iterable[str], ignored: set[str]) -> Iterator[str]:
    """The lines without pip's warnings on ignored locations, which go into the set."""
    for line in lines:
        if found := _IGNORED.match(line):
            ignored.add(found["path"] or found["host"])
        else:
            yield line


def _tell(ignored: set[str]) -> None:
    if ignored:
        named = sorted(ignored)[:_NAMED]
        more = f" and {len(ignored) - _NAMED} more locations" if len(ignored) > _NAMED else ""
        say(f"pip ignores {', '.join(named)}{more} that its configuration gives (pip config list)")
