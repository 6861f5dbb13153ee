#!/usr/bin/env bash
# Sets up build/ on first use and runs every check of the project: ruff, deno, the patches against their sources, mypy, pytest.
# Usage: bash tests/run.sh [--quick] [--timings] [--target VERSION] [pytest arguments]
#        bash tests/run.sh --plugin CHECKOUT [pytest arguments]      of pytest only the plugin's tests, with the verl of a checkout (of main, say)
# The tests run against the verl of patches/DEFAULT. Without arguments, those marked smoke also run against each other
# verl with a patch, those marked every_target against each with requirements of its own, and those marked target against
# the one that they name: in parts, two at a time, with logs in build/logs and a line for each part at the end.
# --target takes one verl, for everything. --timings adds the slowest tests to each log. --quick is for each commit: one
# verl, and nothing that is marked slow; and of each file in tests/multirank no case with ranks but one.
# Exit code: 0 if everything passes, the failing step's own code otherwise.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
root=$PWD build=$PWD/build
source embedded/find_python.sh
say() { printf '%s\n' "run.sh: $*"; }

# A line of a target's PIN; nothing where it has none.
pinned() { [[ ! -f patches/$1/PIN ]] || sed -n "s/^$2=//p" "patches/$1/PIN"; }

# The verl whose requirements a target shares.
environment_of() {
    local shared
    shared=$(pinned "$1" REQUIREMENTS)
    echo "${shared:-$1}"
}

# The virtual environment of a target: build/venv for verl 0.7, build/venv-VERSION for others.
venv_of() {
    local venv
    venv=$build/venv-$(environment_of "$1")
    echo "${venv%-0.7.0}"
}

# A virtual environment is rebuilt when a requirement file or the interpreter changes. For "trackers" it has trackers
# that cannot be installed beside verl; tests find verl in that of the default target.
set_up_venv() {
    local python version file wanted venv files
    if ! python=$(find_python); then
        say "no Python 3.10, 3.11 or 3.12 with the venv module was found; install one of them" >&2
        return 1
    fi
    version=$(environment_of "$1")
    venv=$(venv_of "$1")
    files=("tests/requirements-$version.txt")
    for file in embedded/requirements-{common,"$version",no-deps}.txt; do
        [[ ! -f $file ]] || files+=("$file")
    done
    wanted=$({ "$python" -VV; cat "${files[@]}"; } | sha256sum | cut -d' ' -f1)
    [[ ! -f $venv/ready || $(<"$venv/ready") != "$wanted" ]] || return 0
    say "installing the requirements of $version into build/$(basename "$venv") (a few minutes, once)"
    rm -rf "$venv"
    "$python" -m venv "$venv"
    "$python" embedded/set_up.py "$venv/bin/python" -r "tests/requirements-$version.txt"
    [[ $version == trackers || ! -f embedded/requirements-no-deps.txt ]] ||
        "$python" embedded/set_up.py "$venv/bin/python" --no-deps -r embedded/requirements-no-deps.txt
    echo "$wanted" >"$venv/ready"
}

# build/VERSION/base: verl as released, of the wheel with this SHA-256.
set_up_base() {
    local version=$1 pin=$2 wheel=$build/wheel/verl-$1-py3-none-any.whl base=$build/$1/base sum
    [[ ! -f $base/ready || $(<"$base/ready") != "$version" ]] || return 0
    say "unpacking verl $version into build/$version/base"
    rm -rf "$base"
    [[ -f $wheel ]] ||
        "$venv/bin/python" -m pip download -q --no-deps --only-binary :all: -d "$build/wheel" "verl==$version"
    sum=$(sha256sum "$wheel" | cut -d' ' -f1)
    if [[ $sum != "$pin" ]]; then
        say "$wheel has SHA-256 $sum, not the pinned $pin; delete it and run again" >&2
        return 1
    fi
    "$venv/bin/python" -m zipfile -e "$wheel" "$base"
    echo "$version" >"$base/ready"
}

