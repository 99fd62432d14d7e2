"""FlexPrefill's choosing on a CPU by our kernel and by torch, in one run with own dense and torch's sdpa.

    python benchmarks/flexprefill_choosing.py [--length 32768] [--heads 32] [--kv-heads 8] [--threads 16,12,8,4,1]

bfloat16, inputs of ``saccade bench ops``. *whole*: choosing and attention. Dense and sdpa run with the first number of
threads.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from torch.nn.functional import scaled_dot_product_attention

import saccade.methods.flexprefill.method as flexprefill
from saccade.bench.inputs import make
from saccade.methods import Chunk, parse_method
from saccade.ops import Call, cpu, run
from saccade.selection import Dense, Selection


class Torch:
    """In place of our kernels: what they do not serve, torch does."""

    @staticmethod
    def serves(*_: object) -> str:
        return "torch"


def milliseconds(work: Callable[[], object], repeats: int) -> float:
    work()
    took = []
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        took.append(time.perf_counter() - began)
    return 1000 * statistics.median(took)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=32768)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--threads", default="16,12,8,4,1")
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    made = make(given.heads, given.kv_heads, 128, given.length, given.length, torch.bfloat16)
    method, chunk = parse_method("flexprefill(lines=block)"), Chunk.of(made.q, made.views[0])
    print("instructions:", cpu.isa())

    def choose() -> Selection:
        return method.select_prefill(chunk)

    def attend(selection: Selection, threads: int) -> object:
        return run(Call.of(made.q, made.views[0], selection, threads=threads))

    def chosen(threads: int) -> object:
        return attend(choose(), threads)

    for number, threads in enumerate(int(count) for count in given.threads.split(",")):
        torch.set_num_threads(threads)

        if number == 0:
            print(f"{threads} threads: own dense {milliseconds(partial(attend, Dense(made.shape), threads), 2):.1f} ms")
            q, k, v = (part[None] for part in (made.q, made.k, made.v))
            dense = partial(scaled_dot_product_attention, q, k, v, is_causal=True, enable_gqa=True)
            sdpa = milliseconds(dense, 2)
            print(f"{threads} threads: torch sdpa {sdpa:.1f} ms", flush=True)
        whole = milliseconds(partial(chosen, threads), given.repeats)
        ours, fast = milliseconds(choose, given.repeats), choose()
        flexprefill.cpu = Torch  # type: ignore[attr-defined]
        try:
            torchs, slow = milliseconds(choose, given.repeats), choose()
        finally:
            flexprefill.cpu = cpu  # type: ignore[attr-defined]
        print(
            f"{threads} threads: whole {whole:.1f} ms, choosing {ours:.1f} (torch's {torchs:.1f}), "
            f"density {fast.density():.4f}, lists equal {torch.equal(fast.indices, slow.indices)}",
            flush=True,
        )


if __name__ == "__main__":
    main()
