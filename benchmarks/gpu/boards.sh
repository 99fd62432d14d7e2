#!/usr/bin/env bash
# The boards of pretrained models on one GPU or several. S, Q and G: SmolLM2's, Qwen2.5-Coder's and Gemma-3-270M's folder
# or GGUF file.
#
#     S=... Q=... G=... bash benchmarks/gpu/boards.sh SECONDS [GPU:]NAME...
#
# Boards run side by side, each a process of its own. A GPU runs one process at a time, so more of them on one make each
# slower: with eleven on an H200 a dense step of 48 rows took 32 ms. Name two a GPU, which wait for the host in turns.
# Before they start, rooms.py counts their keys and values and makes them smaller if the GPUs have less free.
#
# A board begins nothing more after SECONDS and is ended 40 seconds later; what is finished lies in BOARDS (default:
# build/boards), where the same call goes on, and is packed into $OUT whenever a setting is finished, an archive a board
# of less than 16 MiB (without samples and long predictions), so that a call that is cut short loses only what runs.
# Names: see `of` below. On two GPUs for 20 to 30 minutes, ten minutes a call, what matters most first:
#
#     boards.sh 520 0:qlong 0:q16k 1:s8k 1:qwide     # and the same call again; then
#     boards.sh 520 0:q32k 0:qprefill 1:g16k 1:gwide
#
# MOST_SECONDS (default: 240) is what a setting may take: then it is ended, keeps what it has answered, gets no rank, and
# the next call goes on with it. The slowest whose steps are recorded, snapkv at 32K, took 200 beside three boards.
#
# KEYS (default: "256 512 128"): budgets of boards whose budgets are keys; the middle one runs first. MORE: options for all
# of them. FREE: "0=139 1=139", GiB of each GPU, where nvidia-smi does not say.
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
first="psa lfps locks quest arkvale cis snapkv" # in the order in which they run; the oracle sorts all keys: slow, late
# Steps of these are recorded on a GPU; methods whose steps run row by row, like qrest's, a board takes last.
decode="$(named $first streaming topk adakv loopserve rocketkv)$lesser"
prefill="$(named sampled_rows flexprefill minference xattention flashprefill infllm)"
at="--protocol B $(printf -- '--keys %s ' ${KEYS:-256 512 128})--recall 0"
asked="--each 24 --limit 8 --limit 24 $tasks"
# 15 of G's 18 layers read a window of 512 at every setting: at 16K dense attention reads 19.5 % of the keys, and nothing
# less than 2.7 %, which is more than 256 keys. Its budgets are shares that lie between.
shares() { echo "--protocol B --budget $2 --budget $3 --budget $1 --recall 0"; }

of() { # the options of a board
    case "$1" in
        s4k) echo "-m $S --length 4096 $at $asked $decode --drift 64 --together 48 --kv-memory 8GiB" ;;
        s8k) echo "-m $S --length 8000 $at $asked $decode --drift 64 --together 48 --kv-memory 12GiB" ;;
        q16k) echo "-m $Q --length 16384 $at $asked $decode --drift 64 --together 48 --kv-memory 12GiB" ;;
        q32k) echo "-m $Q --length 32000 $at --each 16 --limit 4 --limit 16 $tasks $decode --drift 64 --together 32 --kv-memory 14GiB" ;;
        g16k) echo "-m $G --length 16384 $(shares 0.035 0.05 0.1) $asked $decode --drift 64 --together 48 --kv-memory 16GiB" ;;
        g4k) echo "-m $G --length 4096 $(shares 0.12 0.15 0.2) --no-answers $decode --drift 64 --kv-memory 2GiB" ;;
        g32k) echo "-m $G --length 32000 $(shares 0.025 0.05 0.1) --no-answers $decode --drift 64 --kv-memory 4GiB" ;;
        qlong) echo "-m $Q --length 4096 $at --each 48 -t long:all $(named $first streaming topk rocketkv)$lesser --drift 64 --together 48 --kv-memory 5GiB" ;;
        qrest) echo "-m $Q --length 16384 $at --each 24 --limit 2 $tasks $(named twilight topp) --drift 64 --together 16 --kv-memory 4GiB" ;;
        [sqg]prefill)
            model="${S:-}" length=8000
            budgets="--budget 0.1 --budget 0.25 --budget 0.5"
            [ "$1" = qprefill ] && model="$Q" length=16384
            [ "$1" = gprefill ] && model="$G" length=16384 budgets="--budget 0.05 --budget 0.08 --budget 0.12"
            echo "-m $model --length $length --protocol D $budgets --recall 0 --each 24" \
                "--limit 4 --limit 8 $tasks $prefill --drift 64 --together 16 --kv-memory 6GiB" ;;
        [sqg]wide) # what keeps KL at 0.02 nats or less reads more than 512 keys on some models
            model="${S:-}" length=8000
            [ "$1" = qwide ] && model="$Q" length=16384
            budgets="--budget 0.25 --budget 0.5"
            [ "$1" = gwide ] && model="$G" length=16384 budgets="--budget 0.12 --budget 0.16"
            echo "-m $model --length $length --protocol B $budgets --recall 0 --each 24" \
                "--limit 4 --limit 8 $tasks $(named psa lfps cis locks)$lesser --drift 64 --together 32 --kv-memory 10GiB" ;;
        *) echo "unknown board $1" >&2; return 1 ;;
    esac
}

