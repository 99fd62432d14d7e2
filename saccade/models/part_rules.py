"""What ranks share out of each tensor of a model: one declaration for all families, by what transformers calls their
modules (``models.parts`` applies it)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

Unit = Literal["query", "kv", "inner"]  # what is shared out: query heads, KV heads, inner channels of an MLP

INNER: tuple[Unit, ...] = ("inner", "inner")

# By the last part of a module's name: what its outputs are, one block after another.
OUTPUTS: dict[str, tuple[Unit, ...]] = {
    "q_proj": ("query",),
    "k_proj": ("kv",),
    "v_proj": ("kv",),
    "qkv_proj": ("query", "kv", "kv"),
    "gate_proj": ("inner",),
    "up_proj": ("inner",),
    "gate_up_proj": INNER,
    "input_linear": INNER,
    "w1": ("inner",),
    "w3": ("inner",),
    "fc1": ("inner",),
    "c_fc": ("inner",),
}
# What the channels that a module takes in are.
CHANNELS: dict[str, Unit] = {
    "o_proj": "query",
    "dense": "query",
    "out_proj": "query",
    "down_proj": "inner",
    "output_linear": "inner",
    "w2": "inner",
    "fc2": "inner",
    "c_proj": "inner",
}
# Of experts that lie together [experts, ...]: the axis of their inner channels, and how many blocks of these there are;
# where weights lie channels first (gpt-oss) gate and up take turns, as a pair of channels.
EXPERTS = {"gate_up_proj": (1, 2), "up_proj": (1, 1), "down_proj": (2, 1)}
CHANNELS_FIRST = {"gate_up_proj": (2, 1), "gate_up_proj_bias": (1, 1), "down_proj": (1, 1)}
ALIGNED = 8  # inner channels of an expert's part: torch multiplies experts by rows of whole 16 bytes
# Norms of queries and keys: of each head alone, of each with a weight of its own, or of all of them together.
HEAD_NORMS: dict[str, Unit] = {"q_norm": "query", "k_norm": "kv", "q_layernorm": "query", "k_layernorm": "kv"}
# What each rank has all of, of two dimensions or more: routers, gates of shared experts, what stands around experts.
WHOLE = "gate", "router", "shared_expert_gate", "fc1_latent_proj", "fc2_latent_proj"


@dataclass(frozen=True)
class Cut:
    """The runs ``spans`` of a tensor along ``axis``, in their order; ``filled`` up to so many."""

    axis: int
    spans: tuple[tuple[int, int], ...]
    filled: int | None = None

    def of(self, whole: Tensor) -> Tensor:
        """The part, a view of ``whole`` where it is one run of it."""
        runs = [whole.narrow(self.axis, start, stop - start) for start, stop in self.spans]
        own = runs[0] if len(runs) == 1 else torch.cat(runs, self.axis)
        if self.filled is None or own.shape[0] == self.filled:
            return own
        return pad(own, (*(0, 0) * (own.dim() - 1), 0, self.filled - own.shape[0]))
