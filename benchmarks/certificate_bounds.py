"""How many keys a certificate takes that rests on bounds of unread logits, on the reference model's own decode steps.

    python benchmarks/certificate_bounds.py [--length 4096] [--tasks single,multikey,vt,span_copy,table_copy,legend]

Whoever certifies knows of an unread key a bound u of its logit and the greatest norm g of its block's values. Keys are
read one by one by falling exp(u) g, the best order there is for such bounds, until what may still come is below
``epsilon`` times what was read (docs/algorithms.md 6.20, step 1), or until a sample by these bounds takes no more draws
than are left (step 2). Bounds: a block's extremes in each channel; the same with each key's number in one of 2^bits
equal parts between them; and, as the limit, the logits themselves. Every head has lists of its own, and reading
extremes or codes counts nothing: what a real certificate takes is more. Every other KV head, all layers without
windows.
"""

from __future__ import annotations

import argparse
import math

import torch
from torch import Tensor

from saccade.engine.observing import observing
from saccade.engine.settings.config import EngineConfig
from saccade.engine.watch.observe import AttentionCall
from saccade.eval.answer import answer
from saccade.eval.setting import Setting, load
from saccade.eval.sources import find_tasks
from saccade.methods.policy import Policy

EPSILONS = (0.1, 0.5, 0.9)
DELTA = 0.1
BOUNDS = ((16, 0), (4, 0), (16, 1), (16, 2), (16, 3), (16, 4))  # keys of a block, bits of a number
NORMS = 16  # keys of a block whose values' greatest norm is known


def upper(q: Tensor, k: Tensor, size: int, bits: int) -> Tensor:
    """Bounds of the logits of ``q`` [group, head_dim], scaled, with ``k`` [n, head_dim]: [group, n]. Keys behind the
    last whole block have their logits."""
    full = k.shape[0] // size * size
    blocks = k[:full].view(-1, size, k.shape[1])
    low, high = blocks.amin(1, keepdim=True), blocks.amax(1, keepdim=True)
    step = (high - low) / 2**bits
    code = ((blocks - low) / step.clamp(min=1e-30)).floor().clamp(0, 2**bits - 1)
    low = (low + code * step).flatten(0, 1)
    high = low + step.expand(blocks.shape).flatten(0, 1)
    bound = q.clamp(min=0) @ high.T + q.clamp(max=0) @ low.T
    return torch.maximum(torch.cat([bound, q @ k[full:].T], 1), q @ k.T)  # of which rounding may take a little


def shares(bound: Tensor, score: Tensor, norm: Tensor, values: Tensor) -> list[tuple[float, float]]:
    """Of one head, for each epsilon: the share of keys that the bound alone takes, and with a sample if that is
    less. ``bound``, ``score``, ``norm`` [n], ``values`` [n, head_dim], all float64."""
    n, top, log = score.numel(), score.max(), math.log(4 / DELTA)
    order = (bound + norm.log()).argsort(descending=True)
    weight, most, norm, v = (score - top).exp()[order], (bound - top).exp()[order], norm[order], values[order]
    read = (weight[:, None] * v).cumsum(0) / weight.cumsum(0)[:, None]
    allowed = (weight * v.norm(dim=1)).cumsum(0)
    after = [torch.nn.functional.pad(part.flip(0).cumsum(0).flip(0)[1:], (0, 1)) for part in (most * norm, most)]
    left, count = after[0] + read.norm(dim=1) * after[1], torch.arange(1, n + 1, dtype=torch.float64)
    found = []
    for epsilon in EPSILONS:
        alone = int((left <= epsilon * allowed).to(torch.int8).argmax()) + 1
        ceiling = left / (epsilon * allowed / (1.1 * math.sqrt(2)))
        root = (math.sqrt(2) * ceiling + torch.sqrt(2 * ceiling**2 + 8 * ceiling)) / 2
        found.append((alone / n, min(alone / n, float((count + log * root**2).min()) / n)))
    return found


class Counting:
    """``found``: by name of the bound, pairs of shares, one for each head, step and epsilon."""

    def __init__(self) -> None:
        self.found: dict[str, list[tuple[float, float]]] = {}

    def __call__(self, call: AttentionCall) -> None:
        shape = call.selection.shape
        if call.phase != "decode" or shape.q_len != 1 or call.spec.window is not None:
            return
        for kv_head in range(0, shape.kv_heads, 2):
            k, v = (part.double() for part in call.kv.take(torch.arange(shape.k_len), kv_head))
            q = call.q[kv_head * shape.group :][: shape.group, 0].double() * call.spec.scale
            norm = v.norm(dim=1).clamp(min=1e-6)
            norm = torch.nn.functional.pad(norm, (0, -shape.k_len % NORMS)).view(-1, NORMS).amax(1)
            norm = norm.repeat_interleave(NORMS)[: shape.k_len]
            bounds = {f"blocks of {size}, {bits} bits a number": upper(q, k, size, bits) for size, bits in BOUNDS}
            for name, bound in {**bounds, "the logits themselves": q @ k.T}.items():
                for own, score in zip(bound, q @ k.T):
                    self.found.setdefault(name, []).extend(shares(own, score, norm, v))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--tasks", default="single,multikey,vt,span_copy,table_copy,legend")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    llm, counting = load(EngineConfig("reference", dtype="bfloat16", threads=args.threads)), Counting()
    for task in find_tasks(tuple(args.tasks.split(","))):
        with observing(llm.engine, counting):
            answer(llm, task.sample(args.length, 0, 0), Setting(Policy(), "A"))
    for name, found in counting.found.items():
        table = torch.tensor(found).view(-1, len(EPSILONS), 2)
        print(f"{name}, {len(table)} (head, step) pairs:")
        for at, epsilon in enumerate(EPSILONS):
            alone, either = table[:, at, 0], table[:, at, 1]
            few = 100 * (either <= 0.1).double().mean()
            print(
                f"  epsilon {epsilon}: {100 * alone.mean():.1f} % of the keys, with a sample "
                f"{100 * either.mean():.1f} %; at most a tenth in {few:.0f} % of the pairs"
            )


if __name__ == "__main__":
    main()
