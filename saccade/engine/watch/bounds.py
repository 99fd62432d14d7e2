"""PrHS's certificates of one request: for each head in a decode step the bound on its loss, and the loss
(docs/audit.md).

A certificate is computed from what the step knows without its unread keys: extremes of blocks, queries of earlier
steps, and the decay that earlier steps have shown. The step's true attention over all keys is computed beside it. For
each head a report says the largest loss that each bound allowed, the loss that there was, how often the bound said
nothing, and how often a bound that rests on an assumption did not hold.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from saccade.engine.watch.observe import AttentionCall
from saccade.engine.watch.truth import TrueRows, selected_rows, true_rows
from saccade.kv.sequence import SequenceKV
from saccade.methods.base import FreezeMethod, Method, Query
from saccade.methods.borrowed import Borrowed
from saccade.models.interface import LayerAttention
from saccade.ops.prehoc import Fit, divergence, drift, dropped_at_most, fit_changes, information_loss
from saccade.ops.reference import logits
from saccade.randomness import uniform
from saccade.selection import Selection
from saccade.selection.head_part import WHOLE, HeadPart

STEPS = 0x424F554E  # seed of draws that no token shares
SLACK = 1e-5  # of bounds, for rounding in float32
LEAST_DISTANCE = 32  # keys, of those that a decay is fitted to
NAMES = ("dropped", "information", "divergence", "sharing", "centroid", "window", "freeze", "joint")


@dataclass
class Certificate:
    """One kind of bound over (step, layer, head): ``sums`` float64 by layer, [4, heads]: of bounds, of errors, of
    steps in which the bound was vacuous, and in which it was broken. ``errs``: whether errors are known."""

    sums: dict[int, Tensor] = field(default_factory=dict)
    steps: dict[int, int] = field(default_factory=dict)
    errs: bool = True

    def add(self, layer: int, bound: Tensor, error: Tensor | None, trivial: float) -> None:
        """``bound``, ``error`` [heads] of one step; no error can be more than ``trivial``."""
        bound = bound.double().cpu()
        self.errs = self.errs and error is not None
        found = torch.zeros_like(bound) if error is None else error.double().cpu()
        vacuous, broken = bound >= trivial, found > bound * (1 + SLACK) + SLACK * trivial
        fresh = torch.stack([bound, found, vacuous.double(), broken.double()])
        self.sums[layer] = self.sums[layer] + fresh if layer in self.sums else fresh
        self.steps[layer] = self.steps.get(layer, 0) + 1

    @classmethod
    def of_heads(cls, parts: Sequence[Certificate], heads: HeadPart) -> Certificate:
        """One of the model's heads, of which ``heads`` says what each of ``parts`` has."""
        sums = {layer: heads.at(layer).join([one.sums[layer] for one in parts], 1) for layer in parts[0].sums}
        return cls(sums, parts[0].steps, all(one.errs for one in parts))

    def as_dict(self, layers: int) -> dict[str, Any] | None:
        """Plain data for JSON; None where nothing was said."""
        if not self.sums:
            return None
        pairs = sum(steps * self.sums[layer].shape[1] for layer, steps in self.steps.items())
        totals = torch.stack([one.sum(1) for one in self.sums.values()]).sum(0) / pairs
        named: dict[str, Any] = {"pairs": pairs}
        heads: dict[str, Any] = {}
        for place, name in enumerate(("bound", "error", "vacuous", "broken")):
            known = self.errs or name in ("bound", "vacuous")
            named[name] = round(float(totals[place]), 6) if known else None
            by_layer = [self._heads(layer, place) for layer in range(layers)]
            heads[name] = by_layer if known else None
        return {**named, "per_head": heads}

    def _heads(self, layer: int, place: int) -> list[float]:
        if layer not in self.sums:
            return []
        return [round(float(one), 6) for one in self.sums[layer][place] / self.steps[layer]]


