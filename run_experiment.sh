#!/usr/bin/env bash
# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
# GRPO with GradLoc on, by FSDP and vLLM. Change it as you would one of verl's examples/grpo_trainer/*.sh.
#
#   MODEL_PATH=/models/Qwen3-4B TRAIN_FILES=/data/train.parquet VAL_FILES=/data/val.parquet bash run_experiment.sh
#   RAY_ADDRESS=10.0.0.7:6379 NNODES=4 bash run_experiment.sh    # Ray runs on the nodes already: see examples/
#   bash run_experiment.sh --embedded                            # a small model on a CPU; --embedded --help
#
# A variable below may also be an argument, NAME=value. Other arguments are Hydra overrides, which win. Options:
#   --remedy          turn all four remedies on (NAME=off turns one off)
#   --drill           in step 2, plant a spike beside training and find it
#   --plugin          GradLoc is a plugin of a verl 0.9 that is not patched (docs/use/plugin.md)
#   --python PYTHON   the Python that has verl
#   --dry-run         print the command and stop; refuse values that the run would not take
#   --help            print this

MODEL_PATH=${MODEL_PATH:-Qwen/Qwen3-4B}           # a directory or a Hugging Face id
TRAIN_FILES=${TRAIN_FILES:-data/train.parquet}    # in verl's parquet format; several: a,b
VAL_FILES=${VAL_FILES:-data/val.parquet}          # several: a,b
OUTPUT_DIR=${OUTPUT_DIR:-}                        # shared by all nodes; training resumes from a checkpoint in it
BISECT_DUMP_DIR=${BISECT_DUMP_DIR:-}              # the evidence; default: OUTPUT_DIR/bisect_dump
LOGGER=${LOGGER:-console,tensorboard}             # verl's; several: a,b
NNODES=${NNODES:-1}                               # for more than one, start Ray on them first (RAY_ADDRESS)
GPUS_PER_NODE=${GPUS_PER_NODE:-8}
LR=${LR:-1e-6}
TOTAL_STEPS=${TOTAL_STEPS:-null}                  # null: all epochs
PYTHON=${PYTHON:-python3}
# GradLoc's: docs/use/configuration.md
GRAD_NORM_THRESHOLD=${GRAD_NORM_THRESHOLD:-auto}  # τ, the gradient norm of a single token that counts as a spike
SPIKE_ACTION=${SPIKE_ACTION:-log}                 # log, skip, drop or stop
SPIKE_DRILL_STEP=${SPIKE_DRILL_STEP:-null}        # the step of a drill; null: none
# Remedies: docs/use/launching.md. Empty: off, or with --remedy the value in parentheses
TIS=${TIS:-}                                      # (2.0) truncate ratios of training to rollout at this value
SEQUENCE_MASK=${SEQUENCE_MASK:-}                  # (1.2) mask responses with a mean ratio over x or under 1/x
TOKEN_CLIP_ACTION=${TOKEN_CLIP_ACTION:-}          # (drop) TokenClip: drop, smooth or log
LAYER_CLIP=${LAYER_CLIP:-}                        # (on) LayerClip: on

set -euo pipefail
root=$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")

refuse() {
    echo "run_experiment.sh: $*" >&2
    exit 2
}

for argument; do
    [[ $argument == --embedded ]] || continue
    # shellcheck source=embedded/find_python.sh
    source "$root/embedded/find_python.sh"
    # With --help, --dry-run or --python, any that is recent enough will do.
    python=$(find_python || first_python 'sys.version_info >= (3, 10) or sys.exit(1)' python3.{11,12,10} python3) ||
        refuse "no Python 3.10 or later was found: install one"
    exec "$python" -E -s "$root/embedded/launch.py" "$@"
done

run=exec plugin=() remedy='' remedies=() overrides=()
while (($#)); do
    case $1 in
        --remedy) remedy=1 ;;
        --drill) SPIKE_DRILL_STEP=2 ;;
        --plugin) plugin=(actor@actor_rollout_ref.actor=gradloc_dp_actor critic=gradloc_dp_critic) ;;
        --python)
            (($# > 1)) || refuse "--python needs the path of a Python after it"
            PYTHON=$2
            shift
            ;;
        --dry-run) run=print ;;
        --help) sed -n '4,/^$/ s/^# \{0,1\}//p' "$0" && exit ;;
        --) overrides+=("${@:2}") && break ;;
        -*) refuse "unknown option $1: see --help, or put -- before arguments meant for verl" ;;
        [[:upper:]]*=*)
            name=${1%%=*}
            { [[ $name != *[^[:upper:]_]* ]] && grep -q "^$name=\${$name" "$0"; } ||
                refuse "$name is not a variable of this script: see its top"
            printf -v "$name" %s "${1#*=}"
            ;;
        *=* | '~'*) overrides+=("$1") ;;
        *) refuse "'$1' is neither an option nor a Hydra override: write overrides as key=value" ;;
    esac
    shift
done
set -- "${overrides[@]}"

print() {
    local said code=0
    said=$("$1" "$root/tools/check_overrides.py" "${@:4}" 2>&1 >/dev/null) || code=$?
    case $code in
        0) ;;
        2) refuse "${said##*$'\n'}" ;;
        *) echo "run_experiment.sh: the values are not checked: ${said##*$'\n'}" >&2 ;;
    esac
    printf '%q' "$1"
    printf ' %q' "${@:2:2}"
    printf ' \\\n    %q' "${@:4}"
    echo
}

