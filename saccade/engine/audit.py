"""Audits: a random share of what a request's decode steps did, held against true attention.

Of the places (step, layer, KV head) each is drawn with probability ``rate``, by draws that hang on the request's seed
and the place alone. For a place that is drawn the attention of the group's query heads over all stored keys is computed
beside the step, from the same query, keys and values. The heads of a group read the same keys, so they are one
observation: their mean. The estimates are of the mean over all places.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from saccade.engine.estimates import CONFIDENCE, Mean, Share
from saccade.engine.params import SamplingParams
from saccade.errors import SaccadeError
from saccade.kv.view import KVView
from saccade.models.interface import LayerAttention
from saccade.randomness import uniform

HEADS, STEPS = 0x41554449, 0x5245504C  # seeds of draws that no token shares
PART = 2048  # keys turned to float32 at once: they stay in a core's cache
DEVICE_PART = 65536
WAITING = 256  # observations that may lie on a device before they are fetched
STEPS_FOR_TARGET = 0.05  # of steps replayed for a target, where nothing else is said


@dataclass(frozen=True)
class AuditOptions:
    """``rate``: the share of (step, layer, KV head) that is audited. ``steps``: the share of decode steps that are
    replayed densely. ``target``: the agreement with dense to hold, or None."""

    rate: float = 0.0
    steps: float = 0.0
    target: float | None = None

    @classmethod
    def of(cls, params: SamplingParams, default: AuditOptions) -> AuditOptions | None:
        """What a request asks for, where it is silent the engine's default; None where nothing is to be done."""
        rate = default.rate if params.audit is None else params.audit
        target = default.target if params.target is None else params.target
        steps = params.audit_steps
        if steps is None:
            steps = default.steps or (0.0 if target is None else STEPS_FOR_TARGET)
        return cls(rate, steps, target) if rate or steps else None


class Truth(NamedTuple):
    """True attention of one group's query heads: ``out`` fp32 [group, head_dim], ``lse`` fp32 [group] over keys alone,
    ``scale`` fp32 [group] the sum of weight times the value's norm."""

    out: Tensor
    lse: Tensor
    scale: Tensor


