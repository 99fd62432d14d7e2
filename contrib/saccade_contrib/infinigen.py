"""InfiniGen: keys by a query guessed a layer ahead, on a few channels (Lee et al., OSDI 2024).

The guess is this layer's own norm and projection applied to what the layer before took in. It lets a store fetch keys
while that layer still computes; here it changes what is read alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from saccade.methods.base import Chunk, Query
from saccade.methods.labels import WHOLE_BITS, Labels
from saccade.methods.measured import Measured
from saccade.methods.options import require_choice, require_number, require_whole
from saccade.methods.whole import WholeMethod
from saccade.selection import Dense, Selection
from saccade_contrib.calibrations import Skew
from saccade_contrib.channels import top_tokens

CALIBRATION = "skew"  # an orthogonal matrix per KV head: see `saccade calibrate`


@dataclass(frozen=True)
class InfiniGen(WholeMethod):
    """As many keys as lie, on average over the units, within ``alpha`` of the unit's highest speculated logit, at most
    the share ``cap`` of the visible ones; every unit reads that many, the current one among them.

    Logits are speculated on the share ``channels`` of the head's channels, those of greatest summed |q| over the
    prompt, after an orthogonal rotation that gathers the queries' weight in few channels: ``saccade calibrate skew``
    makes it once per model, ``skew=off`` leaves channels as they are. ``query=previous`` speculates from the input of
    the layer before, as published; ``own`` takes the layer's true query. The first ``dense_layers`` layers are dense.
    InfiniGen knows no groups: channels follow the sum over a group, ``unit=kv_head`` its mean logit. ``alpha`` is 4 for
    OPT and 5 for Llama. Rows of up to ``dense_upto`` keys read everything.
    """

    name: ClassVar[str] = "infinigen"
    paper: ClassVar[str] = "InfiniGen, arXiv:2406.19707"
    phases: ClassVar[tuple[str, ...]] = ("decode",)
    rows_only: ClassVar[str | None] = "it asks for the queries of a layer ahead, which recorded steps do not compute"
    watches: ClassVar[bool] = True
    calibrations: ClassVar[Mapping[str, type]] = {CALIBRATION: Skew}
    measured: ClassVar[Measured | None] = Measured(
        "infinigen(alpha={value}, cap=1.0, skew=off, query=own, dense_layers=0)",
        tuple(f"{min(0.01 * 1.15**at, 40):.4g}" for at in range(61)),
        summary=0.2,
    )

    alpha: float = 5.0
    channels: float = 0.2
    cap: float = 0.2
    skew: str = "offline"
    query: str = "previous"
    unit: str = "kv_head"
    dense_layers: int = 1

    def __post_init__(self) -> None:
        require_number("alpha", self.alpha, 0.0, 1e6)
        require_number("channels", self.channels, 0.001, 1.0)
        require_number("cap", self.cap, 0.0001, 1.0)
        require_choice("skew", self.skew, ("offline", "off"))
        require_choice("query", self.query, ("previous", "own"))
        require_choice("unit", self.unit, ("q_head", "kv_head"))
        require_whole("dense_layers", self.dense_layers, 1 if self.query == "previous" else 0)
        self.check_dense_upto()

    @property
    def calibration(self) -> str | None:
        return CALIBRATION if self.skew == "offline" else None

    @property
    def extra_memory(self) -> str | None:
        return f"partial keys take 4 bytes for {self.channels:.3g} of each key's channels beside kv_memory"

    @property
    def joins_heads(self) -> bool:
        return True  # all read as many keys as they want on average

    @property
    def looks_ahead(self) -> bool:
        return self.query == "previous"

    def watch(self, chunk: Chunk) -> Tensor:
        """Sums of |q| by channel, rotated, over the prompt's rows and the group's heads: fp32 [kv_heads, head_dim]."""
        grouped = chunk.q.float().unflatten(0, (chunk.shape.kv_heads, -1)).flatten(1, 2)  # [G, g * rows, d]
        basis = self._basis(chunk)
        sums = (grouped if basis is None else grouped @ basis).abs().sum(1)
        return sums + chunk.past if isinstance(chunk.past, Tensor) else sums

    def begin(self, segment: Chunk) -> Labels | None:
        if segment.layer < self.dense_layers:
            return None
        sums = segment.past if isinstance(segment.past, Tensor) else self.watch(segment)
        count = max(1, round(self.channels * segment.q.shape[-1]))
        heaviest = torch.sort(sums, dim=1, descending=True, stable=True).indices[:, :count]
        partial = Labels(heaviest, WHOLE_BITS, self._basis(segment))
        partial.extend(segment.kv)
        return partial

    def select_decode(self, query: Query, state: Any) -> Selection:
        shape = query.shape
        if query.layer < self.dense_layers or shape.k_len <= self.dense_upto:
            return Dense(shape)
        state.extend(query.kv)
        query.cost.estimated += shape.k_len
        q = query.q
        if self.looks_ahead:
            assert query.ahead is not None, "the engine hands over the queries that a method asks for"
            q = query.ahead
        logits = state.scores(q[:, 0], self.unit) * query.scale
        near = query.all_heads((logits > logits.amax(1, keepdim=True) - self.alpha).sum(1))
        count = max(1, min(round(float(near.double().mean())), int(self.cap * shape.k_len)))
        if count >= shape.k_len:
            return Dense(shape)
        return top_tokens(query, logits, count, local=1)

    def _basis(self, chunk: Chunk) -> Tensor | None:
        if self.skew == "off":
            return None
        assert chunk.offline is not None, "the engine hands over the calibration that a method asks for"
        return chunk.offline["skew"].to(chunk.q.device)
