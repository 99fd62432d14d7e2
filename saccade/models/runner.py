"""Our layer loop over transformers' modules: packed rows of many sequences in, logits of chosen rows out.

We own the loop (rather than calling ``model.forward``) because K/V live in our store, no mask is built,
length-dependent rotary factors must not depend on what else is in the batch, and the head runs on the wanted rows only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from saccade.models.families import Family
from saccade.models.fused import FusedDecoder
from saccade.models.interface import (
    AheadRows,
    AttentionContext,
    FrozenRows,
    LayerAttention,
    ModelSpec,
    ScoredRows,
    Segment,
    Stopwatch,
)
from saccade.models.rotary import CosSin, Rotary, RotaryRows
from saccade.ops.layer_rows import MOST_ROWS

SCORED_SLICE = 256  # rows: 128 MiB of float32 logits at a vocabulary of 128K


class HFRunner:
    """Runs a checked transformers causal LM; implements ``interface.Runner``.

    ``model`` must have been loaded with ``attn_implementation="saccade"`` and be of ``family``.
    """

    def __init__(self, model: Any, family: Family, spec: ModelSpec) -> None:
        self.model = model
        self.family = family
        self.spec = spec
        self.config = model.config
        self._decoder = model.get_decoder()
        self._head = model.get_output_embeddings()
        self._norm = getattr(self._decoder, family.final_norm)
        self._fused = FusedDecoder.of(model, spec)
        self._rotary = Rotary(self._decoder.rotary_emb, self.config, per_layer_type=family.rotary_per_layer_type)

    @property
    def device(self) -> torch.device:
        """Where the weights are, and where ``token_ids`` and ``positions`` are moved to."""
        return self._head.weight.device

    def rope_regime(self, length: int) -> int:
        """Which set of rotary factors a sequence of ``length`` tokens uses; keys of unequal regimes must not be mixed.

        0 for most models at any length. For longrope 0 = short, 1 = long factors; for dynamic NTK scaling the length
        itself beyond the trained context. A store that shares or extends cached keys compares regimes.
        """
        return self._rotary.regime(length)

    def watch(self, stopwatch: Stopwatch | None) -> None:
        """Have ``stopwatch`` time, as "linear", the parts of layers that run without transformers' modules, which
        whoever times those cannot see. None ends it."""
        if self._fused is not None:
            self._fused.stopwatch = stopwatch

    @property
    def layers_rotate_alike(self) -> bool:
        """Whether a position has the same rotary factors in every layer, so that a key may stand for the next
        layer's."""
        return not (self.family.rotary_per_layer_type or self.family.some_layers_unrotated)

    @property
    def restart_length(self) -> int | None:
        """The length at which a decoding sequence must compute its whole past again to equal ``generate``, or None.

        Only Phi-3 with longrope does so, on growing past the trained length; other longrope families keep the cached
        keys. A store that ignores it answers from keys rotated by the short factors.
        """
        switch = self._rotary.long_from
        return switch + 1 if switch is not None and self.family.restarts_at_long_rope else None

    @torch.inference_mode()
    def run(
        self,
        token_ids: Tensor,
        positions: Tensor,
        ctx: AttentionContext,
        *,
        segments: Sequence[Segment],
        logit_rows: Tensor,
        scored: ScoredRows | None = None,
        frozen: FrozenRows | None = None,
        ahead: AheadRows | None = None,
    ) -> Tensor:
        """See ``interface.Runner.run``. ``segments`` must tile the rows in order; ValueError if they do not."""
        _check_rows(token_ids, positions, segments)
        device = self.device
        positions = positions.to(device)[None]  # [1, rows]
        hidden = self._embed(token_ids.to(device)[None])  # [1, rows, hidden]
        rotary = self._rotary.embed(hidden, positions, segments)
        for index in range(self.spec.layers):
            if ahead is not None and index + 1 < self.spec.layers:
                seen = self._projections(index + 1, hidden, positions, rotary, ahead.rows.to(device))
                ahead.visit(index + 1, seen.q)
            skip = None if frozen is None else frozen.skip(index)
            if skip is None or not bool(skip.any()):
                pair = rotary.for_layer(index)
                if self._fused is not None and self._fused.serves(hidden, pair):
                    self._fused.layer(index, hidden, pair, ctx)
                else:
                    hidden = self._layer(index, hidden, positions, pair, ctx)
                continue
            assert frozen is not None
            projected, live = (skip & frozen.projected).nonzero()[:, 0], (~skip).nonzero()[:, 0]
            ctx.store(index, *self._keys_and_values(index, hidden, positions, rotary, projected.to(device)))
            if live.numel():
                rows = live.to(device)
                pair = rotary.for_layer(index, rows)
                hidden.index_copy_(1, rows, self._layer(index, hidden[:, rows], positions[:, rows], pair, ctx))
        if scored is not None:
            for first in range(0, len(scored.rows), SCORED_SLICE):
                scored.visit(first, self._logits(hidden[0, scored.rows[first : first + SCORED_SLICE].to(device)]))
        return self._logits(hidden[0, logit_rows.to(device)])

    def _layer(self, index: int, hidden: Tensor, positions: Tensor, pair: CosSin, ctx: AttentionContext) -> Tensor:
        """One decoder layer over ``hidden`` [1, rows, hidden] at ``positions`` [1, rows]."""
        return self._decoder.layers[index](
            hidden,
            attention_mask=None,
            position_ids=positions,
            past_key_values=None,
            use_cache=False,
            position_embeddings=pair,
            saccade=ctx,
        )

    def _keys_and_values(
        self, index: int, hidden: Tensor, positions: Tensor, rotary: RotaryRows, rows: Tensor
    ) -> tuple[Tensor, Tensor]:
        """What a layer would store for ``rows`` int64 [n] of ``hidden``: two [kv_heads, n, head_dim]."""
        if not rows.numel():
            none = hidden.new_empty(self.spec.kv_heads, 0, self.spec.head_dim)
            return none, none
        seen = self._projections(index, hidden, positions, rotary, rows)
        return seen.k, seen.v

    def _projections(
        self, index: int, hidden: Tensor, positions: Tensor, rotary: RotaryRows, rows: Tensor
    ) -> _Projections:
        """What a layer would hand to its attention for ``rows`` int64 [n] of ``hidden``."""
        seen = _Projections()
        try:
            self._layer(index, hidden[:, rows], positions[:, rows], rotary.for_layer(index, rows), seen)
        except _Seen:
            return seen
        raise RuntimeError(f"layer {index} did not attend")

    def _embed(self, token_ids: Tensor) -> Tensor:
        hidden = self._decoder.embed_tokens(token_ids)
        if self.family.scale_embedding is not None:
            hidden = hidden * getattr(self.config, self.family.scale_embedding)
        return hidden

    def _logits(self, hidden: Tensor) -> Tensor:
        """``hidden`` [rows, hidden] -> float32 [rows, vocab]. The family's last step runs in the model's dtype."""
        if self._fused is not None and 0 < len(hidden) <= MOST_ROWS:
            raw = self._fused.logits(hidden)
        else:
            raw = self._head(self._norm(hidden))
        return self.family.finish_logits(raw, self.config).float()


class _Seen(Exception):
    """Leaves a layer in the middle, once its projections are known: what follows them is not wanted."""


class _Projections:
    """An attention context that notes what a layer hands to it and goes no further. Norms, projections and rotations
    differ between families; what each hands to attention does not."""

    q: Tensor
    k: Tensor
    v: Tensor

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, spec: LayerAttention) -> Tensor:
        self.q, self.k, self.v = q, k, v
        raise _Seen

    def store(self, layer: int, k: Tensor, v: Tensor) -> None:
        raise NotImplementedError


def _check_rows(token_ids: Tensor, positions: Tensor, segments: Sequence[Segment]) -> None:
    rows = token_ids.shape[0]
    if token_ids.dim() != 1 or positions.shape != token_ids.shape:
        raise ValueError(
            f"token_ids and positions must be [rows], got {tuple(token_ids.shape)}, {tuple(positions.shape)}"
        )
    end = 0
    for segment in segments:
        if segment.start != end or segment.length < 1:
            raise ValueError(f"segments must tile the rows in order; {segment} does not start at row {end}")
        end += segment.length
    if end != rows:
        raise ValueError(f"segments cover {end} rows of {rows}")
