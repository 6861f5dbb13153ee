#!/usr/bin/env bash
# What a GPU has to show that no CPU can, in under ten minutes: one line for each part, and a log in build/gpu.
# Usage: bash benchmarks/gpu.sh MODEL [OPTION...]
# MODEL and options are those of `gradloc selftest --model`. After `bash tests/run.sh`; PYTHON (default:
# build/venv/bin/python) needs a CUDA build of torch. GRADLOC_TEST_DEVICE=cpu tries the script itself without a GPU.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
: "${1:?name a model, as for gradloc selftest --model}"
python=${PYTHON:-build/venv/bin/python}
export GRADLOC_TEST_DEVICE=${GRADLOC_TEST_DEVICE:-cuda} GRADLOC_BASE_TREE=$PWD/build/base PYTHONPATH=$PWD/build/verl:$PWD
if [[ $GRADLOC_TEST_DEVICE == cuda ]] && ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "gpu.sh: $python has no torch that sees a GPU; set PYTHON to one that has" >&2
    exit 2
fi
logs=build/gpu code=0
mkdir -p "$logs"

# Runs a part for so many seconds at most.
part() {
    local name=$1 seconds=$2 start=$SECONDS ended=0
    shift 2
    timeout --signal=INT --kill-after=20 "$seconds" "$@" >"$logs/$name.log" 2>&1 </dev/null || ended=$?
    ((ended == 0)) || code=1
    printf '%-12s exit code %3d  %4d s  %s\n' "$name" "$ended" $((SECONDS - start)) "$(tail -n 1 "$logs/$name.log")"
}

selftest=(gradloc selftest --seconds 20 --model "$@")
ranks=("$python" -m pytest -q -x -p no:cacheprovider)
part selftest 150 "$python" -m "${selftest[@]}" --output "$logs/selftest.json"
# NCCL may refuse two ranks on one GPU; the log then says so.
part two-ranks 100 "$python" -m torch.distributed.run --standalone --nproc-per-node 2 -m "${selftest[@]}" --rows 1
part layer-clip 110 "${ranks[@]}" tests/multirank/test_layer_clip.py
part token-clip 100 "${ranks[@]}" tests/multirank/test_token_clip.py
part drill 60 "${ranks[@]}" tests/multirank/test_drill.py
part identities 80 "${ranks[@]}" tests/multirank/test_run_checks_ranks.py
exit "$code"
