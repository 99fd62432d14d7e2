"""A model with layers that keep a state, on a CPU: prefill and decode by our kernels and by torch's, by turns.

    python benchmarks/hybrid.py [--layers 8] [--contexts 1024 8192] [--threads 16] [--tokens 16] [--vocabulary 32000]
        [--ways kernels layers torch]

Qwen3.5-4B's shape (2,560 channels, three gated delta layers to one that attends, heads of 256) with ``--layers`` layers
and random weights, bfloat16. A line each: seconds of the prefill, and the median milliseconds of a decode step.
``layers``: the same kernels, called layer by layer in a step; ``torch``: transformers' modules as they are, states
copied in and out; attention is ours in all.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

from saccade import LLM, SamplingParams
from saccade.methods.policy import Policy
from saccade.models import runner
from saccade.models.keeping_step import kept_step
from saccade.ops import cpu, slotted


def checkpoint(folder: Path, layers: int, vocabulary: int) -> Path:
    config = Qwen3_5TextConfig(
        hidden_size=2560, intermediate_size=9216, num_hidden_layers=layers, num_attention_heads=16,
        num_key_value_heads=4, head_dim=256, linear_num_key_heads=16, linear_num_value_heads=32,
        linear_key_head_dim=128, linear_value_head_dim=128, vocab_size=vocabulary, tie_word_embeddings=True,
        max_position_embeddings=262144,
        layer_types=["full_attention" if at % 4 == 3 else "linear_attention" for at in range(layers)],
    )  # fmt: skip
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    model = Qwen3_5ForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    model.save_pretrained(folder)
    return folder


def measure(llm: LLM, length: int, tokens: int, seed: int, now: Callable[[], float]) -> tuple[float, list[float]]:
    """Seconds to the first token, and of each step behind it."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, llm.model.spec.vocab_size, (length,), generator=generator).tolist()
    params = SamplingParams(temperature=0, max_tokens=tokens + 2, ignore_eos=True)
    began, engine = now(), llm.engine
    request = engine.add(ids, params, Policy.parse("dense"))
    while len(request.sequence.tokens) == request.output_start:
        engine.step()
    prefill, steps = now() - began, []
    for _ in range(tokens):
        began = now()
        engine.step()
        steps.append(now() - began)
    engine.cancel(request)
    return prefill, steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 8192])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--ways", nargs="+", choices=("kernels", "layers", "torch"), default=["kernels", "torch"])
    parser.add_argument("--processor", action="store_true", help="time of all threads together, as of a busy machine")
    asked = parser.parse_args()
    now = time.process_time if asked.processor else time.perf_counter
    torch.set_num_threads(asked.threads)
    ways = {"kernels": slotted.on_host, "layers": slotted.on_host, "torch": lambda device: False}
    with tempfile.TemporaryDirectory() as made:
        folder, llms = checkpoint(Path(made), asked.layers, asked.vocabulary), {}
        for way in asked.ways:
            slotted.on_host = ways[way]
            llms[way] = LLM(folder, dtype="bfloat16", kv_memory="2GiB", enable_prefix_caching=False)
        print(f"{cpu.isa()}, {asked.threads} threads, {asked.layers} layers", flush=True)
        print("| context | by | prefill, s | step, ms |")
        print("|---|---|---|---|")
        for length in asked.contexts:
            found: dict[str, list[tuple[float, list[float]]]] = {way: [] for way in asked.ways}
            for turn in range(asked.rounds):
                for way in asked.ways:
                    slotted.on_host = ways[way]
                    runner.kept_step = kept_step if way == "kernels" else lambda *given: None
                    found[way].append(measure(llms[way], length, asked.tokens, turn, now))
            for way, runs in found.items():
                step = statistics.median(one for _, steps in runs for one in steps)
                print(f"| {length} | {way} | {min(one for one, _ in runs):.3f} | {1e3 * step:.2f} |", flush=True)


if __name__ == "__main__":
    main()
