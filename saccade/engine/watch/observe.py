"""Observers of an engine: they see the arguments of each attention call, the selection that was read, the output, and
the logits of decode steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from saccade.kv.view import KVView
from saccade.models.interface import LayerAttention
from saccade.selection import Selection


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """One layer's attention for rows of one request. The tensors are the engine's own: read them, or copy them.

    ``q``, ``out`` [heads, rows, head_dim], post-RoPE, storage dtype. ``kv`` holds every key the rows may see and is
    good for as long as the observer runs. ``selection`` is what was really read (a Ranking ends as Blocks); its shape
    says where the rows stand.
    """

    request: int
    layer: int
    phase: str
    q: Tensor
    kv: KVView
    selection: Selection
    spec: LayerAttention
    out: Tensor


Observer = Callable[[AttentionCall], None]
LogitsObserver = Callable[[int, int, Tensor], None]  # request, position of the row, its logits fp32 [vocab]
