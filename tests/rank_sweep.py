"""Random models of every family whose heads divide, under every registered method, in one process and in several:
``make sweep-ranks``.

    PYTHONPATH=tests python -m rank_sweep 40 --seed 1

Families, heads, widths, processes (threads here), formats of keys and values, chunks and options of methods are drawn.
Tokens and reports must be those of one process, log-probabilities within 1e-4. Sums over processes round, though, and a
rounding can decide: which of two keys that are estimated alike is read, whether a share reaches a threshold, which code
of 8 bits a number takes. So what differs is asked of six models whose weights are moved by a few roundings each. It
counts as rounding where one process moves at least half as far among these by itself, or where on most of them one
process and several agree; all else is wrong.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import shutil
import sys
import tempfile
import warnings
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

os.environ.setdefault("OMP_NUM_THREADS", "1")

import rank_threads
import torch
from method_matrix import MATRIX
from rank_helpers import CLOSE, EXACT
from safetensors.torch import load_file, save_file
from tiny_models import CONFIGS, make_checkpoint, random_ids

from saccade import LLM, SamplingParams, ranks
from saccade.engine.settings.rank_limits import why_not
from saccade.methods.policy import Policy
from saccade.models.families import FAMILIES
from saccade.models.shards import why_whole

FAR = 9.0  # of answers that differ in more than log-probabilities
COPIES, ROUNDING = 6, 2e-7  # of a model, and by how much of themselves their weights are moved
MORE = (
    "flexprefill(min_budget=0)+rocketkv(budget=24)",
    "quest(budget=64, unit=layer, dense_layers=0)",
    "arkvale(budget=64, unit=layer)",
    "lossless(draft=quest(budget=64, dense_layers=0), tokens=3)",
    "lossless(draft=lfps(k=24, blocks=2, least=1), tokens=2, lookup=0)",
)
METHODS = [Policy.parse(policy).text for case in MATRIX for policy in case.methods()] + [*MORE]
SERVED = [family for family in CONFIGS if why_whole(FAMILIES[family]) is None]


class Answer(NamedTuple):
    """What a request got: its error and tokens, log-probabilities by token of each step, and its report."""

    said: Any
    logprobs: list[dict[int, float]]
    report: dict[str, Any]


@dataclass(frozen=True)
class Cell:
    """A model, and what it is asked in how many processes."""

    family: str
    ranks: int
    sizes: dict[str, Any]
    seed: int
    policies: list[str]
    prompts: list[list[int]]
    options: dict[str, Any]

    def ask(self, folder: Path, count: int, policies: list[str]) -> list[list[Answer]]:
        """The answers of an engine of ``count`` processes, by policy; behind all a session's turns by the last."""
        params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=3, seed=3)
        settings: dict[str, Any] = {"dtype": "float32", "device": "cpu", "threads": 1, "kv_memory": "8MiB"}
        with LLM(folder, tensor_parallel_size=count, enable_prefix_caching=False, **settings, **self.options) as llm:
            found = [llm.generate(self.prompts, params, policy=policy) for policy in policies]
            with llm.session(policies[-1]) as session:
                found.append([session.generate(ids, params) for ids in self.prompts])
            assert llm.pool.used_blocks == 0
        return [[_answer(one) for one in outs] for outs in found]


def _answer(out: Any) -> Answer:
    own = out.outputs[0]
    logprobs = [{token: at.logprob for token, at in step.items()} for step in own.logprobs or []]
    report: dict[str, Any] = {"notes": out.report["notes"]}
    for phase in ("prefill", "decode"):
        counts = {name: out.report[phase][name] for name in (*EXACT, "selections", "keys_scored", "keys_estimated")}
        counts["certified"] = {k: v for k, v in (counts["certified"] or {}).items() if k != "rounding"}
        if "cis" in str(out.report["policy"]):
            del counts["keys_estimated"]  # with queries of steps in which any head here searched
        report[phase] = counts
    return Answer((out.error, list(own.token_ids)), logprobs, report)


def apart(one: list[Answer], other: list[Answer]) -> float:
    """How far two lists of answers are apart in log-probability; 0 within the bound, FAR where anything else differs.
    Counts that are means over heads are rounded."""
    found = 0.0
    for mine, theirs in zip(one, other, strict=True):
        if mine.said != theirs.said or not _alike(mine.report, theirs.report):
            return FAR
        for left, right in zip(mine.logprobs, theirs.logprobs, strict=True):
            found = max(found, *(abs(left[token] - right[token]) for token in left.keys() & right.keys()))
    return found if found > CLOSE else 0.0


def _alike(mine: Any, theirs: Any, name: str = "") -> bool:
    if isinstance(mine, dict):
        return mine.keys() == theirs.keys() and all(_alike(mine[key], theirs[key], key) for key in mine)
    return abs(mine - theirs) <= 8 + mine / 500 if name in ("keys_scored", "keys_estimated") else mine == theirs


