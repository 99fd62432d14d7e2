"""One decode step of many sequences as a fixed row of launches: nothing on the way asks the host for anything that only
the device knows, so a CUDA graph can record it.

Layers of the Llama shape run as matrix products with a few kernels between them, all others as transformers' modules.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor

from saccade.models.interface import AttentionContext, LayerAttention
from saccade.models.llama_kernels import StepLayer
from saccade.models.runner import HFRunner


class Foresight(Protocol):
    """Has what a layer is likely to read brought in while the layer before it computes its MLP."""

    def wants(self, layer: int) -> bool:
        """Whether there is anything to do for ``layer``."""
        ...

    def beside(
        self, layer: int, kernels: StepLayer, hidden: Tensor, rotary: tuple[Tensor, Tensor], spec: LayerAttention
    ) -> AbstractContextManager[None]:
        """Begin, by what ``kernels`` of ``layer`` ask for of ``hidden`` [rows, channels], the residual stream before
        the MLP of the layer before. ``hidden`` may be written to when the context ends."""
        ...


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
        foresight: Foresight | None = None,
    ) -> Tensor:
        """``token_ids``, ``positions`` int64 [rows] on the model's device -> float32 logits [rows, vocab_size], or
        those of the rows ``wanted`` (int64 [n], there too) alone. ``ctx`` is asked to attend with all rows at once.
        ``foresight`` is asked in layers of the Llama shape."""
        runner, kernels, llama = self.runner, self._kernels, self._llama
        hidden = runner.embed(token_ids)
        rotary = runner.rotary.embed(hidden, positions, ())
        if kernels is None or llama is None:
            for index in range(runner.spec.layers):
                hidden = runner.modules.run(index, hidden, positions, rotary.layers[index], ctx)
            return runner.logits(hidden if wanted is None else hidden[wanted])
        delta = None
        for index, layer in enumerate(kernels.layers):
            q, k, v = layer.project(hidden, *rotary.layers[index], delta)
            attended, after = ctx.run(index, q, k, v, llama.attention[index]), index + 1
            if foresight is None or after == len(kernels.layers) or not foresight.wants(after):
                delta = layer.finish(hidden, attended)
                continue
            x, coming = layer.add_attended(hidden, attended), kernels.layers[after]
            with foresight.beside(after, coming, hidden, rotary.layers[after], llama.attention[after]):
                delta = layer.mlp(x)
        if wanted is not None:
            hidden, delta = hidden[wanted], None if delta is None else delta[wanted]
        return runner.finish_logits(kernels.logits(hidden, delta))
