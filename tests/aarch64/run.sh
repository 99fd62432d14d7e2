#!/usr/bin/env bash
# The kernels' tests on an emulated AArch64 CPU: cross compiles the extension and runs pytest under qemu, with an
# AArch64 Python, torch and numpy of its own beside this environment's pure packages. What it downloads (some 250 MB)
# and builds stays in build/aarch64. A test takes seconds where it takes hundredths without emulation.
#
#   apt-get install g++-aarch64-linux-gnu qemu-user-static
#   bash tests/aarch64/run.sh [pytest arguments]
set -euo pipefail
cd "$(dirname "$0")/../.."
tests=(tests/test_cpu_kernels.py tests/test_cpu_finite.py tests/test_cpu_progressive.py -k 'not portable')
source tests/aarch64/prepare.sh

cmake -S . -B "$root/kernels" -G Ninja -DCMAKE_BUILD_TYPE=Release -DPython_EXECUTABLE="$python" "${cross[@]/#/-D}"
nice ninja -C "$root/kernels" -j "${JOBS:-1}"

# Weights in planes, bit for bit (planes.cpp).
compile() { aarch64-linux-gnu-g++ -O3 -std=c++17 -Icsrc "$@"; }
compile -ffp-contract=fast -c csrc/planes_portable.cpp -o "$root/portable.o"
compile -march=armv8-a -c csrc/planes_neon.cpp -o "$root/neon.o"
compile -march=armv8.2-a+bf16+dotprod+i8mm -c csrc/planes_neon_bf16.cpp -o "$root/neon_bf16.o"
compile -static tests/aarch64/planes.cpp csrc/threads.cpp "$root"/{portable,neon,neon_bf16}.o -o "$root/planes" -lpthread
qemu-aarch64-static "$root/planes"

mkdir -p "$root/path"
ln -sfn "$PWD/saccade" "$root/path/saccade"
export PYTHONPATH=$root/path:$root/site:$root/pure:$PWD/tests:$PWD/tests/aarch64
cp "$root"/kernels/_kernels*.so saccade/  # beside the modules, for this run
trap 'rm -f saccade/_kernels.cpython-311-aarch64-linux-gnu.so' EXIT
"${qemu[@]}" tests/wheel_smoke.py kernels
"${qemu[@]}" -m pytest -q --noconftest -p emulated -p no:cacheprovider -o timeout=3000 "${@:-${tests[@]}}"
