"""What paper_figures.py measures, a layer of a captured run at a time: values by figure and line, one tensor a call."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace

import paper_stats as stats
import torch
from paper_captures import Captured, Layer, Step, decoded, prompt_chunk
from paper_lfps import LETTER, SHARE, Found, overlap, resting, tables
from paper_prefill import loopserve, prefill
from torch import Tensor
from torch.nn.functional import cosine_similarity

from saccade.kv.view import KVView
from saccade.methods.cis import CIS
from saccade.methods.eviction import AdaKV, SnapKV
from saccade.methods.policy import parse_method
from saccade.methods.quest import Quest
from saccade.methods.streaming import Streaming
from saccade_contrib.double_sparsity import DoubleSparsity
from saccade_contrib.h2o import H2O
from saccade_contrib.hshare import HShare

ALIKE = 0.8
SHARING = [(anchors, s) for anchors in ("retrieved", "any") for s in (8, 16, 20, 32)]


def methods(budget: int) -> dict[str, str]:
    """Decode methods by what they are called in the tables; those with a budget read ``budget`` keys in all, CIS and
    HShare with the paper's parts of it: 16 first, 64 last and 432 others of 512. They choose for each query head where
    they can: ArkVale, LoopServe and those without a budget choose as they do by default."""
    sinks, local = budget // 32, budget // 8
    rest = budget - sinks - local
    ends = f"sinks={sinks}, local={local}"
    every = "hshare(source=exact, head_share=1.0, layer_share=1.0, unit=q_head, heavy={rest}, {ends}, every={n})"
    cis = f"cis(k={rest}, {ends}, follow=none"
    return {
        "top-k oracle": f"topk(k={budget}, unit=q_head)",
        "CIS, r=1": f"{cis})",
        "CIS, r=0": f"{cis}, r=0)",
        "CIS, anchors=any": f"{cis}, anchors=any)",
        "CIS, tau=0.6": f"{cis}, tau=0.6)",
        "CIS, follow=2 (default)": f"cis(k={rest}, {ends})",
        **{f"shared for {n} steps": every.format(rest=rest, ends=ends, n=n) for n in (2, 4, 8)},
        "HShare 3/4-1-1/2": every.format(rest=rest, ends=ends, n=2).replace("head_share=1.0", "head_share=0.75"),
        "Quest": f"quest(budget={budget}, dense_layers=0, unit=q_head)",
        "ArkVale": f"arkvale(budget={budget})",
        "Double Sparsity": f"double_sparsity(k={budget}, source=prompt, dense_layers=0, unit=q_head)",
        "SnapKV": f"snapkv(capacity={budget}, window={local}, unit=q_head)",
        "Ada-KV": f"adakv(capacity={budget}, window={local}, unit=q_head)",
        "H2O": f"h2o(budget={budget}, unit=q_head)",
        "StreamingLLM": f"streaming(sinks={sinks}, window={budget - sinks})",
        "LoopServe": f"loopserve(budget={budget})",
        "LFPS to the letter": re.sub(r"\(", f"(k={budget}, ", LETTER, count=1),
        "LFPS": f"lfps(k={budget})",
        "RocketKV": f"rocketkv(budget={budget})",
        "MagicPIG": "magicpig",
        "PSA": "psa",
        "Twilight": "twilight(dense_layers=0)",
        "vAttention": "vattention",
        "top-p 0.95": "topp(p=0.95)",
        "random keys": f"random(k={budget})",
    }


def attention(run: Captured, layer: Layer, found: Found) -> None:
    """LFPS, Fig. 2, Table 3 and Fig. 6 to 8; PrHS, Fig. 2 and 4; how queries turn."""
    weights = layer.weights(run.steps)
    count = max(1, round(SHARE * run.context))
    sets = stats.heaviest(weights, count)
    for back, name in ((1, "one step before"), (16, "16 steps before")):
        wanted, seen = sets[:, back:], run.steps[back:] + 1
        position, distance = stats.history(sets, back)
        for what, given in (
            ("by position", position),
            ("by distance", distance),
            ("position or distance", position | distance),
            ("position or distance, with neighbours", stats.spread(position | distance, stats.NEIGHBOURS)),
        ):
            found["LFPS Fig. 2a", f"{name}, {what}"].append(stats.held(wanted, given))
            if what.startswith("position"):
                found["LFPS Fig. 2a", f"{name}, {what}: share of the keys"].append(given.sum(-1) / seen)
    found["LFPS Fig. 2b", "heaviest 2 %: within 2 of another"].append(stats.near(sets, 2))
    wide = stats.heaviest(weights, max(1, round(0.05 * run.context)))
    found["LFPS Fig. 6", "heaviest 5 %: within 2 of another"].append(stats.near(wide, 2))
    resting(run, layer, weights, sets, found)
    q = layer.q[:, run.steps]
    cosines = cosine_similarity(q[:, 1:], q[:, :-1], dim=-1)
    found["PrHS CIS", "cosine of neighbouring queries"].append(cosines)
    found["PrHS CIS", "neighbours with a cosine above 0.8"].append((cosines > ALIKE).double())
    clusters(weights, cosines > ALIKE, found)


def clusters(weights: Tensor, alike: Tensor, found: Found) -> None:
    """PrHS, Fig. 2 and 4: of neighbours whose queries are ``alike`` [heads, steps - 1]."""
    sets = stats.heaviest(weights, 64)
    met = stats.clusters_met(sets[:, :-1], sets[:, 1:], 2)
    found["PrHS Fig. 2", "best 64 keys that the step before had"].append(stats.held(sets[:, 1:], sets[:, :-1])[alike])
    found["PrHS Fig. 2", "clusters that meet one of the step before"].append(met[alike])
    best = stats.heaviest(weights, 128)
    third = stats.heaviest(weights, 128 // 3)
    for ago in (1, 2):
        pairs = alike if ago == 1 else alike[:, :-1] & alike[:, 1:]
        wanted = best[:, ago:]
        for name, given in (
            ("shared as they are", best),
            ("the best third dilated by 1", best | stats.spread(third, (-1, 1))),
            ("all dilated by 1", stats.spread(best, (-1, 1))),
            ("all dilated by 2", stats.spread(best, (-2, -1, 1, 2))),
        ):
            given = given[:, :-ago]
            found["PrHS Fig. 4", f"best 128 keys, {ago} step back, {name}"].append(stats.held(wanted, given)[pairs])
            if ago == 1:
                size = given.sum(-1).double() / best.sum(-1)[:, :-1]
                found["PrHS Fig. 4", f"size of the set, {name}"].append(size[pairs])


def sharing(run: Captured, layer: Layer, found: Found) -> None:
    """CIS's share of searches by block size, at tau 0.8 (Table VI)."""
    for anchors, s in SHARING:
        method = CIS(k=16, sinks=0, local=1, r=0, m=0, follow=None, s=s, anchors=anchors)
        searches = [step.query.cost.searches or 0 for step in decoded(run, layer, method)]
        found["PrHS Table VI", f"search ratio, anchors={anchors}, s={s}"].append(
            torch.tensor(searches).double() / len(layer.q)
        )