dry() { # the options of a small board
    sed -E "s/--length [0-9]+/--length $DRY/; s/--keys 256 --keys 512 --keys 128/--keys 256/; s/(--budget [0-9.]+ )(--budget [0-9.]+ ?)+/\1/
        s/--each [0-9]+/--each ${DRY_EACH:-5}/; s/(--limit [0-9]+ ?)+/--limit 1 --limit 2 /; s/--drift [0-9]+/--drift 8/
        s/--together [0-9]+/--together 2/; s/--kv-memory [0-9]+GiB/--kv-memory ${DRY_ROOM:-512MiB}/"
}

pack() { # what a board has finished; samples are made again, and long predictions are only read by people
    local name="$1" place="$out/boards-$1" left
    left="$(mktemp)"
    (cd "$boards" && find "$name" -name predictions.jsonl -size +"${MOST_KIB:-2048}"k) >"$left"
    (cd "$boards" && tar cz --exclude=data -X "$left" "$name" "$name.log") >"$place.part" 2>"$left.said"
    if [ "$(stat -c %s "$place.part")" -ge $((16 * 1024 * 1024)) ]; then
        (cd "$boards" && tar cz --exclude=data --exclude=predictions.jsonl "$name" "$name.log") >"$place.part" 2>"$left.said"
    fi
    mv "$place.part" "$place.tgz"
    rm -f "$left" "$left.said"
}

pack_new() { # every board that has finished more than it had when it was packed last
    for name in $names; do
        [ "$boards/$name/placed.json" -nt "$out/boards-$name.tgz" ] && pack "$name"
    done
}

seconds="$1"
shift
begun="$(date +%s)"
lines="" names=""
for given in "$@"; do
    name="${given#*:}"
    words="$(of "$name")" || continue
    [ -n "${DRY:-}" ] && words="$(echo "$words" | dry)"
    gpu="${given%%:*}"
    [ "$gpu" = "$given" ] && gpu=0
    lines="$lines$gpu"$'\t'"$name"$'\t'"$words"$'\n'
done
lines="$(printf '%s' "$lines" | "$python" benchmarks/gpu/rooms.py ${FREE:+$(printf -- '--free %s ' $FREE)})" || exit 1
while IFS=$'\t' read -r gpu name words; do
    echo "=== $name on GPU $gpu: saccade eval board $words"
    eval "set -- $words ${MORE:-}"
    CUDA_VISIBLE_DEVICES="$gpu" timeout -k 10 "$((seconds + 40))" "$python" -m saccade eval board --device "${DEVICE:-cuda}" \
        --threads 2 --mix --seconds "$seconds" --most-seconds "${MOST_SECONDS:-240}" --out "$boards/$name" "$@" >"$boards/$name.log" 2>&1 </dev/null &
    names="$names $name"
done <<<"$lines"
turns=0
while [ -n "$(jobs -rp)" ] && [ $(($(date +%s) - begun)) -lt $((seconds + 55)) ]; do
    sleep "${EVERY:-5}"
    pack_new
    turns=$((turns + 1))
    [ $((turns % 4)) -eq 0 ] || continue
    echo "--- $(($(date +%s) - begun)) s: $(for name in $names; do echo "$name $(grep -c ' settings$' "$boards/$name.log")"; done | xargs)"
    for name in $names; do grep -h -i -m 1 "error" "$boards/$name.log"; done | sort -u | cut -c1-200 | head -n 4
done
for name in $names; do pack "$name"; done # with logs, and the page of a board that ended
ls -l "$out"
for name in $names; do tail -n 3 "$boards/$name.log"; done | cut -c1-300
