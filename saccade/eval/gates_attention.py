"""What dense attention looks like on a validation set: the properties that sparse methods live on, per head.

Sources: sinks, local windows and lines as in MInference and LoopServe (3.1, 3.2), head classes as in FlexPrefill (Alg.
2), the spread of need as in PSA.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from saccade.engine.watch.observe import AttentionCall
from saccade.engine.watch.truth import true_rows
from saccade.errors import SaccadeError
from saccade.eval.capture import Capture
from saccade.eval.micro import sample_positions
from saccade.methods.base import Chunk
from saccade.methods.flexprefill import FlexPrefill
from saccade.methods.loopserve.line_cover import cover_lines
from saccade.ops.scores import block_sums
from saccade.selection import Dense, Shape

SINKS = 4  # first keys
LOCAL = 64  # last keys, the row's own included
LINES = 0.1  # of the 2n lines of a prompt of n tokens
BLOCK = 32
SHARE = 0.95  # of the mass, for the blocks a row needs
BUDGET = 0.1  # of the keys or blocks, for top-k sets of questions and answers
STEP_BUDGET = 0.02  # of the keys, for top-k sets of successive decode steps
WINDOW = 16  # last prompt rows that select for an answer

Lines = tuple[frozenset[int], frozenset[int]]  # columns, distances


class HeadShapes(NamedTuple):
    """Per query head of one layer, over sampled rows of one prompt: mean mass on the first ``SINKS`` keys and on the
    last ``LOCAL`` [heads]; share of the mass on the best ``LINES`` of the lines [heads] and those lines; blocks of
    ``BLOCK`` keys that hold ``SHARE`` of a row's mass, int64 [heads, rows]."""

    sinks: Tensor
    local: Tensor
    coverage: Tensor
    lines: list[Lines]
    blocks: Tensor


def whole_prefill(calls: Sequence[AttentionCall]) -> AttentionCall:
    """The prefill of one layer as one call over all its rows, whatever chunks it ran in; ``selection`` is dense."""
    if not calls or any(call.phase != "prefill" or call.layer != calls[0].layer for call in calls):
        raise SaccadeError("a whole prefill takes the prefill calls of one layer, at least one")
    ordered = sorted(calls, key=lambda call: call.selection.shape.q_start)
    q, out = (torch.cat([getattr(call, name) for call in ordered], 1) for name in ("q", "out"))
    shape = Shape.suffix(q.shape[0], ordered[-1].kv.kv_heads, q.shape[1], ordered[-1].kv.length, q.device)
    return replace(ordered[-1], q=q, out=out, selection=Dense(shape))


def head_shapes(call: AttentionCall, rows: int = 64, seed: int = 0) -> HeadShapes:
    """Measure ``rows`` sampled rows of a whole prefill; rows before ``2 * LOCAL`` see too little to tell lines, sinks
    and windows apart and are left out. Raises SaccadeError for a prompt that has no others."""
    shape = call.selection.shape
    if shape.k_len <= 2 * LOCAL:
        raise SaccadeError(f"a prompt of {shape.k_len} tokens is too short to measure; give at least {2 * LOCAL + 1}")
    chosen = sample_positions(shape.k_len, rows, seed, first=2 * LOCAL) - shape.q_start
    near = (chosen[:, None] + shape.q_start - torch.arange(shape.k_len)).abs() < LOCAL
    sinks, local, coverage, lines, blocks = [], [], [], [], []
    for true in true_rows(call, chosen, entries=shape.group * shape.k_len * chosen.numel()):
        weights = true.weights()
        sinks.append(weights[..., :SINKS].sum(-1).mean(-1))
        local.append((weights * near).sum(-1).mean(-1))
        blocks.append(blocks_needed(weights))
        for head in weights:
            share, picked = best_lines(head, chosen + shape.q_start, round(LINES * 2 * shape.k_len))
            coverage.append(share)
            lines.append(picked)
    return HeadShapes(torch.cat(sinks), torch.cat(local), torch.tensor(coverage), lines, torch.cat(blocks))


def blocks_needed(weights: Tensor, share: float = SHARE, block: int = BLOCK) -> Tensor:
    """The fewest blocks of ``block`` keys that hold ``share`` of a row's mass: [..., n] -> int64 [...]."""
    masses = block_sums(weights, block).double().sort(-1, descending=True).values
    reached = masses.cumsum(-1) >= share * masses.sum(-1, keepdim=True) - 1e-9
    return (~reached).sum(-1) + 1


def best_lines(weights: Tensor, positions: Tensor, count: int) -> tuple[float, Lines]:
    """LoopServe's greedy order (Alg. 2, exact overlap) cut at about ``count`` lines: the share of ``weights`` (fp32 [m,
    n], rows at ``positions``) that they hold, and the lines. The greedy lines of a smaller share are a prefix of those
    of a larger one, so the share is found by bisection, to 1/512."""
    low, high, total = 0.0, 1.0, float(weights.double().sum())
    best = cover_lines(weights, positions, 0, low)
    for _ in range(9):
        middle = (low + high) / 2
        cover = cover_lines(weights, positions, 0, middle)
        if cover.columns.numel() + cover.distances.numel() <= count:
            low, best = middle, cover
        else:
            high = middle
    return best.recovered / total, (frozenset(best.columns.tolist()), frozenset(best.distances.tolist()))


