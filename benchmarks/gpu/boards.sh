#!/usr/bin/env bash
# The boards of pretrained models, side by side on one GPU or several: each is a process of its own, as decode steps of
# small models wait for the host. S, Q and G: SmolLM2's, Qwen2.5-Coder's and Gemma-3-270M's folder or GGUF file.
#
#     S=... Q=... G=... bash benchmarks/gpu/boards.sh SECONDS [GPU:]NAME...
#
# A board begins nothing more after SECONDS and is ended 40 seconds later; what is finished lies in BOARDS (default:
# build/boards), where the same call goes on, and is packed into $OUT, an archive a model. Names: see `of` below. MORE: options for all of them.
# DRY=1024 DEVICE=cpu: the same boards at that length, few keys, samples and forced tokens, to see that each of them runs.
set -u
root="$(cd "$(dirname "$0")/../.." && pwd)"
cd "$root" || exit 1
export PYTHONUNBUFFERED=1 PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
python="${PYTHON:-python3}"
out="${OUT:-build/boards-packed}"
boards="${BOARDS:-build/boards}"
mkdir -p "$out" "$boards"

tasks="-t natural:facts -t natural:turns_end"
for task in single_2_prose single_3_prose multikey_1_prose multivalue_prose multiquery_prose; do
    tasks="$tasks -t ruler:niah_$task"
done
named() { for name in "$@"; do printf -- '--method %s ' "$name"; done; }
lesser="--without 'psa, cuboids'"
first="topk psa lfps cis quest arkvale snapkv locks"         # in the order in which they run
decode="$(named $first streaming rocketkv adakv loopserve)$lesser" # steps of all these are recorded on a GPU
prefill="$(named sampled_rows flexprefill minference xattention flashprefill infllm)"
at="--protocol B --keys 256 --keys 512 --keys 128 --recall 0"
asked="--each 24 --limit 8 --limit 24 $tasks"

of() { # the options of a board
    case "$1" in
        s4k) echo "-m $S --length 4096 $at $asked $decode --drift 64 --together 48 --kv-memory 8GiB" ;;
        s8k) echo "-m $S --length 8000 $at $asked $decode --drift 64 --together 48 --kv-memory 12GiB" ;;
        q16k) echo "-m $Q --length 16384 $at $asked $decode --drift 64 --together 48 --kv-memory 12GiB" ;;
        q32k) echo "-m $Q --length 32000 $at --each 16 --limit 4 --limit 16 $tasks $decode --drift 64 --together 32 --kv-memory 14GiB" ;;
        g16k) echo "-m $G --length 16384 $at $asked $decode --drift 64 --together 48 --kv-memory 16GiB" ;;
        g4k) echo "-m $G --length 4096 $at --no-answers $decode --drift 64 --kv-memory 2GiB" ;;
        g32k) echo "-m $G --length 32000 $at --no-answers $decode --drift 64 --kv-memory 4GiB" ;;
        qlong) echo "-m $Q --length 4096 $at --each 48 -t long:all $(named psa lfps cis topk locks)$lesser --drift 64 --together 48 --kv-memory 5GiB" ;;
        qlong2) echo "-m $Q --length 4096 $at --each 48 -t long:all $(named quest arkvale snapkv rocketkv streaming) --drift 64 --together 48 --kv-memory 5GiB" ;;
        qrest) echo "-m $Q --length 16384 $at --each 24 --limit 2 $tasks $(named twilight topp) --drift 64 --together 16 --kv-memory 4GiB" ;;
        [sqg]prefill)
            model="${S:-}" length=8000
            [ "$1" = qprefill ] && model="$Q" length=16384
            [ "$1" = gprefill ] && model="$G" length=16384
            echo "-m $model --length $length --protocol D --budget 0.1 --budget 0.25 --budget 0.5 --recall 0 --each 24" \
                "--limit 4 --limit 8 $tasks $prefill --drift 64 --together 16 --kv-memory 6GiB" ;;
        [sqg]wide) # what keeps KL at 0.02 nats or less reads more than 512 keys on some models
            model="${S:-}" length=8000
            [ "$1" = qwide ] && model="$Q" length=16384
            [ "$1" = gwide ] && model="$G" length=16384
            echo "-m $model --length $length --protocol B --budget 0.25 --budget 0.5 --recall 0 --each 24" \
                "--limit 4 --limit 8 $tasks $(named psa lfps cis locks)$lesser --drift 64 --together 32 --kv-memory 10GiB" ;;
        *) echo "unknown board $1" >&2; return 1 ;;
    esac
}

dry() { # the options of a small board
    sed -E "s/--length [0-9]+/--length $DRY/; s/--keys 256 --keys 512 --keys 128/--keys 256/; s/--budget 0.1 --budget 0.25 /--budget 0.25 /
        s/--each [0-9]+/--each ${DRY_EACH:-5}/; s/(--limit [0-9]+ ?)+/--limit 1 --limit 2 /; s/--drift [0-9]+/--drift 8/
        s/--together [0-9]+/--together 2/; s/--kv-memory [0-9]+GiB/--kv-memory ${DRY_ROOM:-512MiB}/"
}

seconds="$1"
shift
wanted="$*"
begun="$(date +%s)"
for given in $wanted; do
    name="${given#*:}"
    words="$(of "$name")" || continue
    [ -n "${DRY:-}" ] && words="$(echo "$words" | dry)"
    gpu="${given%%:*}"
    [ "$gpu" = "$given" ] && gpu=0
    echo "=== $name on GPU $gpu: saccade eval board $words"
    eval "set -- $words ${MORE:-}"
    CUDA_VISIBLE_DEVICES="$gpu" timeout -k 10 "$((seconds + 40))" "$python" -m saccade eval board --device "${DEVICE:-cuda}" \
        --threads 2 --mix --seconds "$seconds" --out "$boards/$name" "$@" >"$boards/$name.log" 2>&1 &
done
while [ -n "$(jobs -rp)" ] && [ $(($(date +%s) - begun)) -lt $((seconds + 55)) ]; do
    sleep 20
    echo "--- $(($(date +%s) - begun)) s: $(cd "$boards" && for log in *.log; do echo "${log%.log} $(grep -c ': 1 of 1 settings' "$log")"; done | xargs)"
    grep -h -i -m 1 "error" "$boards"/*.log | sort -u | cut -c1-200 | head -n 4
done
for model in s q g; do
    logs="$(cd "$boards" && ls $model*.log 2>/dev/null)"
    [ -n "$logs" ] && (cd "$boards" && tar czf "$model.tgz" --exclude=data $logs $(for log in $logs; do [ -d "${log%.log}" ] && echo "${log%.log}"; done)) &&
        mv "$boards/$model.tgz" "$out/boards-$model.tgz"
done
ls -l "$out"
tail -n 3 "$boards"/*.log | cut -c1-300
