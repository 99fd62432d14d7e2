"""Speed of ``lossless`` beside dense decode, and beside what its own step times and acceptance allow.

    python benchmarks/lossless.py [--model random|random-8b:LAYERS|reference] [--contexts 8192,32768] [--batch 1]
        [--tokens 64] [--warm 16] [--drafts "psa(epsilon=0.3);quest(dense_layers=0)"] [--lengths 0] [--replay 0.7,0.9]
        [--recorded 1,3,7,15] [--dense-tokens 64] [--before 0] [--threads N]

``random`` is a 125M Llama and ``random-8b:LAYERS`` one of 8B shape, both with random weights and made-up keys;
``reference`` answers the suite's tasks. The first ``--warm`` tokens are not counted, their time is printed apart;
with ``--warm 1`` what it costs to find out what drafts are worth is counted. ``--before``: tokens that the engine has
made before; one that has made none decodes until its tokens can bear what a first round may lose. ``--lengths``: tokens
drafted a round, 0 for as many as pay. With ``--replay`` the draft's steps run as they are, and each token that they
give is replaced by dense decode's or by another one, so that of every 50 tokens put to the test exactly that share
stays, in an order drawn for each request: what speed such an acceptance would have. ``ideal`` is the tokens over the
draft steps and verifications alone, each at the median of its time in the run; ``of ideal`` is what was achieved of it,
everything counted. ``best`` is what rounds of the best fixed length would give at these times and the asked acceptance.
Before any measurement on a GPU dense decode and rounds of ``--recorded`` drafts run for a while, so that all kernels
are compiled and recorded. Dense decode is measured before and after the others. A step that fails, or in which a
request of the batch has no row, ends the benchmark.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from lossless_passes import Passes, Replaying, best_of, passes_of, steps_that_fail

from saccade import LLM, SamplingParams
from saccade.bench.cli import model_folder
from saccade.bench.generate_kv import TAIL, synthesize
from saccade.bench.ttft import prompt
from saccade.engine.request import Request
from saccade.methods.policy import Policy
from saccade.methods.verified import MOST

TASKS = ("span_copy", "vt", "single", "table_copy")  # of the suite


Fill = Callable[[Request], None] | None


def measure(
    llm: LLM,
    prompts: Sequence[list[int]],
    fills: Sequence[Fill],
    policy: str,
    tokens: int,
    known: dict[int, list[int]] | None = None,
    chance: float | None = None,
    warm: int = 16,
    now: Callable[[], float] = time.perf_counter,
) -> tuple[float, int, list[Request], Passes]:
    """Seconds and tokens after the warm-up, the requests, and the worker's passes, with what was ``replayed``."""
    engine = llm.engine
    params = SamplingParams(temperature=0, max_tokens=tokens + warm, ignore_eos=True)
    requests = []
    for ids, fill in zip(prompts, fills):
        request = engine.add(ids, params, Policy.parse(policy))
        if fill is not None:
            fill(request)
        requests.append(request)
    numbers = {request.id: number for number, request in enumerate(requests)}
    replay = Replaying(known, numbers, chance) if known and chance is not None else None
    with passes_of(llm, replay, len(requests)) as made, steps_that_fail() as failed:
        began = time.perf_counter()
        while any(len(request.sequence.tokens) - request.output_start < warm for request in requests):
            engine.step()
        made.first = time.perf_counter() - began
        gc.collect()
        gc.freeze()  # as the server does once: a collection walks over all prompts, for as long as a round takes
        before = sum(len(request.sequence.tokens) - request.output_start for request in requests)
        made.counted = True
        began = now()
        while not any(request.finished for request in requests):  # fewer requests would be another batch
            engine.step()
        seconds = now() - began
        made.counted = False
        done = sum(len(request.sequence.tokens) - request.output_start for request in requests)
        for request in requests:
            engine.cancel(request)
    for request in requests:
        if request.error is not None:
            raise SystemExit(f"{policy}: {request.error}")
    if failed:
        raise SystemExit(f"{policy}: {failed[0]}")
    made.replayed = replay
    return seconds, done - before, requests, made


