"""The weights of a model of the Llama shape, read from its modules and laid where steps read them fastest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from saccade.machine import ask_for_huge_pages, forget_file_pages, trim_memory
from saccade.models.families import Family, LlamaShape
from saccade.ops.layer_weights import HeadNorms, LayerWeights, Matrix, Norm

ARENA_BYTES = 1 << 26
LINE = 64  # values: weights begin at a cache line
SMALL = 1 << 20  # bytes: of norms and biases


@dataclass(frozen=True, eq=False)
class LlamaWeights:
    """All layers, the final norm and the head. ``joined``, if there are any, are each layer's query, key and value as
    one matrix, of which theirs are parts. ``scales`` are what each layer's attention multiplies its logits by."""

    layers: list[LayerWeights]
    norm: Norm
    head: Matrix
    scales: list[float]
    joined: list[Matrix] | None

    @property
    def ends(self) -> tuple[Tensor | None, ...]:
        """The tensors of the final norm and the head."""
        return self.norm.weight, self.head.weight, self.head.bias


def read_weights(model: Any, family: Family, head_dim: int, join: bool | None = None) -> LlamaWeights | None:
    """The weights of ``model``, which stay its parameters; None where its modules are not of the Llama shape. ``join``
    (by default on a GPU) lays each layer's query, key and value side by side."""
    shape = family.llama_shape
    if shape is None or model.config.hidden_act != "silu":
        return None
    decoder, output = model.get_decoder(), model.get_output_embeddings()
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    if gather_weights(linears):
        moved = {id(module.weight) for module in linears}
        for weight in model.parameters():
            if id(weight) not in moved and weight.device.type == "cpu" and _bytes(weight) < SMALL:
                weight.data = weight.data.clone()  # the last ones by which the file would stay mapped beside its copy
    joined = None
    try:
        layers = [_layer(layer, shape, head_dim) for layer in decoder.layers]
        if output.weight.is_cuda if join is None else join:
            joined = [_join(layer.self_attn) for layer in decoder.layers]
            layers = [_layer(layer, shape, head_dim) for layer in decoder.layers]  # their weights are parts now
        norm, head = _norm(getattr(decoder, family.final_norm)), _matrix(output)
    except _Unlike:
        return None
    return LlamaWeights(layers, norm, head, [float(layer.self_attn.scaling) for layer in decoder.layers], joined)


@torch.inference_mode(False)
def gather_weights(modules: Sequence[nn.Linear]) -> bool:
    """Move the weights of large models on a CPU, of one dtype, into memory with pages of 2 MiB, in the order of the
    modules: a step reads each of them once, and its reading is faster by a quarter. They stay the parameters they are;
    at most ``ARENA_BYTES`` more are needed while they move, since pages of the file that are copied are let go. Whether
    they were moved."""
    weights = list({id(module.weight): module.weight for module in modules}.values())
    if sum(_bytes(weight) for weight in weights) < ARENA_BYTES or len({weight.dtype for weight in weights}) > 1:
        return False
    if any(weight.device.type != "cpu" for weight in weights):
        return False
    while weights:
        some = [weights.pop(0)]
        while weights and sum(map(_bytes, some)) < ARENA_BYTES:
            some.append(weights.pop(0))
        starts = list(accumulate((-(-weight.numel() // LINE) * LINE for weight in some), initial=0))
        arena = torch.empty(starts[-1], dtype=some[0].dtype)
        ask_for_huge_pages(arena)
        for start, weight in zip(starts, some):
            moved = arena[start : start + weight.numel()].view(weight.shape).copy_(weight.data)
            forget_file_pages(weight.data)
            weight.data = moved
        trim_memory()
    return True


def _bytes(weight: Tensor) -> int:
    return weight.numel() * weight.element_size()


class _Unlike(Exception):
    """A module is not what the decoder computes."""


def _layer(layer: Any, shape: LlamaShape, head_dim: int) -> LayerWeights:
    attention, mlp = layer.self_attn, layer.mlp
    query, key, value = _matrix(attention.q_proj), _matrix(attention.k_proj), _matrix(attention.v_proj)
    return LayerWeights(
        _norm(layer.input_layernorm),
        query,
        key,
        value,
        _matrix(attention.o_proj),
        _norm(layer.post_attention_layernorm),
        _matrix(mlp.gate_proj),
        _matrix(mlp.up_proj),
        _matrix(mlp.down_proj),
        head_dim,
        rotated=bool(getattr(attention, "use_rope", True)),
        head_norms=_head_norms(_norm(attention.q_norm), _norm(attention.k_norm)) if shape.head_norms else None,
    )


def _matrix(module: Any) -> Matrix:
    if type(module) is not nn.Linear:
        raise _Unlike
    return Matrix(module.weight.detach(), None if module.bias is None else module.bias.detach())


def _norm(module: Any) -> Norm:
    if not type(module).__name__.endswith("RMSNorm"):
        raise _Unlike
    return Norm(module.weight.detach(), module.variance_epsilon)


def _head_norms(query: Norm, key: Norm) -> HeadNorms:
    if query.epsilon != key.epsilon:
        raise _Unlike
    return HeadNorms(query.weight, key.weight, query.epsilon)


@torch.no_grad()
def _join(attention: Any) -> Matrix:
    """The weights [all outputs, channels] and biases of the query, key and value as one, of which theirs become
    parts."""
    modules = [attention.q_proj, attention.k_proj, attention.v_proj]
    widths = [module.weight.shape[0] for module in modules]
    weight = torch.cat([module.weight for module in modules])
    bias = None if modules[0].bias is None else torch.cat([module.bias for module in modules])
    for number, (module, part) in enumerate(zip(modules, weight.split(widths))):
        module.weight.data = part
        if bias is not None:
            module.bias.data = bias.split(widths)[number]
    if weight.is_cuda:
        torch.cuda.empty_cache()  # what they held before is of no size that anything else has
    return Matrix(weight, bias)
