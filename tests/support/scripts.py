"""The programs in embedded/, without its package, which changes torch and verl for a machine without a GPU."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "embedded"))

import follow  # noqa: E402
import launch  # noqa: E402
import prepare  # noqa: E402
import processes  # noqa: E402
import run  # noqa: E402
import set_up  # noqa: E402

__all__ = ["follow", "launch", "prepare", "processes", "run", "set_up"]
