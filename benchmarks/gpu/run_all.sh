#!/usr/bin/env bash
# Tests and measures the GPU backend in one call, in under ten minutes and without a network. Results go to $OUT
# (default: benchmarks/gpu/results): one json a part as it runs, and report.md at the end. A part that fails or takes too
# long does not stop the next. Parts that run only when named: kernels (the C++ kernels, built in place; tiers, states
# saved and CPU peers need them), gather, tiers, ranks (two GPUs), codes (keys and values in 8 bits), answers (those
# formats on pretrained models: MODELS, folders; TEXT, a book), latents (their CPU kernels beside the limit).
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
    timeout --signal=INT --kill-after=20 "$seconds" "$@" 2>&1 | tee "$OUT/$name.log.part" | tail -n "${LINES_SHOWN:-60}"
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
        kernels) part kernels 200 bash -c "cmake -S . -B build/gpu -G Ninja -DCMAKE_BUILD_TYPE=Release \
            -DPython_EXECUTABLE=\$(command -v $python) -DSKBUILD_PROJECT_NAME=saccade -DSKBUILD_PROJECT_VERSION=0 \
            -Dnanobind_ROOT=\$($python -m nanobind --cmake_dir) && cmake --build build/gpu && cp build/gpu/*.so saccade/" ;;
        ranks)
            part ranks_tests 170 "$python" -m pytest -p no:cacheprovider -v -n 8 --tb=short -rf tests/gpu/test_gpu_ranks.py
            part ranks 360 "$python" benchmarks/tensor_parallel.py --kernels ;;
        codes)
            part codes_tests 150 "$python" -m pytest -p no:cacheprovider -n 10 -v --tb=short -rf tests/gpu/test_gpu_kv_codes.py
            part codes 150 "$python" "$here/kv_formats.py" ;;
        answers)
            for model in ${MODELS:?folders of pretrained models}; do
                part "answers-$(basename "$model")" 150 "$python" benchmarks/kv_tasks.py --model "$model" --device cuda \
                    --kv-memory 8GiB --together 16 --formats "${FORMATS:-auto,int8,fp8}" --length 4096 --samples 58 \
                    --task natural:questions --task natural:facts --task ruler:niah_single_1 \
                    --task ruler:niah_single_2_prose --task ruler:niah_single_3_prose --task ruler:niah_multikey_1_prose \
                    --task ruler:niah_multivalue_prose --task ruler:niah_multiquery_prose --task ruler:niah_multikey_2
                part "drift-$(basename "$model")" 60 "$python" benchmarks/kv_accuracy.py --model "$model" --device cuda \
                    --dtype bfloat16 --text "${TEXT:?a book}" --length 2048 --windows 10 --formats "auto;int8;fp8"
            done ;;
        latents) part latents 120 "$python" benchmarks/latents.py --threads "$(nproc)" --heads 128 64 32 16 ;;
        gather) part gather 60 "$python" "$here/gather.py" ;;
        tiers) part tiers 150 "$python" "$here/tiers.py" long ;;
        reference) part reference 60 "$python" "$here/reference.py" ;;
        endtoend) part endtoend 150 "$python" "$here/endtoend.py" ;;
        *) echo "unknown part $name" ;;
    esac
done
"$python" "$here/report.py"
"$python" "$here/doc_tables.py" | tee -a "$OUT/report.md"
