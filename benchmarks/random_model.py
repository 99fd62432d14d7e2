"""Llamas of a shape with random weights, in this process and its ranks, without files: what tensor_parallel.py and
gpu/vllm_plugin.py time. Run as a script, this is a rank of such a model.

Weights are made on each rank's device, by their names: the same for any number of ranks. A folder says a shape's name.
"""

from __future__ import annotations

import os
import sys
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig

import saccade.llm
import saccade.ranks
from saccade.engine.ranks import meeting
from saccade.models import attention
from saccade.models.families import FAMILIES
from saccade.models.identity import FoundOnce, identity_of
from saccade.models.interface import ModelSpec
from saccade.models.llama import LlamaDecoder
from saccade.models.llama_weights import Use, read_weights
from saccade.models.loader import LoadedModel
from saccade.models.parts import Parts
from saccade.models.runner import HFRunner
from saccade.models.shards import Share, whole_spec
from saccade.models.tokenizer import load_tokenizer
from saccade.ops.matrices import DenseMatrix, Matrix
from saccade.ops.planes import packed
from saccade.selection.head_part import WHOLE

sys.path.insert(0, str(Path(__file__).parent / "gpu"))
from random_blocks import random_blocks

CHUNK = 4096  # tokens at a prompt's end that are computed again although its prefix is there
STEPS = 64  # decode steps by how many more long answers take what is timed
PLAIN = "bfloat16", "float32"  # weights that are no blocks
NO_SUMS = "SACCADE_BENCH_NO_SUMS"  # of processes that leave sums out
ALONE = "SACCADE_BENCH_ALONE"  # of a process that runs its part of the model without the others


@dataclass(frozen=True)
class Shape:
    """A Llama's, ``weights`` in bfloat16 or random blocks of a format, whose head is Q6_K; and what is measured of it:
    first tokens of a prompt of ``first``, decode steps of ``batch`` rows after ``context`` tokens each."""

    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    first: int | None
    context: int
    batch: int
    weights: str = "bfloat16"
    vocab: int = 128256
    head_dim: int = 128

    @property
    def kv_bytes(self) -> int:
        """Of the tokens that are there at once, and some room."""
        tokens = max(self.first or 0, self.batch * (self.context + CHUNK + 2 * STEPS)) + 64 * self.batch
        return self.layers * 2 * self.kv_heads * self.head_dim * (2 if self.weights != "float32" else 4) * tokens


SHAPES = {
    "8b": Shape(32, 4096, 14336, 32, 8, 131072 - 256, 49152, 8),
    "70b": Shape(80, 8192, 28672, 64, 8, None, 32768, 4, "Q4_K"),
    "tiny": Shape(2, 64, 128, 4, 2, 600, 300, 2, "float32", 300, 32),
    "deep": Shape(80, 256, 512, 4, 2, None, 300, 2, "Q4_K", 300, 64),  # a 70B's layers and formats, for any machine
}


class RandomWeights:
    """A source (models.llama_weights.WeightSource) of weights that its names draw, or of a rank's ``parts`` of them."""

    def __init__(self, shapes: dict[str, torch.Size], weights: str, device: torch.device, parts: Parts | None) -> None:
        self._shapes, self._weights, self._device, self._parts = shapes, weights, device, parts
        self._dtype = torch.float32 if weights == "float32" else torch.bfloat16

    def tensor(self, name: str, use: Use) -> Tensor:
        whole = self._whole(name)
        return whole if self._parts is None else self._parts.tensor(name, whole).clone()

    def _whole(self, name: str) -> Tensor:
        shape = self._shapes[name]
        if len(shape) == 1:
            return torch.ones(shape, dtype=self._dtype, device=self._device)
        made = torch.empty(shape, dtype=self._dtype, device=self._device)
        return made.normal_(0, 0.02, generator=self._drawn(name))

    def _drawn(self, name: str) -> torch.Generator:
        return torch.Generator(self._device).manual_seed(zlib.crc32(name.encode()))

    def matrix(self, name: str, bias: bool = False, use: Use = "matrix") -> Matrix:
        if use == "table" or self._weights in PLAIN:
            own: Matrix = DenseMatrix(self.tensor(f"{name}.weight", use), None)
            return own if self._parts is None else self._parts.matrix(name, own)
        kind, size = "Q6_K" if name == "lm_head" else self._weights, self._shapes[f"{name}.weight"]
        whole = packed(random_blocks(kind, *size, self._device, self._drawn(name)))
        return whole if self._parts is None else self._parts.matrix(name, self._parts.split(name, whole))


def random_model(
    path: str | Path,
    dtype: Any = None,
    device: Any = "cpu",
    quantize: None = None,
    lora: None = None,
    layers: None = None,
    share: Share | None = None,
) -> LoadedModel:
    """As ``load_model``, of a folder that says a shape's name alone."""
    folder, device, ranks = Path(path), torch.device(device), 1 if share is None else share.ranks
    shape = SHAPES[(folder / "shape").read_text()]
    attention.register()
    config = LlamaConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=1 << 18,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
    )
    kind = torch.float32 if shape.weights == "float32" else torch.bfloat16
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(
            config, dtype=kind, attn_implementation=attention.ATTENTION_NAME
        ).eval()
    sizes = {name: one.shape for name, one in model.state_dict().items()}
    grouped = shape.weights not in PLAIN
    parts = None if share is None else Parts(model, FAMILIES["llama"], share, lambda name, channels: grouped)
    with torch.inference_mode():
        source = RandomWeights(sizes, shape.weights, device, parts)
        weights = read_weights(model, source, join=device.type == "cuda")
    decoder = model.get_decoder()
    decoder.rotary_emb = type(decoder.rotary_emb)(config=model.config).to(device)
    spec = ModelSpec(
        family="llama",
        layers=shape.layers,
        heads=shape.heads // ranks,
        kv_heads=shape.kv_heads // ranks,
        head_dim=shape.head_dim,
        vocab_size=shape.vocab,
        max_position=1 << 18,
        dtype=kind,
        windows=(None,) * shape.layers,
    )
    runner = HFRunner(model, FAMILIES["llama"], spec, LlamaDecoder(weights))
    found = FoundOnce(lambda: identity_of(config, whole_spec(spec, ranks), f"random {shape}", None))
    kept = GenerationConfig(do_sample=False)
    part = WHOLE if parts is None else parts.head
    return LoadedModel(
        folder, spec, runner, load_tokenizer(folder), model.config, kept, (), device, (), found, part
    )  # fmt: skip


def no_sums(*given: Any) -> Any:
    """What joins ranks on their devices, but that sums are the ranks' own parts."""
    joins = _joins(*given)
    joins.sum = lambda part: part
    return joins


_joins = meeting.device_reduce


def patch() -> None:
    """Have this process' ranks be of random models."""
    saccade.llm.load_model = saccade.ranks.load_model = random_model  # type: ignore[attr-defined]
    saccade.llm.checkpoint_folder = saccade.ranks.checkpoint_folder = lambda path, *more: Path(path)  # type: ignore
    saccade.llm.find_heads = lambda *more: None  # type: ignore[attr-defined]  # these folders have no tensors to know
    saccade.ranks.COMMAND = (__file__,)
    if os.environ.get(NO_SUMS):
        meeting.device_reduce = no_sums
    if os.environ.get(ALONE):
        saccade.llm.check_devices = lambda *more: None  # type: ignore[attr-defined]


if __name__ == "__main__":
    patch()
    saccade.ranks.main()
