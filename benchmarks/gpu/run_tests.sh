#!/usr/bin/env bash
# The GPU tests, one process a file side by side, since they spend their time compiling; files take turns on the GPUs that
# there are, those of ranks see all. Each file's end is printed. SECONDS_EACH: the most that a file may take (150); TESTS: files
# in place of all. A file that takes longer is interrupted, so that it still says what failed.
set -u
here="$(cd "$(dirname "$0")/../../tests/gpu" && pwd)"
logs="$(mktemp -d)"
"${PYTHON:-python3}" -c 'import importlib.metadata as m, sys; sys.exit(not m.entry_points(group="saccade.methods"))' || {
    echo "methods of contrib are not installed (pip install ./contrib): many tests could not be collected"
    exit 1
}
gpus="$(nvidia-smi -L | wc -l)"
turn=0
for file in ${TESTS:-"$here"/test_gpu_*.py}; do
    seen=$((turn++ % gpus))
    case "$file" in *ranks*) seen="$(seq -s, 0 $((gpus - 1)))" ;; esac
    CUDA_VISIBLE_DEVICES="$seen" env --default-signal=INT timeout --signal=INT --kill-after=20 "${SECONDS_EACH:-150}" \
        "${PYTHON:-python3}" -m pytest -p no:cacheprovider -v --tb=short -rf --timeout 120 "$file" \
        >"$logs/$(basename "$file").log" 2>&1 &
done
wait
for log in "$logs"/*.log; do
    echo "----- $(basename "$log" .log)"
    grep -E "^(E  |FAILED|ERROR)|passed|failed|error|KeyboardInterrupt" "$log" | cut -c1-300 | tail -n 25
done
[ -z "${OUT:-}" ] || cat "$logs"/*.log >"$OUT/tests.txt"
rm -rf "$logs"