def dilation(run: Captured, layer: Layer, found: Found, budget: int) -> None:
    """PrHS, Fig. 8: what sets that are shared hold, by the number ``m`` of keys that are dilated."""
    weights = layer.weights(run.steps)
    sinks, local = budget // 32, budget // 8
    k = budget - sinks - local
    for m in (0, k // 8, k // 4, k // 3, k // 2, k):
        method = CIS(k=k, sinks=sinks, local=local, m=m, follow=None)
        for at, step in enumerate(decoded(run, layer, method)):
            fresh = step.state.fresh
            shared = torch.ones(len(layer.q), dtype=torch.bool) if fresh is None else ~fresh
            if at == 0 or not bool(shared.any()):
                continue
            read, best = step.mask()[shared], stats.heaviest(weights[shared, at, : step.row + 1], budget)
            found["PrHS Fig. 8", f"budget {budget}, m = {m / k:.2f} k: among the best"].append((read & best).sum(-1))
            found["PrHS Fig. 8", f"budget {budget}, m = {m / k:.2f} k: others"].append((read & ~best).sum(-1))


def errors(run: Captured, layer: Layer, found: Found, budget: int) -> None:
    """PrHS, Fig. 1, and eq. 8 with P1, P2 and QAA, of every decode method."""
    weights = layer.weights(run.steps)
    true, best = layer.outputs(weights), stats.best_masses(weights)
    for name, text in methods(budget).items():
        surrogate = surrogate_of(parse_method(text), layer, run)
        for at, step in enumerate(decoded(run, layer, parse_method(text))):
            own, read = weights[:, at, : step.row + 1], step.mask()
            dropped = 1 - (own * read).sum(-1)
            least = 1 - best[:, at].gather(-1, read.sum(-1, keepdim=True))[:, 0]
            cost = step.query.cost
            for figure, value in (
                ("PrHS Fig. 1a", 2 * dropped),  # L1 between the weights and those that are left, renormalised
                ("PrHS Fig. 1b", stats.relative(step.ran.out[:, 0], true[:, at])),
                ("PrHS Fig. 1c keys read", read.sum(-1) / own.shape[-1]),
                ("PrHS Fig. 1c keys scored", torch.tensor([(cost.scored + cost.estimated) / own.shape[-1]])),
                ("PrHS eq. 8 mass dropped", dropped),
                ("PrHS eq. 8 beyond the oracle's", dropped - least),
            ):
                found[figure, name].append(value)
            if surrogate is None:
                continue
            guess = surrogate(step, weights)
            bias = stats.variation(own, guess)
            most = least + 2 * bias
            found["PrHS eq. 8 bias", name].append(bias)
            found["PrHS eq. 8 dropped at most (P1)", name].append(most)
            found["PrHS eq. 8 says nothing (P2)", name].append((most >= 1).double())
            if name in ("Quest", "Double Sparsity"):
                off = (guess.clamp(min=1e-300).log() - own.clamp(min=1e-300).log()).abs()
                found["PrHS eq. 8 logits off by at most (QAA)", name].append(off.amax(-1) / 2)


def surrogate_of(method: object, layer: Layer, run: Captured) -> Callable[[Step, Tensor], Tensor] | None:
    """What a method takes for the weights (PrHS, II-C): a function of a step and the true weights to a distribution
    float64 [heads, keys]. None for methods that rank by the true logits, by no distribution, or by a draw."""
    group = layer.q.shape[0] // layer.k.shape[0]

    def logits_of(scores: Tensor) -> Tensor:
        return torch.softmax(scores.double() * layer.scale, -1)

    def over(sums: Tensor, keys: int) -> Tensor:
        """``sums`` [heads, m] and what they leave of 1, evenly on the later keys."""
        spare = (1 - sums.sum(-1, keepdim=True)).clamp(min=0)
        later = keys - sums.shape[-1]
        return (
            torch.cat([sums, (spare / max(1, later)).expand(-1, later)], -1) if later else sums / sums.sum(-1)[:, None]
        )

    if isinstance(method, Quest):
        size = method.block_size

        def bounds(step: Step, weights: Tensor) -> Tensor:
            q, k = layer.q[:, step.row].unflatten(0, (-1, group)), layer.k[:, : step.row + 1]
            return logits_of(torch.cat([stats.page_scores(one, keys, size) for one, keys in zip(q, k)]))

        return bounds
    if isinstance(method, DoubleSparsity):
        return lambda step, weights: logits_of(step.state.scores(step.query.q[:, 0]))
    if type(method) in (SnapKV, AdaKV):
        assert isinstance(method, SnapKV)
        view = KVView.from_tensors(layer.k, layer.v)
        window = replace(method, kernel=1)  # their weights, before neighbours join them
        votes = window.votes(prompt_chunk(layer, view, run.context, method.tail_rows)).double() / method.tail_rows
        return lambda step, weights: over(votes, step.row + 1)
    if isinstance(method, H2O):

        def sums(step: Step, weights: Tensor) -> Tensor:
            out = torch.zeros(len(layer.q), step.row + 1, dtype=torch.float64)
            for head, (kept, sums) in enumerate(zip(step.state.positions, step.state.sums)):
                out[head, kept] = sums.double() / sums.sum()
            return out

        return sums
    if isinstance(method, HShare):

        def before(step: Step, weights: Tensor) -> Tensor:
            made = step.state.since + method.local - 1  # the row that retrieved
            own = layer.weights(torch.tensor([made]))[:, 0] if made < run.context else weights[:, made - run.context]
            return own[:, : step.row + 1][step.state.donor]

        return before
    if isinstance(method, CIS):

        def anchor(step: Step, weights: Tensor) -> Tensor:
            lent = method.borrowed(step.query, step.state)
            assert lent is not None
            q, k = lent.queries.double().unflatten(0, (-1, group)), layer.k[:, : step.row + 1].double()
            return logits_of((q @ k.mT).flatten(0, 1))

        return anchor
    if isinstance(method, Streaming):
        return lambda step, weights: step.mask().double() / step.mask().sum(-1, keepdim=True)
    return None


def measure(run: Captured, parts: Sequence[str], budget: int) -> Found:
    """All of ``parts`` (of ``PARTS``) over all layers of a run; decode methods read ``budget`` keys."""
    found: Found = defaultdict(list)
    for layer in run.layers:
        for part in parts:
            PARTS[part](run, layer, found, budget)
    return found


def _alone(one: Callable[[Captured, Layer, Found], None]) -> Callable[[Captured, Layer, Found, int], None]:
    return lambda run, layer, found, budget: one(run, layer, found)


PARTS: dict[str, Callable[[Captured, Layer, Found, int], None]] = {
    "prefill": _alone(prefill),
    "loopserve": loopserve,
    "attention": _alone(attention),
    "tables": _alone(tables),
    "overlap": _alone(overlap),
    "sharing": _alone(sharing),
    "dilation": dilation,
    "errors": errors,
}
