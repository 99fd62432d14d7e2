"""PrHS's a-priori certificates on a model's own decode steps, by layer: what they say, and what is true (Pre-hoc
Sparsity, Section VIII and Appendix A).

    python benchmarks/prehoc_bounds.py [--model reference] [--tokens 4096] [--steps 32] [--keys 432]

All are of attention's weights, from a dense run that an observer watches. ``SharingBound`` is CIS's: a head that reads
the k best keys of the step before loses at most 2 Delta of the weight that its own k best have. ``RecencyBound`` is
PSAW's: keys more than D back have at most e^(-lambda D) of the weight beyond the sinks. ``FreezeBound`` is ETF's: keys
that are those of the layer before move at most (Q_max / sqrt d) B e^(-mu (l - l_s)) of the weight.

A bound of 1 or more says nothing. ``broken`` is the share of steps in which the error was larger than its bound: PSAW's
decay is fitted to the first half of the steps and tried on the other.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

import torch
from torch import Tensor

from saccade import LLM, SamplingParams
from saccade.engine.observing import observing
from saccade.engine.watch.observe import AttentionCall
from saccade.engine.watch.truth import true_rows
from saccade.ops.prehoc import Fit, drift, fit_changes


@dataclass(frozen=True)
class Verdict:
    """What a certificate said of one head at ``layer`` in ``steps`` steps, and what was true: means of the ``bound``
    and of the ``error`` that it is of; the share of steps in which it was ``vacuous`` (1 or more, which every error is
    below) and in which it was ``broken``."""

    layer: int
    head: int
    steps: int
    bound: float
    error: float
    vacuous: float
    broken: float


def verdict(layer: int, head: int, bound: Tensor, error: Tensor) -> Verdict:
    """Of bounds and errors [steps]."""
    broken = error > bound * (1 + 1e-5) + 1e-5
    means = (float(part.double().mean()) for part in (bound, error, bound >= 1, broken))
    return Verdict(layer, head, bound.numel(), *means)


class SharingBound:
    """Watches decode steps. ``keys``: so many the oracle reads of a head's weights, and a sharing head of the step
    before's."""

    def __init__(self, keys: int) -> None:
        self.keys = keys
        self._before: dict[int, tuple[Tensor, Tensor]] = {}  # by layer: queries, and their best keys
        self._seen: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def __call__(self, call: AttentionCall) -> None:
        if call.phase != "decode":
            return
        weights = torch.cat([true.weights()[:, 0] for true in true_rows(call)])  # [heads, n]
        best = weights.topk(min(self.keys, weights.shape[1]), dim=1).indices
        query, before = call.q[:, 0].float(), self._before.get(call.layer)
        self._before[call.layer] = query, best
        if before is None:
            return
        shape = call.selection.shape
        longest = call.kv.keys(0, shape.k_len).float().norm(dim=-1).amax(1).repeat_interleave(shape.group)
        lost = weights.gather(1, best).sum(1) - weights.gather(1, before[1]).sum(1)
        bound = 2 * drift(query, before[0], longest, call.spec.scale)
        self._seen.setdefault(call.layer, []).append((bound.cpu(), lost.cpu()))

    def verdicts(self) -> list[Verdict]:
        """One for each layer and head."""
        found = []
        for layer, seen in sorted(self._seen.items()):
            bounds, errors = (torch.stack(part) for part in zip(*seen))
            found += [verdict(layer, head, bounds[:, head], errors[:, head]) for head in range(bounds.shape[1])]
        return found


class RecencyBound:
    """Watches decode steps. ``distances``: the D at which weights beyond them are added up; the first ``sinks`` keys do
    not count."""

    def __init__(self, distances: Sequence[int], sinks: int = 16) -> None:
        self.distances, self.sinks = list(distances), sinks
        self._seen: dict[int, list[Tensor]] = {}

    def __call__(self, call: AttentionCall) -> None:
        if call.phase != "decode":
            return
        weights = torch.cat([true.weights()[:, 0] for true in true_rows(call)])[:, self.sinks :].double()
        n = weights.shape[1]
        beyond = [weights[:, : max(0, n - distance)].sum(1) for distance in self.distances]
        self._seen.setdefault(call.layer, []).append(torch.stack(beyond, 1).cpu())

    def verdicts(self) -> list[tuple[float, Verdict]]:
        """For each layer and head: the decay lambda that the first half of the steps allow, the largest for which the
        bound holds in all of them, and what it said in the others, over all distances."""
        found = []
        distances = torch.tensor(self.distances, dtype=torch.float64)
        for layer, seen in sorted(self._seen.items()):
            mass = torch.stack(seen)  # [steps, heads, distances]
            half = mass.shape[0] // 2
            for head in range(mass.shape[1]):
                worst = mass[:half, head].amax(0).clamp(1e-12, 1.0)
                decay = float((-worst.log() / distances).amin())
                bound = torch.exp(-decay * distances).expand(mass.shape[0] - half, -1)
                one = verdict(layer, head, bound.flatten(), mass[half:, head].flatten())
                found.append((decay, one))
        return found


