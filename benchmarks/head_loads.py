"""How much more the busiest of several processes reads than their mean, by what a model's heads read under each policy:
in the model's order of heads, and shared out by what each reads (``saccade.models.head_order``).

    python benchmarks/head_loads.py --model build/real/smollm2 --policy psa --policy flexprefill

A row a policy, phase and kind of heads. ``KV heads`` are the model's own. ``query heads``: as if each had keys of its
own, as in models without groups; of policies that choose by KV head they say nothing new, and are left out. ``drawn``:
layers of eight KV heads, drawn from what this model's read over the mean of their layer; no model's.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator, Sequence

from saccade import LLM
from saccade.eval.drift.measure import run
from saccade.methods.policy import Policy
from saccade.models.head_order import HeadDensities, busiest, gains
from saccade.passage import made_passage

Rows = tuple[tuple[float, ...], ...]
HEADS, DRAWS = 8, 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--policy", action="append", required=True)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--tokens", type=int, default=32, help="at its end that are forced as decode steps")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--kv-memory", default="1GiB")
    asked = parser.parse_args()
    print("| policy | phase | density | heads | one process a head | processes: the model's order, shared out |")
    print("|---|---|---:|---|---:|---|")
    with LLM(asked.model, device=asked.device, kv_memory=asked.kv_memory) as llm:
        spec, text = llm.model.spec, made_passage(llm.encode, asked.length, asked.tokens, 0)
        for policy in map(Policy.parse, asked.policy):
            _, ran = run(llm, text, policy, weights=False)
            for phase in ("prefill", "decode"):
                if not getattr(policy, phase).is_dense:
                    density = f"{100 * ran[phase]['density']:.0f} %"
                    for kind, rows in kinds(ran["heads"][phase], spec.heads // spec.kv_heads):
                        print(f"| `{policy.text}` | {phase} | {density} | {kind} | {said(rows)} |", flush=True)


def kinds(by_query_head: Sequence[Sequence[float]], group: int) -> Iterator[tuple[str, Rows]]:
    """Densities by layer and head, of each kind of heads."""
    own = tuple(tuple(sum(row[at : at + group]) / group for at in range(0, len(row), group)) for row in by_query_head)
    yield f"{len(own[0])} KV heads", own
    if any(len(set(row[:group])) > 1 for row in by_query_head):
        yield f"{len(by_query_head[0])} query heads", tuple(map(tuple, by_query_head))
    if len(own[0]) > 1:
        pool, draws = [one * len(row) / sum(row) for row in own for one in row], random.Random(0)
        yield f"{HEADS} drawn", tuple(tuple(draws.sample(pool, HEADS)) for _ in range(DRAWS))


def said(rows: Rows) -> str:
    found = HeadDensities("", "", "", decode=rows)
    heads = len(rows[0])
    alone = [busiest(found.loads(layer), tuple(range(heads)), heads) for layer in range(len(rows))]
    shared = [f"{ranks}: {plain:.2f}, {best:.2f}" for ranks, (plain, best) in gains(found).items()]
    return f"{sum(alone) / len(alone):.2f} | {'; '.join(shared) or '-'}"


if __name__ == "__main__":
    main()
