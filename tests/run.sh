#!/usr/bin/env bash
# Sets up the environment, then runs lint, types, tests and the site:  bash tests/run.sh
# bash tests/run.sh PYTEST ARGUMENTS: lint, types and these tests.
# bash tests/run.sh --all [--peers DIR]: the night's part too: tests marked `night`, random settings, models in
#     many tiles and blocks, older CPUs' instructions, the older Triton, frameworks' own training code
#     (tests/trainers) and their own unit tests (tests/peers); DIR has checkouts of those that PyPI lacks.
# bash tests/run.sh --coverage [pytest arguments]: the same under coverage, with its figures by part.
# bash tests/run.sh --matrix [--main CHECKOUT]: instead, what holds on each Megatron-Core release, into docs/releases.md.
# Every stage runs even if an earlier one fails; the exit status is 0 only if all passed.
set -uo pipefail
CDPATH='' cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
case ${1:-} in
    -h | --help)  # what stands above, without an environment
        sed -n '2,/^[^#]/s/^# //p' tests/run.sh
        exit ;;
esac

# Creates .venv on the first run (minutes) and activates it; later runs find it ready.
# With --all vLLM too, for one test file; where it has no wheel that file's tests are skipped and say so.
environment() { source examples/setup_env.sh tests "$@"; }
{ [ "${1:-}" = --all ] && environment vllm; } || environment || { echo "tests/run.sh: the environment could not be set up" >&2; exit 1; }
export OMP_NUM_THREADS=1
export TRITON_CACHE_DIR="$VIRTUAL_ENV/triton"  # by default in the home folder, which some users lack

# Releases other than the ones that pip installs here are unpacked wheels, which go first on PYTHONPATH.
unpack() {  # unpack PROJECT VERSION [PIP OPTIONS]: its wheel into .venv, once
    local project=$1 version=$2 wheels unpacked
    local folder="$VIRTUAL_ENV/$project-$version"
    [ -d "$folder" ] && return
    echo "tests/run.sh: fetching $project $version (once)" >&2
    wheels=$(mktemp -d "$VIRTUAL_ENV/wheel.XXXXXX")
    python -m pip download -q --no-deps --only-binary=:all: "${@:3}" \
        --dest "$wheels" "$project==$version" \
        && python -m zipfile -e "$wheels"/*.whl "$wheels/unpacked" \
        && mv "$wheels/unpacked" "$folder"
    unpacked=$?
    rm -rf "$wheels"
    [ "$unpacked" -eq 0 ] || echo "tests/run.sh: $project $version could not be downloaded" >&2
    return "$unpacked"
}
# Megatron-Core from 0.17 on asks pip for Python 3.12 but runs on 3.11 too.
newest=0.19.2
releases="0.15.3 0.16.1 0.17.1 0.18.2 $newest"  # the last patch of each, for --matrix
megatron() { unpack megatron-core "$1" --python-version 3.12; }
tritons="3.6.0 3.7.1"  # what torch 2.11 and 2.13 bring to a GPU machine; the newest is installed

export MCORE_LOGPROBS_MEGATRON_019="$VIRTUAL_ENV/megatron-core-$newest"
if [ "${1:-}" = --matrix ]; then
    folders=()
    for release in $releases; do
        megatron "$release" || exit 1
        folders+=("$VIRTUAL_ENV/megatron-core-$release")
    done
    exec python -m tests.megatron.release_matrix "${folders[@]}" "${@:2}"
fi
megatron "$newest" || exit 1

# Frameworks whose names the drop-ins carry, as source: tests read it, and load single files of it.
export MCORE_LOGPROBS_FRAMEWORKS="$VIRTUAL_ENV/frameworks"
mkdir -p "$MCORE_LOGPROBS_FRAMEWORKS"
while read -r framework; do
    [ -d "$MCORE_LOGPROBS_FRAMEWORKS/$framework" ] && continue
    echo "tests/run.sh: fetching $framework (once)" >&2
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

# What their training code imports, each framework's in a folder of its own, so that it meets nothing else:
# of the day's rows here; at night `python -m tests.trainers` installs the others.
export MCORE_LOGPROBS_TRAINERS="$VIRTUAL_ENV/trainers"
python -m tests.trainers.requirements verl || exit 1

run_pytest=(python -m pytest)
selected=(-m "not night")
case "${1:-}" in
    --coverage)
        shift
        coverage=yes
        python -m coverage erase
        run_pytest=(python -m coverage run -m pytest)
        ;;
    --all)
        shift
        all=yes
        selected=()
        if [ "${1:-}" = --peers ]; then
            MCORE_LOGPROBS_PEERS=$(cd "${2:?--peers: expected a folder}" && pwd) || exit 1
            export MCORE_LOGPROBS_PEERS
            shift 2
        fi
        ;;
esac

# Bytecode is compiled by each process that imports a module before another has written it: here once,
# while mypy leaves a core idle, for the three processes below.
compile_imports() {
    [ -f "$VIRTUAL_ENV/.imports_stamp" ] && return
    python -W ignore -c "import torch._inductor.compile_fx, torch.distributed.tensor, pytest, triton
import transformers.generation.utils, transformers.models.llama.modeling_llama
import megatron.core.optimizer, megatron.core.pipeline_parallel.schedules
import megatron.core.models.gpt.gpt_layer_specs, megatron.core.models.multimodal.llava_model
import megatron.core.distributed.fsdp.mcore_fsdp_adapter" && touch "$VIRTUAL_ENV/.imports_stamp"
}
compile_imports >/dev/null 2>&1 &
imports=$!

failed=""
stage() {  # stage NAME COMMAND...: runs the command and remembers whether it failed
    local name=$1
    shift
    echo "== $name"
    "$@" || failed="$failed $name"
}
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT
# Three processes share the cores: gloo ranks wait for each other, and another's work fills the gaps.
# The third has what these two leave.
parts=(
    "tests/megatron tests/dropin tests/cpu_megatron tests/context_parallel tests/examples tests/test_mismatch.py tests/test_costs_hidden.py tests/test_messages.py tests/test_nan_rows.py"
    "tests/kernels tests/gpu tests/test_costs_of_operations.py tests/test_tracing.py tests/test_docs.py tests/test_audit.py"
)
tests() {
    if [ "$#" -gt 0 ]; then
        "${run_pytest[@]}" --durations=10 "$@" 2>&1 | tee "$logs/0"
        return "${PIPESTATUS[0]}"
    fi
    local status=0 number=0 part others=() pids=()
    for part in "${parts[@]}"; do
        number=$((number + 1))
        # shellcheck disable=SC2086
        "${run_pytest[@]}" --durations=10 ${selected[@]+"${selected[@]}"} $part >"$logs/$number" 2>&1 &
        pids+=($!)
        for part in $part; do others+=("--ignore=$part"); done
    done
    "${run_pytest[@]}" --durations=10 ${selected[@]+"${selected[@]}"} "${others[@]}" 2>&1 | tee "$logs/0"
    status=${PIPESTATUS[0]}
    for number in "${!pids[@]}"; do
        wait "${pids[$number]}" || status=1
        echo "-- ${parts[$number]}"
        cat "$logs/$((number + 1))"
    done
    [ -n "${all:-}" ] || echo "-- deselected: tests marked night, which bash tests/run.sh --all runs"
    return "$status"
}

stage ruff-check python -m ruff check .
stage ruff-format python -m ruff format --check .
pages() { python -m ruff format --check --line-length 76 ./*.md docs/*.md docs/*/*.md; }
stage ruff-pages pages
stage mypy python -m mypy
wait "$imports"  # one that fails is a test's to report
[ "$#" -gt 0 ] || { bash docs/build.sh >"$logs/docs" 2>&1 & site=$!; }  # while tests run
stage pytest tests "$@"
# The rest runs on the CPU, where there are GPUs too.
if [ "$#" -eq 0 ] && python -c "import sys, torch; sys.exit(not torch.cuda.is_available())"; then
    stage gpu env MCORE_LOGPROBS_TEST_GPU=1 python -m pytest tests/kernels tests/test_no_sync.py
