# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Installs packages into a virtual environment, with uv, or with pip where that is configured.

python tools/install.py VENV/bin/python -r requirements.txt     # what follows the Python is as for `pip install`
"""

import os
import subprocess
import sys
from pathlib import Path

from launcher.installer import Installer  # type: ignore[import-not-found]  # this file's folder is on the path

UV = Path(__file__).resolve().parents[1] / "embedded/requirements-uv.txt"


def main() -> int:
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    try:
        Installer(Path(sys.argv[1]), UV.read_text().strip(), os.environ).install(*sys.argv[2:])
    except subprocess.CalledProcessError as error:
        return error.returncode  # the command has said itself what is wrong
    return 0


if __name__ == "__main__":
    sys.exit(main())