@dataclass
class Audit:
    """One request's audit, and what it found so far."""

    options: AuditOptions
    seed: int
    sample: int = 0
    places: int = 0  # that might have been drawn
    steps: int = 0  # likewise
    mass: Mean = field(default_factory=Mean)
    error: Mean = field(default_factory=Mean)
    scaled: Mean = field(default_factory=Mean)
    agreement: Share = field(default_factory=Share)
    divergence: Mean = field(default_factory=Mean)
    controlled: Any = None  # what says where a target's dial stands
    _waiting: list[Tensor] = field(default_factory=list)

    def draw(self, position: int, layers: int, kv_heads: int) -> dict[int, list[int]]:
        """The KV heads drawn for the step of the row at ``position``, by layer."""
        count, rate = layers * kv_heads, self.options.rate
        self.places += count
        drawn: dict[int, list[int]] = {}
        place, number = -1, 0
        while rate > 0:
            if rate < 1:  # how many places are passed over follows a geometric law
                chance = uniform(self.seed ^ HEADS, self.sample + (number << 32), position)
                place += int(min(count, math.log1p(-chance) / math.log1p(-rate)))
            place, number = place + 1, number + 1
            if place >= count:
                break
            drawn.setdefault(place // kv_heads, []).append(place % kv_heads)
        return drawn

    def draws_step(self, position: int) -> bool:
        """Whether the step of the row at ``position`` is replayed."""
        return uniform(self.seed ^ STEPS, self.sample, position) < self.options.steps

    def observe(self, q: Tensor, out: Tensor, lse: Tensor | None, truth: Truth) -> None:
        """One group: ``q``, ``out`` [group, head_dim] of the step, ``lse`` [group] over the keys that it read, None
        where something stands for those that it did not."""
        off = (out.float() - truth.out).norm(dim=-1)
        tiny = torch.finfo(torch.float32).tiny
        error, scaled = off / truth.out.norm(dim=-1).clamp(min=tiny), off / truth.scale.clamp(min=tiny)
        mass = torch.full_like(error, -1.0) if lse is None else torch.exp(lse.float() - truth.lse).clamp(max=1.0)
        values = torch.stack([mass, error.clamp(max=1.0), scaled.clamp(max=1.0)]).mean(1)
        self._waiting.append(values)
        if not values.is_cuda or len(self._waiting) >= WAITING:
            self.settle()

    def settle(self) -> None:
        """Count what still lies on a device."""
        if not self._waiting:
            return
        for mass, error, scaled in torch.stack(self._waiting).tolist():
            if mass >= 0:
                self.mass.add(mass)
            self.error.add(error)
            self.scaled.add(scaled)
        self._waiting = []

    def compare(self, sparse: Tensor, dense: Tensor) -> bool:
        """One step's logits [vocab] and those of its dense replay: whether the likeliest token is the same."""
        agrees = int(sparse.argmax()) == int(dense.argmax())
        self.agreement.add(agrees)
        p, q = torch.log_softmax(dense.double(), -1), torch.log_softmax(sparse.double(), -1)
        known = p > -torch.inf
        self.divergence.add(float((p.exp() * (p - q))[known].sum()))
        return agrees

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON, see docs/audit.md."""
        self.settle()
        return {
            "rate": self.options.rate,
            "steps_rate": self.options.steps,
            "confidence": CONFIDENCE,
            "places": self.places,
            "retained_mass": self.mass.as_dict(),
            "output_error": self.error.as_dict(),
            "output_error_scaled": self.scaled.as_dict(),
            "steps": self.steps,
            "agreement": self.agreement.as_dict(),
            "divergence": self.divergence.as_dict(),
            "target": None if self.controlled is None else self.controlled.as_dict(),
        }


@dataclass(frozen=True)
class RowAudit:
    """What of one decode row is audited: KV heads by layer. ``whole``: whether the lse of its attention is over the
    keys that it reads and nothing else."""

    audit: Audit
    drawn: Mapping[int, list[int]]
    whole: bool

    def take(self, layer: int, q: Tensor, out: Tensor, lse: Tensor, kv: KVView, spec: LayerAttention) -> str | None:
        """Audit a row at ``layer``: ``q``, ``out`` [heads, head_dim], ``lse`` [heads] of the keys that it read. ``kv``
        ends with its own key. Returns why something could not be audited, or None: an audit fails no request."""
        for kv_head in self.drawn.get(layer, ()):
            group = q.shape[0] // kv.kv_heads
            heads = slice(kv_head * group, (kv_head + 1) * group)
            try:
                truth = true_attention(q[heads], kv, kv_head, spec, heads)
                self.audit.observe(q[heads], out[heads], lse[heads] if self.whole else None, truth)
            except (SaccadeError, ValueError, RuntimeError) as error:
                return f"audit: a sample of layer {layer} was left out: {error}"
        return None


def true_attention(q: Tensor, kv: KVView, kv_head: int, spec: LayerAttention, heads: slice) -> Truth:
    """Attention in float32 of one row's query heads ``q`` [group, head_dim] (``heads`` of the layer's) over all keys of
    their KV head, within the layer's own window and with its sink logits."""
    own = kv.paged()
    start = 0 if spec.window is None else max(0, kv.length - spec.window)
    size = own.format.block_size
    table = own.block_table[0 if own.block_table.shape[0] == 1 else kv_head]
    slots = table[start // size : own.format.blocks(kv.length)].long()
    if not q.is_cuda and bool((slots < 0).any()):
        raise SaccadeError("some of its keys are in a tier")
    query, skip = q.float() * spec.scale, start % size
    step = (DEVICE_PART if q.is_cuda else PART) // size
    keys, values = own.k[:, kv_head], own.v[:, kv_head]
    count = kv.length - start + skip
    parts = []
    for at, chosen in enumerate(slots.split(step)):
        score = query @ keys.index_select(0, chosen).flatten(0, 1).float().T
        score = score[:, : count - at * step * size]
        parts.append(score if spec.softcap is None else spec.softcap * torch.tanh(score / spec.softcap))
    scores = torch.cat(parts, 1)
    scores[:, :skip] = -torch.inf
    lse = torch.logsumexp(scores, -1)
    total = lse
    if spec.sinks is not None:
        total = torch.logaddexp(lse, spec.sinks[heads].to(lse.dtype))
    weights = torch.exp(scores - total[:, None])
    out, scale = torch.zeros_like(query), torch.zeros_like(lse)
    for chosen, weight in zip(slots.split(step), weights.split(step * size, 1)):
        value = values.index_select(0, chosen).flatten(0, 1)[: weight.shape[1]].float()
        if skip:  # what lies before a window may be anything
            value = torch.where((weight > 0).any(0)[:, None], value, 0.0)
        out += weight @ value
        scale += weight @ value.norm(dim=-1)
    return Truth(out, lse, scale)