class FreezeBound:
    """Watches decode steps: what if the keys of the first ``share`` of the context were, from layer ``start`` on, those
    of the layer before?"""

    def __init__(self, start: int, share: float = 0.5) -> None:
        self.start, self.share = start, share
        self._keys: Tensor | None = None
        self._changes: dict[int, float] = {}
        self._seen: dict[int, list[tuple[Tensor, Tensor]]] = {}  # by layer: |q| scale, and the weight that moves

    def __call__(self, call: AttentionCall) -> None:
        if call.phase != "decode":
            return
        shape = call.selection.shape
        keys = call.kv.keys(0, shape.k_len).float()
        before, self._keys = self._keys, keys
        if call.layer < max(1, self.start) or before is None:
            return
        frozen = int(self.share * shape.k_len)
        change = (keys - before)[:, :frozen].norm(dim=-1).amax()
        self._changes[call.layer] = max(self._changes.get(call.layer, 0.0), float(change))
        mixed = torch.cat([before[:, :frozen], keys[:, frozen:]], 1)
        query = call.q[:, 0].float().unflatten(0, (shape.kv_heads, -1)) * call.spec.scale
        moved = (torch.softmax(query @ keys.mT, -1) - torch.softmax(query @ mixed.mT, -1)).abs().sum(-1) / 2
        self._seen.setdefault(call.layer, []).append((query.norm(dim=-1).flatten().cpu(), moved.flatten().cpu()))

    def verdicts(self) -> tuple[Fit, list[Verdict]]:
        """The fit to all layers, and one verdict for each layer and head."""
        layers = sorted(self._changes)
        fit = fit_changes([self._changes[layer] for layer in layers], layers[0])
        found = []
        for layer in layers:
            lengths, moved = (torch.stack(part) for part in zip(*self._seen[layer]))
            for head in range(lengths.shape[1]):
                bound = lengths[:, head].amax() * fit.at(layer) * torch.ones(len(lengths))
                found.append(verdict(layer, head, bound, moved[:, head]))
        return fit, found


def show(title: str, verdicts: Iterable[Verdict]) -> None:
    print(title)
    layers: dict[int, list[Verdict]] = {}
    for one in verdicts:
        layers.setdefault(one.layer, []).append(one)
    for layer, heads in sorted(layers.items()):
        bound, error, vacuous, broken = (
            fmean(getattr(one, name) for one in heads) for name in ("bound", "error", "vacuous", "broken")
        )
        print(
            f"  layer {layer:2}: mean bound {bound:10.4g}, error {error:.4f}; vacuous in {100 * vacuous:5.1f} % of the "
            f"steps and heads, broken in {100 * broken:.1f} %"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="reference")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--keys", type=int, default=432, help="of the oracle that CIS is held to")
    given = parser.parse_args()
    llm = LLM(given.model, dtype="float32", max_model_len=given.tokens + given.steps + 2, enable_prefix_caching=False)
    vocabulary = llm.model.spec.vocab_size
    ids = torch.randint(vocabulary // 2, (given.tokens,), generator=torch.Generator().manual_seed(0)).tolist()
    distances = [2**power for power in range(5, 20) if 2**power < given.tokens]
    sharing, recency = SharingBound(given.keys), RecencyBound(distances)
    freeze = FreezeBound(3 * llm.model.spec.layers // 4)

    def look(call) -> None:
        for one in (sharing, recency, freeze):
            one(call)

    with observing(llm.engine, look):
        llm.generate(ids, SamplingParams(temperature=0, max_tokens=given.steps + 1, ignore_eos=True))
    show(f"CIS: weight lost by the {given.keys} best keys of the step before", sharing.verdicts())
    decays = recency.verdicts()
    show("PSAW: weight beyond a distance, of 32 and more", (one for _, one in decays))
    print(f"  decay lambda of heads: {min(d for d, _ in decays):.2g} to {max(d for d, _ in decays):.2g} a token")
    fit, verdicts = freeze.verdicts()
    show("ETF: weight moved by half the keys as the layer before had them", verdicts)
    print(f"  keys change by at most {fit.most:.3g} e^(-{fit.mu:.3g} (l - {fit.start}))")


if __name__ == "__main__":
    main()
