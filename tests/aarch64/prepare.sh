# Sourced by run.sh and wheel.sh in the repository's root: an AArch64 Python with its headers, torch and what else the
# tests import, in build/aarch64. Sets root, system, python, qemu, and cross: the options that cross compile the extension.
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

cross=(
  "CMAKE_TOOLCHAIN_FILE=$PWD/tests/aarch64/toolchain.cmake"
  "NB_SUFFIX=.cpython-311-aarch64-linux-gnu.so"
  "nanobind_DIR=$root/build/nanobind/cmake"
  "Python_INCLUDE_DIR=$system/usr/include/python3.11"
  "CMAKE_CXX_FLAGS=-idirafter $system/usr/include"
)

# This environment's pure packages.
mkdir -p "$root/pure"
packages=$("$python" -c "import xxhash; print(xxhash.__path__[0] + '/..')")
for name in pytest _pytest py.py pluggy iniconfig packaging pytest_timeout.py hypothesis sortedcontainers typing_extensions.py \
    sympy mpmath networkx jinja2 filelock fsspec tqdm attr attrs pygments; do
  [ ! -e "$packages/$name" ] || ln -sfn "$packages/$name" "$root/pure/$name"
done
qemu=(qemu-aarch64-static -L "$system" "$system/usr/bin/python3.11")
export OMP_NUM_THREADS=1
