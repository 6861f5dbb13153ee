#!/bin/bash
# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
# Trains on the nodes of a Slurm job: starts Ray on each, waits until all have joined, runs run_experiment.sh on the
# first, and ends the Ray that it started. Change the #SBATCH lines to fit your cluster; then, in the project's folder:
#
#   sbatch --nodes=4 examples/slurm.sh MODEL_PATH=/shared/model TRAIN_FILES=/shared/train.parquet \
#       VAL_FILES=/shared/val.parquet OUTPUT_DIR=/shared/run1
#
# The arguments are those of run_experiment.sh. This project, training's Python with the patched verl and the package (or
# the container image that holds it), and all paths have to be the same on every node. Environment variables:
#   CONTAINER      what starts a container, such as "apptainer exec --nv --bind /shared /shared/verl.sif"; default: none
#   PYTHON         training's Python; default: python3
#   GRADLOC_DIR    this project; default: where sbatch was called
#   HEAD_ADDRESS   address of the first node; default: the first one that `hostname --ip-address` prints there
#   RAY_PORT       port of Ray on the first node; default: 6379
#   RAY_WAIT       seconds for the nodes to join; default: 300
#   RAY_AUTH_MODE, RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH
#                  Ray's own; default: mode token, with a token for this job
#
#SBATCH --job-name=gradloc
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=24:00:00
#SBATCH --output=slurm-%j.out
set -euo pipefail

refuse() {
    echo "slurm.sh: $*" >&2
    exit 2
}

[[ ${SLURM_JOB_NODELIST-} ]] || refuse "this is a script for Slurm: start it with sbatch"
root=${GRADLOC_DIR:-${SLURM_SUBMIT_DIR-}}
[[ -f $root/run_experiment.sh ]] || refuse "there is no run_experiment.sh in '$root': set GRADLOC_DIR to the project"
gpus=${SLURM_GPUS_PER_NODE:-${SLURM_GPUS_ON_NODE-}}
gpus=${gpus##*:} # of a100:8, the 8
[[ $gpus =~ ^[1-9][0-9]*$ ]] || refuse "Slurm says '$gpus' GPUs per node: ask for them with --gpus-per-node"
python=${PYTHON:-python3}
port=${RAY_PORT:-6379}
read -ra container <<<"${CONTAINER-}"
unset RAY_ADDRESS # of the shell that called sbatch
# Without a mode, Ray's head asks for the token in ~/.ray if there is one, and other nodes and drivers do not send it.
export RAY_AUTH_MODE=${RAY_AUTH_MODE:-token}
if [[ $RAY_AUTH_MODE == token && ! ${RAY_AUTH_TOKEN-}${RAY_AUTH_TOKEN_PATH-} ]]; then
    RAY_AUTH_TOKEN=$(od -An -vtx1 -N32 /dev/urandom | tr -d ' \n')
    export RAY_AUTH_TOKEN
fi
# Since Slurm 22.05, srun does not take this from sbatch.
[[ ! ${SLURM_CPUS_PER_TASK-} ]] || export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
[[ ${nodes[0]-} ]] || refuse "scontrol names no node for '$SLURM_JOB_NODELIST'"
head=${nodes[0]}

# on NODE COMMAND...: runs a command on one node, beside what runs there already.
on() { exec srun --overlap --nodes=1 --ntasks=1 --nodelist="$1" "${@:2}"; }

address=${HEAD_ADDRESS-}
if [[ ! $address ]]; then
    read -ra addresses < <(on "$head" hostname --ip-address) || true
    for candidate in "${addresses[@]}"; do
        [[ $candidate == *:* || $candidate == 127.* ]] || { address=$candidate && break; }
    done
    [[ $address ]] || refuse "$head has only the addresses '${addresses[*]}': set HEAD_ADDRESS"
fi

# shellcheck disable=SC2016 # for the bash on each node to expand
srun --nodes="${#nodes[@]}" --ntasks="${#nodes[@]}" --ntasks-per-node=1 "${container[@]}" bash -c '
    said=$("$@" 2>&1)
    (($? == 10)) || { echo "slurm.sh: the verl of $(hostname) is not ready: $said" >&2; exit 1; }' \
    check "$python" "$root/apply_patch.py" --installed --check --force

main_step='' ray=() # process ids: of what waits or trains, and of Ray on each node
# Ends the steps of this script, training first. `ray stop` would end every Ray of this user on the node.
# shellcheck disable=SC2329 # a trap calls it
end_steps() {
    local steps tries
    trap '' HUP INT TERM
    for steps in "$main_step" "${ray[*]}"; do
        [[ $steps ]] || continue
        # shellcheck disable=SC2086 # several ids
        kill $steps 2>/dev/null || true
        for ((tries = 0; tries < 80; tries++)); do
            # shellcheck disable=SC2086
            kill -0 $steps 2>/dev/null || break
            sleep 0.5
        done
    done
}
trap end_steps EXIT
trap 'exit 129' HUP
trap 'exit 130' INT
trap 'exit 143' TERM

start_ray() {
    echo "slurm.sh: starting Ray on $1"
    on "$1" "${container[@]}" ray start --block --num-gpus="$gpus" \
        ${SLURM_CPUS_PER_TASK:+--num-cpus="$SLURM_CPUS_PER_TASK"} "${@:2}" &
    ray+=($!)
}

# await N: waits until N nodes have joined.
await() {
    local at
    on "$head" "${container[@]}" "$python" "$root/examples/wait_for_ray.py" "$address:$port" "$1" \
        --seconds "${RAY_WAIT:-300}" &
    main_step=$!
    while kill -0 "$main_step" 2>/dev/null; do
        for at in "${!ray[@]}"; do
            kill -0 "${ray[at]}" 2>/dev/null || { echo "slurm.sh: Ray on ${nodes[at]} has ended" >&2 && exit 1; }
        done
        sleep 0.5
    done
    wait "$main_step"
}

start_ray "$head" --head --node-ip-address="$address" --port="$port"
await 1 # the others cannot join before that
for node in "${nodes[@]:1}"; do start_ray "$node" --address="$address:$port"; done
await "${#nodes[@]}"

# Arguments win over these.
export RAY_ADDRESS=$address:$port NNODES=${#nodes[@]} GPUS_PER_NODE=$gpus
on "$head" "${container[@]}" bash "$root/run_experiment.sh" --python "$python" "$@" &
main_step=$!
status=0
wait "$main_step" || status=$?
exit "$status"
