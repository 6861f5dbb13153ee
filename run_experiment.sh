#!/usr/bin/env bash
# Launches training with the patched verl: on a GPU cluster, or in a small form on a machine without a GPU.
# Privileged mode (-p) ignores functions and shell options of the environment; sh has none of what follows.
case $- in *p*) ;; *) exec bash -p -- "$0" "$@" ;; esac
set +o posix
set -euo pipefail
root=$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")
source "$root/embedded/find_python.sh"

die() {
    printf 'run_experiment.sh: %s\n' "$*" >&2
    exit 2
}

[[ $OSTYPE == linux* ]] && ((BASH_VERSINFO[0] >= 4)) || die "this needs Linux and bash 4 or later"

usage() {
    cat <<'USAGE'
Usage: bash run_experiment.sh [options] [NAME=value ...] [Hydra overrides ...]

  --cluster        GRPO on FSDP and vLLM (default where nvidia-smi finds a GPU)
  --embedded       SmolLM2-135M on CPU, set up by itself under .embedded/ (default elsewhere; Linux)
  --tiny           with --embedded: a random model of two layers, seconds per step
  --remedy         TOKEN_CLIP, SEQUENCE_CLIP and LAYER_CLIP on; NAME=off leaves one of them out
  --python PYTHON  the Python with the patched verl (default: python3; with --embedded: one made for it)
  --dry-run        print the command and stop
  --help           print this
  --               pass everything after it to verl as it is

Hydra overrides (key=value, +key=value, ~key) come last in the command, so they win.
Settings, given as an argument NAME=value or as an environment variable (-: no effect in that profile):

USAGE
}

