"""Prefill operators: dense and block-sparse kernels and FlexPrefill with its selection, beside torch's dense kernels
and, where it is installed, FlashInfer's FlashAttention-3.

``python prefill.py [contexts...]``; times are whole calls over 32 query heads, 8 KV heads of 128 channels in bfloat16.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from harness import DTYPE, HEAD_DIM, HEADS, KV_HEADS, Results, measured_limits, random_blocks, time_ms
from torch.nn.attention import SDPBackend, sdpa_kernel

from saccade.bench.inputs import Problem, make
from saccade.kv.view import KVView
from saccade.methods import Chunk, parse_method
from saccade.ops import attend
from saccade.ops.triton.prefill import Config, attend_prefill
from saccade.selection import Dense

SCALE = HEAD_DIM**-0.5
TRIED = (
    Config(128, 64, 8, 3),
    Config(128, 128, 8, 2),
    Config(64, 64, 4, 3),
    Config(128, 64, 8, 3, copy=True),
    Config(128, 64, 8, 4, copy=True),
    Config(128, 128, 8, 2, copy=True),
    Config(128, 128, 8, 3, copy=True),
    Config(64, 128, 4, 2, copy=True),
)
METHODS = tuple(f"flexprefill({at}lines=block)" for at in ("", "gamma=0.9, ", "gamma=0.8, ", "gamma=0.6, "))
METHODS += ("flexprefill(lines=token)",)


def peers(problem: Problem) -> dict[str, Callable[[], Any]]:
    q, k, v = problem.q[None], problem.k[None], problem.v[None]

    def sdpa(backend: SDPBackend) -> Callable[[], Any]:
        def call() -> Any:
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

        return call

    calls = {"sdpa flash": sdpa(SDPBackend.FLASH_ATTENTION), "sdpa cudnn": sdpa(SDPBackend.CUDNN_ATTENTION)}
    if importlib.util.find_spec("flashinfer") is not None:
        calls["flashinfer fa3"] = flashinfer_peer(problem)
    return calls


def flashinfer_peer(problem: Problem) -> Callable[[], Any]:
    from flashinfer import single_prefill_with_kv_cache

    q, k, v = (part.transpose(0, 1).contiguous() for part in (problem.q, problem.k, problem.v))  # rows first
    return lambda: single_prefill_with_kv_cache(q, k, v, causal=True, sm_scale=SCALE, backend="fa3")


def flex_attention_peer(problem: Problem) -> Callable[[], Any]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    n = problem.shape.k_len
    compiled = torch.compile(flex_attention)
    mask = create_block_mask(lambda b, h, row, key: row >= key, None, None, n, n, device="cuda", _compile=True)
    q, k, v = problem.q[None], problem.k[None], problem.v[None]
    return lambda: compiled(q, k, v, block_mask=mask, enable_gqa=True)


def flops(pairs: float) -> float:
    """Of all heads, from pairs per head."""
    return 4.0 * HEAD_DIM * HEADS * pairs


class Part:
    def __init__(self) -> None:
        self.results = Results("prefill")
        self.limits = measured_limits()
        self.results.facts = {"heads": HEADS, "kv_heads": KV_HEADS, "head_dim": HEAD_DIM, "limits": self.limits}

    def row(self, context: int, name: str, ms: float, pairs: float, best: float | None, **more: Any) -> None:
        floor = flops(pairs) / self.limits["matmul_tflops"] / 1e9
        causal = context * (context + 1) / 2
        self.results.add(
            context=context,
            what=name,
            ms=ms,
            density=pairs / causal,
            tflops=flops(pairs) / ms / 1e9,
            percent_of_floor=100 * floor / ms,
            speedup=None if best is None else best / ms,
            over_density=None if best is None else ms / (pairs / causal * best),
            **more,
        )

    def tune(self, problem: Problem) -> None:
        """What tiles cost for dense and for block lists of a quarter of the keys; some need more shared memory than
        there is."""
        view = problem.views[0]
        lists = random_blocks(problem.shape, 128, 0.25)
        pairs = float(lists.unit_pairs().double().mean())
        for config in TRIED:
            for name, selection, count in (
                ("tile dense", Dense(problem.shape), problem.shape.causal_pairs),
                ("tile blocks 0.25", lists, pairs),
            ):
                ms = self.results.attempt(
                    f"{name} {config}",
                    lambda s=selection, c=config: time_ms(
                        lambda: attend_prefill(problem.q, view, s, scale=SCALE, config=c)
                    ),
                )
                if ms is not None:
                    self.row(problem.shape.k_len, name, ms, count, None, config=str(config))

    def context(self, context: int, with_flex: bool) -> None:
        problem = make(HEADS, KV_HEADS, HEAD_DIM, context, context, DTYPE, device="cuda")
        if context == 32768:
            self.tune(problem)
        self.measure(problem, with_flex)
        del problem
        torch.cuda.empty_cache()

    def measure(self, problem: Problem, with_flex: bool) -> None:
        view, shape, context = problem.views[0], problem.shape, problem.shape.k_len
        best: float | None = None
        calls = peers(problem)
        if with_flex:
            made = self.results.attempt("flex_attention", lambda: flex_attention_peer(problem))
            calls |= {"flex_attention": made} if made else {}
        for name, call in calls.items():
            ms = self.results.attempt(name, lambda call=call: time_ms(call))
            if ms is not None:
                best = ms if best is None else min(best, ms)
                self.row(context, name, ms, shape.causal_pairs, None)
        ms = self.results.attempt(
            "dense",
            lambda: time_ms(lambda: attend_prefill(problem.q, view, Dense(shape), scale=SCALE)),
        )
        if ms is not None:
            self.row(context, "saccade dense", ms, shape.causal_pairs, best)
        for density in (0.5, 0.25, 0.15, 0.05):
            lists = random_blocks(shape, 128, density)
            pairs = float(lists.unit_pairs().double().mean())
            ms = self.results.attempt(
                f"blocks {density}",
                lambda s=lists: time_ms(lambda: attend_prefill(problem.q, view, s, scale=SCALE)),
            )
            if ms is not None:
                self.row(context, f"blocks 128 ({density:g})", ms, pairs, best)
        for text in METHODS:
            self.results.attempt(text, lambda text=text: self.method(problem, text, best))

    def method(self, problem: Problem, text: str, best: float | None) -> None:
        method, shape, stored = parse_method(text), problem.shape, problem.views[0]
        view = KVView(stored.paged())  # no block summary is kept between calls
        chosen = method.select_prefill(Chunk.of(problem.q, view))
        deciding = time_ms(lambda: method.select_prefill(Chunk.of(problem.q, view)), 150)

        def whole() -> Any:
            selection = method.select_prefill(Chunk.of(problem.q, view))
            return attend(problem.q, view, selection, scale=SCALE)

        ms = time_ms(whole)
        pairs = float(chosen.unit_pairs().double().mean())
        percent = None if best is None else 100 * deciding / best
        self.row(shape.k_len, text, ms, pairs, best, selection_ms=deciding, selection_percent_of_best=percent)


def main() -> None:
    torch.manual_seed(0)
    part = Part()
    contexts = [int(text) for text in sys.argv[1:]] or [131072, 32768, 8192, 65536, 16384]
    with torch.inference_mode():
        for context in contexts:
            part.results.attempt(f"context {context}", lambda c=context: part.context(c, with_flex=c == 32768))


main()
