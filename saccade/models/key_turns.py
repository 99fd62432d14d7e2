"""The basis that queries and keys meet in (``kv_rotate``): after RoPE both are turned, so that a key's channels are of
like size where they are rounded, and every product of a query with a key stays what it was.

A Hadamard matrix spreads an outlier over all channels (QuaRot, Ashkboos et al., 2024). Where keys have a bias it is
most of what they are, in a few pairs of channels that RoPE turns: Qwen2.5's first layer has pairs of 108 among others
of 7. Channels of such a layer are first balanced by the sizes that the bias gives them, alike in the two that RoPE
mixes, each of its own where RoPE turns only a head's first channels: keys are divided, and queries multiplied. All that
is known from the weights; nothing is fitted to data.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from saccade.ops import row_passes

if TYPE_CHECKING:
    from saccade.models.families import Family
    from saccade.models.interface import AttentionContext, LayerAttention
    from saccade.models.llama_weights import LlamaWeights

POWER = 0.5  # of a pair's size, by which its channels are divided
LEAST = 1e-3  # of the greatest pair's: what smaller ones count as


@dataclass(frozen=True, eq=False)
class KeyTurn:
    """One layer's. ``query`` fp32 [heads, head_dim] and ``key`` [kv_heads, head_dim]: by what channels are multiplied
    before they are spread, each the inverse of the other; None for 1."""

    query: Tensor | None = None
    key: Tensor | None = None

    def turn(self, q: Tensor, k: Tensor | None) -> None:
        """Queries [heads, rows, head_dim] and keys [kv_heads, rows, head_dim], in place; None for keys of a layer that
        reads another's."""
        row_passes.turn(q, self.query)
        if k is not None:
            row_passes.turn(k, self.key)


PLAIN = KeyTurn()


def turns_of(weights: LlamaWeights) -> list[KeyTurn]:
    """Of every layer of a model of the Llama shape."""
    return [
        balanced(layer.key.bias, layer.query.outputs // layer.head_dim, layer.head_dim)
        if layer.key.bias is not None and layer.rotated and layer.head_norms is None
        else PLAIN
        for layer in weights.layers
    ]


def turns_of_modules(layers: Sequence[Any], family: Family, config: Any) -> list[KeyTurn]:
    """Of every layer of a model that runs as transformers' modules, by layer of the model, those that do not attend
    too."""
    part = "self_attn" if family.keeping is None else family.keeping.attention
    return [turn_of_module(getattr(layer, part, None), family, config) for layer in layers]


def turn_of_module(module: Any, family: Family, config: Any) -> KeyTurn:
    """Of transformers' attention ``module``, None for a layer without. What norms its keys behind the bias, or may not
    rotate them, is not balanced."""
    query, key = (getattr(getattr(module, name, None), "bias", None) for name in ("q_proj", "k_proj"))
    normed = any(getattr(module, name, None) is not None for name in ("k_norm", "k_layernorm"))
    still = normed or family.rotary is None or family.some_layers_unrotated
    if module is None or still or not isinstance(query, Tensor) or not isinstance(key, Tensor):
        return PLAIN
    size = int(module.head_dim)
    rope = getattr(config, "rope_parameters", None) or {}
    rotated = int(size * float(rope.get("partial_rotary_factor", 1.0)))
    return balanced(key, len(query) // size, size, rotated, family.rotates_neighbours)


def balanced(bias: Tensor, heads: int, head_dim: int, rotated: int | None = None, neighbours: bool = False) -> KeyTurn:
    """Of a layer whose keys have ``bias`` [kv_heads * head_dim], of which the first ``rotated`` channels of a head (all
    of them) are then rotated, channel c with c + rotated / 2, or ``neighbours`` with each other. A pair counts by its
    size, the root of its mean square, a channel that is not rotated by its own; those below the head's median as
    that."""
    rotated = head_dim if rotated is None else rotated
    channels = bias.detach().float().view(-1, head_dim)
    pairs = channels[:, :rotated].unflatten(1, (-1, 2) if neighbours else (2, -1))
    along = 2 if neighbours else 1
    sizes = pairs.square().mean(along, keepdim=True).sqrt().expand_as(pairs).flatten(1)
    sizes = torch.cat([sizes, channels[:, rotated:].abs()], 1)  # [kv_heads, head_dim]
    most = sizes.amax(1, keepdim=True)
    if not bool((most > 0).all() and most.isfinite().all()):
        return PLAIN
    least = sizes.median(1, keepdim=True).values.maximum(LEAST * most)
    size = sizes.maximum(least).pow(POWER)
    size = size / size.mean(1, keepdim=True)
    return KeyTurn(size.repeat_interleave(heads // len(size), 0).contiguous(), size.reciprocal())


@dataclass(frozen=True, eq=False)
class TurnedContext:
    """``ctx`` for layers that do not turn their queries and keys themselves. ``turns``: of each that attends."""

    ctx: AttentionContext
    turns: Sequence[KeyTurn]

    def run(self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None, spec: LayerAttention) -> Tensor:
        """See AttentionContext."""
        self.turns[layer].turn(q, k)
        return self.ctx.run(layer, q, k, v, spec)

    def store(self, layer: int, k: Tensor, v: Tensor) -> None:
        """See AttentionContext; what is stored apart was projected apart, and turned then."""
        self.ctx.store(layer, k, v)


def alike(turns: Sequence[KeyTurn]) -> bool:
    """Whether all layers turn keys in the same way."""
    return all(one is PLAIN for one in turns)
