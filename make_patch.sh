#!/usr/bin/env bash
# Makes the patch from its sources; --help shows how. Finds a Python and hands over to tools/make_patch.py.
# Privileged mode (-p) ignores functions and shell options of the environment; sh has no BASH_SOURCE.
case $- in *p*) ;; *) exec bash -p -- "$0" "$@" ;; esac
set -euo pipefail
root=$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")
python=${PYTHON:-python3}
# Asked first: a command that fails by itself must not look like the verdict of --check.
if [[ $("$python" -c 'import sys; print(sys.version_info >= (3, 10))' 2>/dev/null) != True ]]; then
    printf 'make_patch.sh: %s is not Python 3.10 or newer; set PYTHON to one that is\n' "$python" >&2
    exit 3
fi
exec "$python" -B -W ignore "$root/tools/make_patch.py" "$@"