@dataclass
class Bounds:
    """The certificates of one request. ``rate``: share of its decode steps that they are computed in, drawn by
    ``seed``, ``sample`` and place. ``freeze``: what froze tokens of a context of ``length``. ``joined``: asks the
    processes that share out the heads what each found, for what this one did; ``part`` says which heads they have."""

    rate: float
    seed: int
    sample: int
    layers: int
    freeze: FreezeMethod | None = None
    length: int = 0
    steps: int = 0
    left_out: int = 0  # (step, layer) whose truth could not be computed
    found: dict[str, Certificate] = field(default_factory=lambda: {name: Certificate() for name in NAMES})
    joined: Callable[[Mapping[str, Certificate]], Sequence[Mapping[str, Certificate]]] | None = None
    part: HeadPart = WHOLE
    _decay: dict[int, Tensor] = field(default_factory=dict)  # by layer, float64 [heads]: lambda as steps so far allow
    _changes: dict[int, float] = field(default_factory=dict)  # by layer: the greatest of a key from the layer before
    _ends: dict[int, int] | None = None  # by layer: behind the last token that it froze
    _fitted: tuple[int, Fit | None] = (0, None)  # to so many keys

    def draws_step(self, position: int) -> bool:
        """Whether the step of the row at ``position`` has certificates."""
        return uniform(self.seed ^ STEPS, self.sample, position) < self.rate

    def take(
        self, query: Query, used: Selection, out: Tensor, spec: LayerAttention, method: Method, kv: SequenceKV
    ) -> str | None:
        """Certify a step at ``query``'s layer, which read ``used`` by ``method``. Returns why it could not, or None: a
        certificate fails no request."""
        state = query.states[query.layer] if query.layer < len(query.states) else None
        call = AttentionCall(0, query.layer, "decode", query.q, query.kv, used, spec, out)
        try:
            self._take(query, call, method, method.borrowed(query, state), kv)
        except (ValueError, RuntimeError, IndexError) as error:
            self.left_out += 1
            return f"bounds: those of layer {query.layer} were left out: {error}"
        return None

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON, see docs/audit.md."""
        found = self.found
        if self.joined is not None:
            every = self.joined(found)
            found = {name: Certificate.of_heads([one[name] for one in every], self.part) for name in NAMES}
        certificates = {name: one.as_dict(self.layers) for name, one in found.items()}
        return {"rate": self.rate, "steps": self.steps, "left_out": self.left_out, "certificates": certificates}

    def _take(
        self, query: Query, call: AttentionCall, method: Method, borrowed: Borrowed | None, kv: SequenceKV
    ) -> None:
        n, layer = query.shape.k_len, query.layer
        self.steps += layer == 0
        parts = [_Group(query, call, true, borrowed) for true in true_rows(call)]
        dropped = torch.cat([one.unread for one in parts])
        most = torch.cat([one.unread_at_most for one in parts])
        self._say(layer, "dropped", most, dropped, 1.0)
        # The loss rises with the share up to L / (L + 1): beyond that all may be lost.
        least_known = most.clamp(max=n / (n + 1))
        lost = torch.cat([one.entropy_change for one in parts])
        self._say(layer, "information", information_loss(least_known, n), lost, math.log(n))
        self._say(layer, "divergence", divergence(most.clamp(max=1 - 2**-50)), divergence(dropped), math.log(n))
        hidden, window = self._window(query, parts)
        sharing = None
        if borrowed is not None:
            delta = torch.cat([one.delta for one in parts])
            gap = torch.cat([one.gap for one in parts])
            sharing = 2 * delta
            self._say(layer, "sharing", sharing, (gap - hidden).clamp(min=0), 1.0)
            if call.spec.sinks is None:  # weights of keys add up to 1
                moved = torch.cat([one.centroid_moves for one in parts])
                self._say(layer, "centroid", delta * (n - 1) / 2, moved, float(n - 1))
        elif method.is_dense:
            sharing, gap = torch.zeros_like(dropped), dropped
        frozen = self._frozen(query, kv)
        if sharing is not None and (borrowed is not None or window is not None or frozen is not None):
            parts_of = [one for one in (sharing, window, frozen) if one is not None]
            self._say(layer, "joint", torch.stack(parts_of).sum(0), gap if frozen is None else None, 1.0)

    def _say(self, layer: int, name: str, bound: Tensor, error: Tensor | None, trivial: float) -> None:
        self.found[name].add(layer, bound, error, trivial)

    def _window(self, query: Query, parts: Sequence[_Group]) -> tuple[Tensor, Tensor | None]:
        """PSAW: the weight that a window hides, and what it is at most by the decay of steps before, both [heads]."""
        cone, n, layer = query.window, query.shape.k_len, query.layer
        start = 0 if cone is None else cone.start(n - 1)
        if cone is None or start <= cone.sink_keys:
            return torch.zeros(query.shape.heads, dtype=torch.float64, device=query.q.device), None
        before = torch.cat([one.weights[:, cone.sink_keys : start].cumsum(1) for one in parts])
        hidden, distance = before[:, -1], n - start
        decay = self._decay.get(layer)
        bound = torch.ones_like(hidden) if decay is None else torch.exp(-decay * distance)
        self._say(layer, "window", bound, hidden, 1.0)
        # A decay that is to hold for this distance must hold for shorter ones: those are known, too.
        distances = [distance]
        while distances[-1] // 2 >= LEAST_DISTANCE:
            distances.append(distances[-1] // 2)
        tails = [torch.cat([one.weights[:, cone.sink_keys : n - at].sum(1) for one in parts]) for at in distances]
        fresh = torch.stack([-tail.clamp(1e-300, 1.0).log() / at for tail, at in zip(tails, distances)]).amin(0)
        self._decay[layer] = fresh if decay is None else torch.minimum(decay, fresh)
        return hidden, bound

    def _frozen(self, query: Query, kv: SequenceKV) -> Tensor | None:
        """ETF: at most so much weight moves [heads] where early keys are those of the layer before; None where none
        are. B and mu are fitted to the keys of later tokens, which did not freeze."""
        if self.freeze is None:
            return None
        if self._ends is None:
            first = self.freeze.first_frozen(torch.arange(self.length), self.length, self.layers)
            lasts = [(first <= layer).nonzero().flatten().tolist()[-1:] for layer in range(self.layers)]
            self._ends = {layer: last[0] + 1 for layer, last in enumerate(lasts) if last}
        if query.layer not in self._ends:
            return None
        fit = self._fit(self._ends, kv, query.shape.k_len - 1)
        bound = query.q[:, 0].double().norm(dim=-1) * query.scale * fit.at(query.layer)
        self._say(query.layer, "freeze", bound, None, 1.0)
        return bound

    def _fit(self, ends: Mapping[int, int], kv: SequenceKV, stop: int) -> Fit:
        known, fit = self._fitted
        if fit is None or known < stop:
            for layer, end in ends.items():
                first = max(known, end)
                if first < stop:
                    keys, before = (kv.view(one).keys(first, stop).float() for one in (layer, layer - 1))
                    change = float((keys - before).norm(dim=-1).amax())
                    self._changes[layer] = max(self._changes.get(layer, 0.0), change)
            fit = fit_changes([self._changes.get(layer, 0.0) for layer in ends], min(ends))
            self._fitted = stop, fit
        return fit


class _Group:
    """The heads of one KV head in one step: bounds and truths [group], float64."""

    def __init__(self, query: Query, call: AttentionCall, true: TrueRows, borrowed: Borrowed | None) -> None:
        kv_head = true.heads.start // query.shape.group
        keys = query.kv.keys(0, query.shape.k_len)[kv_head].float()
        q = query.q[true.heads, 0].float()
        mask = selected_rows(call.selection, true.heads, true.rows)[:, 0].to(keys.device)
        scores = true.scores[:, 0]
        lse = torch.logsumexp(scores.masked_fill(~mask, -torch.inf).double(), -1)
        if true.sinks is not None:
            lse = torch.logaddexp(lse, true.sinks.double())
        self.weights = true.weights()[:, 0].double()
        self.unread = (self.weights * ~mask).sum(1)
        self.unread_at_most = dropped_at_most(q, keys, mask, lse, query.scale, query.softcap)
        kept = self.weights * mask
        left = kept / kept.sum(1, keepdim=True).clamp(min=1e-300)
        self.entropy_change = (_entropy(self.weights) - _entropy(left)).abs()
        if borrowed is None:
            return
        asked = borrowed.queries[true.heads]
        self.delta = drift(q, asked, keys.norm(dim=-1).amax(), query.scale).double()
        self.gap = (self._best(borrowed) - (self.weights * mask).sum(1)).clamp(min=0)
        then = torch.softmax(logits(asked, keys, query.scale, query.softcap).double(), -1)
        places = torch.arange(len(keys), dtype=torch.float64, device=keys.device)
        self.centroid_moves = ((self.weights - then) @ places).abs()

    def _best(self, borrowed: Borrowed) -> Tensor:
        """The weight of the keys that an oracle reads, which has as many."""
        n, weights = self.weights.shape[1], self.weights
        if n <= borrowed.sinks + borrowed.keys + borrowed.local:
            return weights.sum(1)
        middle = weights[:, borrowed.sinks : n - borrowed.local]
        ends = weights.sum(1) - middle.sum(1)
        return ends + middle.topk(borrowed.keys, 1, sorted=False).values.sum(1)


def joined(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Bounds of several samples as of one: means over all pairs."""
    counts = {name: sum(one[name] for one in parts) for name in ("steps", "left_out")}
    certificates: dict[str, Any] = {}
    for name in NAMES:
        said = [one["certificates"][name] for one in parts if one["certificates"][name] is not None]
        pairs = [one["pairs"] for one in said]
        certificates[name] = {**_mean(said, pairs), "pairs": sum(pairs)} if said else None
    return {**parts[0], **counts, "certificates": certificates}


def _mean(parts: Sequence[Any], pairs: Sequence[int]) -> Any:
    """Of numbers, or number by number of what they lie in."""
    if isinstance(parts[0], Mapping):
        return {name: _mean([one[name] for one in parts], pairs) for name in parts[0]}
    if isinstance(parts[0], list):
        return [_mean(list(some), pairs) for some in zip(*parts)]
    if parts[0] is None:
        return None
    return round(sum(one * count for one, count in zip(parts, pairs)) / sum(pairs), 6)


def _entropy(weights: Tensor) -> Tensor:
    return -torch.xlogy(weights, weights).sum(-1)