# build/VERSION/verl: the same with the patch.
set_up_patched() {
    local version=$1 base=$build/$1/base patched=$build/$1/verl wanted
    wanted=$(find patches/files "patches/$version" -type f | sort | xargs cat | sha256sum | cut -d' ' -f1)
    [[ ! -f $patched/ready || $(<"$patched/ready") != "$wanted" ]] || return 0
    rm -rf "$patched"
    mkdir "$patched"
    cp -R "$base/verl" "$patched/verl"
    "$venv/bin/python" apply_patch.py --target "$version" --no-install "$patched"
    echo "$wanted" >"$patched/ready"
}

# The report is tested in a real browser. Without one those tests fail, and all others run.
set_up_browser() {
    if command -v chromium >/dev/null && command -v chromedriver >/dev/null; then return 0; fi
    [[ -z $* || $* == *report* ]] || return 0
    if [[ $(id -u) == 0 ]] && command -v apt-get >/dev/null; then
        say "installing Chromium for the tests of the report"
        if apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends \
            chromium chromium-driver fonts-dejavu-core >/dev/null; then return 0; fi
    fi
    say "the tests of the report in a browser will fail: Chromium or its driver is missing" >&2
}

# The patched verl comes before the unpatched one that is installed in the environment.
use_target() {
    venv=$(venv_of "$1")
    export GRADLOC_BASE_TREE=$build/$1/base PYTHONPATH=$build/$1/verl:$root MYPYPATH=$build/$1/verl
}

MOST_MINUTES=86 # of a run
default=$(<patches/DEFAULT)
targets=(patches/*/PIN)
targets=("${targets[@]%/PIN}")
targets=("${targets[@]#patches/}")
target=$default plugin='' quick='' chosen='' in_parts=''
others=() timings=()
if [[ ${1-} == --plugin ]]; then
    plugin=$(cd "${2:?must name a checkout of verl}" && pwd)
    target=0.9.1
    set -- tests/unit/test_plugin_with_verl.py tests/trainer/test_end_to_end.py "${@:3}"
fi
while [[ ${1-} == --quick || ${1-} == --timings || ${1-} == --target ]]; do
    case $1 in
        --quick) quick=--quick ;;
        --timings) timings=(--durations=40 --durations-min=1) ;;
        --target)
            target=${2-} chosen=1
            if [[ " ${targets[*]} " != *" $target "* ]]; then
                say "--target takes one of: ${targets[*]}" >&2
                exit 2
            fi
            shift
            ;;
    esac
    shift
done
if ((!$#)); then
    [[ $chosen && ! $quick ]] || in_parts=1
    # The newest one first, which has most of the marked tests.
    [[ $chosen || $quick ]] || for version in "${targets[@]}"; do
        [[ $version == "$default" ]] || others=("$version" "${others[@]}")
    done
fi

mkdir -p "$build"
exec 9>"$build/lock"
flock 9 # two runs side by side must not set up the same files
venv=$(venv_of "$target")
for version in "$target" "${others[@]}"; do set_up_venv "$version"; done
[[ $quick || $plugin ]] || set_up_venv trackers
for version in "${targets[@]}"; do set_up_base "$version" "$(pinned "$version" WHEEL_SHA256)"; done
# No target: a few tests of the plugin run with it, in the environment of 0.9.1.
set_up_base 0.9.0 6e9374db1e2ab346a0aafe9a202bee1b239a042def2f2ccd6db2a4cd04c6308b

say "ruff, deno"
"$venv/bin/ruff" check .
"$venv/bin/ruff" format --check .
"$venv/bin/deno" lint
"$venv/bin/deno" fmt --check
say "the patches"
PYTHON=$venv/bin/python bash make_patch.sh --check
for version in "${targets[@]}"; do set_up_patched "$version"; done
for name in base verl; do ln -sfn "$default/$name" "$build/$name"; done
use_target "$target"
check_types() { env -u PYTHONPATH "$venv/bin/mypy"; } # which would take what is on it for installed
has_types=$([[ $venv != "$build/venv" ]] || echo 1) # those of verl 0.7
[[ $in_parts || ! $has_types ]] || check_types
[[ $quick || $plugin ]] || set_up_browser "$@"
if [[ $in_parts ]]; then
    # Each run has a folder of its own; build/logs is that of the newest.
    find "$build" -maxdepth 1 -name 'logs.*' -mmin "+$MOST_MINUTES" -exec rm -rf {} +
    logs=$(mktemp -d "$build/logs.XXXXXX")
    ln -sfn "${logs##*/}" "$build/logs"
