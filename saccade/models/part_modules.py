"""transformers' modules of whose matrices a rank has a part (``models.parts``): what joins their outputs where it is no
product, and the numbers of heads by which they cut what they have made."""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor, nn

from saccade.models.matrix_modules import MatrixExperts
from saccade.models.parts import Parts
from saccade.selection.head_part import HeadPart


def share_modules(model: Any, parts: Parts) -> None:
    """Have the modules of ``model``, filled with the part of one rank, run with those of the others."""
    for name, module in list(model.named_modules()):
        if isinstance(module, MatrixExperts):
            _sum(module, parts)
        elif name.endswith(".experts") and parts.cuts_experts(name):
            _sum(module, parts)
            bias = getattr(module, "down_proj_bias", None)
            if bias is not None and parts.share.rank:
                bias.data.zero_()  # it is added once
        elif parts.joins_norm(name):
            _norm_all(module, parts, parts.head_at(name))
        elif hasattr(module, "num_key_value_groups"):
            _of_own_heads(module, parts)
        elif (state := parts.states.by_module.get(name)) is not None:
            for size in state.sizes:
                setattr(module, size, getattr(module, size) // parts.share.ranks)


def _sum(module: nn.Module, parts: Parts) -> None:
    def joined(_: nn.Module, given: Any, made: Tensor) -> Tensor:
        return parts.share.join().sum(made)

    module.register_forward_hook(joined)


def _norm_all(module: nn.Module, parts: Parts, head: HeadPart) -> None:
    """Of all heads together: they are gathered before it, so that it is that of one process bit for bit."""

    def whole(_: nn.Module, given: tuple[Tensor]) -> tuple[Tensor]:
        return (head.join(parts.share.join().gather(given[0].contiguous())[:: head.copies], -1),)

    def own(_: nn.Module, given: Any, made: Tensor) -> Tensor:
        return head.own(made, -1)

    module.register_forward_pre_hook(whole)
    module.register_forward_hook(own)


def _of_own_heads(attention: Any, parts: Parts) -> None:
    heads = {"num_attention_heads": parts.heads, "num_key_value_heads": parts.kv_heads, "num_heads": parts.heads}
    own = {name: count // parts.head.parts for name, count in heads.items()}
    if hasattr(attention, "config"):
        attention.config = copy.copy(attention.config)
    for where in (attention, getattr(attention, "config", None)):
        for name, count in own.items():
            if where is not None and isinstance(getattr(where, name, None), int):
                setattr(where, name, count)
