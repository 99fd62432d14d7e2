"""A small hybrid for training: LFM2's layers, gated short convolutions by turns with attention, parameters named as in
transformers. Everything but attention is compiled once, over flat lists of tokens, as ``train.model``'s."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Lfm2Config

from saccade.models.reference import vocabulary as v
from train.export import write
from train.model import Shape, _loss, _norm, _turn

TAPS = 3
KINDS = "conv", "full_attention"  # by turns


def _convolved(x: Tensor, norm: Tensor, into: Tensor, taps: Tensor, out: Tensor, place: Tensor, eps: float):
    """x [n, width] -> what a convolution adds to it; ``place`` int64 [n] of each token in its row."""
    gate, after, inner = F.linear(_norm(x, norm, eps), into.to(x.dtype)).chunk(3, -1)
    gated = gate * inner
    mixed = gated * taps[:, 0, TAPS - 1].to(x.dtype)
    for back in range(1, TAPS):
        before = torch.roll(gated, back, 0) * (place >= back)[:, None]
        mixed = mixed + before * taps[:, 0, TAPS - 1 - back].to(x.dtype)
    return F.linear(after * mixed, out.to(x.dtype))


def _queries(
    x: Tensor, norm: Tensor, wq: Tensor, wk: Tensor, wv: Tensor, qn: Tensor, kn: Tensor, cos: Tensor, sin: Tensor,
    eps: float,
):  # fmt: skip
    """x [n, width] -> q [n, heads, dim], k and v [n, kv_heads, dim], normed by head and rotated."""
    hidden = _norm(x, norm, eps)
    q, k, values = (F.linear(hidden, w.to(x.dtype)).unflatten(-1, (-1, len(qn))) for w in (wq, wk, wv))
    return _turn(_norm(q, qn, eps), cos, sin), _turn(_norm(k, kn, eps), cos, sin), values


def _inner(x: Tensor, added: Tensor, norm: Tensor, gate: Tensor, up: Tensor, down: Tensor, eps: float):
    """x and what its layer has added to it, [n, width] -> the residual stream after this layer."""
    x = x + added
    hidden = _norm(x, norm, eps)
    inner = F.silu(F.linear(hidden, gate.to(x.dtype))) * F.linear(hidden, up.to(x.dtype))
    return x + F.linear(inner, down.to(x.dtype))


class Layer(nn.Module):
    def __init__(self, s: Shape, kind: str) -> None:
        super().__init__()
        linear = lambda inputs, outputs: nn.Linear(inputs, outputs, bias=False)  # noqa: E731
        if kind == "conv":
            taps = nn.Conv1d(s.width, s.width, TAPS, groups=s.width, bias=False)
            self.conv = nn.ModuleDict(
                {"conv": taps, "in_proj": linear(s.width, 3 * s.width), "out_proj": linear(s.width, s.width)}
            )
        else:
            self.self_attn = nn.ModuleDict(
                {
                    "q_proj": linear(s.width, s.heads * s.head_dim),
                    "k_proj": linear(s.width, s.kv_heads * s.head_dim),
                    "v_proj": linear(s.width, s.kv_heads * s.head_dim),
                    "out_proj": linear(s.heads * s.head_dim, s.width),
                    "q_layernorm": nn.RMSNorm(s.head_dim),
                    "k_layernorm": nn.RMSNorm(s.head_dim),
                }
            )
        self.feed_forward = nn.ModuleDict(
            {"w1": linear(s.width, s.inner), "w3": linear(s.width, s.inner), "w2": linear(s.inner, s.width)}
        )
        self.operator_norm = nn.RMSNorm(s.width)
        self.ffn_norm = nn.RMSNorm(s.width)


class Hybrid(nn.Module):
    """``model.*`` as in ``Lfm2ForCausalLM`` with tied embeddings."""

    def __init__(self, shape: Shape, compiled: bool) -> None:
        super().__init__()
        self.shape = shape
        self.model = nn.ModuleDict(
            {
                "embed_tokens": nn.Embedding(shape.vocabulary, shape.width),
                "layers": nn.ModuleList(Layer(shape, KINDS[at % len(KINDS)]) for at in range(shape.layers)),
                "embedding_norm": nn.RMSNorm(shape.width),
            }
        )
        wrap = (lambda f: torch.compile(f, dynamic=False)) if compiled else (lambda f: f)
        self._convolved, self._queries, self._inner, self._loss = map(wrap, (_convolved, _queries, _inner, _loss))
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                deep = name.endswith(("out_proj.weight", "w2.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * shape.layers) ** 0.5 if deep else 0.02)

    def forward(self, ids: Tensor, positions: Tensor, targets: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """As of ``train.model.Model``."""
        s = self.shape
        rows, length = ids.shape
        kind = torch.bfloat16
        frequencies = s.rope_base ** (-torch.arange(0, s.head_dim, 2, device=ids.device).float() / s.head_dim)
        angles = positions.flatten()[:, None, None] * frequencies
        cos, sin = angles.cos().to(kind), angles.sin().to(kind)
        place = torch.arange(length, device=ids.device).repeat(rows)
        x = F.embedding(ids.flatten(), self.model["embed_tokens"].weight).to(kind)
        for layer in self.model["layers"]:
            norm = layer.operator_norm.weight
            if hasattr(layer, "conv"):
                c = layer.conv
                parts = c["in_proj"].weight, c["conv"].weight, c["out_proj"].weight
                added = self._convolved(x, norm, *parts, place, s.epsilon)
            else:
                added = self._attended(x, layer.self_attn, norm, cos, sin, rows)
            m = layer.feed_forward
            inner = m["w1"].weight, m["w3"].weight, m["w2"].weight
            x = self._inner(x, added, layer.ffn_norm.weight, *inner, s.epsilon)
        loss, best = self._loss(
            x,
            self.model["embedding_norm"].weight,
            self.model["embed_tokens"].weight,
            targets.flatten(),
            weights.flatten(),
            s.epsilon,
        )
        return loss, best.unflatten(0, (rows, length))

    def _attended(self, x: Tensor, a: nn.ModuleDict, norm: Tensor, cos: Tensor, sin: Tensor, rows: int) -> Tensor:
        s = self.shape
        names = "q_proj", "k_proj", "v_proj", "q_layernorm", "k_layernorm"
        parts = self._queries(x, norm, *(a[name].weight for name in names), cos, sin, s.epsilon)
        q, k, values = (part.unflatten(0, (rows, -1)).transpose(1, 2) for part in parts)
        group = s.heads // s.kv_heads
        k, values = k.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
        mixed = F.scaled_dot_product_attention(q, k, values, is_causal=True).transpose(1, 2)
        return F.linear(mixed.reshape(len(x), -1), a["out_proj"].weight.to(x.dtype))


def export(weights: dict[str, Tensor], shape: Shape, folder: Path) -> None:
    """config.json, generation_config.json, model.safetensors in bfloat16, and the tokenizer with its chat template."""
    config = Lfm2Config(
        vocab_size=shape.vocabulary,
        hidden_size=shape.width,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.positions,
        norm_eps=shape.epsilon,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_base},
        block_auto_adjust_ff_dim=False,
        conv_L_cache=TAPS,
        layer_types=[KINDS[at % len(KINDS)] for at in range(shape.layers)],
        tie_word_embeddings=True,
        bos_token_id=v.BOS,
        eos_token_id=v.END,
        pad_token_id=v.PAD,
        dtype="bfloat16",
        architectures=["Lfm2ForCausalLM"],
    )
    write(weights, config, folder)