find_verl='import importlib.util as u; spec = u.find_spec("verl"); print(*spec.submodule_search_locations if spec else "")'
verl=$("$PYTHON" -c "$find_verl") || refuse "there is no Python at '$PYTHON': give one with --python"
[[ $verl || $run == print ]] ||
    refuse "$PYTHON has no verl: install it there, and run: $PYTHON $root/apply_patch.py --installed"
# Not the package: pip leaves it where it installs verl again.
[[ ! $verl || ${#plugin[@]} -gt 0 ]] || grep -qs 'from verl.utils.spikes import ' "$verl/trainer/main_ppo.py" ||
    refuse "the verl in $verl is not patched: run $PYTHON $root/apply_patch.py --installed"

if [[ $remedy ]]; then : "${TIS:=2.0}" "${SEQUENCE_MASK:=1.2}" "${TOKEN_CLIP_ACTION:=drop}" "${LAYER_CLIP:=on}"; fi
clips=${TIS:=off}-${SEQUENCE_MASK:=off}-${TOKEN_CLIP_ACTION:=off}-${LAYER_CLIP:=off}
corrections=algorithm.rollout_correction actor=actor_rollout_ref.actor
mask=seq_mean_k1
[[ $(cat "$verl/version/version" 2>/dev/null || true) != 0.7.0 ]] || mask=geometric
[[ $TIS == off ]] || remedies+=("$corrections.rollout_is=token" "$corrections.rollout_is_threshold=$TIS")
[[ $SEQUENCE_MASK == off ]] ||
    remedies+=("$corrections.rollout_rs=$mask" "$corrections.rollout_rs_threshold=$SEQUENCE_MASK")
[[ $TOKEN_CLIP_ACTION == off ]] ||
    remedies+=("$actor.token_clip.enable=True" "$actor.token_clip.action=$TOKEN_CLIP_ACTION")
[[ $LAYER_CLIP == @(on|off) ]] || refuse "LAYER_CLIP is $LAYER_CLIP: set it to on or off"
[[ $LAYER_CLIP == off ]] || remedies+=("$actor.layer_clip.enable=True")

# A run must not resume from the checkpoints of one with another model or other clips.
name=$(basename -- "$MODEL_PATH")
name=${name,,}-grpo-clip-$clips
name=${name/%-clip-off-off-off-off/}
name=${name/%-clip-2.0-1.2-drop-on/-remedy}
OUTPUT_DIR=$(realpath -m -- "${OUTPUT_DIR:-outputs/$name}")
BISECT_DUMP_DIR=$(realpath -m -- "${BISECT_DUMP_DIR:-$OUTPUT_DIR/bisect_dump}")

[[ $run == print ]] || echo "The evidence will be in $BISECT_DUMP_DIR. To read it: gradloc report $BISECT_DUMP_DIR"
$run "$PYTHON" -m verl.trainer.main_ppo \
    "${plugin[@]}" \
    algorithm.adv_estimator=grpo \
    data.train_files="[$TRAIN_FILES]" \
    data.val_files="[$VAL_FILES]" \
    data.train_batch_size=128 \
    data.max_prompt_length=1024 \
    data.max_response_length=8192 \
    data.filter_overlong_prompts=True \
    data.seed=1 \
    actor_rollout_ref.model.path="$MODEL_PATH" \
    actor_rollout_ref.actor.optim.lr="$LR" \
    actor_rollout_ref.actor.ppo_mini_batch_size=32 \
    actor_rollout_ref.actor.use_dynamic_bsz=True \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=18432 \
    actor_rollout_ref.actor.clip_ratio_high=0.28 \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.n=8 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=1 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6 \
    actor_rollout_ref.rollout.calculate_log_probs=True `# training and rollout are compared in the evidence` \
    \
    actor_rollout_ref.actor.spike_detection=True \
    actor_rollout_ref.actor.grad_norm_threshold="$GRAD_NORM_THRESHOLD" \
    actor_rollout_ref.actor.spike_action="$SPIKE_ACTION" \
    actor_rollout_ref.actor.spike_drill_step="$SPIKE_DRILL_STEP" \
    actor_rollout_ref.actor.bisect_dump_dir="$BISECT_DUMP_DIR" \
    "${remedies[@]}" \
    \
    trainer.project_name=gradloc \
    trainer.experiment_name="$name" \
    trainer.logger="[$LOGGER]" \
    trainer.nnodes="$NNODES" \
    trainer.n_gpus_per_node="$GPUS_PER_NODE" \
    trainer.default_local_dir="$OUTPUT_DIR" \
    trainer.total_epochs=10 \
    trainer.total_training_steps="$TOTAL_STEPS" \
    trainer.test_freq=10 \
    trainer.save_freq=20 \
    trainer.max_actor_ckpt_to_keep=3 \
    hydra.run.dir="$OUTPUT_DIR/hydra" \
    +ray_kwargs.ray_init.runtime_env.env_vars.TENSORBOARD_DIR="$OUTPUT_DIR/tensorboard" \
    "$@"
