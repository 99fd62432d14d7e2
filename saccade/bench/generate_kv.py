"""Synthetic keys and values of a long context, made for a model's own queries.

A random model's queries point nowhere in particular, so keys drawn apart from them would see flat attention at any
structure. Here the last rows of the prompt are really computed, layer by layer, and each layer's keys are made when its
queries are known: sinks and a few heavy columns lie along the mean of a head's queries, the rest is noise. Values share
a mean per head, so hidden states, and hence the queries of neighbouring rows, resemble each other, as they do in
trained models; but for those of the first layer, which are the tokens' own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import torch
from torch import Tensor

from saccade.engine.request import Sequence
from saccade.kv import SequenceKV
from saccade.llm import LLM
from saccade.models.interface import AttentionContext, LayerAttention, Segment
from saccade.models.runner import HFRunner
from saccade.ops import attend

TAIL = 64  # prompt rows that are computed on top of synthetic keys: methods learn from their queries
SINKS = 4
COLUMN_EVERY = 2048  # tokens to a heavy column
ABOVE = 10.0  # by how much the greatest logit exceeds that of flat attention's whole weight
WEAKEST = 0.7  # of the heavy columns' logits, against the greatest
AWAY = 4  # one in so many of a head's columns has a key of the opposite sign


@dataclass(frozen=True)
class SyntheticKV:
    """``layers[i]`` holds keys and values [kv_heads, past, head_dim] of the first ``past`` tokens."""

    past: int
    layers: list[tuple[Tensor, Tensor]]

    def fill(self, sequence: Sequence) -> None:
        """Store them as if a prefill had computed the first ``past`` tokens of a sequence that has computed none. The
        pool must have room."""
        kv = sequence.memories[sequence.id].kv
        kv.reserve(len(sequence.tokens))
        for layer, (k, v) in enumerate(self.layers):
            kv.append(layer, k, v)
        sequence.filled(self.past)


def synthesize(llm: LLM, ids: list[int], seed: int = 0) -> SyntheticKV:
    """Keys and values for all but the last ``TAIL`` tokens of the prompt ``ids``."""
    past = len(ids) - TAIL
    spec = llm.model.spec
    context = _Planting(past, spec.kv_heads, spec.dtype, spec.reads, torch.Generator().manual_seed(seed))
    run_tail(llm.model.runner, ids, context)
    return SyntheticKV(past, context.layers)


def run_tail(runner: HFRunner, ids: list[int], context: AttentionContext) -> None:
    """Compute the last ``TAIL`` tokens of ``ids``; what comes before them is the ``context``'s."""
    past = len(ids) - TAIL
    runner.run(
        torch.tensor(ids[past:]),
        torch.arange(past, len(ids)),
        context,
        segments=[Segment(0, TAIL, len(ids))],
        logit_rows=torch.empty(0, dtype=torch.long),
    )


@dataclass
class _Planting:
    """An attention context that makes a layer's past when it sees the layer's queries, and attends to it."""

    past: int
    kv_heads: int
    dtype: torch.dtype
    reads: tuple[int, ...]  # see ModelSpec
    generator: torch.Generator
    layers: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # that store
    whole: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # the same with the rows behind them

    def run(self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None, spec: LayerAttention) -> Tensor:
        if k is None or v is None:
            whole = self.whole[self.reads[layer]]
        else:
            made = plant(q.cpu(), self.past, self.kv_heads, spec.scale, self.generator)
            old_k, old_v = (part.to(q.device, self.dtype) for part in made)
            self.layers.append((old_k, old_v))
            whole = torch.cat([old_k, k], 1), torch.cat([old_v, v], 1)
            self.whole.append(whole)
        return attend(q, whole, scale=spec.scale, softcap=spec.softcap)[0]

    def store(self, layer: int, k: Tensor, v: Tensor) -> None:
        raise NotImplementedError("synthetic keys are made for rows that no freeze passes by")


class Filling:
    """An attention context that stores a layer's made-up past, ``piece`` tokens at a time, when it sees the layer's
    queries, and attends to the last piece of it. ``change`` alters the keys [kv_heads, n, head_dim] of a piece, given
    the queries and the generator; ``summaries``: kinds and block sizes that are made while the keys are at hand."""

    def __init__(
        self,
        kv: SequenceKV,
        past: int,
        piece: int,
        seed: int,
        change: Callable[[Tensor, Tensor, torch.Generator], None] | None = None,
        summaries: Collection[tuple[str, int]] = (),
    ) -> None:
        self.kv, self.past, self.piece, self.change, self.summaries = kv, past, piece, change, summaries
        self.layout, self.device = kv.pool.format, kv.pool.storage.device
        self.generator = torch.Generator(self.device).manual_seed(seed)

    def run(self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None, spec: LayerAttention) -> Tensor:
        assert k is not None, "every layer stores its own keys"
        assert v is not None
        for start in range(0, self.past, self.piece):
            count = min(self.piece, self.past - start)
            with torch.device(self.device):
                made = plant(q, count, self.layout.kv_heads, spec.scale, self.generator)
            if self.change is not None:
                self.change(made[0], q, self.generator)
            past_k, past_v = (part.to(self.layout.dtype) for part in made)
            self.kv.append(layer, past_k, past_v)
            for kind, size in self.summaries:
                self.kv.view(layer).summary(kind, size)
        self.kv.append(layer, k, v)
        seen = torch.cat([past_k, k], 1), torch.cat([past_v, v], 1)
        return attend(q, seen, scale=spec.scale, softcap=spec.softcap)[0]

    def store(self, layer: int, k: Tensor, v: Tensor) -> None:
        raise NotImplementedError("made-up keys are for rows that no freeze passes by")


def plant(q: Tensor, past: int, kv_heads: int, scale: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Keys and values fp32 [kv_heads, past, head_dim] for queries ``q`` [heads, rows, head_dim] of one layer, both on
    the CPU, so that they are the same everywhere. The sinks are every head's, a heavy column is one head's of each
    group; some point away from it, for a head whose queries have no common direction."""
    head_dim = q.shape[-1]
    toward = torch.nn.functional.normalize(q.float().mean(1), dim=-1)  # [H, d]
    reach = torch.einsum("hrd,hd->hr", q.float(), toward).square().mean(1).sqrt().clamp(min=1e-6)
    heavy = toward * ((math.log(past) + ABOVE) / (scale * reach))[:, None]  # the key of the greatest logit
    heavy = heavy.unflatten(0, (kv_heads, -1))  # [G, g, d]
    group = heavy.shape[1]
    k = torch.randn(kv_heads, past, head_dim, generator=generator)
    columns = torch.randperm(past, generator=generator)[: max(4 * group, past // COLUMN_EVERY)]
    columns = columns[columns >= SINKS]
    share = WEAKEST + (1 - WEAKEST) * torch.rand(kv_heads, columns.numel(), generator=generator)
    place = torch.arange(columns.numel())
    share[:, place // group % AWAY == AWAY - 1] *= -1
    k[:, columns] += heavy[:, place % group] * share[..., None]
    k[:, :SINKS] += WEAKEST * heavy.sum(1, keepdim=True)
    v = torch.randn(kv_heads, past, head_dim, generator=generator)
    v += torch.randn(kv_heads, 1, head_dim, generator=generator)
    return k, v
