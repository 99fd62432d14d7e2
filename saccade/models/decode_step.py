"""One decode step of many sequences as a fixed row of launches: nothing on the way asks the host for anything that only
the device knows, so a CUDA graph can record it.

Layers of the Llama shape run as matrix products with a few kernels between them, all others as transformers' modules;
those that keep a state find it in slots whose numbers lie on the device, too.
"""

from __future__ import annotations

import torch
from torch import Tensor

from saccade.models.interface import AttentionContext
from saccade.models.keeping import SlotRows
from saccade.models.runner import HFRunner


class DecodeStep:
    """Decode steps of ``runner``'s model on its device."""

    def __init__(self, runner: HFRunner) -> None:
        self.runner = runner
        # Other rotary factors hang on more than a row's position: the host decides, at every step.
        self.serves = runner.rotary.by_position
        self._llama = runner.llama
        self._kernels = None if runner.llama is None else runner.llama.step_kernels()

    @torch.inference_mode()
    def run(
        self,
        token_ids: Tensor,
        positions: Tensor,
        ctx: AttentionContext,
        wanted: Tensor | None = None,
        states: SlotRows | None = None,
    ) -> Tensor:
        """``token_ids``, ``positions`` int64 [rows] on the model's device -> float32 logits [rows, vocab_size], or
        those of the rows ``wanted`` (int64 [n], there too) alone. ``ctx`` is asked to attend with all rows at once.
        ``states``: the rows', for layers that keep one."""
        runner, kernels, llama = self.runner, self._kernels, self._llama
        embedded = runner.embed(token_ids)
        hidden, beside = runner.around.begin(embedded), runner.around.by_layer(token_ids, embedded)
        rotary = runner.rotary.embed(hidden, positions, ())
        if kernels is None or llama is None:
            given = runner.turned(ctx)
            for index in range(runner.depth):
                own = None if beside is None else beside[:, index]
                hidden = runner.modules.run(index, hidden, positions, rotary.layers[index], given, states, own)
            return runner.logits(hidden if wanted is None else hidden[wanted])
        delta = None
        for index, layer in enumerate(kernels.layers):
            q, k, v = layer.project(hidden, *rotary.layers[index], delta)
            if runner.turns is not None:
                runner.turns[index].turn(q, k)
            delta = layer.finish(hidden, ctx.run(index, q, k, v, llama.attention[index]))
        if wanted is not None:
            hidden, delta = hidden[wanted], None if delta is None else delta[wanted]
        return runner.finish_logits(kernels.logits(hidden, delta))
