#!/usr/bin/env bash
# Sets up the environment, then runs lint, types and tests:  bash tests/run.sh [pytest arguments]
# Every stage runs even if an earlier one fails; the exit status is 0 only if all passed.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1

# Creates .venv on the first run (minutes) and activates it; later runs find it ready.
source examples/setup_env.sh || { echo "tests/run.sh: the environment could not be set up" >&2; exit 1; }
export OMP_NUM_THREADS=1

# The newest Megatron-Core asks pip for Python 3.12 but runs on 3.11 too, so tests reach it from an
# unpacked wheel, beside the version that pip installs here.
megatron=0.19.2
export MCORE_LOGPROBS_MEGATRON_019="$VIRTUAL_ENV/megatron-core-$megatron"
if [ ! -d "$MCORE_LOGPROBS_MEGATRON_019" ]; then
    wheels=$(mktemp -d "$VIRTUAL_ENV/wheel.XXXXXX")
    python -m pip download -q --no-deps --python-version 3.12 --only-binary=:all: \
        --dest "$wheels" "megatron-core==$megatron" \
        && python -m zipfile -e "$wheels"/*.whl "$wheels/unpacked" \
        && mv "$wheels/unpacked" "$MCORE_LOGPROBS_MEGATRON_019"
    unpacked=$?
    rm -rf "$wheels"
    if [ "$unpacked" -ne 0 ]; then
        echo "tests/run.sh: megatron-core $megatron could not be downloaded" >&2
        exit 1
    fi
fi

# Frameworks whose names the drop-ins carry, as source: tests read it, and load single files of it.
export MCORE_LOGPROBS_FRAMEWORKS="$VIRTUAL_ENV/frameworks"
mkdir -p "$MCORE_LOGPROBS_FRAMEWORKS"
while read -r framework; do
    [ -d "$MCORE_LOGPROBS_FRAMEWORKS/$framework" ] && continue
    wheels=$(mktemp -d "$VIRTUAL_ENV/wheel.XXXXXX")
    python -m pip download -q --no-deps --python-version 3.12 --only-binary=:all: \
        --dest "$wheels" "$framework" </dev/null \
        && python -m zipfile -e "$wheels"/*.whl "$wheels/unpacked" \
        && mv "$wheels/unpacked" "$MCORE_LOGPROBS_FRAMEWORKS/$framework"
    unpacked=$?
    rm -rf "$wheels"
    if [ "$unpacked" -ne 0 ]; then
        echo "tests/run.sh: $framework could not be downloaded" >&2
        exit 1
    fi
done < <(grep -v '^#' tests/dropin/frameworks.txt)

failed=""
stage() {  # stage NAME COMMAND...: runs the command and remembers whether it failed
    local name=$1
    shift
    echo "== $name"
    "$@" || failed="$failed $name"
}
log=$(mktemp)
trap 'rm -f "$log"' EXIT
tests() {
    python -m pytest --durations=10 "$@" 2>&1 | tee "$log"
    return "${PIPESTATUS[0]}"
}

stage ruff-check python -m ruff check .
stage ruff-format python -m ruff format --check .
stage mypy python -m mypy
stage pytest tests "$@"

echo "== stages failed:${failed:- none}"
tail -n 1 "$log"
[ -z "$failed" ]
