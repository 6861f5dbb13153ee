# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
# For bash scripts to source.
# shellcheck shell=bash

# first_python TEST COMMAND...: prints the path of the first command that is a Python in which the statements TEST
# succeed; fails if none is.
first_python() {
    local candidate test=$1
    shift
    for candidate; do
        # Running it is the only proof: a launcher on PATH may stand for a version that is not installed.
        if "$candidate" -c "import sys; $test; print(sys.executable)" 2>/dev/null; then return; fi
    done
    return 1
}

# Prints the path of the first Python on PATH that verl can be installed with; fails if there is none.
find_python() {
    first_python 'import venv, ensurepip; (3, 10) <= sys.version_info[:2] <= (3, 12) or sys.exit(1)' \
        python3.11 python3.12 python3.10 python3
}
