"""A few rows through decoder layers of the Llama shape without transformers' modules: a decode step on a CPU.

A step of one row spends more time between torch calls, and in torch's products of one row, than in reading weights. The
module loop in ``runner`` remains the oracle, and what runs everything else.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from saccade.kv.pool import ask_for_huge_pages
from saccade.models.interface import AttentionContext, LayerAttention, ModelSpec, Stopwatch
from saccade.models.rotary import CosSin
from saccade.ops.layer_rows import MOST_ROWS, Matrix, Norm, RowLayer, head, reads

ARENA_BYTES = 1 << 26
LINE = 64  # values: weights begin at a cache line
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "smollm3")


class FusedDecoder:
    """The layers and the head of a checked model, by the row kernels. Of every layer: its weights, what it asks of its
    attention, and whether it rotates."""

    def __init__(
        self, layers: list[RowLayer], attention: list[LayerAttention], rotated: list[bool], norm: Norm, matrix: Matrix
    ) -> None:
        self.layers = layers
        self.attention = attention
        self.rotated = rotated
        self.norm = norm
        self.head = matrix
        self.stopwatch: Stopwatch | None = None  # times what is neither attention nor choosing keys, as "linear"

    @classmethod
    def of(cls, model: Any, spec: ModelSpec) -> FusedDecoder | None:
        """None where the model's modules are not of the shape, or not where and as the kernels read them."""
        if model.config.model_type not in FAMILIES or model.config.hidden_act != "silu" or not spec.head_dim:
            return None  # a spec that is blank still: the model is being probed
        decoder = model.get_decoder()
        gather_weights([module for module in model.modules() if isinstance(module, nn.Linear)])
        try:
            layers = [_layer(layer, spec) for layer in decoder.layers]
            norm, matrix = _norm(decoder.norm), _matrix(model.get_output_embeddings())
        except _Unlike:
            return None
        attention = [
            LayerAttention(scale=float(layer.self_attn.scaling), window=window)
            for layer, window in zip(decoder.layers, spec.windows)
        ]
        rotated = [bool(getattr(layer.self_attn, "use_rope", True)) for layer in decoder.layers]
        return cls(layers, attention, rotated, norm, matrix)

    def serves(self, hidden: Tensor, pair: CosSin) -> bool:
        """Whether :meth:`layer` can take ``hidden`` [1, rows, channels] with these rotary factors."""
        layer = self.layers[0]
        return hidden.shape[1] <= MOST_ROWS and hidden.dtype == layer.dtype and pair[0].shape[-1] == layer.head_dim

    def layer(self, index: int, hidden: Tensor, pair: CosSin, ctx: AttentionContext) -> None:
        """One decoder layer over ``hidden`` [1, rows, channels], in place."""
        layer, rows, watch = self.layers[index], hidden[0], self.stopwatch
        cos, sin = (pair[0][0], pair[1][0]) if self.rotated[index] else (None, None)
        if watch is None:
            layer.finish(rows, ctx.attend(index, *layer.project(rows, cos, sin), self.attention[index]))
            return
        watch.begin("linear")
        parts = layer.project(rows, cos, sin)
        watch.end()
        out = ctx.attend(index, *parts, self.attention[index])
        watch.begin("linear")
        layer.finish(rows, out)
        watch.end()

    def logits(self, hidden: Tensor) -> Tensor:
        """``hidden`` [rows, channels], before the final norm -> [rows, vocab], in its dtype."""
        if self.stopwatch is None:
            return head(hidden.contiguous(), self.norm, self.head)
        self.stopwatch.begin("linear")
        out = head(hidden.contiguous(), self.norm, self.head)
        self.stopwatch.end()
        return out


@torch.inference_mode(False)
def gather_weights(modules: Sequence[nn.Linear]) -> None:
    """Move the weights of large models on a CPU, of one dtype, into memory with pages of 2 MiB, in the order of the
    modules: a step reads each of them once, and its reading is faster by a quarter. They stay the parameters they are;
    at most ``ARENA_BYTES`` more are needed while they move."""
    weights = list({id(module.weight): module.weight for module in modules}.values())
    if sum(_bytes(weight) for weight in weights) < ARENA_BYTES or len({weight.dtype for weight in weights}) > 1:
        return
    if any(weight.device.type != "cpu" for weight in weights):
        return
    while weights:
        some = [weights.pop(0)]
        while weights and sum(map(_bytes, some)) < ARENA_BYTES:
            some.append(weights.pop(0))
        starts = list(accumulate((-(-weight.numel() // LINE) * LINE for weight in some), initial=0))
        arena = torch.empty(starts[-1], dtype=some[0].dtype)
        ask_for_huge_pages(arena)
        for start, weight in zip(starts, some):
            weight.data = arena[start : start + weight.numel()].view(weight.shape).copy_(weight.data)


def _bytes(weight: Tensor) -> int:
    return weight.numel() * weight.element_size()


class _Unlike(Exception):
    """A module is not what the kernels compute."""


def _layer(layer: Any, spec: ModelSpec) -> RowLayer:
    attention, mlp = layer.self_attn, layer.mlp
    return RowLayer(
        _norm(layer.input_layernorm),
        _matrix(attention.q_proj),
        _matrix(attention.k_proj),
        _matrix(attention.v_proj),
        _matrix(attention.o_proj),
        _norm(layer.post_attention_layernorm),
        _matrix(mlp.gate_proj),
        _matrix(mlp.up_proj),
        _matrix(mlp.down_proj),
        spec.head_dim,
        query_norm=_norm(attention.q_norm) if hasattr(attention, "q_norm") else None,
        key_norm=_norm(attention.k_norm) if hasattr(attention, "k_norm") else None,
    )


def _matrix(module: Any) -> Matrix:
    if type(module) is not nn.Linear or not reads(module.weight, module.bias):
        raise _Unlike
    return Matrix(module.weight.detach(), None if module.bias is None else module.bias.detach())


def _norm(module: Any) -> Norm:
    if not type(module).__name__.endswith("RMSNorm") or not reads(module.weight):
        raise _Unlike
    return Norm(module.weight.detach(), module.variance_epsilon)
