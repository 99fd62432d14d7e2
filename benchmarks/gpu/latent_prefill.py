"""Prefill of latents, expanded to the keys of 192 and values of 128 channels of DeepSeek-V3's heads.

    python benchmarks/gpu/latent_prefill.py [--context 65536] [--heads 16] [--sweep]

A group of heads, as many as are expanded at once; times are scaled to all 128. ``expanding``: making keys and values of
the latents. Keys have the structure of bench.inputs. Beside dense attention of FlashAttention by torch, whose values
have as many channels as keys.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from harness import DTYPE, Results, random_blocks, time_ms
from torch.nn.attention import SDPBackend, sdpa_kernel

from saccade.bench.inputs import make
from saccade.engine.rows.expanded import expanded_view
from saccade.kv import rows as by_torch
from saccade.kv.view import KVView
from saccade.methods import Chunk, parse_method
from saccade.models.interface import LatentRows
from saccade.ops import attend
from saccade.ops.movers import row_mover
from saccade.ops.triton.prefill import Config, attend_prefill
from saccade.selection import Dense, Shape

ALL, RANK, PLAIN, TURNED, VALUES = 128, 512, 128, 64, 128
SCALE = (PLAIN + TURNED) ** -0.5
METHODS = ("sampled_rows(threshold=0.0005)", "xattention", "flexprefill(lines=block)", "flashprefill")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", type=int, default=65536)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--methods", nargs="*", default=METHODS)
    parser.add_argument("--sweep", action="store_true")
    given = parser.parse_args()
    heads, context = given.heads, given.context
    results = Results("latent_prefill")
    problem = make(heads, heads, PLAIN + TURNED, context, context, DTYPE, device="cuda")
    q, k = problem.q, problem.k
    problem.v[..., VALUES:] = 0
    latents = torch.randn(1, context, RANK + TURNED, device="cuda", dtype=DTYPE)
    rows = LatentRows(
        q, lambda stored, group: (k[group, : len(stored)], problem.v[group, : len(stored), :VALUES]), VALUES, 1
    )
    stored = KVView(KVView.from_tensors(latents, latents).paged(), mover=row_mover(q.device) or by_torch)
    view = expanded_view(stored, rows, slice(0, heads))
    del problem.views[:]
    for start in range(0, context, 2048):
        view.write(start, k[:, start : start + 2048], problem.v[:, start : start + 2048])
    shape = Shape.suffix(heads, heads, context, context, "cuda")
    weights = torch.randn(2, heads, PLAIN, RANK, device="cuda", dtype=DTYPE)

    def expand(own: torch.Tensor, group: slice) -> tuple[torch.Tensor, torch.Tensor]:
        plain, turned = own.split([RANK, TURNED], -1)
        keys, values = (plain @ part[group].transpose(1, 2) for part in weights)
        return torch.cat([keys, turned.expand(len(keys), -1, -1)], -1), values

    making = LatentRows(q, expand, VALUES, 1)
    best = None

    def row(what: str, ms: float | None, pairs: float, **more: object) -> None:
        if ms is not None:
            tflops = 2 * (PLAIN + TURNED + VALUES) * heads * pairs / ms / 1e9
            speed = None if best is None else best / ms
            scaled = ms * ALL / heads
            results.add(
                what=what,
                ms=ms,
                all_heads_ms=scaled,
                tflops=tflops,
                density=pairs / shape.causal_pairs,
                speedup=speed,
                **more,
            )

    row(
        "expanding",
        results.attempt("expanding", lambda: time_ms(lambda: expanded_view(stored, making, slice(0, heads)))),
        0,
    )
    every = Dense(shape)
    plans: list[Config | None] = [None]
    if given.sweep:
        plans += [
            Config(128, 64, 8, 4, copy=True), Config(128, 128, 8, 2, copy=True), Config(64, 64, 4, 3, copy=True),
        ]  # fmt: skip
    lists = random_blocks(shape, 128, 0.2)
    pairs = float(lists.unit_pairs().double().mean())
    for plan in plans:
        for name, selection, count in (("dense", every, shape.causal_pairs), ("blocks", lists, pairs)):
            ms = results.attempt(
                f"{name} {plan}",
                lambda s=selection, c=plan: time_ms(lambda: attend_prefill(q, view, s, scale=SCALE, config=c), 100),
            )
            best = ms if plan is None and name == "dense" else best
            row(name, ms, count, config=str(plan and tuple(vars(plan).values())))
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        row(
            "sdpa flash",
            results.attempt(
                "sdpa",
                lambda: time_ms(
                    lambda: F.scaled_dot_product_attention(q[None], k[None], problem.v[None], is_causal=True), 100
                ),
            ),
            shape.causal_pairs,
        )
    for text in given.methods:
        method = parse_method(text)

        def choose(method=method):
            return method.select_prefill(Chunk.of(q, KVView(view.paged())))

        chosen = results.attempt(text, choose)
        if chosen is None:
            continue
        deciding = results.attempt(text, lambda: time_ms(choose, 100))
        whole = results.attempt(text, lambda: time_ms(lambda: attend(q, view, choose(), scale=SCALE), 100))
        row(text, whole, float(chosen.unit_pairs().double().mean()), choosing=deciding)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
