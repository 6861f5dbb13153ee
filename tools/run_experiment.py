# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Launches training with the patched verl; `bash run_experiment.sh --help` shows how.

It runs before anything is installed: this file and the package `launcher` need Python 3.10 and its standard library.
"""

import sys

from launcher.main import main  # type: ignore[import-not-found]  # this file's folder is on the path

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
