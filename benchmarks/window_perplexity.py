"""Perplexity of a prefill whose deep layers hide or freeze part of the context (PrHS, Table VI): PSAW over phi and
alpha, ETF over psi and gamma, CPE's pair of both; and the share of a dense prefill's (query, key) pairs that is left.

python benchmarks/window_perplexity.py --length 4096 --samples 8

The paper measures LLaMA-2-7B on WikiText. The reference model knows little of prose, so here the perplexity is that of
the right answers to the suite's questions, in the same prefill as their contexts. ``--text FILE`` measures the second
half of every --length tokens of a file instead, for a checkpoint of your own (--model).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from saccade import LLM, SamplingParams
from saccade.eval.render import gold_answer, render
from saccade.eval.sources import find_tasks

POLICIES = (
    "dense",
    "dense+psaw(phi=0.9,alpha=1)",
    "dense+psaw(phi=0.7,alpha=1)",
    "dense+psaw(phi=0.7,alpha=1.5)",
    "dense+psaw(phi=0.5,alpha=1)",
    "dense+psaw(phi=0.3,alpha=1)",
    "dense+etf(psi=0.9,gamma=1)",
    "dense+etf(psi=0.5,gamma=1)",
    "dense+etf(psi=0.5,gamma=1.5)",
    "dense+etf(psi=0.4,gamma=1)",
    "dense+etf(psi=0.2,gamma=1)",
    "dense+psaw(phi=0.7,alpha=1.2)+etf(psi=0.5,gamma=1.2)",
    "dense+psaw(phi=0.7,alpha=1)+etf(psi=0.5,gamma=1)",
)
TASKS = ("single", "multikey", "multivalue", "vt", "words", "common", "legend", "span_copy", "table_copy")


def losses(
    llm: LLM, texts: Sequence[tuple[list[int], int]], policies: Sequence[str] = POLICIES
) -> Iterator[tuple[str, Tensor, float]]:
    """By policy the losses in nats of the last tokens of each text, float64 [tokens], and the share of causal pairs
    that prefills read. ``texts``: token ids, and how many of the last are measured."""
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    for policy in policies:
        found: list[float] = []
        attended = causal = 0.0
        for ids, measured in texts:
            (output,) = llm.generate([ids], params, policy=policy)
            assert output.prompt_logprobs is not None, output.error
            for place in range(len(ids) - measured, len(ids)):
                chosen = output.prompt_logprobs[place]
                assert chosen is not None
                found.append(-chosen[ids[place]].logprob)
            attended += output.report["prefill"]["keys_attended"]
            causal += output.report["prefill"]["keys_causal"]
        yield policy, torch.tensor(found, dtype=torch.float64), attended / causal


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="reference")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--samples", type=int, default=8, help="of each task, or pieces of --text")
    parser.add_argument("--text", type=Path, help="a file, cut into texts of --length tokens")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    llm = LLM(args.model, dtype=args.dtype, threads=args.threads, enable_prefix_caching=False)
    texts: list[tuple[list[int], int]] = []  # token ids, and how many of the last are measured
    if args.text is not None:
        ids = llm.encode(args.text.read_text(encoding="utf-8"))
        starts = range(0, len(ids) - args.length + 1, args.length)[: args.samples]
        texts += [(ids[at : at + args.length], args.length // 2) for at in starts]
    else:
        for task in find_tasks(TASKS):
            for index in range(args.samples):
                turn = task.sample(args.length, index, 0).turns[0]
                right = llm.tokenizer.encode(gold_answer(turn), add_special_tokens=False)
                texts.append((render(llm.tokenizer, [], turn).ids + right, len(right)))
    if not texts:
        parser.error(
            f"{args.text} holds fewer than length={args.length} tokens; give a longer file or a smaller length"
        )
    print(f"{args.model}, {args.dtype}, {len(texts)} texts of {args.length} tokens\n")
    print("| policy | perplexity | x dense | pairs read |\n|---|---:|---:|---:|")
    first = None
    for policy, found, pairs in losses(llm, texts):
        perplexity = float(found.mean().exp())
        first = perplexity if first is None else first
        print(f"| `{policy}` | {perplexity:.4f} | {perplexity / first:.4f} | {100 * pairs:.1f} % |", flush=True)


if __name__ == "__main__":
    main()
