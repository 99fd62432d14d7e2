"""Audits: a random share of what a request's decode steps did, held against true attention.

Of the places (step, layer, KV head) each is drawn with probability ``rate``, by draws that hang on the request's seed
and the place alone. For a place that is drawn the attention of the group's query heads over all stored keys is computed
beside the step, from the same query, keys and values. The heads of a group read the same keys, so they are one
observation: their mean. The estimates are of the mean over all places.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from saccade.copied import Copied
from saccade.engine.sampling.params import SamplingParams
from saccade.engine.watch.contradiction import Contradiction, contradiction
from saccade.engine.watch.estimates import CONFIDENCE, Mean, Share, departures
from saccade.engine.watch.layer_stats import LayerStats
from saccade.errors import SaccadeError
from saccade.kv.view import KVView
from saccade.models.interface import LayerAttention
from saccade.ops.truth import Truth, group_truth
from saccade.randomness import uniform
from saccade.selection.head_part import WHOLE as ALL_HEADS
from saccade.selection.head_part import HeadPart

HEADS, STEPS = 0x41554449, 0x5245504C  # seeds of draws that no token shares
TOGETHER = 16  # places of several steps that are drawn at once, about: few draws a step are what they cost
WAITING = 256  # observations that may lie on a device before they are fetched
RAREST = 1e-300  # of rates: a quotient by a lower one is no number any more
LONGEST = 2.0**40  # steps that are drawn for together
Place = tuple[int, int]  # layer, KV head
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


@dataclass
class Audit:
    """One request's audit, and what it found so far."""

    options: AuditOptions
    seed: int
    sample: int = 0
    places: int = 0  # that might have been drawn
    left_out: int = 0  # of the drawn ones, those that could not be audited
    steps: int = 0  # that might have been drawn
    mass: Mean = field(default_factory=Mean)
    masses: dict[Place, Mean] = field(default_factory=dict)  # the same by place
    error: Mean = field(default_factory=Mean)
    scaled: Mean = field(default_factory=Mean)
    agreement: Share = field(default_factory=Share)
    divergence: Mean = field(default_factory=Mean)
    controlled: Any = None  # what says where a target's dial stands
    elsewhere: Callable[[], Sequence[Findings]] | None = None  # what other processes found: set while that may be new
    _waiting: list[tuple[Tensor, bool, Sequence[Place]]] = field(default_factory=list)
    _held: int = 0  # observations that wait
    _coming: tuple[Copied, list[tuple[bool, Place]]] | None = None  # those on their way from a device
    _heads: int = 1  # KV heads of a layer
    _rows: int = 0  # that might have been drawn from
    _window: tuple[int, int, int] | None = None  # the steps drawn for last
    _drawn: dict[int, dict[int, list[int]]] = field(default_factory=dict)  # in them

    def draw(self, position: int, layers: int, kv_heads: int) -> dict[int, list[int]]:
        """The KV heads drawn for the step of the row at ``position``, by layer."""
        count, rate = layers * kv_heads, self.options.rate
        self.places += count
        self._heads, self._rows = kv_heads, self._rows + 1
        if rate <= 0:
            return {}
        steps = 1 << int(math.log2(min(max(1.0, TOGETHER / max(rate * count, RAREST)), LONGEST)))
        window, step = divmod(position, steps)
        if self._window != (window, layers, kv_heads):
            self._window, self._drawn = (window, layers, kv_heads), self._draw(window, steps * count, count, kv_heads)
        return self._drawn.get(step, {})

    def _draw(self, window: int, places: int, count: int, kv_heads: int) -> dict[int, dict[int, list[int]]]:
        """The KV heads drawn in a stretch of ``places``, ``count`` a step, by step and layer."""
        drawn: dict[int, dict[int, list[int]]] = {}
        rate, place, number = self.options.rate, -1, 0
        while True:
            if rate < 1:  # how many places are passed over follows a geometric law
                chance = uniform(self.seed ^ HEADS, self.sample + (number << 32), window)
                place += int(min(places, math.log1p(-chance) / math.log1p(-rate)))
            place, number = place + 1, number + 1
            if place >= places:
                return drawn
            step, head = divmod(place, count)
            drawn.setdefault(step, {}).setdefault(head // kv_heads, []).append(head % kv_heads)

    def chance(self, position: int) -> float:
        """The draw of the step of the row at ``position``: it is replayed where that is below a request's ``steps``."""
        return uniform(self.seed ^ STEPS, self.sample, position)

    def observe(self, out: Tensor, lse: Tensor, truth: Truth, whole: bool, place: Place) -> None:
        """The group of ``place``: ``out`` [group, head_dim] of the step, ``lse`` [group] over the keys that it read;
        not ``whole`` where something stands for those that it did not."""
        off = (out.float() - truth.out).norm(dim=-1)
        tiny = torch.finfo(torch.float32).tiny
        error, scaled = off / truth.out.norm(dim=-1).clamp(min=tiny), off / truth.scale.clamp(min=tiny)
        mass = torch.exp(lse.float() - truth.lse)
        self.found(torch.stack([mass, error, scaled]).clamp(max=1.0).mean(1)[None], whole, [place])

    def found(self, values: Tensor, whole: bool, places: Sequence[Place]) -> None:
        """``values`` fp32 [n, 3] of the groups of n ``places``: retained mass (where ``whole``), error and scaled
        error."""
        self._waiting.append((values, whole, places))
        self._held += len(values)
        if not values.is_cuda or self._held >= WAITING:
            self._send()
        if not values.is_cuda:
            self._count()

    def settle(self) -> None:
        """Count what still lies on a device, and what others have found."""
        ask, self.elsewhere = self.elsewhere, None
        for findings in () if ask is None else ask():
            self.left_out += findings.left_out
            for found in findings.found:
                self.found(*found)
        if self._waiting:
            self._send()
        self._count()

    def _send(self) -> None:
        """Have what waits brought to the host, and count what came before: nothing waits for steps that still run."""
        self._count()
        waiting, self._waiting, self._held = self._waiting, [], 0
        known = [(whole, place) for _, whole, places in waiting for place in places]
        self._coming = Copied(torch.cat([values for values, _, _ in waiting])), known

    def _count(self) -> None:
        coming, self._coming = self._coming, None
        if coming is None:
            return
        copied, known = coming
        for (mass, error, scaled), (knows, place) in zip(copied.wait(), known):
            if math.isnan(error + scaled) or (knows and math.isnan(mass)):  # of numbers that are not finite
                self.left_out += 1
                continue
            if knows:
                self.mass.add(mass)
                self.masses.setdefault(place, Mean()).add(mass)
            self.error.add(error)
            self.scaled.add(scaled)

    def compare(self, sparse: Tensor, dense: Tensor) -> bool:
        """One step's logits [vocab] and those of its dense replay: whether the likeliest token is the same."""
        agrees, divergence = departures(sparse[None], dense[None])[0].tolist()
        return self.replayed(bool(agrees), divergence)

    def replayed(self, agrees: bool, divergence: float) -> bool:
        """Count one step beside its dense replay (``departures``)."""
        self.agreement.add(agrees)
        self.divergence.add(divergence)
        return agrees

    def contradiction(self, layers: Sequence[LayerStats]) -> Contradiction | None:
        """What of the estimates that stopping rules made in ``layers`` the true weights contradict."""
        self.settle()
        return contradiction(self.masses, layers, self._heads, self._rows, not self.left_out)

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON, see docs/audit.md."""
        self.settle()
        return {
            "rate": self.options.rate,
            "steps_rate": self.options.steps,
            "confidence": CONFIDENCE,
            "places": self.places,
            "left_out": self.left_out,
            "retained_mass": self.mass.as_dict(),
            "output_error": self.error.as_dict(),
            "output_error_scaled": self.scaled.as_dict(),
            "steps": self.steps,
            "agreement": self.agreement.as_dict(),
            "divergence": self.divergence.as_dict(),
            "target": None if self.controlled is None else self.controlled.as_dict(),
        }


class Findings(NamedTuple):
    """What a process found of a request's places, as of ``Audit.found``; and how many it left out."""

    found: list[tuple[Tensor, bool, Sequence[Place]]]
    left_out: int


@dataclass
class HeadsAudit(Audit):
    """Of a process that audits its own heads for another's ``Audit``: it keeps what it finds until it is asked."""

    noted: list[tuple[Tensor, bool, Sequence[Place]]] = field(default_factory=list)  # on the host
    _fresh: list[tuple[Tensor, bool, Sequence[Place]]] = field(default_factory=list)

    def found(self, values: Tensor, whole: bool, places: Sequence[Place]) -> None:
        """See :class:`Audit`. What has gathered on a device is brought here now and then."""
        self._fresh.append((values, whole, places))
        self._held += len(values)
        if self._held >= WAITING:
            self._rest()

    def take(self) -> Findings:
        """What was found since the last time."""
        self._rest()
        told, self.noted, self.left_out = Findings(self.noted, self.left_out), [], 0
        return told

    def _rest(self) -> None:
        """Hold nothing on a device, and what is alike in one piece."""
        made: dict[tuple[bool, torch.device], tuple[list[Tensor], list[Place]]] = {}
        for values, whole, places in self._fresh:
            tensors, known = made.setdefault((whole, values.device), ([], []))
            tensors.append(values)
            known.extend(places)
        self.noted += [(torch.cat(tensors).cpu(), whole, known) for (whole, _), (tensors, known) in made.items()]
        self._fresh, self._held = [], 0


@dataclass(frozen=True)
class RowAudit:
    """What of one decode row is audited: KV heads by layer. ``whole``: whether the lse of its attention is over the
    keys that it reads and nothing else. ``part``: of the layers' KV heads, where processes share them
    out; heads of others are theirs to audit."""

    audit: Audit
    drawn: Mapping[int, list[int]]
    whole: bool
    part: HeadPart = ALL_HEADS

    def own(self, layer: int, kv_heads: int) -> list[Place]:
        """What is drawn of the ``kv_heads`` KV heads of ``layer`` that are at hand: their numbers in the model, and
        here."""
        here = {number: kv_head for kv_head, number in enumerate(self.part.at(layer).units(kv_heads))}
        return [(number, here[number]) for number in self.drawn.get(layer, ()) if number in here]

    def take(
        self,
        layer: int,
        q: Tensor,
        out: Tensor,
        lse: Tensor,
        kv: KVView,
        spec: LayerAttention,
        threads: int | None = None,
    ) -> str | None:
        """Audit a row at ``layer``: ``q``, ``out`` [heads, head_dim], ``lse`` [heads] of the keys that it read. ``kv``
        ends with its own key. Returns why something could not be audited, or None: an audit fails no request."""
        asked: dict[str, Any] = {"scale": spec.scale, "softcap": spec.softcap, "window": spec.window}
        group = q.shape[0] // kv.kv_heads
        for number, kv_head in self.own(layer, kv.kv_heads):
            heads = slice(kv_head * group, (kv_head + 1) * group)
            try:
                truth = group_truth(q, kv, kv_head, **asked, threads=threads)
                if spec.sinks is not None:
                    truth = truth.with_sinks(spec.sinks[heads])
                truth = truth._replace(out=truth.out[:, : kv.format.value_dim])  # behind those nothing is meant
                own = out[heads, : kv.format.value_dim]
                self.audit.observe(own, lse[heads], truth, self.whole, (layer, number))
            except (SaccadeError, ValueError, RuntimeError) as error:
                self.audit.left_out += 1
                return f"audit: a sample of layer {layer} was left out: {error}"
        return None
