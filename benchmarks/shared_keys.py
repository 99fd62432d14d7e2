"""What layers that read others' keys take, beside layers of their own keys: Gemma 3n's shape, random weights, on this
machine.

    python benchmarks/shared_keys.py [--layers 10] [--shared 4] [--hidden 256] [--context 8192 32768] [--steps 16]
        [--policy dense "quest(budget=1024)"] [--rounds 3] [--threads 1] [--dtype bfloat16] [--device cpu]
        [--kv-memory 6GiB]

Two checkpoints that differ in ``num_kv_shared_layers`` alone: every fifth layer without a window, heads of 256
channels, two of keys and values. A row a context and policy, for each of the two: bytes of keys and values that are
held; of the prompt's rows and layers those that were computed; keys read by a decode step, all layers; and by turns,
medians of ``--rounds``, seconds of the prefill and milliseconds of a decode step. Where the machine is busy, the counts
alone mean something.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, Gemma3nTextConfig

from saccade import LLM, SamplingParams
from saccade.machine import show_bytes


def checkpoint(folder: Path, layers: int, shared: int, hidden: int, context: int) -> Path:
    """A random one in ``folder``."""
    config = Gemma3nTextConfig(
        vocab_size=1024,
        vocab_size_per_layer_input=1024,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_kv_shared_layers=shared,
        max_position_embeddings=context + 1024,
        laurel_rank=16,
        hidden_size_per_layer_input=32,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=10)
    parser.add_argument("--shared", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--context", type=int, nargs="+", default=[8192, 32768])
    parser.add_argument("--policy", nargs="+", default=["dense"])
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--kv-memory", default="6GiB", help="of each of the two")
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    params = SamplingParams(temperature=0, max_tokens=asked.steps + 1, ignore_eos=True)
    sizes = asked.layers, asked.hidden, max(asked.context)
    with tempfile.TemporaryDirectory() as place:
        both = {
            name: LLM(
                checkpoint(Path(place) / name, sizes[0], shared, *sizes[1:]),
                dtype=asked.dtype,
                threads=asked.threads,
                device=asked.device,
                kv_memory=asked.kv_memory,
                enable_prefix_caching=False,
            )
            for name, shared in (("shared", asked.shared), ("own", 0))
        }
        print(f"{'context':>8} {'policy':<24} {'keys':<7} {'held':>10} {'rows x layers':>14} {'keys a step':>12} "
              f"{'prefill, s':>11} {'step, ms':>9}")  # fmt: skip
        for context in asked.context:
            ids = torch.randint(1024, (context,), generator=torch.Generator().manual_seed(1)).tolist()
            for policy in asked.policy:
                found: dict[str, list[dict[str, float]]] = {name: [] for name in both}
                for _ in range(asked.rounds):
                    for name, llm in both.items():
                        report = llm.generate(ids, params, policy=policy)[0].report
                        prefill, decode = report["prefill"], report["decode"]
                        computed = 1 - (prefill["rows_unread"] + prefill["rows_frozen"]) / (context * asked.layers)
                        found[name].append(
                            {
                                "rows": computed,
                                "keys": decode["keys_attended"] / decode["tokens"],
                                "prefill": prefill["seconds"],
                                "step": 1000 * decode["seconds"] / decode["tokens"],
                            }
                        )
                for name, rounds in found.items():
                    middle = {key: statistics.median(one[key] for one in rounds) for key in rounds[0]}
                    llm = both[name]
                    held = llm.pool.layers * llm.pool.format.blocks(context) * llm.pool.format.block_bytes
                    print(f"{context:>8,} {policy:<24} {name:<7} {show_bytes(held):>10} {middle['rows']:>14.1%} "
                          f"{middle['keys']:>12,.0f} {middle['prefill']:>11.2f} {middle['step']:>9.2f}")  # fmt: skip
        for llm in both.values():
            llm.close()


if __name__ == "__main__":
    main()
