#!/usr/bin/env bash
# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
# Launches training with the patched verl: on a GPU cluster, or with a small model on a machine without a GPU.
# This script finds a Python and starts tools/run_experiment.py, which does the rest.

# Privileged mode (-p) ignores functions and shell options from the environment, and sh cannot run what follows.
case $- in *p*) ;; *) exec bash -p -- "$0" "$@" ;; esac
set -euo pipefail
root=$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")

# Training may have a Python of its own that is not on PATH: --python names it.
named=()
for ((i = 1; i < $#; i++)); do
    [[ ${!i} != --python ]] || named+=("${@:i+1:1}")
done

# Variables that are meant for the training, or could break a `python3` that is a shell script, as pyenv's is.
unneeded=(-u PYTHONHOME -u PYTHONPATH)
while IFS='=' read -r -d '' name _; do
    [[ $name != BASH_FUNC_* ]] || unneeded+=(-u "$name")
done < <(env -0)

# shellcheck disable=SC2016 # for the inner bash to expand
find_any_python='source "$1"; find_python || first_python "sys.version_info >= (3, 10) or sys.exit(1)" python3 "${@:2}"'
python=$(env "${unneeded[@]}" bash -p -c "$find_any_python" bash "$root/embedded/find_python.sh" "${named[@]}") || {
    echo "run_experiment.sh: no Python 3.10 or later was found: install one, or give one with --python" >&2
    exit 2
}
exec "$python" -E -s -X utf8 "$root/tools/run_experiment.py" "$@"