profile='' tiny='' remedy='' python='' dry_run='' help=''
overrides=()
declare -A given=()
while (($#)); do
    case $1 in
        --cluster | --embedded)
            [[ -z $profile || $profile == "${1#--}" ]] || die "--cluster and --embedded exclude each other: give one"
            profile=${1#--}
            ;;
        --tiny) tiny=1 ;;
        --remedy) remedy=1 ;;
        --python)
            (($# > 1)) && [[ -n $2 && $2 != -* ]] || die "--python needs the path of a Python interpreter after it"
            python=$2
            shift
            ;;
        --dry-run) dry_run=1 ;;
        --help | -h) help=1 ;;
        --)
            overrides+=("${@:2}")
            break
            ;;
        -*) die "unknown option $1: see --help for the options, or put -- before arguments meant for verl" ;;
        *)
            if [[ $1 =~ ^[A-Z][A-Z0-9_]*= ]]; then
                [[ -n ${1#*=} ]] || die "${1%%=*} is empty: give it a value, or leave it out"
                given[${1%%=*}]=${1#*=}
            elif [[ $1 == *=* || $1 == '~'* ]]; then
                overrides+=("$1")
            else
                die "'$1' is neither an option nor a Hydra override: write overrides as key=value, options as in --help"
            fi
            ;;
    esac
    shift
done
if [[ -z $profile ]]; then
    profile=embedded
    if [[ -z $tiny && $(nvidia-smi -L 2>/dev/null) =~ (^|$'\n')GPU\ [0-9] ]]; then profile=cluster; fi
fi
[[ -z $tiny || $profile == embedded ]] || die "--tiny belongs to --embedded: leave it out, or give --embedded"

state=$root/.embedded
prepared=$state/smollm2
[[ -z $tiny ]] || prepared=$state/tiny

# What a setting may be: a pattern of Hydra's grammar, and how a sentence says it.
exponent='([eE][+-]?[0-9]+)?'
amount="((0|[1-9][0-9]*)(\.[0-9]*)?|\.[0-9]+)$exponent"
positive="([1-9][0-9]*(\.[0-9]*)?|0?\.[0-9]*[1-9][0-9]*)$exponent"
declare -A kinds=(
    [count]='^[1-9][0-9]{0,8}$ a whole number of at least 1'
    [few]='^[1-9][0-9]{0,2}$ a whole number from 1 to 999'
    [number]="^-?$amount\$ a number"
    [amount]="^$amount\$ a number of at least 0"
    [positive]="^$positive\$ a number over 0"
    [share]='^(0?\.[0-9]*[1-9][0-9]*|1(\.0*)?)$ a number over 0 and at most 1'
    [over1]='^(([2-9]|[1-9][0-9]+)(\.[0-9]*)?|1\.0*[1-9][0-9]*)$ a number over 1'
    [switch]='^([Tt]rue|TRUE|[Ff]alse|FALSE)$ True or False'
)

# check_value NAME KIND: KIND is text, list (of texts) or dir, or a choice of the kinds above and of words: positive|auto.
check_value() {
    local choice choices wanted=''
    case $2 in text | list | dir) check_text "$@"; return ;; esac
    IFS='|' read -r -a choices <<<"$2"
    for choice in "${choices[@]}"; do
        if [[ -n ${kinds[$choice]+x} ]]; then
            [[ ! ${!1} =~ ${kinds[$choice]%% *} ]] || return 0
            choice=${kinds[$choice]#* }
        else
            [[ ${!1} != "$choice" ]] || return 0
        fi
        wanted+=", $choice"
    done
    wanted=${wanted#, }
    [[ $wanted != *', '* ]] || wanted="${wanted%, *} or ${wanted##*, }"
    die "$1 is '${!1}': give $wanted"
}

# Texts are quoted for Hydra, and arrive as they are, but for what no quoting can carry through verl.
check_text() {
    [[ ${!1} != *'${'* ]] || die "$1 is '${!1}': verl would resolve the \${ in it, so write out what it stands for"
    [[ ,${!1}, != *,'???',* ]] || die "$1 is '${!1}': ??? means a missing value to Hydra, so give another"
    iconv -f UTF-8 -t UTF-8 <<<"${!1}" >/dev/null 2>&1 || die "$1 is not valid UTF-8: rename what it names"
    [[ $2 != dir || ${!1} != *://* ]] ||
        die "$1 is '${!1}': give a directory, on several nodes one that all of them share"
}

# setting NAME KIND CLUSTER EMBEDDED [TINY] MEANING: the argument NAME=value wins, then the environment (an empty
# variable counts as none), then the default.
declare -A kind_of=()
names=()
setting() {
    local name=$1 default=$3 meaning=${*: -1}
    if [[ $profile == embedded ]]; then default=$4; fi
    if [[ -n $tiny && $# == 6 ]]; then default=$5; fi
    [[ -z $help ]] || printf "$help_row" "$name" "$3" "${4/#"$prepared"*/(prepared)}" "$meaning"
    if [[ $default == - ]]; then
        [[ -z ${given[$name]+x} ]] || die "$name has no effect in the $profile profile: leave it out"
        return
    fi
    names+=("$name")
    kind_of[$name]=$2
    printf -v "$name" '%s' "${given[$name]-${!name:-$default}}"
}

now=$(date +%Y%m%d-%H%M%S)
help_row='  %-24s %-22s %-24s %s\n'
if [[ -n $help ]]; then
    usage
    printf "$help_row" NAME 'CLUSTER DEFAULT' 'EMBEDDED DEFAULT' MEANING
    now=TIME
fi
setting MODEL_PATH text Qwen/Qwen3-4B "$prepared/model" "directory of the model, or its Hugging Face id"
setting TRAIN_FILES list data/train.parquet "$prepared/train.parquet" "training data in verl's parquet form; several: a,b"
setting VAL_FILES list data/val.parquet "$prepared/val.parquet" "validation data; several: a,b"
clips='off off off' remedy_clips='2.0 1.2 zscore'
[[ -z $remedy ]] || clips=$remedy_clips
read -r token sequence layer <<<"$clips"
setting TOKEN_CLIP 'over1|off' "$token" "$token" \
    "off, or the ratio to the rollout at which a token's weight is cut (--remedy: 2.0)"
setting SEQUENCE_CLIP 'over1|off' "$sequence" "$sequence" \
    "off, or the mean ratio x: answers over x or under 1/x are left out (--remedy: 1.2)"
setting LAYER_CLIP 'zscore|ratio|fixed|off' "$layer" "$layer" \
    "off, or LayerClip's rule: zscore, ratio, fixed (--remedy: zscore)"
# A run of another model, or with other clips, must not resume from this one's checkpoints.
run=$(basename -- "$MODEL_PATH")
run=${run,,}
[[ -z $help ]] || run=MODEL
run+=-grpo
clips="$TOKEN_CLIP $SEQUENCE_CLIP $LAYER_CLIP"
case $clips in
    'off off off') ;;
    "$remedy_clips") run+=-remedy ;;
    *) run+=-clip-${clips// /-} ;;
esac
setting OUTPUT_DIR dir "outputs/$run" "outputs/embedded-$now" \
    "checkpoints, logs and evidence; on a cluster, a checkpoint in it is resumed (--remedy: MODEL-grpo-remedy)"
setting EXPERIMENT text "$run" embedded "name of the run in its logs"
setting PROJECT text gradloc gradloc "name of the project in its logs"
setting LOGGER list console,tensorboard console "verl's loggers; several: a,b"
setting NNODES count "${SLURM_JOB_NUM_NODES:-1}" 1 "nodes; for more than one, start Ray on them first (RAY_ADDRESS)"
setting GPUS_PER_NODE few 8 2 "GPUs, or CPU workers, on each node"
setting TRAIN_BATCH_SIZE count 128 6 4 "prompts in a step"
setting MINI_BATCH_SIZE count 32 3 2 "prompts in an optimizer step"
setting MICRO_BATCH_SIZE count - 2 "answers in a forward pass of a worker (the cluster packs by tokens)"
setting MAX_TOKENS_PER_GPU count 18432 - "tokens in a forward pass of a GPU"
setting ROLLOUT_N count 8 4 "answers to each prompt"
setting MAX_PROMPT_LENGTH count 1024 48 "tokens of a prompt at most"
setting MAX_RESPONSE_LENGTH count 8192 32 12 "tokens of an answer at most"
setting TEMPERATURE positive 1.0 1.0 "of sampling in training"
setting TENSOR_PARALLEL count 1 2 "workers that share a rollout engine"
setting GPU_MEMORY_UTILIZATION share 0.6 - "share of a GPU's memory for vLLM"
strategies='fsdp|fsdp2'
[[ $profile == cluster ]] || strategies=fsdp2
setting STRATEGY "$strategies" fsdp fsdp2 "fsdp or fsdp2 (CPU: fsdp2 only)"
setting OFFLOAD switch False False "keep parameters and optimizer in host memory between phases"
setting LR amount 1e-6 1e-5 "learning rate"
setting CLIP_RATIO_LOW amount 0.2 0.2 "lower clip range of the importance ratio"
setting CLIP_RATIO_HIGH amount 0.28 0.28 "upper clip range of the importance ratio"
setting LOSS_AGG_MODE 'token-mean|seq-mean-token-sum|seq-mean-token-mean|seq-mean-token-sum-norm' token-mean token-mean \
    "how token losses become one loss"
setting KL_LOSS_COEF amount 0 0 "weight of the KL loss; 0 runs no reference model"
setting ENTROPY_COEFF number 0 0 "weight of the entropy bonus"
setting TOTAL_EPOCHS count 10 1 "passes over the training data"
setting TOTAL_STEPS 'count|null' null 8 3 "training steps; null: as many as the epochs have"
setting TEST_FREQ 'count|0|-1' 10 -1 "steps between validations; -1: none"
setting SAVE_FREQ 'count|0|-1' 20 -1 "steps between checkpoints; -1: none"
setting SEED 'count|0|null' 1 1 "of the data's order"
setting SPIKE_DETECTION switch True True "GradLoc on or off"
setting GRAD_NORM_THRESHOLD 'positive|auto' 640.0 90.0 \
    "token gradient norm that counts as a spike; auto: from the run's own norms"
setting BISECT_BUDGET_STEPS count 128 128 "extra passes for one spike at most"
setting BISECT_DUMP_DIR dir OUTPUT_DIR/bisect_dump OUTPUT_DIR/bisect_dump "directory of spikes.jsonl"
setting SPIKE_TRIGGER 'unit|global' unit unit "unit: any micro-batch over its threshold; global: the whole gradient"
setting SPIKE_ACTION 'log|skip|drop' log log \
    "on a spike, log: step as usual; skip: do not step; drop: step without the culprits"
[[ -z $help ]] || exit 0
for name in "${!given[@]}"; do
    [[ -n ${kind_of[$name]+x} ]] || die "unknown setting $name: see --help for the settings"
done
for name in "${names[@]}"; do check_value "$name" "${kind_of[$name]}"; done
[[ $BISECT_DUMP_DIR != OUTPUT_DIR/* ]] || BISECT_DUMP_DIR=$OUTPUT_DIR/${BISECT_DUMP_DIR#*/}
for name in OUTPUT_DIR BISECT_DUMP_DIR; do
    IFS= read -r -d '' "$name" < <(realpath -m -z -- "${!name}") # $(...) would lose a newline at its end
    check_value "$name" dir
done
for override in "${overrides[@]}"; do
    [[ $override != *actor_rollout_ref.actor.bisect_dump_dir=* ]] ||
        die "bisect_dump_dir is the setting BISECT_DUMP_DIR here: give BISECT_DUMP_DIR=${override#*=}"
done

# hydra_value TEXT: TEXT as a quoted value of Hydra, in which backslashes count only before a quote.
hydra_value() {
    local char slashes='' quoted='' i
    for ((i = 0; i < ${#1}; i++)); do
        char=${1:i:1}
        case $char in
            \\) slashes+=\\ ;;
            \') quoted+=$slashes\\ slashes='' ;;
            *) slashes='' ;;
        esac
        quoted+=$char
    done
    printf "'%s'" "$quoted$slashes"
}

# hydra_list A,B: the same for a list.
hydra_list() {
    local item items=() list=''
    IFS=, read -r -d '' -a items < <(printf '%s\0' "$1")
    for item in "${items[@]}"; do list+=,$(hydra_value "$item"); done
    printf '[%s]' "${list#,}"
}

args=(
    "hydra.run.dir=$(hydra_value "$OUTPUT_DIR/hydra")"
    "+ray_kwargs.ray_init.runtime_env.env_vars.TENSORBOARD_DIR=$(hydra_value "$OUTPUT_DIR/tensorboard")"
    algorithm.adv_estimator=grpo
    "data.train_files=$(hydra_list "$TRAIN_FILES")"
    "data.val_files=$(hydra_list "$VAL_FILES")"
    "data.train_batch_size=$TRAIN_BATCH_SIZE"
    "data.max_prompt_length=$MAX_PROMPT_LENGTH"
    "data.max_response_length=$MAX_RESPONSE_LENGTH"
    data.filter_overlong_prompts=True
    data.truncation=error
    "data.seed=$SEED"
    "actor_rollout_ref.model.path=$(hydra_value "$MODEL_PATH")"
    "actor_rollout_ref.actor.strategy=$STRATEGY"
    "actor_rollout_ref.actor.optim.lr=$LR"
    "actor_rollout_ref.actor.ppo_mini_batch_size=$MINI_BATCH_SIZE"
    "actor_rollout_ref.actor.clip_ratio_low=$CLIP_RATIO_LOW"
    "actor_rollout_ref.actor.clip_ratio_high=$CLIP_RATIO_HIGH"
    "actor_rollout_ref.actor.loss_agg_mode=$LOSS_AGG_MODE"
    "actor_rollout_ref.actor.entropy_coeff=$ENTROPY_COEFF"
    "actor_rollout_ref.actor.fsdp_config.param_offload=$OFFLOAD"
    "actor_rollout_ref.actor.fsdp_config.optimizer_offload=$OFFLOAD"
    "actor_rollout_ref.actor.spike_detection=$SPIKE_DETECTION"
    "actor_rollout_ref.actor.grad_norm_threshold=$GRAD_NORM_THRESHOLD"
    "actor_rollout_ref.actor.bisect_budget_steps=$BISECT_BUDGET_STEPS"
    "actor_rollout_ref.actor.bisect_dump_dir=$(hydra_value "$BISECT_DUMP_DIR")"
    "actor_rollout_ref.actor.spike_trigger=$SPIKE_TRIGGER"
    "actor_rollout_ref.actor.spike_action=$SPIKE_ACTION"
    "actor_rollout_ref.rollout.n=$ROLLOUT_N"
    "actor_rollout_ref.rollout.temperature=$TEMPERATURE"
    "actor_rollout_ref.rollout.tensor_model_parallel_size=$TENSOR_PARALLEL"
    # The evidence shows where training's probabilities part from the rollout's.
    actor_rollout_ref.rollout.calculate_log_probs=True
    "trainer.project_name=$(hydra_value "$PROJECT")"
    "trainer.experiment_name=$(hydra_value "$EXPERIMENT")"
    "trainer.logger=$(hydra_list "$LOGGER")"
    "trainer.nnodes=$NNODES"
    "trainer.n_gpus_per_node=$GPUS_PER_NODE"
    "trainer.default_local_dir=$(hydra_value "$OUTPUT_DIR")"
    "trainer.total_epochs=$TOTAL_EPOCHS"
    "trainer.total_training_steps=$TOTAL_STEPS"
    "trainer.test_freq=$TEST_FREQ"
    "trainer.save_freq=$SAVE_FREQ"
)
if [[ $KL_LOSS_COEF =~ ^$positive$ ]]; then
    args+=(actor_rollout_ref.actor.use_kl_loss=True "actor_rollout_ref.actor.kl_loss_coef=$KL_LOSS_COEF")
else
    args+=(actor_rollout_ref.actor.use_kl_loss=False)
fi
# verl's own corrections of the rollout's probabilities; they need calculate_log_probs.
if [[ $TOKEN_CLIP != off ]]; then
    args+=(
        algorithm.rollout_correction.rollout_is=token
        "algorithm.rollout_correction.rollout_is_threshold=$TOKEN_CLIP"
    )
fi
if [[ $SEQUENCE_CLIP != off ]]; then
    args+=(
        algorithm.rollout_correction.rollout_rs=geometric
        "algorithm.rollout_correction.rollout_rs_threshold=$SEQUENCE_CLIP"
    )
fi
if [[ $LAYER_CLIP != off ]]; then
    args+=(
        actor_rollout_ref.actor.layer_clip.enable=True
        "actor_rollout_ref.actor.layer_clip.rule=$LAYER_CLIP"
    )
fi

environment=()
if [[ $profile == cluster ]]; then
    args+=(
        actor_rollout_ref.model.use_remove_padding=True
        actor_rollout_ref.model.enable_gradient_checkpointing=True
        actor_rollout_ref.actor.use_dynamic_bsz=True
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=$MAX_TOKENS_PER_GPU"
        actor_rollout_ref.rollout.name=vllm
        "actor_rollout_ref.rollout.gpu_memory_utilization=$GPU_MEMORY_UTILIZATION"
        trainer.max_actor_ckpt_to_keep=3
    )
else
    # Unix sockets lie in Ray's directory, and their names may have no more than 107 characters: keep it short.
    ray_dir=/tmp/gradloc-$$
    # The numbers of CPUs and GPUs tell Ray what may run at once; nothing is reserved.
    args+=(
        trainer.device=cpu
        +ray_kwargs.ray_init.address=local
        "+ray_kwargs.ray_init._temp_dir=$ray_dir"
        +ray_kwargs.ray_init.include_dashboard=False
        ray_kwargs.ray_init.num_cpus=$((3 * GPUS_PER_NODE + 2))
        "+ray_kwargs.ray_init.num_gpus=$GPUS_PER_NODE"
        "+ray_kwargs.ray_init.resources.cpu=$GPUS_PER_NODE"
        actor_rollout_ref.model.use_remove_padding=False
        actor_rollout_ref.model.enable_gradient_checkpointing=False
        +actor_rollout_ref.model.override_config.attn_implementation=sdpa
        actor_rollout_ref.actor.fsdp_config.dtype=float32
        actor_rollout_ref.actor.use_torch_compile=False
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=$MICRO_BATCH_SIZE"
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=$MICRO_BATCH_SIZE"
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=$MICRO_BATCH_SIZE"
        actor_rollout_ref.rollout.name=hf
        actor_rollout_ref.rollout.load_format=safetensors
        actor_rollout_ref.rollout.agent.num_workers=1
        data.dataloader_num_workers=0
        trainer.val_before_train=False
        trainer.resume_mode=disable
    )
    threads=$(($(nproc) / GPUS_PER_NODE))
    no_gpus=$(printf -- '-1,%.0s' $(seq "$GPUS_PER_NODE"))
    environment=(
        "VERL_USE_EXTERNAL_MODULES=embedded${VERL_USE_EXTERNAL_MODULES:+,$VERL_USE_EXTERNAL_MODULES}"
        "PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}"
        "OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))}"
        # Freed tensors go back to the system, a third less memory; in huge pages that costs little time.
        MALLOC_ARENA_MAX=2 MALLOC_MMAP_THRESHOLD_=4000000 MALLOC_TRIM_THRESHOLD_=64000000
        GLIBC_TUNABLES=glibc.malloc.hugetlb=1
        RAY_DEDUP_LOGS=0 # it would take the lines of two quick steps for repetitions
        RAY_USAGE_STATS_ENABLED=0
        PYTHONUNBUFFERED=1
        "CUDA_VISIBLE_DEVICES=${no_gpus%,}" # as many as Ray is told of, and none that CUDA would find
    )
fi

venv=$state/venv
if [[ $profile == cluster ]]; then : "${python:=python3}"; else : "${python:=$venv/bin/python}"; fi
command=("$python" -m verl.trainer.main_ppo "${args[@]}" "${overrides[@]}")

# Paths that do not exist, one a line. Addresses (hdfs://...) and Hugging Face ids are verl's to find.
missing_paths() {
    local name item items
    for name in MODEL_PATH TRAIN_FILES VAL_FILES; do
        items=("${!name}")
        [[ ${kind_of[$name]} != list ]] || IFS=, read -r -d '' -a items < <(printf '%s\0' "${!name}")
        for item in "${items[@]}"; do
            [[ -e $item || $item == *://* ]] && continue
            [[ $name == MODEL_PATH && $item =~ ^[A-Za-z0-9][A-Za-z0-9_.-]*(/[A-Za-z0-9_.-]+)?$ ]] && continue
            [[ $profile == embedded && $item == "$prepared"/* ]] && continue # made by the set-up
            printf '  %s=%s\n' "$name" "$item"
        done
    done
}
missing=$(missing_paths)

if [[ -n $dry_run ]]; then
    [[ -z $missing ]] || printf 'run_experiment.sh: these paths do not exist:\n%s\n' "$missing" >&2
    ((${#environment[@]} == 0)) || printf '%q ' env "${environment[@]}"
    printf '%q -m verl.trainer.main_ppo' "$python"
    printf ' \\\n    %q' "${command[@]:3}"
    printf '\n'
    exit 0
fi
[[ -z $missing ]] || die "these paths do not exist; correct the settings or create them:"$'\n'"$missing"

say() { printf '[%s] %s\n' "$(date +%H:%M:%S)" "$*"; }

# is FILE TEXT: the file says so. Each stage of the set-up leaves such a note of what it was made from.
is() { [[ -f $1 && $(<"$1") == "$2" ]]; }
hash_of() { cat -- "$@" | sha256sum | cut -d' ' -f1; }

set_up_venv() {
    local base wanted site
    unset PYTHONPATH # pip and apply_patch.py must see this environment only; it is set again for training
    base=$(find_python) ||
        die "no Python 3.10, 3.11 or 3.12 with the venv module was found: install one, or name one by --python"
    wanted=$("$base" -VV | cat - "$root"/embedded/requirements*.txt | sha256sum)
    if ! is "$venv/ready" "$wanted"; then
        say "Installing the requirements into .embedded/venv (some minutes, once)"
        rm -rf "$venv"
        "$base" -m venv "$venv"
        # PyPI's torch may bring CUDA along. PIP_EXTRA_INDEX_URL can name an index with torch's CPU builds instead.
        "$venv/bin/python" -m pip install --progress-bar off -r "$root/embedded/requirements.txt" |
            awk '/^Collecting/ { if (++n % 20 == 0) { print "  " n " packages"; fflush() } }
                 /^Installing collected/ { print "  writing them to disk"; fflush() }'
        "$venv/bin/python" -m pip install --quiet --no-deps -r "$root/embedded/requirements-no-deps.txt"
        echo "$wanted" >"$venv/ready"
    fi
    wanted=$(hash_of "$root/patches/gradloc.patch" "$venv/ready")
    if ! is "$venv/patched" "$wanted"; then
        say "Patching verl"
        rm -f "$venv/patched"
        # An earlier patch may be in it, and left files of its own: start from the release.
        site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
        rm -rf "$site/verl"
        "$venv/bin/python" -m pip install --quiet --no-deps --force-reinstall \
            "$(grep '^verl==' "$root/embedded/requirements.txt")"
        "$venv/bin/python" "$root/apply_patch.py" --installed
        echo "$wanted" >"$venv/patched"
    fi
}

prepare() {
    local wanted
    wanted=$(hash_of "$root/embedded/prepare.py" "$root/embedded/requirements-no-deps.txt")
    if ! is "$prepared/ready" "$wanted"; then
        say "Preparing model and data (about a minute, once)"
        rm -rf "$prepared"
        "$python" "$root/embedded/prepare.py" "$prepared" ${tiny:+--tiny}
        echo "$wanted" >"$prepared/ready"
    fi
}

# Refuses a Python whose verl is not as the patch makes it.
check_verl() {
    local found patch_it said status=0
    command -v "$python" >/dev/null || die "there is no Python at $python: name one by --python"
    found=$("$python" -c '
import importlib.util as util
spec = util.find_spec("verl")
print(spec.submodule_search_locations[0] if spec else "")') || die "$python does not run"
    if [[ -z $found || $found == */@(site|dist)-packages/verl ]]; then
        printf -v patch_it '%q ' "$python" "$root/apply_patch.py" --installed
    else
        printf -v patch_it '%q ' "$python" "$root/apply_patch.py" --repo "${found%/verl}"
    fi
    [[ -n $found ]] || die "$python has no verl: install verl 0.7.0 there and run: $patch_it"
    # By content: folders and words stay when pip or git restore verl, and an older patch has them, too.
    said=$("$python" "$root/apply_patch.py" --check --force --repo "$(dirname -- "$(realpath -- "$found")")" 2>&1) ||
        status=$?
    case $status in
        10) ;;
        0) die "the verl in $found is not patched: run $patch_it" ;;
        *) die "the verl in $found is not as this patch makes it (${said#apply_patch: });" \
            "to launch with it all the same, run what --dry-run prints" ;;
    esac
}

# Training runs in a session of its own, which all of its Ray processes inherit.
session='' follower=''
session_pids() {
    local stat line
    for stat in /proc/[0-9]*/stat; do
        read -r line 2>/dev/null <"$stat" || continue
        set -- ${line##*) } # after "pid (name)": state, parent, group, session
        if [[ $4 == "$session" && $1 != Z ]]; then echo "${stat//[!0-9]/}"; fi
    done
}

stop() {
    trap - EXIT
    trap '' INT TERM
    [[ -z $follower ]] || kill "$follower" 2>/dev/null || true
    if [[ -n $session ]]; then
        disown -a # bash need not tell how they ended
        kill -TERM "$session" 2>/dev/null || true # Ray's own way out
        for _ in {1..25}; do
            [[ -n $(session_pids) ]] || break
            sleep 0.2
        done
        while pids=$(session_pids) && [[ -n $pids ]]; do
            # shellcheck disable=SC2086
            kill -KILL $pids 2>/dev/null || true
            sleep 0.1
        done
    fi
    [[ $profile == cluster || -z $session ]] || rm -rf "$ray_dir"
    exit "$1"
}
trap 'stop $?' EXIT
trap 'stop 130' INT
trap 'stop 143' TERM

if [[ $profile == cluster ]]; then
    check_verl
    latest=$OUTPUT_DIR/latest_checkpointed_iteration.txt # verl's note of its last checkpoint
    if [[ -f $latest && ! "${overrides[*]}" =~ trainer\.(resume_mode=(disable|resume_path)|default_local_dir=) ]]; then
        say "Resuming from step $(<"$latest") in $OUTPUT_DIR (to start anew: another OUTPUT_DIR, or trainer.resume_mode=disable)"
    fi
    setsid "${command[@]}" &
    session=$!
    status=0
    wait "$session" || status=$?
    if [[ -f $BISECT_DUMP_DIR/spikes.jsonl ]]; then
        say "The evidence of spikes is $BISECT_DUMP_DIR/spikes.jsonl. To look at it:"
        printf '%q ' "$python" -m verl.utils.gradloc.report "$BISECT_DUMP_DIR" --html report.html
        echo
    else
        say "There is no spikes.jsonl in $BISECT_DUMP_DIR: no spike was recorded, or the driver ran on another node"
    fi
    exit "$status"
fi

mkdir -p "$state" "$OUTPUT_DIR"
exec 9>"$state/lock"
flock 9 # two runs side by side must not set up the same files
[[ $python != "$venv/bin/python" ]] || set_up_venv
export "${environment[@]}"
check_verl
prepare
exec 9>&-

log=$OUTPUT_DIR/train.log
say "Training; the full log is $log"
unset RAY_ADDRESS
mkdir -m 700 "$ray_dir"
setsid "${command[@]}" >"$log" 2>&1 &
session=$!
"$python" "$root/embedded/follow.py" "$log" "$session" &
follower=$!
status=0
wait "$session" || status=$?
wait "$follower" || true
if [[ -f $BISECT_DUMP_DIR/spikes.jsonl ]]; then
    "$python" -m gradloc.report "$BISECT_DUMP_DIR" --html "$OUTPUT_DIR/report.html" || true
fi
if ((status)); then
    say "Training failed (exit code $status). The end of $log:"
    tail -n 30 "$log"
fi
exit "$status"