def line_overlap(a: Lines, b: Lines) -> float:
    """LoopServe's overlap of the lines of two inputs (3.1.2): what both have over what either has."""
    either = len(a[0] | b[0]) + len(a[1] | b[1])
    return (len(a[0] & b[0]) + len(a[1] & b[1])) / either


def mean_line_overlap(prompts: Sequence[Sequence[Lines]]) -> Tensor:
    """``prompts[p][h]``: the mean overlap over all pairs of prompts, per head: fp32 [heads]."""
    if len(prompts) < 2:
        raise SaccadeError("line overlap between inputs takes at least two prompts")
    pairs = list(itertools.combinations(prompts, 2))
    heads = range(len(prompts[0]))
    return torch.tensor([sum(line_overlap(a[h], b[h]) for a, b in pairs) / len(pairs) for h in heads])


def query_aware(call: AttentionCall, tau: float = 0.1, block: int = 64) -> Tensor:
    """bool [heads]: FlexPrefill's class of each head at the end of a whole prefill."""
    chunk = Chunk.of(call.q, call.kv, scale=call.spec.scale, softcap=call.spec.softcap, layer=call.layer)
    return FlexPrefill(tau=tau, block_size=block).head_kinds(chunk)


def answer_mass(captured: Capture, layer: int, prompt: int) -> Tensor:
    """Mean weight of the answer's rows (the prompt's last one, which predicts the first token, and every decode step)
    on the prompt's keys: fp32 [heads, prompt]."""
    rows = _last_rows(captured, layer, 1, prompt) + [
        torch.cat([true.weights()[:, 0, :prompt] for true in true_rows(call)])[:, None]
        for call in captured.of(layer, "decode")
    ]
    return torch.cat(rows, 1).mean(1)


def window_mass(captured: Capture, layer: int, prompt: int, window: int = WINDOW) -> Tensor:
    """Mean weight of the prompt's last ``window`` rows on its keys: fp32 [heads, prompt]."""
    return torch.cat(_last_rows(captured, layer, window, prompt), 1).mean(1)


def question_overlap(a: Tensor, b: Tensor, context: int, budget: float = BUDGET, block: int = BLOCK) -> Tensor:
    """Jaccard overlap of the heaviest ``budget`` of the context's blocks for two questions: fp32 [heads]. ``a``, ``b``
    fp32 [heads, n or m] are their masses; the first ``context`` keys are the same."""
    sums = [block_sums(mass[:, :context], block) for mass in (a, b)]
    chosen = [_top(part, max(1, round(budget * part.shape[-1]))) for part in sums]
    return (chosen[0] & chosen[1]).sum(-1) / (chosen[0] | chosen[1]).sum(-1)


def window_answer_overlap(captured: Capture, prompt: int, layers: int, budget: float = BUDGET) -> float:
    """LoopServe's overlap (3.2): of the ``budget`` heaviest prompt tokens for the last window, how many are for the
    answer too. Weights are summed over a layer's heads; the mean over layers."""
    count = max(1, round(budget * prompt))
    shares = []
    for layer in range(layers):
        sums = [mass(captured, layer, prompt).sum(0)[None] for mass in (window_mass, answer_mass)]
        chosen = [_top(part, count) for part in sums]
        shares.append(float((chosen[0] & chosen[1]).sum()) / count)
    return sum(shares) / len(shares)


def step_overlap(captured: Capture, layer: int, budget: float = STEP_BUDGET) -> Tensor:
    """Share of a decode step's heaviest keys (``budget`` of the first step's) that are the next step's too, averaged
    over steps: fp32 [heads]. Raises SaccadeError for fewer than two steps."""
    calls = sorted(captured.of(layer, "decode"), key=lambda call: call.kv.length)
    if len(calls) < 2:
        raise SaccadeError(f"temporal overlap takes at least two decode steps, the run had {len(calls)}")
    count = max(1, round(budget * calls[0].kv.length))
    sets = [_top(torch.cat([true.scores[:, 0] for true in true_rows(call)]), count) for call in calls]
    shares = [(a & b[:, : a.shape[1]]).sum(-1) / count for a, b in itertools.pairwise(sets)]
    return torch.stack(shares).mean(0)


def _last_rows(captured: Capture, layer: int, count: int, prompt: int) -> list[Tensor]:
    """Weights of the prompt's last rows, [heads, r, prompt] per chunk that holds some of them."""
    found = []
    for call in captured.of(layer, "prefill"):
        shape = call.selection.shape
        rows = torch.arange(min(max(0, prompt - count - shape.q_start), shape.q_len), shape.q_len)
        if rows.numel():
            weights = torch.cat([true.weights() for true in true_rows(call, rows, entries=2**62)])
            found.append(torch.nn.functional.pad(weights, (0, prompt - weights.shape[-1])))
    return found


def _top(scores: Tensor, count: int) -> Tensor:
    """bool like ``scores`` [h, n]: the ``count`` greatest of each row, ties to the lower index."""
    order = torch.sort(scores, dim=-1, descending=True, stable=True).indices[:, :count]
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(1, order, True)
