"""Record greedy tokens and counts of every method, alone and over turns, for ``tests/test_golden_tokens.py``.

Run it in a checkout whose answers are to be kept, with this folder's parent on the path:

    PYTHONPATH=/path/to/tests python -m golden.record --commit $(git rev-parse HEAD)

With ``--policy`` only the cases of these policies are recorded anew; the others stay as they are.

A prompt is kept if its answers hold on any machine: the two greatest logits of every step lie at least ``MARGIN``
apart, and tokens and counts stay the same when each weight moves by about 2e-6 of itself, in several ways and on the
reference backend too. Otherwise the next seed is tried; a length at which none holds is left out.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from golden.replay import FILE, MODELS, RUN, answer, checkpoint, load, margin, mixed
from method_matrix import MATRIX

from saccade.methods.outside import load_outside
from saccade.methods.policy import Policy
from saccade.methods.registry import METHODS

MARGIN = 1e-3
SEEDS = 12
LENGTHS = (60, 600)
TURNS = (150, 201, 33)
NEW_TOKENS = 8

# Forms of a method that the matrix of the invariant tests lacks, calibrated methods, windows, freezes and sums.
FORMS = (
    "psa(epsilon=0.7, block_size=16, microbatch=1, rank=cuboid)",
    "psa(epsilon=0.7, block_size=16, microbatch=1, unit=layer, rank=cuboid)",
    "psa(epsilon=0.7, block_size=16, microbatch=2, rest=min, rank=cuboid)",
    "psa(epsilon=0.7, block_size=16, microbatch=1, rank=moments, rest=last_max)",
    "psa(epsilon=0.7, block_size=16, microbatch=1, rank=moments, rest=estimate)",
    "psa(epsilon=0.7, block_size=16, microbatch=1, rank=moments, rest=estimate, margin=0.5, unit=layer, stop=mean)",
    "lfps",
    "lfps(k=40)",
    "lfps(k=40, blocks=0)",
    "lfps(k=40, unit=kv_head)",
    "lfps(k=40, unit=kv_head, blocks=0)",
    "lfps(k=40, blocks=4, epsilon=0.1)",
    "lfps(k=40, blocks=4, history=keep, running_means=true)",
    "lfps(k=40, blocks=4, rest=none)",
    "cis(k=30, sinks=4, local=8, tau=0.0)",
    "cis(k=30, sinks=4, local=8, tau=0.0, unit=kv_head)",
    "cis(k=30, sinks=4, local=8, tau=0.0, follow=none)",
    "cis(k=30, sinks=4, local=8, tau=0.0, follow=1, unit=kv_head, align=position)",
    "cis(k=30, sinks=4, local=8, tau=1)",
    "cpe",
    "cis(k=30, sinks=4, local=8, tau=0.0)+psaw(start_layer=1, block_size=32)+etf(start_layer=1)",
    "psaw(start_layer=1, block_size=16)",
    "psa(epsilon=0.7, block_size=16, microbatch=1, rank=cuboid)+psaw(start_layer=1, block_size=32)",
    "lfps(k=40, blocks=4)+psaw(start_layer=1, block_size=32)",
    "etf(start_layer=1)",
    "topk(k=48)+etf(start_layer=1, reuse=kv)",
    "flexprefill(gamma=0.5, block_size=64, min_budget=0)+psa(epsilon=0.4, block_size=16, microbatch=1, rank=cuboid)",
    "flexprefill(gamma=0.5, block_size=64, min_budget=0)+lfps(k=40, blocks=4, unit=kv_head)",
    "xattention(threshold=0.5, block_size=32)+quest(budget=64, dense_layers=0)",
    "a_shape(sinks=4, window=60)+arkvale(budget=128, block_size=16)",
    "prefill=streaming(window=100), decode=arkvale(budget=128, block_size=16, unit=q_head)",
    "arkvale(budget=256)",
    "arkvale(budget=192, unit=kv_head)",
    "quest(budget=64)",
    "loopserve(budget=40, n_d=4, first=2)",
    "streaming(sinks=4, window=60)",
    "double_sparsity(dense_upto=0, k=24)",
    "double_sparsity(dense_upto=0, k=24, dense_layers=0, unit=q_head)",
    "hshare(heavy=24, sinks=2, local=8, rows=8)",
    "hshare(heavy=24, sinks=2, local=8, every=4, layer_share=0.5)",
    "infinigen(dense_upto=0, alpha=1.0)",
    "infinigen(dense_upto=0, alpha=1.0, query=own, dense_layers=0)",
    "magicpig(dense_upto=0, bits=4, tables=20, local=8)",
    "auto(least=100, method=psa)",
    "auto(least=100, method='lfps(unit=kv_head)')",
    "psa(epsilon=0.7, block_size=16, microbatch=1)",
    "psa(epsilon=0.7, block_size=16, microbatch=1, bits=8, unit=layer, stop=mean)",
)
# What every other model runs: one setting of each method, and what goes by windows and depth.
OTHERS = (*(f for f in FORMS if f.startswith(("cpe", "psaw", "etf", "flexprefill"))), FORMS[0], FORMS[4], "lfps(k=40)")

Case = dict[str, Any]


def cases_of(family: str) -> list[Case]:
    """What to record of one model: prompts still without their seeds, as [length]. Prefill-only settings run one
    prompt."""
    settings = [Policy.parse(one).text for case in MATRIX for one in case.methods()]
    policies = [*settings, *FORMS]
    if family != "llama":
        policies = [Policy.parse(case.methods()[0]).text for case in MATRIX] + list(OTHERS)
    shared = {"model": family, "new_tokens": NEW_TOKENS}
    cases = []
    for policy in dict.fromkeys(policies):
        parsed = Policy.parse(policy)
        decodes = parsed.decode.name != "dense" or parsed.window or parsed.freeze or policy == "dense"
        lengths = LENGTHS if decodes and family == "llama" else LENGTHS[-1:]
        turns = (TURNS if family == "llama" else TURNS[:2],) if decodes else ()
        kinds = [*(("alone", (length,)) for length in lengths), *(("session", lengths) for lengths in turns)]
        cases += [
            {**shared, "policy": policy, "kind": kind, "prompts": [[length] for length in prompts]}
            for kind, prompts in kinds
        ]
    return cases


def record(case: Case, plain: Any, variants: list[Any]) -> tuple[Case | None, int]:
    """The case with its prompts and answers, and how many seeds were refused; None if all were."""
    run = RUN[case["kind"]]
    for seed in range(SEEDS):
        tried = {**case, "prompts": [[*prompt[:1], 100 * seed + turn] for turn, prompt in enumerate(case["prompts"])]}
        outputs = run(plain, tried, logprobs=2)
        least = min(margin(output) for output in outputs)
        answers = [answer(output) for output in outputs]
        if least >= MARGIN and all([answer(one) for one in run(llm, tried)] == answers for llm in variants):
            return {**tried, "margin": round(least, 6), "answers": answers}, seed
    return None, SEEDS


def _in_order(cases: list[Case], rows: list[Case]) -> list[Case]:
    """``rows`` as ``cases`` asks for them; those that it does not ask for are left out."""

    def key(case: Case) -> tuple[Any, ...]:
        return case["policy"], case["kind"], *(prompt[0] for prompt in case["prompts"])

    by_key = {key(row): row for row in rows}
    return [by_key[key(case)] for case in cases if key(case) in by_key]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commit", required=True, help="the commit of the code that runs")
    parser.add_argument("--output", type=Path, default=FILE)
    parser.add_argument("--model", choices=list(MODELS), help="record one model's cases anew and keep the others'")
    parser.add_argument("--policy", action="append", help="record this policy's cases anew and keep the others'")
    options = parser.parse_args()
    torch.set_num_threads(1)
    again = None if options.policy is None else {Policy.parse(policy).text for policy in options.policy}
    before: list[Case] = json.loads(FILE.read_text())["cases"] if options.model or again is not None else []
    recorded: list[Case] = []
    for family in MODELS:
        cases = [] if options.model not in (None, family) else cases_of(family)
        asked = {case["policy"] for case in cases if again is None or Policy.parse(case["policy"]).text in again}
        kept = [case for case in before if case["model"] == family and case["policy"] not in asked]
        if options.model not in (None, family) or not asked:
            recorded += kept
            continue
        with tempfile.TemporaryDirectory() as folder:
            plain = load(checkpoint(family, Path(folder, "plain")))
            variants = [
                load(checkpoint(family, Path(folder, f"jitter{seed}"), jitter=seed), backend=backend)
                for seed, backend in ((1, "auto"), (2, "auto"), (3, "reference"), (4, "reference"))
            ]
            rows = []
            for case in cases:
                if case["policy"] not in asked:
                    continue
                row, refused = record(case, plain, variants)
                if row is None:
                    print(f"{family} {case['kind']} {case['policy']}: no seed holds for {case['prompts']}", flush=True)
                    continue
                rows.append(row)
                density = [sum(one["decode"]["density_per_layer"]) / 3 for one in row["answers"]]
                said = ", ".join(f"{value:.3f}" for value in density)
                print(f"{family} {row['kind']} {row['policy']}: densities {said}, {refused} seeds refused", flush=True)
            single = [row for row in rows if row["kind"] == "alone"]
            for output, row in zip(mixed(plain, single), single):
                if answer(output) != row["answers"][0]:
                    raise SystemExit(f"a batch changes the answer of {row}")
            recorded += _in_order(cases, kept + rows)
    policies = [Policy.parse(row["policy"]) for row in recorded]
    methods = {part.name for policy in policies for part in (policy.prefill, policy.decode)}
    load_outside()
    if missing := set(METHODS) - methods:
        raise SystemExit(f"not recorded: {', '.join(sorted(missing))}")
    head = {"commit": options.commit, "least_margin": min(row["margin"] for row in recorded)}
    lines = ",\n".join(json.dumps(row, separators=(",", ":")) for row in recorded)
    options.output.write_text(f'{json.dumps(head)[:-1]}, "cases": [\n{lines}\n]}}\n')
    print(f"{len(recorded)} cases in {options.output}")


if __name__ == "__main__":
    main()