fi
covered() { python -m coverage combine -q && python -m tests.covered; }
[ -z "${coverage:-}" ] || stage coverage covered
older_triton() {  # older_triton VERSION; the wheel's assembler comes without its executable bits
    unpack triton "$1" || return 1
    chmod -R u+x "$VIRTUAL_ENV/triton-$1/triton/backends/nvidia/bin"
    PYTHONPATH="$VIRTUAL_ENV/triton-$1" python -m pytest -q tests/kernels/test_triton_build.py
}
# The same operations by other instructions: of AVX2, and of none of the newer ones.
another_cpu() (  # another_cpu CAPABILITY ISA: as ATEN_CPU_CAPABILITY and ONEDNN_MAX_CPU_ISA have them
    # torch's compiler cache does not tell CPUs apart, but for the library's own kernels.
    export TORCHINDUCTOR_CACHE_DIR="$VIRTUAL_ENV/inductor-$1"
    ATEN_CPU_CAPABILITY=$1 MKL_ENABLE_INSTRUCTIONS=${3:-$2} ONEDNN_MAX_CPU_ISA=$2 python -m pytest -q -m "not night" \
        tests/test_operations.py tests/test_soundness.py tests/test_large_logits.py tests/test_invariant_*.py \
        tests/test_policy_loss.py tests/test_divergences.py tests/test_topk_divergence.py tests/kernels/test_inductor_pairs.py
)
# Tests of models, drop-ins and calls, all of them in many tiles and blocks (tests/helpers/sizes.py).
many_blocks() (  # two processes: after the tests of models torch.compile does not know torch.full_like
    export MCORE_LOGPROBS_TEST_BUDGETS=narrow
    run() { python -m pytest -q -m "not night and not own_sizes" "$@"; }
    failed=0
    run tests/megatron tests/dropin tests/context_parallel || failed=1
    run tests/test_lazy*.py tests/test_losses_in_training.py \
        tests/test_{choices,divergences,drafts,dtensor,filters_hidden,hidden_edges,linear_map,nan_rows,new_source}.py \
        tests/test_{outlived,policy_loss,prefix_tree,rows,sample,saved_bytes,soundness,statistics_edges,topk_divergence}.py \
        || failed=1
    exit "$failed"
)
[ -z "${all:-}" ] || stage many-blocks many_blocks
[ -z "${all:-}" ] || stage cpu-avx2 another_cpu avx2 AVX2
[ -z "${all:-}" ] || stage cpu-sse4 another_cpu default SSE41 SSE4_2
[ -z "${all:-}" ] || for triton in $tritons; do stage "triton-$triton" older_triton "$triton"; done
[ -z "${all:-}" ] || stage trainers python -m tests.trainers
[ -z "${all:-}" ] || stage peers python -m tests.peers
site() { wait "$site"; local status=$?; cat "$logs/docs"; return "$status"; }
[ "$#" -gt 0 ] || stage docs site

echo "== stages failed:${failed:- none}"
tail -q -n 1 "$logs"/[0-9]*
[ -z "$failed" ]
