"""LOCKS: pages by the weight that a low-rank copy of their keys says (locks-kv; docs/algorithms.md 6.24)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from saccade.kv.low_rank import unpacked
from saccade.methods.base import Query
from saccade.methods.device_state import Opening
from saccade.methods.dial import Dial
from saccade.methods.options import require_choice, require_whole
from saccade.methods.pages import Heads, blocks_of, ends_of, page_choice
from saccade.methods.tails import BlockMethod
from saccade.ops.scores import top_places
from saccade.selection import Dense, Selection
from saccade.selection.forms import PlanSpec
from saccade.selection.plan import DevicePlan
from saccade.selection.readings import Choice

SUMMARY = "low_rank"


@dataclass(frozen=True)
class Locks(BlockMethod):
    """``budget`` keys in pages of ``block_size``: the first ``sinks`` and the last ``window`` pages, the begun one
    included, and for each KV head the others whose keys weigh most, as each page's mean and rank-8 basis (int4, with
    coefficients in int8) say. A head's page weighs the sum of e^logit over its keys; ``combine="mass"`` adds the heads
    of a KV head, each over its own heaviest page, ``"max"`` takes the greatest.

    Only full pages have a summary: some 10 % of the KV. On a GPU kernels make and score it (``combine="mass"``); on a
    CPU torch unpacks it at every step: there it is for what it keeps, not for its speed.
    """

    name: ClassVar[str] = "locks"
    paper: ClassVar[str] = "LOCKS (locks-kv)"
    phases: ClassVar[tuple[str, ...]] = ("decode",)
    dial: ClassVar[Dial | None] = Dial("budget", "keys")

    budget: int = 2048
    block_size: int = 16
    sinks: int = 1
    window: int = 1
    combine: str = "mass"

    def __post_init__(self) -> None:
        require_whole("budget", self.budget, 1)
        require_choice("block_size", self.block_size, (8, 16, 32))
        require_whole("sinks", self.sinks, 0)
        require_whole("window", self.window, 1)
        require_choice("combine", self.combine, ("mass", "max"))
        self.check_tail()

    def select_decode(self, query: Query, state: Any) -> Selection:
        choice, size = self._choice(query.shape), self.block_size
        if query.shape.k_len <= choice.dense_upto:
            return Dense(query.shape)
        first, last = ends_of(query, choice)
        if not choice.take:
            return blocks_of(query, size, torch.cat([first, last], 1))
        stop = -(-query.shape.k_len // size) - choice.last  # full pages all: the last one is read anyway
        query.cost.estimated += stop - choice.first
        records = query.kv.summary(SUMMARY, size)[choice.first : stop]
        weights = page_weights(query, records, size)
        scores = combined(weights, self.combine, choice.units)
        best = (top_places(scores, choice.take) + choice.first).to(torch.int32)
        return self.with_tail(query, blocks_of(query, size, torch.cat([first, best, last], 1)), size)

    def whole_upto(self, opening: Opening) -> int:
        return self._choice(opening.spec).dense_upto

    def device_plan(self, spec: PlanSpec) -> DevicePlan | None:
        if self.combine != "mass" or self.stands_in or spec.head_dim % 2:  # what kernels do not do
            return None
        return DevicePlan.alike(self, spec, self._choice(spec))

    def _choice(self, shape: Heads) -> Choice:
        return page_choice(SUMMARY, self.block_size, shape.kv_heads, self.budget, self.sinks, self.window)


def page_weights(query: Query, records: Tensor, size: int) -> Tensor:
    """Log of the sum of e^logit over each page's keys, as its record says: fp32 [heads, pages]."""
    basis, coefficients, mean = unpacked(records, size)  # [G, pages, 8, d], [G, pages, size, 8], [G, pages, d]
    q = query.q[:, 0].float().unflatten(0, (mean.shape[0], -1))  # [G, g, d]
    along = torch.einsum("gpnd,ghd->gphn", basis, q)
    logits = torch.einsum("gptn,gphn->ghpt", coefficients, along) + torch.einsum("gpd,ghd->ghp", mean, q)[..., None]
    logits = logits * query.scale
    if query.softcap is not None:
        logits = query.softcap * torch.tanh(logits / query.softcap)
    return torch.logsumexp(logits, -1).flatten(0, 1)


def combined(weights: Tensor, combine: str, units: int) -> Tensor:
    """``weights`` [heads, pages] of the heads of each of ``units``: [units, pages]."""
    if combine == "mass":
        weights = torch.exp(weights - weights.amax(-1, keepdim=True))
    grouped = weights.unflatten(0, (units, -1))
    return grouped.sum(1) if combine == "mass" else grouped.amax(1)
