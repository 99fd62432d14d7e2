"""What a decoder does between its embedding and its first layer, and behind its last one, where that is more than
Llama's: embeddings of a token for each layer, and residual streams side by side (Gemma 3n).

AltUp (Baykal et al., 2023, "Alternating Updates for Efficient Transformers") keeps several streams of channels. A layer
runs on one of them, the *active* one, and corrects the others by what it has changed there. Layers themselves are
transformers' modules; how streams begin and end stands in the forward of its whole decoder, and here.
"""

from __future__ import annotations

from inspect import signature
from typing import Any

import torch
from torch import Tensor

LEAST = 1e-5  # mean square of a stream that is scaled


class Surroundings:
    """Of a plain ``decoder``: nothing."""

    def begin(self, embedded: Tensor) -> Tensor:
        """``embedded`` [rows, channels] -> what the first layer takes in, [rows, ...]."""
        return embedded

    def by_layer(self, token_ids: Tensor, embedded: Tensor) -> Tensor | None:
        """What layers are given of each token besides: [rows, layers, channels]; None where they are given nothing."""
        return None

    def active(self, hidden: Tensor) -> Tensor:
        """Of what a layer takes in, what its attention is made of: [rows, channels]."""
        return hidden

    def end(self, hidden: Tensor) -> Tensor:
        """``hidden`` [rows, ...], as the last layer leaves it -> [rows, channels]."""
        return hidden


class LayerEmbeddings(Surroundings):
    """Of a decoder that embeds tokens for each layer, beside a projection of their embedding (Gemma 3n, Gemma 4)."""

    def __init__(self, decoder: Any) -> None:
        self._decoder = decoder
        asked = len(signature(decoder.get_per_layer_inputs).parameters)
        self._more = (None,) * (asked - 1)  # Gemma 4's can find tokens by their embedding

    def by_layer(self, token_ids: Tensor, embedded: Tensor) -> Tensor:
        """See Surroundings."""
        known = token_ids < self._decoder.embed_tokens_per_layer.num_embeddings  # others count as the first
        own = self._decoder.get_per_layer_inputs(torch.where(known, token_ids, 0)[None], *self._more)
        made: Tensor = self._decoder.project_per_layer_inputs(embedded[None], own)
        return made[0]


class AltUpStreams(LayerEmbeddings):
    """Of a decoder with AltUp, hidden states being [rows, streams, channels]."""

    def __init__(self, decoder: Any) -> None:
        super().__init__(decoder)
        self._active: int = decoder.config.altup_active_idx
        self._out, self._back = decoder.altup_projections, decoder.altup_unembed_projections

    def begin(self, embedded: Tensor) -> Tensor:
        """The embedding and its projections, all of the embedding's magnitude."""
        size = _magnitude(embedded)
        return torch.stack([embedded, *(_sized(project(embedded), size) for project in self._out)], 1)

    def active(self, hidden: Tensor) -> Tensor:
        """See Surroundings."""
        return hidden[:, self._active]

    def end(self, hidden: Tensor) -> Tensor:
        """The mean of the streams, projected back, all of the first one's magnitude."""
        first, *others = hidden.unbind(1)
        size = _magnitude(first)
        return torch.stack([first, *(_sized(back(one), size) for back, one in zip(self._back, others))]).mean(0)


class QuantileCut:
    """Stands for a module's own cut of its activations at a quantile of the normal distribution with their mean and
    deviation, which it looks up in every pass: a recorded step cannot."""

    def __init__(self, share: float) -> None:
        self.deviations = float(torch.distributions.Normal(0, 1).icdf(torch.tensor(share, dtype=torch.float32)))

    def __call__(self, inputs: Tensor) -> Tensor:
        """``inputs`` [..., channels], less what ``share`` of them would be below; 0 where they are."""
        spread = torch.std(inputs, dim=-1, keepdim=True, unbiased=False)
        # The module rounds the number to the activations' dtype before it multiplies.
        rounded = torch.tensor(self.deviations, dtype=inputs.dtype, device="cpu").item()
        return torch.relu(inputs - (inputs.mean(-1, keepdim=True) + spread * rounded))


def cut_by_quantiles(layers: Any) -> None:
    """Have MLPs of ``layers`` that cut their activations so do it by a number that is known."""
    for layer in layers:
        mlp = layer.mlp
        if getattr(mlp, "activation_sparsity", 0.0) > 0:
            mlp._gaussian_topk = QuantileCut(mlp.activation_sparsity)


def _magnitude(rows: Tensor) -> Tensor:
    return (rows**2).mean(-1, keepdim=True) ** 0.5


def _sized(rows: Tensor, size: Tensor) -> Tensor:
    """``rows`` [rows, channels] of the magnitude ``size`` [rows, 1]."""
    return rows * size / (rows**2).mean(-1, keepdim=True).clamp(min=LEAST).sqrt()


def surroundings(decoder: Any, streams: bool, by_layer: bool) -> Surroundings:
    """What stands around the layers of ``decoder``."""
    if streams:
        return AltUpStreams(decoder)
    return LayerEmbeddings(decoder) if by_layer else Surroundings()
