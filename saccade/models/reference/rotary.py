"""Rotary geometry of the retriever: twelve fast pairs that tell distances apart, fifty-two that tell nothing.

RoPE turns every pair of q and k dimensions by ``position * frequency``, so a plain head cannot compare contents
irrespective of distance. Llama 3's own frequency scaling is the way out: pairs slower than a cut are divided by an
enormous factor and stand still over the whole context, pairs faster than the cut are untouched. The base spreads
wavelengths from 6.3 to 1,600 tokens over the twelve fast pairs.

With a constant key ``(1, 0)`` in each fast pair, a constant query z_i gives the logit ``sum_i Re(z_i exp(i w_i D))`` at
distance D, whatever the text: a filter over distances. Two filters are needed, and both come from a linear program
over all 131,072 distances (no closed form comes near them; their margins are held by the tests):

* LOOK: weights a_i >= 0, sum 1, that maximise the gap between distance 0 and every other distance. Turning the query
  back by j tokens moves the peak to distance j. The gap is 0.10 per unit of scale. It could be twice that, but for a
  second condition: averaged over blocks of 128 tokens the filter must stay nearly flat (0.021 per unit of scale).
  Otherwise pooled queries and keys seem to foretell the head (FlexPrefill's query-aware test), rightly for the block of
  the query itself and, by aliasing, wrongly for the one before it, which rows at a block's start look into.
* WINDOW: a pass band over the last 48 tokens (ripple 1.5 nats), nothing beyond 160 tokens within 12.8 nats of it,
  subject to the weights' L1 norm staying below 150, which bounds the rounding error in bfloat16.
"""

from __future__ import annotations

import torch
from torch import Tensor

MAX_POSITION = 131_072
HEAD_DIM = 128
BASE = 1e14
FAST_PAIRS = 12
# Pairs with a wavelength above 8192 / 4 tokens are slowed by FACTOR; the slowest fast pair has 1,601, the next 2,649.
SCALING = {
    "rope_type": "llama3",
    "rope_theta": BASE,
    "factor": 1e9,
    "low_freq_factor": 4.0,
    "high_freq_factor": 4.5,
    "original_max_position_embeddings": 8192,
}

LOOK = (0.137, 0.1586, 0.1116, 0.1871, 0.0971, 0.2035, 0.0928, 0.0121, 0.0, 0.0, 0.0001, 0.0)
WINDOW_COS = (0.0, -0.038, 0.333, 0.123, 2.429, 1.936, 0.556, 11.514, 17.287, 15.159, 16.246, 39.996)
WINDOW_SIN = (-0.049, -0.164, -0.227, -0.465, -0.281, 0.0, 0.476, 6.628, 14.928, 9.123, 5.34, -6.701)

_PAIRS = HEAD_DIM // 2
# transformers keeps a pair in dimensions (i, i + head_dim / 2).
FAST_REAL = slice(0, FAST_PAIRS)
FAST_IMAG = slice(_PAIRS, _PAIRS + FAST_PAIRS)
STILL = tuple(range(FAST_PAIRS, _PAIRS)) + tuple(range(_PAIRS + FAST_PAIRS, HEAD_DIM))


def frequencies() -> Tensor:
    """Radians per token of the fast pairs, float64 [FAST_PAIRS]."""
    return torch.tensor(BASE, dtype=torch.float64) ** (-torch.arange(FAST_PAIRS, dtype=torch.float64) / _PAIRS)


def look_query(distance: int, scale: float) -> Tensor:
    """The constant query, complex128 [FAST_PAIRS], whose logit peaks at exactly ``distance`` tokens back."""
    weights = torch.tensor(LOOK, dtype=torch.float64)
    return torch.polar(scale * weights, -distance * frequencies())


def window_query() -> Tensor:
    """The constant query, complex128 [FAST_PAIRS], that averages over about the last 48 tokens."""
    return torch.complex(torch.tensor(WINDOW_COS, dtype=torch.float64), -torch.tensor(WINDOW_SIN, dtype=torch.float64))