fi
exec 9>&-

# pytest, interrupted MOST_MINUTES after the start: what hangs is then seen at the end of a log.
run_pytest() {
    local left=$((MOST_MINUTES * 60 - SECONDS))
    timeout --foreground --signal=INT --kill-after=60 $((left > 60 ? left : 60)) \
        "$venv/bin/python" -m pytest ${quick:+"$quick"} "${timings[@]}" "$@"
}

# A part of a run: a verl, and what of the tests: one of these folders, all others, or what is marked for another verl; or
# the types.
FOLDERS="tests/multirank tests/trainer tests/unit tests/tools tests/report"
test_part() {
    local version=$1 what=$2 marked="smoke or target(version='$1')" arguments=() folder
    [[ $(environment_of "$version") != "$version" ]] || marked="every_target or $marked"
    use_target "$version"
    if [[ $what == types ]]; then
        check_types
        return
    fi
    case $what in
        rest) for folder in $FOLDERS; do arguments+=("--ignore=$folder"); done ;;
        marked) # no other file is imported
            mapfile -t arguments < <(grep -rlE --include='test_*.py' 'mark\.(smoke|every_target|target)\b|on_engine\(' tests | sort)
            arguments+=(-m "$marked")
            ;;
        *) arguments=("$what") ;;
    esac
    say "pytest, verl $version, $what"
    run_pytest "${arguments[@]}"
}

# Runs parts until all are taken: who makes the folder has the part.
work() {
    local number part code start
    for number in "${!parts[@]}"; do
        part=$logs/$number
        mkdir "$part" 2>/dev/null || continue
        code=0 start=$SECONDS
        # shellcheck disable=SC2086 # a verl, and what
        test_part ${parts[number]} >"$part/log" 2>&1 </dev/null || code=$?
        printf '%d:%02d\n' $(((SECONDS - start) / 60)) $(((SECONDS - start) % 60)) >"$part/minutes"
        echo "$code" >"$part/code"
    done
}

# One line for each part, and below it what was skipped and why, what failed, and a failing part's log.
summarize() {
    local number part counts
    for number in "${!parts[@]}"; do
        part=$logs/$number
        if [[ ! -s $part/code ]]; then
            say "${parts[number]}: did not end; its log: build/logs/$number/log"
            continue
        fi
        counts=$(sed -nE 's/^(=+ )?(no tests ran|[0-9]+ [a-z].*) in [0-9.]+s.*/\2/p; s/^(Success|Found [0-9]+ error).*/&/p' "$part/log" |
            tail -n 1)
        say "${parts[number]}: ${counts:-no result}, $(<"$part/minutes") min"
        sed -nE 's/^(SKIPPED|FAILED|ERROR) (.*)/    \L\1\E \2/p' "$part/log"
        [[ $(<"$part/code") == 0 ]] || echo "    log: build/logs/$number/log"
    done
}

if [[ ! $in_parts ]]; then
    say "pytest, verl ${plugin:-$target}"
    [[ ! $plugin ]] || export GRADLOC_BASE_TREE=$plugin
    run_pytest "$@"
    exit
fi

# The longest parts come first, so that none runs alone at the end. Two at a time keep two cores busy: one part alone does
# so where it runs ranks, and hardly at all where it waits for Ray.
parts=()
for folder in $FOLDERS; do
    [[ ! -d $folder ]] || parts+=("$target $folder")
    [[ $folder != tests/multirank ]] || for version in "${others[@]}"; do parts+=("$version marked"); done
done
parts+=("$target rest")
[[ ! $has_types ]] || parts+=("$target types")
set -m # each in a process group of its own, which ends with this one
work &
work &
set +m
code=0 worker=
trap 'for worker in $(jobs -p); do kill -- "-$worker" 2>/dev/null || true; done' EXIT
for number in "${!parts[@]}"; do
    until [[ -s $logs/$number/code || -z $(jobs -rp) ]]; do sleep 1; done
    cat "$logs/$number/log" || true
    ended=$(cat "$logs/$number/code" || echo 1)
    ((ended == 0)) || code=$ended
done
summarize
exit "$code"
