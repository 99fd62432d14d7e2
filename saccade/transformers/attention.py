"""Attention of layers that run in transformers' own loop, and the mask that it hands to them: what is padding."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from saccade.errors import ModelError, SaccadeError
from saccade.models.interface import LayerAttention
from saccade.transformers.cache import SaccadeCache, taken_in
from saccade.transformers.runtime import runtime_of

_scratch: dict[int, SaccadeCache] = {}  # the same, by the id of the model's config, while the pass runs


def padding_mask(
    *,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    use_vmap: bool = False,
    **rest: Any,
) -> Tensor | None:
    """What transformers calls to have a mask built for our name: its ``attention_mask`` bool [batch, columns] as it is,
    for attention is causal, and windows are told apart. ModelError for a mask that says more."""
    if use_vmap or not allow_is_causal_skip:
        raise ModelError(
            "attn_implementation='saccade' attends causally over tokens of one sequence a row: not over several that "
            "are packed into one (position_ids that begin anew), nor over images, nor in both directions; use 'sdpa'"
        )
    return attention_mask


def attend(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, spec: LayerAttention) -> Tensor:
    """See models.attention.Outside. Rows without a cache of ours are a pass of their own, whose keys are forgotten
    behind it. SaccadeError, naming it, for what cannot be served."""
    if q.requires_grad:
        raise SaccadeError("attn_implementation='saccade' has no gradients; use torch.no_grad(), or 'sdpa' to train")
    if mask is not None and mask.dim() != 2:
        raise ModelError(
            f"{type(module).__name__} was given a mask of {mask.dim()} dimensions; attn_implementation='saccade' takes "
            "attention_mask [batch, columns], 1 for tokens and 0 for padding"
        )
    layer: int = module.layer_idx  # type: ignore[assignment]
    cache = taken_in(runtime_of(module.config).source(layer), k)
    if cache is not None:
        return cache.attend(module, q, k, v, mask, spec)
    if k.shape[2] != q.shape[2]:
        raise SaccadeError(
            f"{q.shape[2]} rows over {k.shape[2]} keys of a cache that is not saccade's; use model.generate, or give "
            "past_key_values=saccade.transformers.SaccadeCache(model)"
        )
    config = module.config
    cache = _scratch.get(id(config)) if layer else None
    if cache is None:
        cache = _scratch[id(config)] = SaccadeCache._of(runtime_of(config))
    out = cache.attend(module, q, k, v, mask, spec)
    if layer == cache.runtime.layers - 1:
        cache.ended([0] * cache.batch_size)
        _scratch.pop(id(config)).reset()
    return out
