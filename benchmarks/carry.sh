#!/usr/bin/env bash
# Puts what a GPU machine without a network lacks into a folder, for `python -m benchmarks.gpu_session`:
#   bash benchmarks/carry.sh [FOLDER [MEGABYTES]]      runs/peers, at most 60 MB
# The wheels of the libraries that a session compares with, for that machine's Python. The session unpacks
# them itself: nothing is installed. Each is imported and tried here first; what came of it is printed and
# lies in FOLDER/tried.txt. One that is missing there is a row of the session's table that says why.
# quack and Liger's SM90 kernels want NVIDIA's CUTLASS DSL, 90 MB packed: from 120 MB on they are taken too.
#   MACHINE_PYTHON=3.12   the machine's Python
#   PYTHON=python3        the one that tries them here: with torch and Triton
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
folder=${1:-runs/peers}
most=${2:-60}
machine=${MACHINE_PYTHON:-3.12}
python=${PYTHON:-python3}

wanted=(
    megatron-core==0.19.2
    liger-kernel==0.8.5
    cut-cross-entropy==25.1.1
    transformer-engine==2.20.2  # without its library: the cross entropy is Triton
)
if [ "$most" -ge 120 ]; then
    wanted+=(
        quack-kernels==0.6.5
        nvidia-cutlass-dsl==4.7.1
        nvidia-cutlass-dsl-libs-core==4.7.1
        nvidia-cutlass-dsl-libs-base==4.7.1
        nvidia-cutlass-dsl-libs-cu13==4.7.1
        apache-tvm-ffi==0.1.15.post2
        torch-c-dlpack-ext==0.1.5
        einops==0.8.2
    )
fi

platforms=()  # of wheels with compiled parts, newest first
for glibc in 2_28 2_27 2_24 2_17; do platforms+=(--platform "manylinux_${glibc}_x86_64"); done
platforms+=(--platform manylinux2014_x86_64)

"$python" -c "import torch, triton" || {
    echo "carry.sh: $python has no torch and Triton to try the wheels with: set PYTHON to one that has" >&2
    exit 1
}

mkdir -p "$folder"
rm -f "$folder"/*.whl "$folder"/tried.txt
for project in "${wanted[@]}"; do
    "$python" -m pip download -q --no-deps --only-binary=:all: --implementation cp \
        --python-version "$machine" "${platforms[@]}" --dest "$folder" "$project" </dev/null \
        || echo "carry.sh: $project could not be downloaded: its rows will say so" >&2
done

"$python" -m benchmarks.gpu_peers "$folder" | tee "$folder/tried.txt"

size=$(du -sm --apparent-size "$folder" | cut -f1)
echo "$folder: $size MB, $(find "$folder" -name '*.whl' | wc -l) wheels"
if [ "$size" -gt "$most" ]; then
    echo "carry.sh: expected at most $most MB: remove a wheel, or raise the second argument" >&2
    exit 1
fi
