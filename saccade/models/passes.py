"""Layers of the Llama shape with one pass over the rows where transformers' modules take several: norms, rotations and
gated activations by ``ops.row_passes``, rounded as the modules round, so that results stay the same.

A long prompt's rows fall out of the caches between two passes, which then cost as much as a small product of matrices.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import Tensor

from saccade.models.attention import saccade_attention
from saccade.models.interface import ModelSpec
from saccade.ops import row_passes

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
SLICE = 1024  # rows of an MLP whose gate and up values stay in a CPU's caches until they have been multiplied


def install(model: Any, spec: ModelSpec) -> None:
    """Give the modules of a checked model, where its family has the shape, forwards that take fewer passes. A module
    whose rows no kernel fits keeps to its class's own."""
    if spec.family not in FAMILIES or model.config.hidden_act != "silu":
        return
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = MethodType(_norm, module)
    for layer, window in zip(model.get_decoder().layers, spec.windows):
        layer.self_attn.saccade_window = window
        layer.self_attn.forward = MethodType(_attention, layer.self_attn)
        layer.mlp.forward = MethodType(_mlp, layer.mlp)
        layer.forward = MethodType(_layer, layer)


def remove(model: Any) -> None:
    """Give every module of ``model`` its class's forward back."""
    for module in model.modules():
        module.__dict__.pop("forward", None)


def _norm(module: Any, hidden_states: Tensor) -> Tensor:
    if not row_passes.fits(hidden_states, module.weight):
        return type(module).forward(module, hidden_states)
    rows = hidden_states.reshape(-1, hidden_states.shape[-1])
    return row_passes.rms_norm(rows, module.weight, module.variance_epsilon).view(hidden_states.shape)


def _mlp(module: Any, x: Tensor) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    if not row_passes.fits(x) or module.gate_proj.out_features % row_passes.WIDTH:
        return type(module).forward(module, x)
    if rows.is_cuda:
        return module.down_proj(row_passes.silu_mul(module.gate_proj(rows), module.up_proj(rows))).view(x.shape)
    out = torch.empty_like(rows)
    for first in range(0, len(rows), SLICE):
        part = rows[first : first + SLICE]
        gated = row_passes.silu_mul(module.gate_proj(part), module.up_proj(part))
        out[first : first + SLICE] = module.down_proj(gated)
    return out.view(x.shape)


def _attention(
    module: Any, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], **options: Any
) -> tuple[Tensor, None]:
    cos, sin = position_embeddings
    if not row_passes.rotates(hidden_states, cos) or cos.shape[-1] != module.head_dim:
        return type(module).forward(module, hidden_states, position_embeddings=position_embeddings, **options)
    heads = (*hidden_states.shape[:-1], -1, module.head_dim)
    q, k, v = (project(hidden_states).view(heads) for project in (module.q_proj, module.k_proj, module.v_proj))
    if hasattr(module, "q_norm"):
        q, k = module.q_norm(q), module.k_norm(k)
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    row_passes.rotate(q[0], cos[0], sin[0])
    row_passes.rotate(k[0], cos[0], sin[0])
    mask = options.pop("attention_mask", None)
    options.pop("past_key_values", None)
    out, _ = saccade_attention(
        module, q, k, v, mask, scaling=module.scaling, sliding_window=module.saccade_window, **options
    )
    return module.o_proj(out.reshape(*hidden_states.shape[:-1], -1)), None


def _layer(module: Any, hidden_states: Tensor, **options: Any) -> Tensor:
    norm = module.post_attention_layernorm
    if not row_passes.fits(hidden_states, norm.weight) or not hidden_states.is_contiguous():
        return type(module).forward(module, hidden_states, **options)
    attended, _ = module.self_attn(hidden_states=module.input_layernorm(hidden_states), **options)
    # The rows are the layer loop's own: the layer adds to them where they are.
    normed = row_passes.rms_norm(hidden_states[0], norm.weight, norm.variance_epsilon, add=attended[0])
    return hidden_states.add_(module.mlp(normed)[None])
