"""What the golden tokens are replayed with: the checkpoints, the prompts, and one function a way of running.

Only the package's public face is used, so that the same file runs on any version of the code.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tiny_models import make_checkpoint, random_ids

from saccade import LLM, SamplingParams

FILE = Path(__file__).parent / "tokens.json"

# Heads of 16 channels, which the C++ kernels serve; sliding windows that the longer prompts leave.
SHAPE: dict[str, Any] = {"hidden_size": 64, "max_position_embeddings": 2048}
MODELS: dict[str, dict[str, Any]] = {
    "llama": SHAPE,
    "qwen3": {**SHAPE, "sliding_window": 100},
    "gemma2": {**SHAPE, "sliding_window": 100},
    "gpt_oss": {**SHAPE, "sliding_window": 100},
}
LAYERS, HEAD_DIM, KV_HEADS = 3, 16, 2
CHUNK = 256  # the longest prompts take several
COUNTS = (
    "tokens",
    "keys_causal",
    "keys_attended",
    "keys_scored",
    "keys_estimated",
    "density_per_layer",
    "retrievals",
    "searches",
    "rows_frozen",
    "selections",
)

Answer = dict[str, Any]  # "tokens": token ids; "prefill" and "decode": COUNTS of the report


def checkpoint(family: str, folder: Path, jitter: int = 0) -> Path:
    """A seeded float32 checkpoint with seeded calibrations. ``jitter``, a seed, moves each weight by about 2e-6 of
    itself: some thirty roundings of float32."""
    make_checkpoint(family, folder, **MODELS[family])
    generator = torch.Generator().manual_seed(7)
    channels, skew = {}, {}
    for layer in range(LAYERS):
        for name in ("q", "k"):
            channels[f"{layer}.{name}"] = torch.rand(KV_HEADS, HEAD_DIM, generator=generator)
        skew[f"{layer}.skew"] = torch.linalg.qr(torch.randn(KV_HEADS, HEAD_DIM, HEAD_DIM, generator=generator)).Q
    (folder / "calibration").mkdir(exist_ok=True)
    save_file(channels, folder / "calibration" / "channels.safetensors")
    save_file({name: q.contiguous() for name, q in skew.items()}, folder / "calibration" / "skew.safetensors")
    if jitter:
        generator.manual_seed(jitter)
        for file in folder.glob("*.safetensors"):
            moved = {
                name: tensor * (1 + 2e-6 * torch.randn(tensor.shape, generator=generator))
                for name, tensor in sorted(load_file(file).items())
            }
            save_file(moved, file, metadata={"format": "pt"})
    return folder


def load(folder: Path, **options: Any) -> LLM:
    return LLM(
        folder,
        dtype="float32",
        kv_memory="64MiB",
        prefill_chunk=CHUNK,
        max_requests=256,
        threads=1,
        **{"enable_prefix_caching": False, **options},
    )


def greedy(count: int, logprobs: int | None = None) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, logprobs=logprobs)


def alone(llm: LLM, case: dict[str, Any], logprobs: int | None = None) -> list[Any]:
    """One output: the case's prompt, run by itself."""
    params = greedy(case["new_tokens"], logprobs)
    return llm.generate([random_ids(*case["prompts"][0])], params, policy=case["policy"])


def session(llm: LLM, case: dict[str, Any], logprobs: int | None = None) -> list[Any]:
    """One output a turn: the case's prompts, appended to one context."""
    with llm.session(case["policy"]) as talk:
        return [talk.generate(random_ids(*prompt), greedy(case["new_tokens"], logprobs)) for prompt in case["prompts"]]


RUN = {"alone": alone, "session": session}


def mixed(llm: LLM, cases: list[dict[str, Any]]) -> list[Any]:
    """An output for each case of one prompt, all in one batch."""
    return llm.generate(
        [random_ids(*case["prompts"][0]) for case in cases],
        [greedy(case["new_tokens"]) for case in cases],
        policy=[case["policy"] for case in cases],
    )


def answer(output: Any) -> Answer:
    """What must not change of an output."""
    if output.error is not None:
        raise RuntimeError(f"the request failed: {output.error}")
    counts = {phase: {name: output.report[phase][name] for name in COUNTS} for phase in ("prefill", "decode")}
    return {"tokens": output.outputs[0].token_ids, **counts}


def margin(output: Any) -> float:
    """The least distance of the two greatest logits over the tokens of an output that ran with ``logprobs=2``."""
    best = [sorted((entry.logprob for entry in step.values()), reverse=True) for step in output.outputs[0].logprobs]
    return min(first - second for first, second, *_ in best)