def filling(llm: LLM, ids: list[int], model: str) -> Fill:
    """Keys and values for all but the last tokens of a prompt of a random model."""
    if model == "random" and llm.model.runner.device.type != "cuda":
        made = synthesize(llm, ids)
        return lambda request: made.fill(request.sequence)
    spec, past = llm.model.spec, len(ids) - TAIL
    k, v = (
        torch.randn(spec.kv_heads, past, spec.head_dim, device=llm.model.runner.device).to(spec.dtype) for _ in range(2)
    )

    def fill(request: Request) -> None:
        kv = request.sequence.kv
        kv.reserve(len(ids))
        for layer in range(spec.layers):
            kv.append(layer, k, v)
        request.sequence.filled(past)

    return fill


def suite_prompts(llm: LLM, length: int, batch: int) -> list[list[int]]:
    from saccade.eval.render import render
    from saccade.eval.suite.tasks import make

    samples = [make(TASKS[number % len(TASKS)], length, number) for number in range(batch)]
    return [render(llm.tokenizer, [], sample.turns[0]).ids for sample in samples]


def bench(llm: LLM, chosen: argparse.Namespace, context: int) -> None:
    vocab = llm.model.spec.vocab_size
    if chosen.model == "reference":
        prompts = suite_prompts(llm, context - chosen.tokens - 16, chosen.batch)
        fills: list[Fill] = [None] * chosen.batch
    else:
        prompts = [prompt(context, vocab, seed) for seed in range(chosen.batch)]
        fills = [filling(llm, prompts[0], chosen.model)] * chosen.batch
    on_gpu = llm.model.runner.device.type == "cuda"
    seconds, made, answered, passes = measure(llm, prompts, fills, "dense", chosen.dense_tokens, warm=chosen.warm)
    if on_gpu:  # its first steps have compiled and recorded
        seconds, made, answered, passes = measure(llm, prompts, fills, "dense", chosen.dense_tokens, warm=chosen.warm)
    dense = made / seconds
    beyond = [0] * (2 * MOST + max(0, chosen.tokens - chosen.dense_tokens))
    known = {number: [*prompts[number], *one.final_ids, *beyond] for number, one in enumerate(answered)}
    recorded: dict[str, dict[int, float]] = {}  # seconds of verifications, by draft and its length
    if chosen.replay is not None and on_gpu:
        for draft in chosen.drafts.split(";"):
            for length in map(int, chosen.recorded.split(",")):
                policy = f"lossless(draft={draft}, tokens={length}, lookup=0)"
                passes = measure(llm, prompts, fills, policy, 3 * (length + 1), known, 1.0, 2 * (length + 1))[3]
                recorded.setdefault(draft, {})[length] = statistics.median(passes.verified[length])
    print(
        f"{context} x {chosen.batch}: dense {1000 * chosen.batch / dense:.2f} ms/step, {dense:.1f} tokens/s, "
        f"the first {chosen.warm} in {passes.first:.2f} s, {passes.fresh} passes recorded meanwhile",
        flush=True,
    )
    for draft in chosen.drafts.split(";"):
        for length in chosen.lengths.split(","):
            for chance in [None] if chosen.replay is None else [float(one) for one in chosen.replay.split(",")]:
                policy = f"lossless(draft={draft}, tokens={length}{'' if chance is None else ', lookup=0'})"
                pacing = llm.engine.sparse_drafts.pacing
                pacing.forget()
                pacing.ledger(Policy.parse(draft).decode.text).worth = chosen.before
                seconds, made, requests, passes = measure(
                    llm, prompts, fills, policy, chosen.tokens, known, chance, chosen.warm
                )
                said = [request.report.as_dict()["speculation"] for request in requests]
                drafted, found = (sum(one[name] for one in said) for name in ("drafted", "accepted_looked_up"))
                rounds = sum(one["verifications"] for one in said)
                density = statistics.fmean([one["draft"]["density"] or 0.0 for one in said])
                same = sum(one.final_ids == two.final_ids[: len(one.final_ids)] for one, two in zip(requests, answered))
                speed, ideal = made / seconds, made / passes.ideal()
                stays = sum(one["acceptance"] or 0.0 for one in said) / len(said)
                if chance is not None:
                    stays = passes.replayed.stayed / max(1, passes.replayed.tests)
                times = {**recorded.get(draft, {}), **{k: statistics.median(v) for k, v in passes.verified.items()}}
                rest = seconds - sum(map(sum, passes.seconds.values()))
                verifies = len(passes.seconds["verify"])
                parts = (
                    f"  {policy}" + ("" if chance is None else f" replayed at {chance}"),
                    f"draft {1000 * passes.median('draft'):.2f} ms/step at density {density:.3f}",
                    f"verify {1000 * passes.median('verify'):.2f} ms, {drafted / max(1, rounds):.1f} drafts a round",
                    f"acceptance {stays:.3f}, found {found}",
                    f"{speed:.1f} tokens/s = {speed / dense:.2f} x dense",
                    f"ideal {ideal:.1f}, of ideal {speed / ideal:.3f}",
                    best_of(stays if chance is None else chance, passes.median("draft"), times, chosen.batch / dense),
                    f"answers equal {same}/{len(requests)}",
                    f"{verifies} verifications and {len(passes.seconds['plain'])} plain steps",
                    f"between passes {1000 * rest / max(1, verifies + len(passes.seconds['plain'])):.2f} ms a step",
                    f"the first {chosen.warm} tokens in {passes.first:.2f} s, {passes.fresh} passes recorded later",
                    f"off: {said[0]['off']}",
                )
                print("; ".join(parts), flush=True)
    seconds, made, _, passes = measure(llm, prompts, fills, "dense", chosen.dense_tokens, warm=chosen.warm)
    again = made / seconds
    print(f"  dense again: {1000 * chosen.batch / again:.2f} ms/step, {again / dense:.3f} of the first", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="random")
    parser.add_argument("--contexts", default="8192,32768")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--dense-tokens", type=int, help="of the measurements of dense decode; as --tokens by default")
    parser.add_argument("--before", type=float, default=0.0)
    parser.add_argument("--warm", type=int, default=16)
    parser.add_argument("--drafts", default="psa(epsilon=0.3);quest(dense_layers=0)")
    parser.add_argument("--lengths", default="0")
    parser.add_argument("--replay", default=None)
    parser.add_argument("--recorded", default="1,3,7,15")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    chosen = parser.parse_args()
    chosen.dense_tokens = chosen.tokens if chosen.dense_tokens is None else chosen.dense_tokens
    if chosen.dense_tokens < chosen.tokens and chosen.replay is None:
        parser.error("answers are compared with dense decode's: --dense-tokens less than --tokens goes with --replay")
    torch.set_num_threads(chosen.threads)
    contexts = [int(one) for one in chosen.contexts.split(",")]
    longest = max(contexts) + chosen.tokens + 1024
    with tempfile.TemporaryDirectory() as folder:
        dtype = torch.bfloat16 if chosen.dtype == "bfloat16" else torch.float32
        path = model_folder(chosen.model, Path(folder), dtype, positions=longest)
        options: dict[str, Any] = {"device": chosen.device} if chosen.device != "auto" else {}
        llm = LLM(
            path,
            dtype=chosen.dtype,
            max_model_len=longest,
            max_requests=chosen.batch,
            threads=chosen.threads,
            exact=False,
            **options,
            enable_prefix_caching=False,
        )
        gc.collect()
        gc.freeze()  # as a server does: else a walk over all that torch imported falls into one measurement or another
        with llm:
            for context in contexts:
                bench(llm, chosen, context)


if __name__ == "__main__":
    main()
