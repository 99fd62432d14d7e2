"""Time to the first token of transformers' own ``generate``: sdpa beside saccade's attention under each policy.

    python benchmarks/transformers_first_token.py qwen2.5-coder -f book.txt --length 8192 --threads 2

Seconds are the least of ``--runs``, of which each is one ``generate`` of one token.
"""

from __future__ import annotations

import argparse
import time
from importlib.resources import files
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import saccade.transformers
from saccade.models.folders import checkpoint_folder

POLICIES = ["dense", "flexprefill(lines=block)+lfps", "flashprefill(alpha=0.3)+lfps"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", help="as saccade's -m")
    parser.add_argument("-f", "--prompt-file", type=Path, help="UTF-8 text; by default the package's logbook, repeated")
    parser.add_argument("--length", type=int, default=8192, help="tokens of the prompt")
    parser.add_argument("--threads", type=int, help="torch's and the kernels'")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--policy", action="append", help="one or more; by default three")
    given = parser.parse_args()
    if given.threads:
        torch.set_num_threads(given.threads)
    folder = checkpoint_folder(given.model)
    source = given.prompt_file or files("saccade").joinpath("eval/logbook.txt")
    ids = AutoTokenizer.from_pretrained(folder)(source.read_text(encoding="utf-8"))["input_ids"]
    prompt = torch.tensor([(ids * (-(-given.length // len(ids))))[: given.length]])
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, given.dtype)).eval()

    def timed(attention: str, **asked: str) -> float:
        model.set_attn_implementation(attention)
        model.generate(prompt[:, :64], max_new_tokens=1, do_sample=False, pad_token_id=0, **asked)  # warm
        seconds = []
        for _ in range(given.runs):
            began = time.perf_counter()
            model.generate(prompt, max_new_tokens=1, do_sample=False, pad_token_id=0, **asked)
            seconds.append(time.perf_counter() - began)
        return min(seconds)

    print(f"{given.model}, {given.length} tokens, {torch.get_num_threads()} threads, {given.dtype}", flush=True)
    base = timed("sdpa")
    print(f"sdpa {base:.2f} s", flush=True)
    for policy in given.policy or POLICIES:
        seconds = timed("saccade", saccade=policy)
        density = saccade.transformers.report(model)[0]["prefill"]["density"]
        print(f"{policy} {seconds:.2f} s, {base / seconds:.2f}x sdpa, density {density:.3f}", flush=True)


if __name__ == "__main__":
    main()
