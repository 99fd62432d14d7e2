#!/usr/bin/env bash
# The GPU tests, one process a file side by side, since they spend their time compiling; each file's end is printed.
set -u
here="$(cd "$(dirname "$0")/../../tests/gpu" && pwd)"
logs="$(mktemp -d)"
for file in "$here"/test_gpu_*.py; do
    timeout 150 "${PYTHON:-python3}" -m pytest -p no:cacheprovider -q "$file" >"$logs/$(basename "$file").log" 2>&1 &
done
wait
for log in "$logs"/*.log; do
    echo "----- $(basename "$log" .log)"
    grep -E "^(E  |FAILED|ERROR)|passed|failed|error" "$log" | cut -c1-300 | tail -n 25
done
rm -rf "$logs"