def moved(folder: Path, to: Path, seed: int) -> Path:
    """A copy of a model whose weights are moved by about ``ROUNDING`` of themselves."""
    shutil.copytree(folder, to)
    rng = torch.Generator().manual_seed(seed)
    for path in to.glob("*.safetensors"):
        tensors = load_file(path)
        for name, tensor in tensors.items():
            if tensor.dtype == torch.float32:
                sign = torch.randint(-1, 2, tensor.shape, generator=rng)
                tensors[name] = (tensor * (1 + ROUNDING * sign)).contiguous()
        save_file(tensors, path, metadata={"format": "pt"})
    return to


def drawn(rng: random.Random, families: list[str], policies: list[str]) -> Cell:
    """A model of sizes that so many processes can share out, and some of ``policies``."""
    family, count = rng.choice(families), rng.choice((2, 3, 4))
    kv_heads = rng.choice([one for one in (2, 3, 4, 6) if one % count == 0 or count % one == 0])
    heads = max(kv_heads, count) * rng.choice((1, 2, 3))
    head_dim, experts = rng.choice((8, 16)), "num_experts_per_tok" in CONFIGS[family]
    sizes = {
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "hidden_size": heads * head_dim,
        "intermediate_size": rng.choice((48, 96, 52 if experts else 51)),
        "max_position_embeddings": 512,
        "tie_word_embeddings": rng.random() < 0.5,
    }
    if "head_dim" in CONFIGS[family]:
        sizes["head_dim"] = head_dim
    if "mamba_n_heads" in CONFIGS[family]:
        count = rng.choice((2, 3))
        kv_heads = rng.choice((count, 6))
        sizes |= {"num_attention_heads": 6, "num_key_value_heads": kv_heads, "hidden_size": 96}
    prompts = [random_ids(rng.randrange(60, 260), seed=rng.randrange(10**6)) for _ in range(2)]
    asked = rng.sample(policies, min(8, len(policies)))
    options = {"kv_dtype": rng.choice(("auto", "int8", "fp8")), "prefill_chunk": rng.choice((64, 100, 512))}
    options["exact"] = rng.random() < 0.3 or any("lossless" in one for one in asked)  # else all drafts are counted
    return Cell(family, count, sizes, rng.randrange(10**6), asked, prompts, options)


@dataclass
class Totals:
    """Answers of policies: ``equal`` ones, those that differ by ``rounding``, and those that are ``wrong``."""

    equal: int = 0
    rounding: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def judge(self, cell: Cell, folder: Path) -> None:
        """Count a cell, whose model is in a folder of that name."""
        one, several = (cell.ask(folder, count, cell.policies) for count in (1, cell.ranks))
        off = [apart(*both) for both in zip(one, several, strict=True)]
        self.equal += off.count(0.0)
        which = [number for number, found in enumerate(off) if found]
        if not which:
            return
        own, agree = [0.0] * len(off), [0] * len(off)
        for copy in range(COPIES):
            other = moved(folder, folder.with_name(f"{folder.name}-{copy}"), copy)
            here, there = (cell.ask(other, count, cell.policies) for count in (1, cell.ranks))
            for number in which:
                own[number] = max(own[number], apart(one[number], here[number]))
                agree[number] += not apart(here[number], there[number])
        for number in which:
            if own[number] >= off[number] / 2 or agree[number] > COPIES / 2:
                self.rounding[cell.options["kv_dtype"]] += 1
            else:
                policy = [*cell.policies, f"a session of {cell.policies[-1]}"][number]
                self.wrong.append(f"{policy}, {off[number]:.1e} off (in one process {own[number]:.1e}): {cell}")


def sweep(count: int, seed: int = 0, families: list[str] = SERVED, policies: list[str] | None = None) -> Totals:
    """``count`` cells."""
    rng, totals = random.Random(seed), Totals()
    texts = policies or [text for text in dict.fromkeys(METHODS) if why_not(Policy.parse(text)) is None]
    torch.set_num_threads(1)
    with patch.object(ranks, "subprocess", rank_threads.SUBPROCESS), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(count):
            cell = drawn(rng, families, texts)
            with tempfile.TemporaryDirectory() as folder:
                totals.judge(cell, make_checkpoint(cell.family, Path(folder) / "model", seed=cell.seed, **cell.sizes))
    return totals


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("count", type=int, nargs="?", default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--families", nargs="*", default=SERVED, choices=SERVED)
    chosen = parser.parse_args()
    logging.getLogger("saccade").setLevel(logging.ERROR)
    found = sweep(chosen.count, chosen.seed, chosen.families)
    rounding = ", ".join(f"{count} over {name}" for name, count in sorted(found.rounding.items())) or "none"
    print(f"{chosen.count} models: {found.equal} equal, by rounding {rounding}, {len(found.wrong)} wrong")
    for one in found.wrong:
        print(one)
    sys.exit(1 if found.wrong else 0)


if __name__ == "__main__":
    main()
