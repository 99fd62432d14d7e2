"""One decode step of many sequences as a fixed row of launches: nothing on the way asks the host for anything that only
the device knows, so a CUDA graph can record it."""

from __future__ import annotations

import torch
from torch import Tensor

from saccade.models.interface import AttentionContext
from saccade.models.runner import HFRunner


def serves(runner: HFRunner) -> bool:
    """Whether a row's rotary factors hang on its position alone: for others the host decides, at every step."""
    rotary = runner._rotary
    return rotary.long_from is None and rotary._grows_from is None


@torch.inference_mode()
def decode_rows(runner: HFRunner, token_ids: Tensor, positions: Tensor, ctx: AttentionContext) -> Tensor:
    """``token_ids``, ``positions`` int64 [rows] on the model's device, one row a sequence -> float32 logits [rows,
    vocab_size]. ``ctx`` is asked to attend with all rows at once."""
    hidden = runner._embed(token_ids[None])
    rotary = runner._rotary.embed(hidden, positions[None], ())
    for index in range(runner.spec.layers):
        hidden = runner._layer(index, hidden, positions[None], rotary.for_layer(index), ctx)
    return runner._logits(hidden[0])
