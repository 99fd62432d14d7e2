"""Layers that keep a state, on a CPU: the C++ kernels beside transformers' torch functions, by turns.

    python benchmarks/keeping.py [--tokens 1 1024] [--threads 1 2] [--rounds 15] [--only delta conv mamba] [--no-torch]

A layer's rule, convolution or scan alone, bfloat16 rows, at Qwen3.5-4B's shape (16 key and 32 value heads of 128, 8,192
channels) and Granite 4.0's (Mamba-2: 48 heads of 64, states of 128). Calls go through the states of 24 layers one after
another, as a step does. A line each: milliseconds (median of ``--rounds``) of the kernel and of torch; beside one token
what copying the states takes.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor
from transformers.models.granitemoehybrid import modeling_granitemoehybrid as granite
from transformers.models.qwen3_next import modeling_qwen3_next as qwen

from saccade.ops import cpu, cpu_keeping
from saccade.ops.slots import NewRows, Slots

LAYERS = 24
Call = Callable[[int], object]


def delta(tokens: int) -> tuple[Call, Call, Tensor]:
    key_heads, heads, width = 16, 32, 128
    mixed = torch.randn(1, tokens, (2 * key_heads + heads) * width, dtype=torch.bfloat16)
    q, k, v = mixed.split([key_heads * width, key_heads * width, heads * width], -1)
    q, k, v = (one.view(1, tokens, -1, width) for one in (q, k, v))
    g, beta = -torch.rand(1, tokens, heads), torch.rand(1, tokens, heads, dtype=torch.bfloat16)
    pool, where = torch.zeros(LAYERS, 1, heads, width, width), torch.zeros(1, dtype=torch.int64)
    rule = qwen.torch_recurrent_gated_delta_rule if tokens == 1 else qwen.torch_chunk_gated_delta_rule
    named = {"g": g, "beta": beta, "output_final_state": True, "use_qk_l2norm_in_kernel": True}
    every_q, every_k = (one.repeat_interleave(heads // key_heads, 2) for one in (q, k))  # as older versions ask for
    return (
        lambda at: cpu_keeping.delta_rule(q, k, v, g, beta, Slots(pool[at], where, where), True),
        lambda at: rule(every_q, every_k, v, initial_state=pool[at], **named),
        pool,
    )


def conv(tokens: int) -> tuple[Call, Call, Tensor]:
    channels, taps = 8192, 4
    rows = torch.randn(1, tokens, channels, dtype=torch.bfloat16).transpose(1, 2)
    weight = torch.randn(channels, taps, dtype=torch.bfloat16)
    pool, where = torch.zeros(LAYERS, 1, channels, taps, dtype=torch.bfloat16), torch.zeros(1, dtype=torch.int64)

    def theirs(at: int) -> Tensor:
        if tokens == 1:
            return qwen.causal_conv1d_update(rows, pool[at], weight, None, "silu")
        whole = torch.cat([pool[at], rows], -1)
        pool[at].copy_(whole[..., -taps:])
        return qwen.causal_conv1d_fn(whole, weight, None, "silu")[..., -tokens:]

    return (
        lambda at: cpu_keeping.convolve(NewRows(rows, Slots(pool[at], where, where)), weight, None, True),
        theirs,
        pool,
    )


def mamba(tokens: int) -> tuple[Call, Call, Tensor]:
    heads, width, size = 48, 64, 128
    mixed = torch.randn(1, tokens, heads * width + 2 * size, dtype=torch.bfloat16)
    x, b, c = mixed.split([heads * width, size, size], -1)
    x, b, c = x.view(1, tokens, heads, width), b.view(1, tokens, 1, size), c.view(1, tokens, 1, size)
    dt = torch.randn(1, tokens, heads, dtype=torch.bfloat16)
    a, d, bias = -torch.rand(heads), torch.rand(heads), torch.rand(heads)
    pool, where = torch.zeros(LAYERS, 1, heads, width, size), torch.zeros(1, dtype=torch.int64)
    limits = (0.0, float("inf"))

    def theirs(at: int) -> object:
        if tokens == 1:
            whole = a[:, None, None].expand(-1, width, size)
            return granite.mamba2_selective_state_update(
                pool[at], x[:, 0], dt[:, 0, :, None].expand(-1, -1, width), whole, b[:, 0], c[:, 0],
                d[:, None].expand(-1, width), dt_bias=bias[:, None].expand(-1, width), dt_softplus=True,
            )  # fmt: skip
        return granite.mamba2_chunk_scan(
            x, dt, a, b, c, 256, D=d, dt_bias=bias, initial_states=pool[at], dt_softplus=True, dt_limit=limits,
            return_final_states=True,
        )  # fmt: skip

    def ours(at: int) -> Tensor:
        return cpu_keeping.state_space(x, dt, a, b, c, d, bias, Slots(pool[at], where, where), softplus=True)

    return ours, theirs, pool


KERNELS = {"delta": delta, "conv": conv, "mamba": mamba}


def line(name: str, threads: int, tokens: int, rounds: int, with_torch: bool, now: Callable[[], float]) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(threads)
    ours, theirs, pool = KERNELS[name](tokens)
    target, calls = torch.empty_like(pool), LAYERS if tokens == 1 else 1
    times: dict[str, list[float]] = {"ours": [], "torch": [], "copy": []}
    with torch.inference_mode():
        for turn in range(rounds + 2):
            for which, call in (("ours", ours), ("torch", theirs), ("copy", lambda at: target[at].copy_(pool[at]))):
                if which == "torch" and not with_torch:
                    continue
                began = now()
                for at in range(calls):
                    call(at)
                if turn > 1:
                    times[which].append((now() - began) / calls)
    ours_ms, torch_ms, copy_ms = (1e3 * statistics.median(one) if one else float("nan") for one in times.values())
    floor = f"{copy_ms:.3f} | {ours_ms / copy_ms:.2f}" if tokens == 1 else " | "
    print(
        f"| {name} | {threads} | {tokens} | {ours_ms:.3f} | {torch_ms:.3f} | {torch_ms / ours_ms:.1f} | {floor} |",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 1024])
    parser.add_argument("--threads", type=int, nargs="+", default=[torch.get_num_threads()])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", nargs="+", choices=KERNELS, default=list(KERNELS))
    parser.add_argument("--no-torch", action="store_true")
    parser.add_argument("--processor", action="store_true", help="time of all threads together, as of a busy machine")
    asked = parser.parse_args()
    print(cpu.isa())
    print(
        "| what | threads | tokens | kernel, ms | torch, ms | torch / kernel | copying the states, ms | kernel / copy |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for name in asked.only:
        for threads in asked.threads:
            for tokens in asked.tokens:
                now = time.process_time if asked.processor else time.perf_counter
                line(name, threads, tokens, asked.rounds, not asked.no_torch, now)


if __name__ == "__main__":
    main()
