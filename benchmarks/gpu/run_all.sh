#!/usr/bin/env bash
# Tests and measures the GPU backend in one call, in under ten minutes and without a network. Results go to $OUT
# (default: benchmarks/gpu/results): one json a part as it runs, and report.md at the end. A part that fails or takes too
# long does not stop the next. Parts that run only when named: kernels (the C++ kernels, built in place; tiers, states
# saved and CPU peers need them), gather, tiers, ranks (two GPUs), codes (keys and values in 8 bits), answers (those
# formats on pretrained MODELS), hybrid (one trained here, and its answers), needle (128K tokens), latents (their CPU
# kernels beside the limit). Variables:
#   LIMIT      seconds of all parts together         LINES_SHOWN  lines of a part that are shown at its end (60)
#   PYTHON     the interpreter (python3)             RUNS         where samples and answers go on from (runs)
# and of answers, hybrid and needle:
#   MODELS     folders or .gguf files, with blanks between; they run beside each other, dealt out to the GPUs
#   GPUS       those that MODELS are dealt out to (all)
#   TEXT       a book; without, no perplexity        N            samples of each kind of task (400)
#   FORMATS    kv_dtypes (auto,int8,fp8)             KV_MEMORY    of each engine (what TOGETHER samples of 5,120 tokens
#   TOGETHER   samples in a step (32)                             of SmolLM2 take, the most of S, Q and G: 4GiB)
#   TRAIN      seconds that the hybrid trains (120)  DEVICE       cuda, or cpu to try a run
#   KEEP       1: the hybrid's checkpoint goes to $OUT/hybrid, which may be too large to come back
# Answers go on from RUNS; what is finished of them is packed into $OUT/answers.tgz after every part, without samples.
# Models that share a GPU are counted by rooms.py before they start, and made smaller where it has less free.
set -u
LIMIT="${LIMIT:-100000}"
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
    [ "$seconds" -le $((LIMIT - SECONDS)) ] || seconds=$((LIMIT - SECONDS))
    [ "$seconds" -gt 5 ] || { echo "=== $name: no time left"; return; }
    echo "=== $name (at most $seconds s, $(date +%T))"
    timeout --signal=INT --kill-after=20 "$seconds" "$@" 2>&1 | tee "$OUT/$name.log.part" | tail -n "${LINES_SHOWN:-60}"
    echo "=== $name ended with ${PIPESTATUS[0]}"
    { echo "##### $name"; cat "$OUT/$name.log.part"; } >>"$OUT/log.txt"
    rm -f "$OUT/$name.log.part"
}

read -ra gpus <<<"${GPUS:-$("$python" -c 'import torch; print(*range(max(1, torch.cuda.device_count())))' 2>/dev/null || echo 0)}"
N="${N:-400}" runs="${RUNS:-runs}"
TOGETHER="${TOGETHER:-32}"
KV_MEMORY="${KV_MEMORY:-$((TOGETHER * 5120 * 23040 / 1024 ** 3 + 1))GiB}" # SmolLM2: 23,040 bytes a token in 16 bits
sized() { # --together and --kv-memory of all that follow
    shared=(--device "${DEVICE:-cuda}" "$@" --formats "${FORMATS:-auto,int8,fp8}")
    tasks=("$python" benchmarks/kv_tasks.py "${shared[@]}" --out "$runs/kv")
}
sized --together "$TOGETHER" --kv-memory "$KV_MEMORY"

pack_answers() { # what is finished; predictions as far as there is room for them in an archive of 16 MiB
    local place="$OUT/answers.tgz" made more
    made="$place.$BASHPID.part"
    [ -d "$runs/kv" ] || return
    for more in none predictions.jsonl; do
        tar cz -C "$runs" --exclude="$more" --no-wildcards-match-slash --exclude='kv/*.jsonl' kv >"$made" 2>/dev/null
        [ "$(stat -c %s "$made")" -lt $((16 * 1024 * 1024)) ] && break
    done
    mv "$made" "$place"
}

answers() { # model, name: N samples of each group of tasks, what matters most first
    part "long-$2" 240 "${tasks[@]}" --model "$1" --length 2048 --samples $(((N + 3) / 4)) \
        --task long:copying --task long:sorting --task long:arithmetic --task long:tracing
    pack_answers
    part "calls-$2" 120 "$python" benchmarks/kv_calls.py "${shared[@]}" --model "$1" --count "$N" --length 512
    part "ruler-$2" 200 "${tasks[@]}" --model "$1" --length 4096 --samples $(((N + 6) / 7)) --task ruler:niah_single_1 \
        --task ruler:niah_single_2_prose --task ruler:niah_single_3_prose --task ruler:niah_multikey_1_prose \
        --task ruler:niah_multivalue_prose --task ruler:niah_multiquery_prose --task ruler:niah_multikey_2
    pack_answers
    part "facts-$2" 150 "${tasks[@]}" --model "$1" --length 2048 --samples "$N" --task natural:facts
    part "questions-$2" 100 "${tasks[@]}" --model "$1" --length 2048 --samples $(((N + 7) / 8)) --task natural:questions
    pack_answers
    [ -z "${TEXT:-}" ] || part "drift-$2" 100 "$python" benchmarks/kv_accuracy.py --model "$1" --dtype bfloat16 \
        --device "${DEVICE:-cuda}" --text "$TEXT" --length 2048 --windows 10 --formats "auto;int8;fp8"
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
            : "${MODELS:?folders of pretrained models}"
            at=0
            lines="$(for model in $MODELS; do # beside each other, dealt out to the GPUs there are
                printf '%s\t%s\t%s\n' "${gpus[at++ % ${#gpus[@]}]}" "$model" "--together $TOGETHER --kv-memory $KV_MEMORY"
            done | "$python" "$here/rooms.py" ${FREE:+$(printf -- '--free %s ' $FREE)})" || continue
            while IFS=$'\t' read -r gpu model words; do
                # shellcheck disable=SC2086
                (sized $words && CUDA_VISIBLE_DEVICES="$gpu" answers "$model" "$(basename "$model")") </dev/null &
            done <<<"$lines"
            wait ;;
        hybrid) # trained here for TRAIN seconds
            part train $((${TRAIN:-120} + 150)) "$python" -m train.reference --hybrid --size H --out "$runs/h" \
                --batch 65536 --paced --minutes "$(awk "BEGIN { print ${TRAIN:-120} / 60 }")" --longest 4096 \
                --device "${DEVICE:-cuda}"
            [ -z "${KEEP:-}" ] || cp -r "$runs/h/checkpoint" "$OUT/hybrid"
            part tasks-hybrid 200 "${tasks[@]}" --model "$runs/h/checkpoint" --length 2048 --samples "$((N / 5))" \
                --task single --task multikey --task table_copy --task span_copy --task vt
            pack_answers ;;
        needle) # 128K tokens, four facts a text
            part needle 150 "${tasks[@]}" --model retriever --length 131072 --samples 10 --together 2 \
                --task facts:shared ;;
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
