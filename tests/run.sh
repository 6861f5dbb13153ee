#!/usr/bin/env bash
# Sets up build/ on first use and runs every check of the project: ruff, then pytest.
# Usage: bash tests/run.sh [pytest arguments]
# Exit code: 0 if everything passes, the failing step's own code otherwise.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
root=$PWD
venv=$root/build/venv
say() { printf '%s\n' "run.sh: $*"; }

find_python() {
    local candidate
    for candidate in python3.11 python3.12 python3.10 python3; do
        # Running it is the only proof: a launcher on PATH may stand for a version that is not installed.
        if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 12))' \
            >/dev/null 2>&1; then
            echo "$candidate"
            return
        fi
    done
    say "no Python 3.10, 3.11 or 3.12 with the venv module was found; install one of them" >&2
    return 1
}

# The virtual environment is rebuilt when a requirement file or the interpreter changes.
set_up_venv() {
    local python requirements wanted
    python=$(find_python)
    requirements=(tests/requirements.txt)
    wanted=$({ "$python" -VV; cat "${requirements[@]}"; } | sha256sum | cut -d' ' -f1)
    [[ -f $venv/ready && $(<"$venv/ready") == "$wanted" ]] && return
    say "installing the requirements into build/venv (a few minutes, once)"
    rm -rf "$venv"
    "$python" -m venv "$venv"
    "$venv/bin/python" -m pip install --progress-bar off "${requirements[@]/#/-r}" |
        awk '/^Collecting/ { if (++n % 20 == 0) { print "  " n " packages"; fflush() } }
             /^Installing collected/ { print "  installing"; fflush() }'
    echo "$wanted" >"$venv/ready"
}

mkdir -p build
exec 9>build/lock
flock 9 # two runs side by side must not set up the same files
set_up_venv
flock -u 9

say "ruff"
"$venv/bin/ruff" check .
"$venv/bin/ruff" format --check .
say "pytest"
if ! compgen -G 'tests/test_*.py' >/dev/null; then
    say "no tests yet"
    exit 0
fi
export PYTHONPATH=$root
exec "$venv/bin/python" -m pytest "$@"
