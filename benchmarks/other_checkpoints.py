"""Make other checkpoints of a pretrained one, to try `saccade tune` and `auto` on: trained on, extended or changed.

    python benchmarks/other_checkpoints.py yarn path/to/smollm2 out/smol-yarn
    python benchmarks/other_checkpoints.py trained path/to/smollm2 out/smol-trained --text german.txt

`yarn`: positions extended four times by YaRN; `linear`: twice, by interpolation. `flat` and `sharp`: queries times
0.5 and 1.6, which spreads attention or narrows it. `lora`: no checkpoint but an adapter of random matrices of rank 8 on
queries, keys and values, for `--lora`. `trained`: `--steps` steps of AdamW on random parts of `--text`, which makes a
model of other weights, not a better one.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

QUERIES = {"flat": 0.5, "sharp": 1.6}
ROPE = {"yarn": 4.0, "linear": 2.0}  # factors
RANK, SIZE = 8, 0.25  # of an adapter; its product beside the matrix that it is added to
ADAPTED = ("q_proj", "k_proj", "v_proj")
WEIGHTS, CONFIG = "model.safetensors", "config.json"


def main() -> None:
    """Make one checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=[*ROPE, *QUERIES, "lora", "trained"])
    parser.add_argument("source", type=Path, help="a folder of one safetensors file")
    parser.add_argument("out", type=Path)
    parser.add_argument("--text", type=Path)
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--length", type=int, default=320, help="tokens a step")
    parser.add_argument("--rate", type=float, default=6e-4)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    torch.manual_seed(asked.seed)
    asked.out.mkdir(parents=True, exist_ok=True)
    if asked.kind == "lora":
        adapter(asked.source, asked.out)
        return
    if asked.kind == "trained":
        if asked.text is None:
            parser.error("trained needs --text")
        trained(asked.source, asked.out, asked.text.read_text(encoding="utf-8"), asked.steps, asked.length, asked.rate)
        return
    for file in asked.source.iterdir():
        if file.is_file() and file.name not in ("sha256.json", WEIGHTS):
            shutil.copy(file, asked.out)
    weights = load_file(asked.source / WEIGHTS)
    if asked.kind in ROPE:
        config = json.loads((asked.source / CONFIG).read_text())
        (asked.out / CONFIG).write_text(json.dumps(extended(config, asked.kind), indent=1))
    else:
        factor = QUERIES[asked.kind]
        weights = {name: one * factor if ".q_proj." in name else one for name, one in weights.items()}
    save_file(weights, asked.out / WEIGHTS, metadata={"format": "pt"})


def extended(config: dict[str, Any], kind: str) -> dict[str, Any]:
    """``config`` with positions extended. Of YaRN its length is the extended one, else the trained."""
    length, base = config["max_position_embeddings"], config["rope_parameters"]["rope_theta"]
    rope = {"rope_type": kind, "rope_theta": base, "factor": ROPE[kind]}
    if kind == "yarn":
        rope["original_max_position_embeddings"] = length
        length = round(ROPE[kind] * length)
    return {**config, "rope_parameters": rope, "max_position_embeddings": length}


def adapter(source: Path, out: Path) -> None:
    """An adapter in peft's format."""
    made = {}
    for name, one in load_file(source / WEIGHTS).items():
        module = name.removesuffix(".weight")
        if module.endswith(ADAPTED) and one.dim() == 2:
            rows, columns = one.shape
            made[f"base_model.model.{module}.lora_A.weight"] = torch.randn(RANK, columns) / columns**0.5
            size = SIZE * float(one.float().std()) * (columns / RANK) ** 0.5
            made[f"base_model.model.{module}.lora_B.weight"] = size * torch.randn(rows, RANK)
    save_file(made, out / "adapter_model.safetensors")
    told = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": RANK, "bias": "none"}
    (out / "adapter_config.json").write_text(json.dumps({**told, "target_modules": ADAPTED}))


def trained(source: Path, out: Path, text: str, steps: int, length: int, rate: float) -> None:
    """A few steps further; prints each loss."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).train()
    ids = torch.tensor(tokenizer(text)["input_ids"])
    best = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.01)
    for step in range(steps):
        at = int(torch.randint(0, len(ids) - length, ()))
        part = ids[None, at : at + length]
        loss = model(input_ids=part, labels=part).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        best.step()
        best.zero_grad()
        print(f"step {step + 1}: loss {float(loss.detach()):.3f}", flush=True)
    model.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)


if __name__ == "__main__":
    main()
