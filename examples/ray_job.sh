#!/usr/bin/env bash
# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
# Submits training to a running Ray cluster, and brings the patched verl along, with GradLoc in it: nothing is changed on
# the cluster.
#
#   RAY_ADDRESS=http://HEAD:8265 bash examples/ray_job.sh NNODES=2 MODEL_PATH=/shared/model \
#       TRAIN_FILES=/shared/train.parquet VAL_FILES=/shared/val.parquet OUTPUT_DIR=/shared/run1
#
# The arguments are those of run_experiment.sh; options of `ray job submit` come before them and end with --, as in
# `bash examples/ray_job.sh --no-wait -- NNODES=2 ...`. PYTHON (default: python3) is a Python on this machine that has
# the verl release of the cluster; its verl is copied and the copy patched. `pip install --no-deps verl==0.9.1` is
# enough. Everything else that verl needs has to be installed on the cluster. If the cluster asks for a token, set
# RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN if the token is not in ~/.ray/auth_token.
set -euo pipefail
root=$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/..
python=${PYTHON:-python3}

refuse() {
    echo "ray_job.sh: $*" >&2
    exit 2
}

options=()
for ((i = 1; i <= $#; i++)); do
    [[ ${!i} == -- ]] || continue
    options=("${@:1:i-1}")
    shift "$i"
    break
done
[[ " $*" == *" OUTPUT_DIR=/"* ]] ||
    refuse "give OUTPUT_DIR=/..., a directory that all nodes share: Ray removes the job's own directory"
find_verl='import importlib.util as util; spec = util.find_spec("verl")
print(spec.submodule_search_locations[0] if spec else "")'
verl=$("$python" -c "$find_verl") || refuse "$python does not run: set PYTHON"
[[ $verl ]] || refuse "$python has no verl: install the cluster's release there, or name another Python with PYTHON"

place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
mkdir "$place/verl" "$place/project"
cp -R "$verl/." "$place/verl"
"$python" "$root/apply_patch.py" "$place" --vendor
cp "$root/run_experiment.sh" "$place/project"
find "$place" -name __pycache__ -prune -exec rm -r {} +
# In a file, because `ray job submit` does not quote what it passes to a shell.
printf '%q ' exec bash run_experiment.sh "$@" >"$place/project/job.sh"

runtime_env=$("$python" -c 'import json, sys
print(json.dumps({"working_dir": sys.argv[1], "py_modules": [sys.argv[2]]}))' "$place/project" "$place/verl")
ray job submit "${options[@]}" --runtime-env-json "$runtime_env" -- bash job.sh
