"""Twilight: blocks by a generous budget, then the fewest of their keys that reach a share of the estimated weight (Lin
et al., 2025).

The paper prunes what any method selects. Here that is Quest, the first of those it is built on, with keys in 4 bits for
the estimate.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from saccade.methods.base import Chunk, Query
from saccade.methods.labels import Labels, labels_note
from saccade.methods.options import budget_keys, require_budget, require_choice, require_number, require_whole
from saccade.methods.pages import page_choice, top_pages
from saccade.methods.whole import WholeMethod
from saccade.ops.reference import soft_capped
from saccade.ops.scores import needed_shares
from saccade.selection import Dense, Selection, Tokens

TINY = 1e-12  # p = 0 reads the heaviest key


@dataclass(frozen=True)
class Twilight(WholeMethod):
    """Of each KV head's ``base`` keys (a number, or a fraction of the visible ones) in Quest's pages of ``block_size``,
    the fewest keys with which a query head reaches ``p`` of their estimated softmax weights, ties to the lower index.
    The estimate takes keys quantized to ``bits`` per token and head.

    With ``unit="kv_head"`` the query heads of a group read the union of what each of them wants, as the published
    kernels do; ``q_head`` lets each read its own. The first ``dense_layers`` layers are dense. ``p=1`` reads all of the
    pages. Rows of up to ``dense_upto`` keys read everything.
    """

    name: ClassVar[str] = "twilight"
    paper: ClassVar[str] = "Twilight, arXiv:2502.02770"
    phases: ClassVar[tuple[str, ...]] = ("decode",)
    rows_only: ClassVar[str | None] = "no batched kernel prunes the keys of chosen blocks"

    p: float = 0.95
    base: float = 0.25
    bits: int = 4
    block_size: int = 16
    dense_layers: int = 2
    unit: str = "kv_head"

    def __post_init__(self) -> None:
        require_number("p", self.p, 0.0, 1.0)
        require_budget("base", self.base)
        require_choice("bits", self.bits, (2, 4, 8))
        require_choice("block_size", self.block_size, (8, 16, 32, 64, 128))
        require_whole("dense_layers", self.dense_layers, 0)
        require_choice("unit", self.unit, ("q_head", "kv_head"))
        self.check_dense_upto()

    @property
    def extra_memory(self) -> str | None:
        return labels_note(self.bits)

    def begin(self, segment: Chunk) -> Labels | None:
        if segment.layer < self.dense_layers:
            return None
        every = torch.arange(segment.q.shape[-1], device=segment.q.device)
        labels = Labels(every.repeat(segment.shape.kv_heads, 1), self.bits)
        labels.extend(segment.kv)
        return labels

    def select_decode(self, query: Query, state: Any) -> Selection:
        shape = query.shape
        if query.layer < self.dense_layers or shape.k_len <= self.dense_upto:
            return Dense(shape)
        state.extend(query.kv)
        budget = budget_keys(self.base, shape.k_len)
        pages = top_pages(query, page_choice("minmax", self.block_size, shape.kv_heads, budget, 0, 1))
        if self.p >= 1:
            return pages
        query.cost.estimated += shape.k_len
        scores = soft_capped(state.scores(query.q[:, 0]) * query.scale, query.softcap)
        chosen = pages.mask()[:, 0].to(scores.device)
        weights = torch.softmax(scores.masked_fill(~chosen, -torch.inf), -1)
        kept = (needed_shares(weights) < max(self.p, TINY)) & chosen
        if self.unit == "kv_head":
            kept = kept.unflatten(0, (shape.kv_heads, -1)).any(1)
        return Tokens.from_mask(shape, kept[:, None])
