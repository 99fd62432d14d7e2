"""What paper_figures.py measures of LFPS, a layer of a captured run at a time (see paper_measures.py)."""

from __future__ import annotations

from collections import defaultdict

import paper_stats as stats
import torch
from paper_captures import Captured, Layer, decoded
from torch import Tensor
from torch.nn.functional import cosine_similarity

from saccade.methods.lfps import LFPS
from saccade.methods.policy import parse_method

Found = defaultdict[tuple[str, str], list[Tensor]]

SHARE, SINKS, RESTS = 0.02, 4, 0.85
LETTER = (
    "lfps(blocks=0, least=1, rest=none, slash_shift_on_read=false, bypass=mean, bypass_shift=false, read_local=false)"
)


def resting(run: Captured, layer: Layer, weights: Tensor, sets: Tensor, found: Found) -> None:
    """LFPS: heads that rest on their sinks, what may stand for the rest, and how alike neighbouring steps are."""
    first, sinks = weights[..., 0], weights[..., :SINKS].sum(-1)
    found["LFPS Table 3", "first key above 0.85"].append((first > RESTS).double())
    found["LFPS Table 3", "first four keys above 0.85"].append((sinks > RESTS).double())
    true, values = layer.outputs(weights), layer.v.double()
    values = values.repeat_interleave(layer.q.shape[0] // len(values), 0)
    kept = weights * sets
    own = weights[..., :SINKS] @ values[:, :SINKS]
    means = (values.cumsum(1)[:, run.steps] - values[:, :SINKS].sum(1, keepdim=True)) / (run.steps[:, None] + 1 - SINKS)
    forms = {
        "exact top 2 %": kept @ values / kept.sum(-1, keepdim=True),
        "sinks alone": own / sinks[..., None],
        "sinks and the mean of the rest": own + (1 - sinks)[..., None] * means,
    }
    for name, out in forms.items():
        error = stats.relative(out, true)
        found["LFPS Fig. 2c", f"{name}: heads that rest"].append(error[sinks > RESTS])
        found["LFPS Fig. 2c", f"{name}: all heads"].append(error.flatten())
    alike = cosine_similarity(weights[:, 1:, SINKS:], weights[:, :-1, SINKS:], dim=-1)
    near, sink = cosine_similarity(true[:, 1:], true[:, :-1], dim=-1), cosine_similarity(true, values[:, :1], dim=-1)
    for name, which in (("above", first > 0.9), ("up to", first <= 0.9)):
        both = which[:, 1:] & which[:, :-1]
        found["LFPS Fig. 7", f"cosine of neighbouring steps' weights, first key {name} 0.9"].append(alike[both])
        found["LFPS Fig. 8", f"cosine of neighbouring steps' outputs, first key {name} 0.9"].append(near[both])
        found["LFPS Fig. 8", f"cosine of outputs and the first key's value, first key {name} 0.9"].append(sink[which])
    for own, rests in zip(weights[..., SINKS:], first):
        made, high = stats.by_interval(own, rests, 0.05)
        close = cosine_similarity(made[:, None], made[None], dim=-1)
        pairs = torch.ones_like(close, dtype=torch.bool).triu(1)
        for name, which in (
            ("both up to 0.9", ~high[:, None] & ~high),
            ("one of them above 0.9", high[:, None] ^ high),
        ):
            what = f"cosine of patterns by intervals of 0.05 of the first key's weight, {name}"
            found["LFPS Fig. 7", what].append(close[pairs & which])


def tables(run: Captured, layer: Layer, found: Found) -> None:
    """LFPS's overlap with exact top-k (eq. 2), and Quest's (Fig. 2a)."""
    weights = layer.weights(run.steps)
    quest = f"quest(budget={max(32, round(SHARE * run.context))}, dense_layers=0, unit=q_head)"
    for name, text in (
        ("LFPS to the letter", LETTER),
        ("LFPS to the letter, a=0.1", LETTER.replace("(", "(a=0.1, ")),
        ("LFPS, defaults", "lfps"),
        ("Quest", quest),
    ):
        method = parse_method(text)
        for at, step in enumerate(decoded(run, layer, method)):
            own = weights[:, at, SINKS : step.row]
            best = stats.heaviest(own, max(1, round(SHARE * own.shape[-1] + 0.5)))
            idle = getattr(step.state, "idle", None)
            active = torch.ones(len(own), dtype=torch.bool) if idle is None else ~idle
            read = step.mask()[:, SINKS : step.row]
            mass = (own * best * read).sum(-1) / (own * best).sum(-1)
            found["LFPS eq. 2", f"{name}: best 2 % that it read"].append(stats.held(best, read)[active])
            found["LFPS eq. 2", f"{name}: their weight that it read"].append(mass[active])
            found["LFPS eq. 2", f"{name}: keys scored"].append(
                torch.tensor([(step.query.cost.scored + step.query.cost.estimated) / step.row])
            )
            if isinstance(method, LFPS):
                found["LFPS Table 3", f"{name}: heads bypassed"].append((~active).double())


def overlap(run: Captured, layer: Layer, found: Found) -> None:
    """LFPS's overlap to the letter (eq. 2) by what is counted: the first keys and the row's own one, which are always
    read, among the best or not; the first steps, whose tables the prompt filled, or all. And how much of what a
    group's heads read is the same."""
    weights, method = layer.weights(run.steps), parse_method(LETTER)
    groups = layer.k.shape[0]
    for at, step in enumerate(decoded(run, layer, method)):
        mask, full = step.mask(), weights[:, at, : step.row + 1]
        idle = step.state.idle
        active = torch.ones(len(mask), dtype=torch.bool) if idle is None else ~idle
        count = max(1, round(SHARE * (step.row - SINKS) + 0.5))
        for where, own, read in (
            ("behind the first four", full[:, SINKS:-1], mask[:, SINKS:-1]),
            ("of all keys", full, mask),
        ):
            best = stats.heaviest(own, count)
            share, mass = stats.held(best, read)[active], ((own * read).sum(-1) / (own * best).sum(-1))[active]
            for steps in ("96 steps", *(("the first 16",) if at < 16 else ())):
                found["LFPS eq. 2 by definition", f"best 2 % {where}, {steps}"].append(share)
                found["LFPS eq. 2 by definition", f"weight read beside theirs, {where}, {steps}"].append(mass)
        shared = mask.unflatten(0, (groups, -1))
        if not bool(shared.any()):  # all heads are bypassed
            continue
        found["LFPS eq. 2 by definition", "keys that a group's heads read, each once, of all their lists"].append(
            shared.any(1).sum().double()[None] / shared.sum()
        )
