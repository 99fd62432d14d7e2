"""The attention weights of one decode step over what it read, for methods that learn from them."""

from __future__ import annotations

import torch
from torch import Tensor

from saccade.errors import SaccadeError
from saccade.kv.view import KVView
from saccade.ops.reference import logits
from saccade.selection import Selection, Tokens


def selected_weights(
    q: Tensor, kv: KVView, selection: Selection, lse: Tensor, *, scale: float, softcap: float | None = None
) -> Tensor:
    """Softmax weights of one query row per head, ``q`` [heads, 1, head_dim], over the keys of ``selection``, whose
    log-sum-exp is ``lse`` [heads, 1]. Every head's weights sum to 1.

    For token lists float32 [heads // units, indices]: entry ``[j, c]`` belongs to the key ``indices[c]`` and to the
    ``j``-th query head of the unit whose list holds ``c``. For other selections float32 [heads, k_len], 0 where a key
    was not read. A kernel that has the weights anyway fills in ``Result.weights`` itself; this reads the keys again.

    Raises SaccadeError for more rows than one.
    """
    shape = selection.shape
    if shape.q_len != 1:
        raise SaccadeError(f"weights are known for calls of one row, got q_len={shape.q_len}")
    if isinstance(selection, Tokens):
        return _of_tokens(q, kv, selection, lse, scale, softcap)
    mask = selection.unit_mask()[:, 0]  # [units, k_len]
    weights = torch.empty(shape.heads, shape.k_len, device=q.device)
    keys = q.new_empty(0)
    for head in range(shape.heads):
        if head % shape.group == 0:
            keys = kv.head_keys(head // shape.group, shape.k_len).float()
        scores = logits(q[head].float(), keys, scale, softcap)[0]
        weights[head] = torch.exp(scores - lse[head]).masked_fill(~mask[head * selection.units // shape.heads], 0.0)
    return weights


def as_tokens(selection: Selection, weights: Tensor | None) -> tuple[Tokens, Tensor]:
    """What a step read as token lists, and its weights as ``selected_weights`` lays them out for these.

    Raises ValueError for ``weights`` None.
    """
    if weights is None:
        raise ValueError("the weights of the step are missing")
    if isinstance(selection, Tokens):
        return selection, weights
    mask = selection.mask()[:, 0]
    return Tokens.from_mask(selection.shape, mask[:, None]), weights[mask][None]


def _of_tokens(q: Tensor, kv: KVView, tokens: Tokens, lse: Tensor, scale: float, softcap: float | None) -> Tensor:
    shape, per_unit = tokens.shape, tokens.shape.heads // tokens.units
    weights = torch.empty(per_unit, tokens.indices.numel(), device=q.device)
    bounds, keys = tokens.offsets.tolist(), q.new_empty(0)
    for head in range(shape.heads):
        unit, row = divmod(head, per_unit)
        span = slice(bounds[unit], bounds[unit + 1])
        if row == 0 or head % shape.group == 0:  # another list, or another KV head
            keys = kv.take(tokens.indices[span], head // shape.group)[0].float()
        weights[row, span] = torch.exp(logits(q[head].float(), keys, scale, softcap)[0] - lse[head])
    return weights
