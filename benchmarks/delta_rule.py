"""The gated delta rule on a CPU: the C++ kernel beside transformers' torch functions, by turns.

    python benchmarks/delta_rule.py [--tokens 1 1024] [--key-heads 16] [--value-heads 32] [--width 128] [--threads 1 2]

One layer's rule alone, bfloat16 rows, float32 states. A line each: milliseconds (median of ``--rounds``) of the kernel
and of torch (its recurrent form for one token, chunks for more), and their ratio; beside one token what reading and
writing the states once takes at the rate of a copy.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from transformers.models.qwen3_next import modeling_qwen3_next as theirs

from saccade.ops.cpu_delta import gated_delta_rule


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 1024])
    parser.add_argument("--key-heads", type=int, default=16)
    parser.add_argument("--value-heads", type=int, default=32)
    parser.add_argument("--width", type=int, default=128, help="of keys' and values' heads")
    parser.add_argument("--threads", type=int, nargs="+", default=[torch.get_num_threads()])
    parser.add_argument("--rounds", type=int, default=15)
    asked = parser.parse_args()
    print("| threads | tokens | kernel, ms | torch, ms | torch / kernel | copying the states, ms |")
    print("|---|---|---|---|---|---|")
    for threads in asked.threads:
        torch.set_num_threads(threads)
        for tokens in asked.tokens:
            line(asked, threads, tokens)


def line(asked: argparse.Namespace, threads: int, tokens: int) -> None:
    torch.manual_seed(0)
    shape = 1, tokens, asked.value_heads
    q, k, v = (torch.randn(*shape, asked.width, dtype=torch.bfloat16) for _ in range(3))
    g, beta = -torch.rand(shape), torch.rand(shape, dtype=torch.bfloat16)
    state = torch.zeros(1, asked.value_heads, asked.width, asked.width)
    copied = torch.empty_like(state)
    ours_q, ours_k = (one[:, :, : asked.key_heads] for one in (q, k))
    reference = theirs.torch_recurrent_gated_delta_rule if tokens == 1 else theirs.torch_chunk_gated_delta_rule
    named = {"g": g, "beta": beta, "output_final_state": True, "use_qk_l2norm_in_kernel": True}
    calls = (
        lambda: gated_delta_rule(ours_q, ours_k, v, initial_state=state, **named),
        lambda: reference(q, k, v, initial_state=state, **named),
        lambda: copied.copy_(state),
    )
    times: list[list[float]] = [[], [], []]
    with torch.inference_mode():
        for turn in range(asked.rounds + 2):
            for call, spent in zip(calls, times, strict=True):
                began = time.perf_counter()
                call()
                if turn > 1:
                    spent.append(time.perf_counter() - began)
    ours, torch_s, copy = (1e3 * statistics.median(one) for one in times)
    floor = f"{copy:.3f}" if tokens == 1 else ""
    print(f"| {threads} | {tokens} | {ours:.3f} | {torch_s:.3f} | {torch_s / ours:.1f} | {floor} |", flush=True)


if __name__ == "__main__":
    main()
