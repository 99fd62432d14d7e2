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
python=${PYTHON:-$PWD/.venv/bin/python}
root=$PWD/build/aarch64
system=$root/system
mkdir -p "$root"

if [ ! -e "$system/usr/bin/python3.11" ]; then  # Debian's packages, without telling this machine's package manager
  mkdir -p "$root"/apt/{lists,archives}/partial "$system"
  touch "$root/apt/status"
  cat > "$root/apt.conf" <<E
APT::Architecture "arm64";
APT::Architectures { "arm64"; };
Dir::State "$root/apt";
Dir::State::status "$root/apt/status";
Dir::Cache "$root/apt";
E
  export APT_CONFIG=$root/apt.conf
  apt-get -q update
  apt-get -q install -y --download-only --no-install-recommends \
    libpython3.11-dev python3.11-minimal libpython3.11-stdlib libstdc++6
  unset APT_CONFIG
  for package in "$root"/apt/archives/*.deb; do dpkg -x "$package" "$system"; done
fi

# torch 2.10 is the last whose AArch64 wheel on the package index needs no CUDA.
[ -e "$root/site/torch" ] || "$python" -m pip install -q --no-deps --target "$root/site" --only-binary=:all: \
  --python-version 3.11 --platform manylinux_2_28_aarch64 --platform manylinux_2_27_aarch64 --platform manylinux_2_17_aarch64 \
  --platform manylinux2014_aarch64 torch==2.10.0 numpy xxhash markupsafe

[ -e "$root/build/nanobind" ] || "$python" -m pip install -q --no-deps --target "$root/build" nanobind

cmake -S . -B "$root/kernels" -G Ninja -DCMAKE_TOOLCHAIN_FILE="$PWD/tests/aarch64/toolchain.cmake" \
  -DCMAKE_BUILD_TYPE=Release \
  -DNB_SUFFIX=.cpython-311-aarch64-linux-gnu.so \
  -Dnanobind_DIR="$root/build/nanobind/cmake" -DPython_EXECUTABLE="$python" \
  -DPython_INCLUDE_DIR="$system/usr/include/python3.11" -DCMAKE_CXX_FLAGS="-idirafter $system/usr/include"
nice ninja -C "$root/kernels" -j "${JOBS:-1}"

# Weights in planes, bit for bit (planes.cpp).
compile() { aarch64-linux-gnu-g++ -O3 -std=c++17 -Icsrc "$@"; }
compile -ffp-contract=fast -c csrc/planes_portable.cpp -o "$root/portable.o"
compile -march=armv8-a -c csrc/planes_neon.cpp -o "$root/neon.o"
compile -march=armv8.2-a+bf16+dotprod+i8mm -c csrc/planes_neon_bf16.cpp -o "$root/neon_bf16.o"
compile -static tests/aarch64/planes.cpp csrc/threads.cpp "$root"/{portable,neon,neon_bf16}.o -o "$root/planes" -lpthread
qemu-aarch64-static "$root/planes"

# This environment's pure packages, and saccade's own modules.
mkdir -p "$root/path" "$root/pure"
ln -sfn "$PWD/saccade" "$root/path/saccade"
packages=$("$python" -c "import sysconfig; print(sysconfig.get_paths()['purelib'])")
for name in pytest _pytest py.py pluggy iniconfig packaging pytest_timeout.py hypothesis sortedcontainers typing_extensions.py \
    sympy mpmath networkx jinja2 filelock fsspec tqdm attr attrs pygments; do
  [ ! -e "$packages/$name" ] || ln -sfn "$packages/$name" "$root/pure/$name"
done

export PYTHONPATH=$root/path:$root/site:$root/pure:$PWD/tests:$PWD/tests/aarch64 OMP_NUM_THREADS=1
cp "$root"/kernels/_kernels*.so saccade/  # beside the modules, for this run
trap 'rm -f saccade/_kernels.cpython-311-aarch64-linux-gnu.so' EXIT
qemu=(qemu-aarch64-static -L "$system" "$system/usr/bin/python3.11")
"${qemu[@]}" tests/wheel_smoke.py kernels
"${qemu[@]}" -m pytest -q --noconftest -p emulated -p no:cacheprovider -o timeout=3000 "${@:-${tests[@]}}"
