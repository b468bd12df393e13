#!/usr/bin/env bash
# All that wants a GPU, in under eight minutes on an H200: the Triton tests compiled for real, the
# kernels against the memory's bandwidth and the vendor's products, and the benchmarks beside the
# peers that are installed (liger-kernel, cut-cross-entropy, megatron-core, ...).
#   bash mcore_logprobs/bench/gpu_session.sh [directory for the tables]
# Each table goes to <directory>/<year>-<month>-<gpu>-<name>.txt, headed by machine and date. A step
# that fails or runs out of its time does not stop the next; the exit status says if any did.
#   SMALL=1      tiny sizes; without a GPU in Triton's interpreter. Checks the script, not the speed.
#   PYTHON=...   the interpreter (python3)
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit 1
python=${PYTHON:-python3}
results=${1:-mcore_logprobs/bench/results}
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

gpu=$("$python" -c 'import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else "")') || exit 1
rows="8192 32768" vocab=152064 hidden=4096 iterations=10 tests=(tests/kernels)
if [ -n "${SMALL:-}" ]; then
    rows=4 vocab=512 hidden=32 iterations=1
    [ -n "$gpu" ] || tests=(tests/kernels/test_triton_operators.py)
elif [ -z "$gpu" ]; then
    echo "gpu_session: no CUDA device; SMALL=1 tries the script without one" >&2
    exit 1
fi
machine=${gpu:-CPU, interpreted}
short=$(echo "${gpu:-cpu}" | tr '[:upper:] ' '[:lower:]-' | sed 's/^nvidia-//')
mkdir -p "$results"

failed=""
step() {  # step NAME SECONDS COMMAND...
    local name=$1 limit=$2 file status
    shift 2
    file=$results/$(date +%Y-%m)-$short-$name.txt
    printf '\n== %s\n' "$name"
    {
        echo "$machine, $(date +%Y-%m-%d): ${*/#$python/python}"
        timeout "$limit" "$@" 2>&1
    } | tee "$file"
    status=${PIPESTATUS[0]}
    [ "$status" -eq 0 ] || failed="$failed $name($status)"
}

# Compiling a kernel for each case takes most of the tests' time, and cores share it out.
workers=()
"$python" -c "import xdist" 2>/dev/null && [ -n "$gpu" ] && workers=(-n 8)
step tests 170 "$python" -m pytest "${tests[@]}" "${workers[@]}"

[ -n "$gpu" ] || export TRITON_INTERPRET=1
# shellcheck disable=SC2086
step kernels 100 "$python" -m mcore_logprobs.bench.gpu_kernels --rows $rows --vocab $vocab --hidden $hidden --iterations $iterations
for name in logits linear policy; do
    # shellcheck disable=SC2086
    step $name 65 "$python" -m mcore_logprobs bench $name --rows ${rows// /,} --vocab $vocab --hidden $hidden --dtype bf16 --rounds $iterations
done

printf '\n== steps failed:%s\n' "${failed:- none}"
[ -z "$failed" ]
