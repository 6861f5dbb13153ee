"""For tests that run the commands that others print, as they stand."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def commands_in(text: str) -> list[str]:
    """Those in backticks, and those that a line ends with."""
    found = re.finditer("`(python -m [^`]*)`|^[A-Z][a-z ]+: +(python -m .*)$", text, flags=re.M)
    return [match[1] or match[2] for match in found]


def run_as_printed(command: str) -> subprocess.CompletedProcess[str]:
    """Runs a command in a shell, in another folder than the one in which it was printed."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    bin_ = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PYTHONPATH": path, "PATH": bin_}
    return subprocess.run(command, shell=True, capture_output=True, text=True, cwd=Path("/"), env=environment)
