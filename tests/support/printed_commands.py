"""For tests that run the commands that others print, as they stand."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import trees


def commands_in(text: str) -> list[str]:
    """Those in backticks, and those that a line ends with."""
    found = re.finditer("`(gradloc [^`]*)`|^[A-Z][a-z ]+: +(gradloc .*)$", text, flags=re.M)
    return [match[1] or match[2] for match in found]


def run_as_printed(command: str) -> subprocess.CompletedProcess[str]:
    """Runs a command in a shell, in another folder than the one in which it was printed."""
    path = os.pathsep.join([str(trees.ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    # As pip's script for the wheel's entry point.
    program = f'gradloc() {{ {shlex.quote(sys.executable)} -m gradloc "$@"; }}\n{command}'
    return trees.run("/bin/sh", "-c", program, cwd=Path("/"), PYTHONPATH=path)
