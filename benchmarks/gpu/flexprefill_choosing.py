"""What the choice of ``flexprefill(lines=block)`` spends its time on, kernel by kernel.

    python benchmarks/gpu/flexprefill_choosing.py [--length 131072] [--rows 16384] [--kernels]

The last ``--rows`` of ``--length`` tokens, bfloat16, 32 query and 8 KV heads of 128 by default, block summaries kept;
milliseconds by events on the device, medians. ``tau`` 0: no head goes by pooled attention, 1: all do. *whole*: the
method's call; *pairs*: counting what it chose for the report.
"""

from __future__ import annotations

import argparse

import torch
from harness import time_ms
from torch.profiler import ProfilerActivity, profile

from saccade.bench.recall.families import generate
from saccade.kv.kept_summaries import KeptSummaries
from saccade.kv.view import KVView
from saccade.methods import Chunk
from saccade.methods.flexprefill import FlexPrefill
from saccade.methods.flexprefill.triton_blocks import choose_blocks
from saccade.methods.flexprefill.triton_pooled import pooled_shares
from saccade.methods.flexprefill.triton_shares import decide
from saccade.methods.flexprefill.triton_threshold import mass_threshold
from saccade.ops.pairs import pairs
from saccade.ops.triton.block_sums import line_sums


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=131072)
    parser.add_argument("--rows", type=int, default=16384)
    parser.add_argument("--family", default="topics")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--kernels", action="store_true", help="each kernel's time by torch's profiler, too")
    given = parser.parse_args()
    made = generate(given.family, given.heads, given.kv_heads, 128, given.length, torch.bfloat16, "cuda")
    view = KVView.from_tensors(made.k, made.v)
    kept = KeptSummaries("mean", 128)
    kept.upto(view)
    chunk = Chunk.of(made.q[:, -given.rows :].contiguous(), KVView(view.paged(), lambda kind, size: kept))
    at, size, scale = (chunk.q, chunk.kv, kept.made), 128, chunk.scale
    for tau in (0.0, 0.1, 1.0):
        method = FlexPrefill(lines="block", max_budget=8192, tau=tau)
        columns, slashes = line_sums(chunk.q, chunk.kv, chunk.shape, size, scale)
        by_pooled, vertical, groups = decide(*at, size, scale, tau, columns, slashes)
        shares = pooled_shares(*at, chunk.shape, size, scale, by_pooled)
        bound = mass_threshold(shares.flatten(1), method.gamma, by_pooled)
        listed = (
            chunk.shape,
            size,
            vertical,
            groups,
            shares,
            by_pooled,
            bound,
            columns,
            method.known_blocks(chunk.shape),
        )
        found = method.select_prefill(chunk)
        calls = {
            "sums": lambda: line_sums(chunk.q, chunk.kv, chunk.shape, size, scale),
            "decide": lambda tau=tau, sums=(columns, slashes): decide(*at, size, scale, tau, *sums),
            "pooled": lambda on=by_pooled: pooled_shares(*at, chunk.shape, size, scale, on),
            "threshold": lambda mass=shares, on=by_pooled, part=method.gamma: mass_threshold(mass.flatten(1), part, on),
            "lists": lambda listed=listed, method=method: choose_blocks(*listed, method.gamma, *method.budget_blocks),
            "whole": lambda method=method: method.select_prefill(chunk),
            "pairs": lambda found=found: pairs(found),
        }
        said = ", ".join(f"{name} {time_ms(call):.3f}" for name, call in calls.items())
        print(
            f"tau {tau}: {said} ms; {int(by_pooled.sum())} query-aware heads, density {found.density():.3f}", flush=True
        )
        if given.kernels:
            with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
                method.select_prefill(chunk)
                torch.cuda.synchronize()
            for event in seen.events():
                if event.device_type == torch.autograd.DeviceType.CUDA:
                    print(f"  {event.time_range.elapsed_us():8.1f} us {event.name}", flush=True)


if __name__ == "__main__":
    main()
