"""A plain Llama for training: parameters named as in transformers, everything but attention compiled once.

All rows of a batch are one flat list of tokens, so that a compiled piece serves every sequence length.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from saccade.models.reference import vocabulary


@dataclass(frozen=True)
class Shape:
    """Widths of a size (docs/reference-model.md)."""

    width: int
    layers: int
    heads: int
    kv_heads: int
    inner: int
    head_dim: int = 64
    rope_base: float = 500_000.0
    epsilon: float = 1e-5
    vocabulary: int = vocabulary.SIZE
    positions: int = 32_768 + 1_024


SIZES = {
    "XS": Shape(128, 4, 4, 2, 352, head_dim=32),
    "S": Shape(256, 6, 4, 1, 704),
    "M": Shape(384, 8, 6, 2, 1024),
    "H": Shape(256, 8, 4, 1, 704),  # of the hybrid: four of its layers attend
}


def _norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon) * weight).to(x.dtype)


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def _before(
    x: Tensor, norm: Tensor, wq: Tensor, wk: Tensor, wv: Tensor, cos: Tensor, sin: Tensor, dim: int, eps: float
):
    """x [n, width] -> q [n, heads, dim], k and v [n, kv_heads, dim], rotated."""
    hidden = _norm(x, norm, eps)
    q, k, v = (F.linear(hidden, w.to(x.dtype)).unflatten(-1, (-1, dim)) for w in (wq, wk, wv))
    return _turn(q, cos, sin), _turn(k, cos, sin), v


def _after(x: Tensor, mixed: Tensor, wo: Tensor, norm: Tensor, gate: Tensor, up: Tensor, down: Tensor, eps: float):
    """x and mixed [n, width] -> the residual stream after this layer."""
    x = x + F.linear(mixed, wo.to(x.dtype))
    hidden = _norm(x, norm, eps)
    inner = F.silu(F.linear(hidden, gate.to(x.dtype))) * F.linear(hidden, up.to(x.dtype))
    return x + F.linear(inner, down.to(x.dtype))


def _loss(x: Tensor, norm: Tensor, embedding: Tensor, targets: Tensor, weights: Tensor, eps: float):
    """Weighted mean cross entropy, and the arg max of each row."""
    logits = F.linear(_norm(x, norm, eps), embedding.to(x.dtype)).float()
    losses = F.cross_entropy(logits, targets, reduction="none")
    return (losses * weights).sum() / weights.sum(), logits.argmax(-1)


class Layer(nn.Module):
    def __init__(self, s: Shape) -> None:
        super().__init__()
        linear = lambda inputs, outputs: nn.Linear(inputs, outputs, bias=False)  # noqa: E731
        self.self_attn = nn.ModuleDict(
            {
                "q_proj": linear(s.width, s.heads * s.head_dim),
                "k_proj": linear(s.width, s.kv_heads * s.head_dim),
                "v_proj": linear(s.width, s.kv_heads * s.head_dim),
                "o_proj": linear(s.heads * s.head_dim, s.width),
            }
        )
        self.mlp = nn.ModuleDict(
            {
                "gate_proj": linear(s.width, s.inner),
                "up_proj": linear(s.width, s.inner),
                "down_proj": linear(s.inner, s.width),
            }
        )
        self.input_layernorm = nn.RMSNorm(s.width)
        self.post_attention_layernorm = nn.RMSNorm(s.width)


class Model(nn.Module):
    """``model.*`` as in ``LlamaForCausalLM`` with tied embeddings."""

    def __init__(self, shape: Shape, compiled: bool) -> None:
        super().__init__()
        self.shape = shape
        self.model = nn.ModuleDict(
            {
                "embed_tokens": nn.Embedding(shape.vocabulary, shape.width),
                "layers": nn.ModuleList(Layer(shape) for _ in range(shape.layers)),
                "norm": nn.RMSNorm(shape.width),
            }
        )
        wrap = (lambda f: torch.compile(f, dynamic=False)) if compiled else (lambda f: f)
        self._before, self._after, self._loss = wrap(_before), wrap(_after), wrap(_loss)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                deep = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * shape.layers) ** 0.5 if deep else 0.02)

    def forward(self, ids: Tensor, positions: Tensor, targets: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """ids, positions, targets int64 and weights float32, all [rows, length]: loss and arg max [rows, length]."""
        s = self.shape
        rows, length = ids.shape
        kind = torch.bfloat16
        frequencies = s.rope_base ** (-torch.arange(0, s.head_dim, 2, device=ids.device).float() / s.head_dim)
        angles = positions.flatten()[:, None, None] * frequencies
        cos, sin = angles.cos().to(kind), angles.sin().to(kind)
        x = F.embedding(ids.flatten(), self.model["embed_tokens"].weight).to(kind)
        for layer in self.model["layers"]:
            a, m = layer.self_attn, layer.mlp
            q, k, v = self._before(
                x, layer.input_layernorm.weight, a["q_proj"].weight, a["k_proj"].weight, a["v_proj"].weight,
                cos, sin, s.head_dim, s.epsilon,
            )  # fmt: skip
            q, k, v = (t.unflatten(0, (rows, length)).transpose(1, 2) for t in (q, k, v))
            group = s.heads // s.kv_heads
            k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = self._after(
                x, mixed.transpose(1, 2).reshape(rows * length, -1), a["o_proj"].weight,
                layer.post_attention_layernorm.weight, m["gate_proj"].weight, m["up_proj"].weight,
                m["down_proj"].weight, s.epsilon,
            )  # fmt: skip
        loss, best = self._loss(
            x,
            self.model["norm"].weight,
            self.model["embed_tokens"].weight,
            targets.flatten(),
            weights.flatten(),
            s.epsilon,
        )
        return loss, best.unflatten(0, (rows, length))
