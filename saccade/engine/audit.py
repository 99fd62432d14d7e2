"""Audits: a random share of what a request's decode steps did, held against true attention.

Of the places (step, layer, KV head) each is drawn with probability ``rate``, by draws that hang on the request's seed
and the place alone. For a place that is drawn the attention of the group's query heads over all stored keys is computed
beside the step, from the same query, keys and values. The heads of a group read the same keys, so they are one
observation: their mean. The estimates are of the mean over all places.
"""

from __future__ import annotations

import math
import threading
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
PART = 4096  # keys turned to float32 at once: they stay in a core's cache
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
    count = kv.length - start + skip
    places = slots * own.format.kv_heads + kv_head  # of single heads' parts of blocks
    keys, values = own.k.flatten(0, 1), own.v.flatten(0, 1)
    group, width = query.shape
    rows = _room("rows", (step, size, width), own.k)
    exact = _room("exact", (step * size, width), query)
    scores = _room("scores", (group, len(places) * size), query)
    for at, chosen in zip(range(0, len(places) * size, step * size), places.split(step)):
        part = exact[: len(chosen) * size]
        part.copy_(torch.index_select(keys, 0, chosen, out=rows[: len(chosen)]).flatten(0, 1))
        scores[:, at : at + len(part)] = query @ part.T
    scores = scores[:, :count]
    if spec.softcap is not None:
        scores.div_(spec.softcap).tanh_().mul_(spec.softcap)
    scores[:, :skip] = -torch.inf
    lse = torch.logsumexp(scores, -1)
    total = lse
    if spec.sinks is not None:
        total = torch.logaddexp(lse, spec.sinks[heads].to(lse.dtype))
    weights = scores.sub_(total[:, None]).exp_()
    out, scale = torch.zeros_like(query), torch.zeros_like(lse)
    ones = query.new_ones(width)
    for chosen, weight in zip(places.split(step), weights.split(step * size, 1)):
        part = exact[: weight.shape[1]]
        part.copy_(torch.index_select(values, 0, chosen, out=rows[: len(chosen)]).flatten(0, 1)[: len(part)])
        out += weight @ part
        scale += weight @ torch.mv(part.square_(), ones).sqrt_()  # a product is faster than a norm
    return Truth(out, lse, scale)


_rooms = threading.local()


def _room(name: str, shape: tuple[int, ...], like: Tensor) -> Tensor:
    """A tensor to write to, kept for the next call: fresh memory costs more than what is done in it."""
    if like.is_cuda:  # whose allocator keeps memory itself
        return like.new_empty(shape)
    held: dict[Any, Tensor] = _rooms.__dict__.setdefault("held", {})
    count, key = math.prod(shape), (name, like.dtype)
    if key not in held or held[key].numel() < count:
        with torch.inference_mode(False):  # in which it may be written to later, too
            held[key] = torch.empty(max(count, 2 * held[key].numel() if key in held else 0), dtype=like.dtype)
    return held[key][:count].view(shape)
