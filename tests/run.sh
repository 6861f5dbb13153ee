#!/usr/bin/env bash
# Sets up build/ on first use and runs every check of the project: ruff, the patch against its sources, pytest.
# Usage: bash tests/run.sh [pytest arguments]
# Exit code: 0 if everything passes, the failing step's own code otherwise.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
root=$PWD
build=$root/build
venv=$build/venv
source embedded/find_python.sh
say() { printf '%s\n' "run.sh: $*"; }

pip_install() {
    "$venv/bin/python" -m pip install --progress-bar off "$@" |
        awk '/^Collecting/ { if (++n % 20 == 0) { print "  " n " packages"; fflush() } }
             /^Installing collected/ { print "  installing"; fflush() }'
}

# The virtual environment is rebuilt when a requirement file or the interpreter changes.
set_up_venv() {
    local python file wanted
    if ! python=$(find_python); then
        say "no Python 3.10, 3.11 or 3.12 with the venv module was found; install one of them" >&2
        return 1
    fi
    local files=(tests/requirements.txt)
    for file in embedded/requirements.txt embedded/requirements-no-deps.txt; do
        [[ ! -f $file ]] || files+=("$file")
    done
    wanted=$({ "$python" -VV; cat "${files[@]}"; } | sha256sum | cut -d' ' -f1)
    [[ ! -f $venv/ready || $(<"$venv/ready") != "$wanted" ]] || return 0
    say "installing the requirements into build/venv (a few minutes, once)"
    rm -rf "$venv"
    "$python" -m venv "$venv"
    pip_install -r tests/requirements.txt
    [[ ! -f embedded/requirements-no-deps.txt ]] || pip_install --no-deps -r embedded/requirements-no-deps.txt
    echo "$wanted" >"$venv/ready"
}

# build/base: verl as released.
set_up_base() {
    local version wheel
    version=$(sed -n 's/^VERSION=//p' patches/BASE_COMMIT)
    wheel=$build/wheel/verl-$version-py3-none-any.whl
    [[ ! -f $build/base/ready || $(<"$build/base/ready") != "$version" ]] || return 0
    say "unpacking verl $version into build/base"
    rm -rf "$build/base" "$build/base.new" "$build/wheel.new"
    if [[ ! -f $wheel ]]; then
        "$venv/bin/python" -m pip download -q --no-deps --only-binary :all: -d "$build/wheel.new" "verl==$version"
        mkdir -p "$build/wheel"
        mv "$build/wheel.new/$(basename "$wheel")" "$wheel"
        rmdir "$build/wheel.new"
    fi
    "$venv/bin/python" -m zipfile -e "$wheel" "$build/base.new"
    echo "$version" >"$build/base.new/ready"
    mv "$build/base.new" "$build/base"
}

# build/verl: the same with the patch.
set_up_patched() {
    local wanted
    wanted=$(sha256sum patches/BASE_COMMIT patches/gradloc.patch | sha256sum | cut -d' ' -f1)
    [[ ! -f $build/verl/ready || $(<"$build/verl/ready") != "$wanted" ]] || return 0
    rm -rf "$build/verl" "$build/verl.new"
    mkdir "$build/verl.new"
    cp -R "$build/base/verl" "$build/verl.new/verl"
    "$venv/bin/python" apply_patch.py --repo "$build/verl.new"
    echo "$wanted" >"$build/verl.new/ready"
    mv "$build/verl.new" "$build/verl"
}

# The report is tested in a real browser. Without one those tests fail, and all others run.
set_up_browser() {
    if command -v chromium >/dev/null && command -v chromedriver >/dev/null; then return 0; fi
    local chosen
    chosen=$("$venv/bin/python" -m pytest --collect-only -q "$@" 2>&1) || true # the run itself tells what is wrong
    [[ $chosen == *test_report_browser.py* ]] || return 0
    if [[ $(id -u) == 0 ]] && command -v apt-get >/dev/null; then
        say "installing Chromium for the tests of the report"
        if apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends \
            chromium chromium-driver fonts-dejavu-core >/dev/null; then return 0; fi
    fi
    say "the tests of the report in a browser will fail: Chromium or its driver is missing" >&2
}

mkdir -p "$build"
exec 9>"$build/lock"
flock 9 # two runs side by side must not set up the same files
set_up_venv
set_up_base

say "ruff"
"$venv/bin/ruff" check .
"$venv/bin/ruff" format --check .
say "deno"
"$venv/bin/deno" lint
"$venv/bin/deno" fmt --check
say "the patch"
PYTHON=$venv/bin/python bash make_patch.sh --check --base-tree build/base
set_up_patched
say "mypy"
"$venv/bin/mypy"
# The patched verl comes before the unpatched one that is installed in the environment.
export GRADLOC_BASE_TREE=$build/base PYTHONPATH=$build/verl:$root
set_up_browser "$@"
exec 9>&-

say "pytest"
exec "$venv/bin/python" -m pytest "$@"
