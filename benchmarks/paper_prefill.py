"""What paper_figures.py measures of prefills: FlexPrefill's and LoopServe's figures, a layer of a captured run at a
time."""

from __future__ import annotations

import paper_stats as stats
import torch
from paper_captures import Captured, Layer, prompt_chunk
from paper_lfps import Found
from torch import Tensor

from saccade.eval.micro import sample_positions
from saccade.kv.view import KVView
from saccade.methods.flexprefill import FlexPrefill
from saccade.methods.loopserve import LoopServe
from saccade.selection import Selection

ROWS, FIRST, WINDOW, STRETCH = 64, 128, 16, 8


def prefill(run: Captured, layer: Layer, found: Found) -> None:
    """LoopServe, Observation 1; FlexPrefill, Fig. 3, 7, 8 and 10, and what it promises (eq. 3)."""
    rows = sample_positions(run.context, ROWS, 0, first=FIRST)
    weights = layer.weights(rows)[..., : run.context]
    distance = rows[:, None] - torch.arange(run.context)
    shares = [stats.line_share(own, distance, 0.1) for own in weights]
    found["LoopServe Obs. 1", "weight on the heaviest tenth of the lines"].append(torch.tensor(shares))
    view, method = KVView.from_tensors(layer.k, layer.v), FlexPrefill(min_budget=0)
    chunk = prompt_chunk(layer, view, run.context)
    apart = method.distances(chunk)
    found["FlexPrefill Fig. 7", "JS distance"].append(apart)
    found["FlexPrefill Fig. 7", f"JS distance, layer {layer.number:02}"].append(apart)
    for tau, what in ((method.tau, "query-aware heads"), (2 * method.tau, "query-aware heads at tau 0.2")):
        aware = (apart < tau).double()
        found["FlexPrefill Fig. 8", what].append(aware)
        found["FlexPrefill Fig. 8", f"{what}, layer {layer.number:02}"].append(aware)
    for lines in ("token", "block"):
        picked = FlexPrefill(min_budget=0, lines=lines).select_prefill(chunk)
        found["FlexPrefill Fig. 3 and 10", f"pairs read at gamma 0.95, lines={lines}"].append(
            picked.pairs() / picked.shape.causal_pairs
        )
        looked = torch.arange(run.context - method.block_size, run.context)
        for name, own, at in (
            ("rows looked at", layer.weights(looked)[..., : run.context], looked),
            ("others", weights, rows),
        ):
            mass = kept(picked, own, at)
            found["FlexPrefill eq. 3", f"lines={lines}, {name}: mass kept"].append(mass)
            found["FlexPrefill eq. 3", f"lines={lines}, {name}: share below gamma"].append((mass < 0.95).double())


def kept(picked: Selection, weights: Tensor, rows: Tensor) -> Tensor:
    """float64 [heads, r]: the part of ``weights`` [heads, r, n] of ``rows`` that ``picked`` reads."""
    heads, units = len(weights), picked.units
    out = []
    for head in range(heads):
        masks = [picked.row_mask(head * units // heads, row, row + 1)[0] for row in rows.tolist()]
        out.append((weights[head] * torch.stack(masks)).sum(-1))
    return torch.stack(out)


def loopserve(run: Captured, layer: Layer, found: Found, budget: int) -> None:
    """LoopServe, Alg. 2's promise, Observation 3, and Fig. 4a and 5: the decode steps stand for an answer."""
    rows = sample_positions(run.context, ROWS, 0, first=FIRST)
    weights = layer.weights(rows)[..., : run.context]
    chunk = prompt_chunk(layer, KVView.from_tensors(layer.k, layer.v), run.context)
    for alpha in (0.955, 0.995):
        picked = LoopServe(alpha=alpha).select_prefill(chunk)
        mass = kept(picked, weights, rows)
        found["LoopServe Alg. 2", f"alpha {alpha}: mass kept"].append(mass)
        found["LoopServe Alg. 2", f"alpha {alpha}: share of rows below alpha"].append((mass < alpha).double())
        found["LoopServe Alg. 2", f"alpha {alpha}: pairs read"].append(picked.pairs() / picked.shape.causal_pairs)
    half = run.context // 2
    halves = [lines_of(weights[:, part], rows[part], half) for part in (rows < half, rows >= half)]
    found["LoopServe Obs. 3", "heaviest tenth of the lines of the first half that the second has"].append(
        overlap(*halves, 2 * half // 10)
    )
    answer = layer.weights(run.steps)[..., : run.context]
    whole, last = answer.sum(1), layer.weights(torch.arange(run.context - WINDOW, run.context))[..., : run.context]
    stretches = [part.sum(1) for part in answer.split(STRETCH, 1) if part.shape[1] == STRETCH]
    found[
        "LoopServe Fig. 4 and 5", f"of the answer's best {budget} keys, those of the prompt's last {WINDOW} rows"
    ].append(overlap(whole, last.sum(1), budget))
    found["LoopServe Fig. 4 and 5", f"of the answer's best {budget} keys, those of its first {STRETCH} rows"].append(
        overlap(whole, stretches[0], budget)
    )
    for apart in (1, 2, 4, 8):
        shared = [overlap(one, other, budget) for one, other in zip(stretches, stretches[apart:])]
        if shared:  # an answer of that many stretches
            what = f"shared by stretches of {STRETCH} rows, {apart} apart"
            found["LoopServe Fig. 4 and 5", what].append(torch.stack(shared))


def inputs(one: Captured, other: Captured, found: Found) -> None:
    """LoopServe, Observation 2: lines of the same heads over two texts of one length."""
    rows = sample_positions(one.context, ROWS, 0, first=FIRST)
    for layer, before in zip(one.layers, other.layers):
        sums = [lines_of(own.weights(rows)[..., : one.context], rows, one.context) for own in (before, layer)]
        found["LoopServe Obs. 2", "heaviest tenth of the lines that another input has"].append(
            overlap(*sums, 2 * one.context // 10)
        )


def lines_of(weights: Tensor, rows: Tensor, count: int) -> Tensor:
    """float64 [heads, 2 * count]: the weight of ``rows`` [heads, r, n] by key and by distance, the first ``count`` of
    each."""
    back = (rows[:, None] - torch.arange(weights.shape[-1])).clamp(min=0).flatten()
    by_distance = torch.zeros(len(weights), weights.shape[-1], dtype=weights.dtype)
    by_distance.index_add_(1, back, weights.flatten(1))
    return torch.cat([weights.sum(1)[:, :count], by_distance[:, :count]], 1)


def overlap(one: Tensor, other: Tensor, count: int) -> Tensor:
    """Of the ``count`` heaviest entries of ``one`` [..., n], the share that is among the other's: [...]."""
    return stats.held(stats.heaviest(one, count), stats.heaviest(other, count))
