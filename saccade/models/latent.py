"""Multi-head latent attention (MLA; DeepSeek-V2, 2024, section 2.1): what is kept of a token is one latent, from which
every head's key and value are made, and a rotated part of the keys that all heads share.

A latent and the rotated part behind it are the key of one KV head, and the latent alone is its value. A query meets it
once it is *absorbed*: q . (W_UK c) is (W_UK' q) . c, so that queries go through W_UK and results through W_UV, and
nothing is made of the tokens that are stored. Where many rows read the same tokens, keys and values of every head may
be made of them instead (``interface.LatentRows``): products are shorter then. Both give the same numbers.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from saccade.errors import ModelError
from saccade.models.interface import AttentionContext, LatentRows, LayerAttention
from saccade.models.rebuilt import plain_forward

Weights = tuple[Tensor, Tensor]  # W_UK [heads, key channels without rotation, latent], W_UV [heads, value_dim, latent]


class LatentAttention:
    """Stands for the forward of ``module``, one layer's attention, whose own submodules it runs."""

    def __init__(self, module: Any) -> None:
        self.module = module
        self.rank: int = module.kv_lora_rank
        self._rotate = _rotation(module)
        self._weights: tuple[int, Weights] | None = None  # with where they were made from
        # A row meets so many more channels of a latent than of a key and a value; a token is made these of once.
        more = 2 * (self.rank + module.qk_rope_head_dim) - module.qk_head_dim - module.v_head_dim
        made = self.rank * (module.qk_nope_head_dim + module.v_head_dim)
        self._pays_from = made // more + 1 if more > 0 else sys.maxsize

    @property
    def weights(self) -> Weights:
        """Of what makes keys and values of latents: parts of the module's own matrix, or of its numbers where it is
        quantised; on a CPU, whose products of strided matrices take eight times as long, copies."""
        product = self.module.kv_b_proj
        source = product.weight.data_ptr()
        if self._weights is None or self._weights[0] != source:
            if isinstance(product, nn.Linear):
                whole = product.weight
            else:
                like = self.module.kv_a_layernorm.weight
                whole = product(torch.eye(self.rank, dtype=like.dtype, device=like.device)).T.contiguous()
            both = (
                whole.detach()
                .unflatten(0, (self.module.num_heads, -1))
                .split([self.module.qk_nope_head_dim, self.module.v_head_dim], 1)
            )
            keys, values = (part.contiguous() if part.is_cpu else part for part in both)
            self._weights = source, (keys, values)
        return self._weights[1]

    def __call__(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        *,
        saccade: AttentionContext,
        **asked: Any,
    ) -> tuple[Tensor, None]:
        """``hidden_states`` [1, rows, channels] -> the same, and no weights."""
        module, rank = self.module, self.rank
        if attention_mask is not None:
            raise ModelError(f"{type(module).__name__} was given an attention mask; masks are not supported")
        if module.q_lora_rank is None:
            q = module.q_proj(hidden_states)
        else:
            q = module.q_b_proj(module.q_a_layernorm(module.q_a_proj(hidden_states)))
        q = q[0].unflatten(-1, (module.num_heads, -1)).transpose(0, 1)  # [heads, rows, channels]
        latents, turned = module.kv_a_proj_with_mqa(hidden_states)[0].split([rank, module.qk_rope_head_dim], -1)
        plain, rotated = q.split([module.qk_nope_head_dim, module.qk_rope_head_dim], -1)
        rotated, turned = self._rotate(rotated[None], turned[None, None], position_embeddings)
        stored = torch.cat([module.kv_a_layernorm(latents), turned[0, 0]], -1)[None]
        keys, values = self.weights
        absorbed = torch.cat([plain @ keys, rotated[0]], -1)
        rows = LatentRows(torch.cat([plain, rotated[0]], -1), self.expand, module.v_head_dim, self._pays_from)
        spec = LayerAttention(scale=module.scaling, latent=rows)
        made = saccade.run(module.layer_idx, absorbed, stored, stored, spec)
        out = rows.finish(lambda part: made[:, part, :rank] @ values.transpose(1, 2))
        return module.o_proj(out.transpose(0, 1).flatten(1))[None], None

    def expand(self, stored: Tensor, heads: slice) -> tuple[Tensor, Tensor]:
        """See LatentRows."""
        keys, values = (part[heads] for part in self.weights)
        latents, turned = stored.split([self.rank, stored.shape[-1] - self.rank], -1)
        shared = turned.expand(len(keys), -1, -1)
        return torch.cat([latents @ keys.transpose(1, 2), shared], -1), latents @ values.transpose(1, 2)


def _rotation(module: Any) -> Callable[[Tensor, Tensor, tuple[Tensor, Tensor]], tuple[Tensor, Tensor]]:
    """How a module rotates queries and keys [1, heads, rows, channels] by cos and sin [1, rows, ...], which for pairs
    of neighbours that stay where they are (DeepSeek-V2) have a column for each."""
    called = plain_forward(module).__globals__
    if "apply_rotary_emb" in called:
        return lambda q, k, pair: called["apply_rotary_emb"](q, k, torch.complex(*(part.float() for part in pair)))
    pairs = getattr(module.config, "rope_interleave", False)
    rotate = called["apply_rotary_pos_emb_interleave" if pairs else "apply_rotary_pos_emb"]
    return lambda q, k, pair: rotate(q, k, *pair)


def use_latents(layers: Any) -> None:
    """Have all ``layers`` of a decoder attend by latents."""
    for layer in layers:
        if not isinstance(layer.self_attn.forward, LatentAttention):
            layer.self_attn.forward = LatentAttention(layer.self_attn)
