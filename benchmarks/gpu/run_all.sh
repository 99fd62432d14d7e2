#!/usr/bin/env bash
# Tests and measures the GPU backend in one call, in under ten minutes and without a network. Results go to $OUT
# (default: benchmarks/gpu/results): one json a part as it runs, and report.md at the end. A part that fails or takes too
# long does not stop the next.
set -u
here="$(cd "$(dirname "$0")" && pwd)"
root="$(cd "$here/../.." && pwd)"
export OUT="${OUT:-$here/results}" PYTHONUNBUFFERED=1 PYTHONPATH="$root:$here${PYTHONPATH:+:$PYTHONPATH}"
export TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
python="${PYTHON:-python3}"
mkdir -p "$OUT"
cd "$root" || exit 1

part() { # name, seconds, command...
    local name="$1" seconds="$2"
    shift 2
    echo "=== $name (at most $seconds s, $(date +%T))"
    timeout --kill-after=10 "$seconds" "$@" 2>&1 | tee "$OUT/$name.log.part" | tail -n "${LINES_SHOWN:-60}"
    echo "=== $name ended with ${PIPESTATUS[0]}"
    { echo "##### $name"; cat "$OUT/$name.log.part"; } >>"$OUT/log.txt"
    rm -f "$OUT/$name.log.part"
}

: >"$OUT/log.txt"
wanted="${*:-limits tests prefill decode endtoend reference}"
for name in $wanted; do
    case "$name" in
        limits) part limits 15 "$python" "$here/limits.py" ;;
        tests) part tests 100 bash "$here/run_tests.sh" ;;
        prefill) part prefill 175 "$python" "$here/prefill.py" ;;
        decode) part decode 60 "$python" "$here/decode.py" ;;
        gather) part gather 60 "$python" "$here/gather.py" ;;
        tiers) part tiers 150 "$python" "$here/tiers.py" long ;;
        reference) part reference 60 "$python" "$here/reference.py" ;;
        endtoend) part endtoend 150 "$python" "$here/endtoend.py" ;;
        *) echo "unknown part $name" ;;
    esac
done
"$python" "$here/report.py"
"$python" "$here/doc_tables.py" | tee -a "$OUT/report.md"
