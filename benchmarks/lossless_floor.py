"""What ``lossless`` may lose: short and long answers beside dense decode, in turn with it.

    python benchmarks/lossless_floor.py [--model random|reference|random-8b:LAYERS] [--contexts 1024,4096,16384,32768]
        [--batches 1,8] [--tokens 64,256] [--drafts "psa(epsilon=0.3)"] [--replay 0,0.5] [--pairs 5] [--clock cpu|wall]
        [--threads N]

A pair is one batch of answers by dense decode and one by ``lossless``, all tokens after the first counted, whatever
was tried meanwhile; which of them comes first alternates. ``first``: an engine that has measured nothing yet, forgotten
before each pair; ``later``: one that keeps what the pairs before showed. Printed are the speed over dense, the median
of the pairs and the slowest, and the rounds of the last. ``--replay``: the share of drafted tokens that stays, as in
``lossless.py``; not for a GPU, where plain steps whose token is replaced are launched ahead in vain. ``--clock cpu``
counts the processor time of all threads, which other work on a machine does not lengthen much.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import tempfile
import time
from pathlib import Path

import torch
from lossless import filling, measure, suite_prompts

from saccade import LLM
from saccade.bench.cli import model_folder
from saccade.bench.ttft import prompt
from saccade.methods.verified import MOST


def numbers(text: str) -> list[int]:
    return [int(one) for one in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="random")
    parser.add_argument("--contexts", type=numbers, default=[1024, 4096, 16384, 32768])
    parser.add_argument("--batches", type=numbers, default=[1, 8])
    parser.add_argument("--tokens", type=numbers, default=[64, 256])
    parser.add_argument("--drafts", default="psa(epsilon=0.3)")
    parser.add_argument("--replay", default="", help="shares of drafted tokens that stay; none: as they fall")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--clock", choices=("cpu", "wall"), default="wall")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    longest = max(chosen.contexts) + max(chosen.tokens) + 1024
    with tempfile.TemporaryDirectory() as folder:
        path = model_folder(chosen.model, Path(folder), torch.bfloat16, positions=longest)
        llm = LLM(
            path,
            dtype="bfloat16",
            max_model_len=longest,
            max_requests=max(chosen.batches),
            threads=chosen.threads,
            exact=False,
            device=chosen.device,
            enable_prefix_caching=False,
        )
        gc.collect()
        gc.freeze()
        with llm:
            for context in chosen.contexts:
                for batch in chosen.batches:
                    for tokens in chosen.tokens:
                        row(llm, chosen, context, batch, tokens)


def row(llm: LLM, chosen: argparse.Namespace, context: int, batch: int, tokens: int) -> None:
    if chosen.model == "reference":
        prompts, fills = suite_prompts(llm, context - tokens - 16, batch), [None] * batch
    else:
        prompts = [prompt(context, llm.model.spec.vocab_size, seed) for seed in range(batch)]
        fills = [filling(llm, prompts[0], chosen.model)] * batch
    now = time.process_time if chosen.clock == "cpu" else time.perf_counter

    def run(policy: str, known=None, chance=None):
        seconds, made, requests, _ = measure(llm, prompts, fills, policy, tokens, known, chance, 1, now)
        return made / seconds, requests

    answers = run("dense")[1]
    known = {number: [*prompts[number], *one.final_ids, *[0] * (2 * MOST)] for number, one in enumerate(answers)}
    for draft in chosen.drafts.split(";"):
        for chance in [float(one) for one in chosen.replay.split(",") if one] or [None]:
            policy = f"lossless(draft={draft}{'' if chance is None else ', lookup=0'})"
            for when in ("first", "later"):
                llm.engine.sparse_drafts.pacing.forget()
                found = []
                for pair in range(chosen.pairs):
                    if when == "first":
                        llm.engine.sparse_drafts.pacing.forget()
                    dense = 0.0 if pair % 2 else run("dense")[0]
                    speed, requests = run(policy, known, chance)
                    found.append(speed / (dense or run("dense")[0]))
                said = requests[0].report.as_dict()["speculation"]
                print(
                    f"{context} x {batch}, {tokens} tokens, {draft}{'' if chance is None else f' at {chance}'}, "
                    f"{when}: "
                    f"{statistics.median(found):.3f} x dense, slowest {min(found):.3f} of "
                    f"{', '.join(f'{one:.3f}' for one in found)}; {said['verifications']} rounds of "
                    f"{said['verifications'] + said['plain_steps']} steps; off: {said['off']}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
