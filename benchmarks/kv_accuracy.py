"""What storing keys and values in fewer bits does to a model: perplexity, and the divergence of its distributions from
those over keys and values of its own dtype. The same windows of a text, teacher-forced, under every format.

    python benchmarks/kv_accuracy.py --model build/real/smollm2 --text FILE --length 1024 --windows 8
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from saccade import LLM, SamplingParams

FORMATS = {
    "auto": {},
    "int8": {"kv_dtype": "int8"},
    "int8, kv_rotate=False": {"kv_dtype": "int8", "kv_rotate": False},
    "auto, kv_rotate=True": {"kv_rotate": True},
    "bf16": {"kv_dtype": "bf16"},
    "fp8": {"kv_dtype": "fp8"},
    "fp8, kv_rotate=True": {"kv_dtype": "fp8", "kv_rotate": True},
}
SCORED = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--policy", default="dense")
    parser.add_argument("--skip", type=int, default=4000, help="tokens at the text's begin")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--formats", default="auto;int8;int8, kv_rotate=False")
    asked = parser.parse_args()
    options: dict[str, Any] = {"dtype": asked.dtype, "threads": asked.threads, "kv_memory": "512MiB"}
    options["device"] = asked.device
    engines = {name: LLM(asked.model, **options, **FORMATS[name]) for name in asked.formats.split(";")}
    first = next(iter(engines.values()))
    ids = first.encode(asked.text.read_text(encoding="utf-8"))[asked.skip :]
    losses: dict[str, list[Tensor]] = {name: [] for name in engines}
    diverged: dict[str, list[Tensor]] = {name: [] for name in engines}
    agreed = dict.fromkeys(engines, 0)
    for number in range(asked.windows):
        window = ids[number * asked.length : (number + 1) * asked.length]
        if len(window) < asked.length:
            break
        truth: Tensor | None = None
        for name, llm in engines.items():
            found = torch.cat([torch.log_softmax(part, -1).cpu() for part in logits(llm, window, asked.policy)])
            target = torch.tensor(window[1:])
            losses[name].append(-found[: len(target)].gather(1, target[:, None])[:, 0].double())
            if truth is None:
                truth = found
            diverged[name].append(torch.cat([divergence(a, b) for a, b in zip(truth.split(64), found.split(64))]))
            agreed[name] += int((truth.argmax(-1) == found.argmax(-1)).sum())
            del found
    plain = torch.cat(losses[next(iter(engines))])
    print(f"{asked.model}, {asked.dtype}, {asked.device}, {asked.policy}: {len(plain)} tokens of {asked.text.name}")
    for name in engines:
        loss, kl = torch.cat(losses[name]), torch.cat(diverged[name])
        off = loss - plain
        change, spread = math.exp(float(off.mean())) - 1, float(off.std()) / len(off) ** 0.5
        print(
            f"{name:24s} perplexity {math.exp(float(loss.mean())):9.4f} {100 * change:+.3f} % (+-{200 * spread:.3f}), "
            f"KL {float(kl.mean()):.6f}, p99 {float(kl.quantile(0.99)):.5f}, same first token "
            f"{agreed[name] / len(kl):.4f}",
            flush=True,
        )


def divergence(truth: Tensor, found: Tensor) -> Tensor:
    """KL of log-probabilities [rows, vocab], in nats."""
    return (truth.exp() * (truth - found)).sum(-1).double()


def logits(llm: LLM, ids: list[int], policy: str) -> Iterator[Tensor]:
    """Of every token of a prompt, float32 [rows, vocab], as the engine computes them to score it."""
    runner, seen = llm.model.runner, []
    own = type(runner).logits

    def noted(hidden: Tensor) -> Tensor:
        made = own(runner, hidden)
        if len(made) > 1 or len(ids) == 1:
            seen.append(made)
        return made

    runner.logits = noted  # type: ignore[method-assign]
    try:
        (output,) = llm.generate([ids], SCORED, policy=policy)
    finally:
        del runner.logits
    assert output.error is None, output.error
    return iter(seen)


if __name__ == "__main__":
    main()
