"""PrHS's a-priori certificates on a model's own decode steps, by layer: what they say, and what is true.

    python benchmarks/prehoc_bounds.py [--model reference] [--tokens 4096] [--steps 32] [--keys 432]

A bound of 1 or more says nothing. ``broken`` is the share of steps in which the error was larger than its bound: PSAW's
decay is fitted to the first half of the steps and tried on the other.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from statistics import fmean

import torch

from saccade import LLM, SamplingParams
from saccade.engine.observe import observing
from saccade.eval.prehoc import FreezeBound, RecencyBound, SharingBound, Verdict


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
    llm = LLM(given.model, dtype="float32", max_model_len=given.tokens + given.steps + 2)
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
