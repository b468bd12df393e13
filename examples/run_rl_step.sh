#!/usr/bin/env bash
# GRPO steps on SmolLM2-135M-Instruct at TP 3, on CPU:  bash examples/run_rl_step.sh [arguments]
# Sets up .venv first. Arguments go to rl_step.py; --config, --tp, --cp and --pp set the number of
# processes too (NPROC=n for more: data parallelism).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

source examples/setup_env.sh || { echo "run_rl_step.sh: the environment could not be set up" >&2; exit 1; }
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} TOKENIZERS_PARALLELISM=false TQDM_DISABLE=1
export PYTHONWARNINGS=${PYTHONWARNINGS:-ignore} PYTHONUNBUFFERED=1

config=configs/smollm2-cpu.yaml
given=("$@")
for ((i = 0; i < ${#given[@]}; i++)); do
    case ${given[i]} in
        --config) config=${given[i + 1]:-} ;;
        --config=*) config=${given[i]#*=} ;;
    esac
done
args=(--config "$config" "$@")
needs=$(python examples/rl_step.py "${args[@]}" --print-processes)
read -r processes engine <<<"$needs"
if [ "$engine" = vllm ]; then
    source examples/setup_env.sh vllm || { echo "run_rl_step.sh: vLLM could not be installed" >&2; exit 1; }
fi
nproc=${NPROC:-$processes}

exec python -m torch.distributed.run --standalone --nproc-per-node "$nproc" \
    examples/rl_step.py "${args[@]}"
