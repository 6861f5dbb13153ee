# For bash scripts to source.

# Prints the first Python on PATH that verl can be installed with; fails if there is none.
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
    return 1
}
