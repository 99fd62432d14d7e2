"""Our layer loop: packed rows of many sequences in, logits of chosen rows out.

We own the loop (rather than calling ``model.forward``) because K/V live in our store, no mask is built,
length-dependent rotary factors must not depend on what else is in the batch, and the head runs on the wanted rows only.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from saccade.machine import sent
from saccade.models import fused_modules
from saccade.models.families import Family, attending_layers, keeping_layers
from saccade.models.interface import (
    AheadRows,
    AttentionContext,
    FrozenRows,
    InputRows,
    ModelSpec,
    RowsPart,
    ScoredRows,
    Segment,
    StateRows,
    Stopwatch,
    WholeRows,
    check_rows,
)
from saccade.models.keeping import KeepingLayers
from saccade.models.keeping_step import KeptStep, kept_step
from saccade.models.key_turns import KeyTurn, TurnedContext, alike, turns_of, turns_of_modules
from saccade.models.latent import use_latents
from saccade.models.llama import LlamaDecoder
from saccade.models.modules import ModuleLayers
from saccade.models.rotary import Rotary, RotaryRows
from saccade.models.streams import cut_by_quantiles, surroundings

SCORED_SLICE = 256  # rows: 128 MiB of float32 logits at a vocabulary of 128K


class HFRunner:
    """Runs packed rows of many sequences through the layers of a checked transformers causal LM.

    ``model`` must have been made with ``attn_implementation="saccade"`` and be of ``family``. ``llama`` runs all of it
    if there is one, and the modules of ``model`` then hold no weights (``models.headers``); else they do.
    """

    def __init__(self, model: Any, family: Family, spec: ModelSpec, llama: LlamaDecoder | None = None) -> None:
        self.model = model
        self.family = family
        self.spec = spec
        self.config = model.config
        self.llama = llama
        decoder = model.get_decoder()
        self.depth = len(decoder.layers)
        keeps = bool(keeping_layers(family, self.config))
        self.keeping = KeepingLayers(decoder.layers, family, self.config) if keeps else None
        if family.latent:
            use_latents(decoder.layers)
        places = () if self.keeping is None else self.keeping.places
        self.modules = ModuleLayers(decoder.layers, places, family.shares_keys)
        by_layer = family.embeds_by_layer and bool(decoder.hidden_size_per_layer_input)
        self.around = surroundings(decoder, family.streams, by_layer)
        if family.streams:
            cut_by_quantiles(decoder.layers)
        # By layer, its number among those that attend; None of others.
        numbers = {place: number for number, place in enumerate(attending_layers(family, self.config))}
        self._numbers = [numbers.get(place) for place in range(self.depth)]
        rotary = None if family.rotary is None else getattr(decoder, family.rotary)
        self.rotary = Rotary(rotary, self.config, per_layer_type=family.rotary_per_layer_type)
        self._embedding = decoder.get_input_embeddings()
        self._norm = getattr(decoder, family.final_norm)
        self._head = model.get_output_embeddings()
        self.turns: list[KeyTurn] | None = None
        self.exact = False  # whether rows give the same bits whichever way they go
        if self.keeping is not None and fused_modules.serves(self.device):
            fused_modules.fuse(model)

    def turn_keys(self, on: bool = True) -> None:
        """Have attention given queries and keys in another basis (models.key_turns), or no longer. Keys that are stored
        must be of the same one."""
        self.turns = None
        if on:
            self.turns = self._module_turns if self.llama is None else turns_of(self.llama.weights)
        if self.llama is not None:
            self.llama.turn(self.turns)

    @cached_property
    def _module_turns(self) -> list[KeyTurn]:
        return turns_of_modules(self.modules.layers, self.family, self.config)

    @property
    def balances_modules(self) -> bool:
        """Whether turned keys are balanced, too, where layers run as transformers' modules (key_turns)."""
        return self.llama is None and not alike(self._module_turns)

    def turned(self, ctx: AttentionContext) -> AttentionContext:
        """``ctx`` for transformers' modules, which do not turn what they hand to it."""
        if self.turns is None:
            return ctx
        return TurnedContext(ctx, [turn for turn, number in zip(self.turns, self._numbers) if number is not None])

    @cached_property
    def _kept_step(self) -> KeptStep | None:
        """The layers of a decode step in one call, where some keep a state and the kernels have what their modules
        do."""
        if self.keeping is None:
            return None
        return kept_step(self.model.get_decoder().layers, self.family, self.config, self.keeping, self.modules)

    @property
    def device(self) -> torch.device:
        """Where the weights are, and where ``token_ids`` and ``positions`` are moved to."""
        return self._head.weight.device if self.llama is None else self.llama.device

    @property
    def weights(self) -> dict[str, Tensor]:
        """All tensors as they are stored, by transformers' names, in its order."""
        held = self.model.state_dict()
        if self.llama is None:
            return held
        named = self.llama.weights.named()
        return {name: named[name] for name in held}

    def rope_regime(self, length: int) -> int:
        """Which set of rotary factors a sequence of ``length`` tokens uses; keys of unequal regimes must not be mixed.

        0 for most models at any length. For longrope 0 = short, 1 = long factors; for dynamic NTK scaling the length
        itself beyond the trained context. A store that shares or extends cached keys compares regimes.
        """
        return self.rotary.regime(length)

    def watch(self, stopwatch: Stopwatch | None) -> None:
        """Have ``stopwatch`` time, as "linear", what layers and head do besides attention where no transformers'
        module does it. None ends it."""
        if self.llama is not None:
            self.llama.watch(stopwatch)

    @property
    def layers_rotate_alike(self) -> bool:
        """Whether keys of a position are rotated, and turned, by the same factors in every layer, so that a key may
        stand for the next layer's."""
        return not (self.family.rotary_per_layer_type or self.family.some_layers_unrotated) and alike(self.turns or ())

    @property
    def restart_length(self) -> int | None:
        """The length at which a decoding sequence must compute its whole past again to equal ``generate``, or None.

        Only Phi-3 with longrope does so, on growing past the trained length; other longrope families keep the cached
        keys. A store that ignores it answers from keys rotated by the short factors.
        """
        switch = self.rotary.long_from
        return switch + 1 if switch is not None and self.family.restarts_at_long_rope else None

    @torch.inference_mode()
    def run(self, token_ids: Tensor, positions: Tensor, ctx: AttentionContext, **asked: Any) -> Tensor:
        """What :meth:`steps` does with the same arguments, without a stop: returns the logits."""
        logits: list[Tensor] = []
        for _ in self.steps(token_ids, positions, ctx, take=logits.append, **asked):
            pass
        return logits[0]

    @torch.inference_mode()
    def steps(
        self,
        token_ids: Tensor,
        positions: Tensor,
        ctx: AttentionContext,
        *,
        take: Callable[[Tensor], None],
        segments: Sequence[Segment],
        logit_rows: Tensor,
        scored: ScoredRows | None = None,
        frozen: FrozenRows | None = None,
        ahead: AheadRows | None = None,
        inputs: InputRows | None = None,
        parts: Sequence[RowsPart] | None = None,
        whole: WholeRows | None = None,
        states: StateRows | None = None,
    ) -> Generator[int, None, None]:
        """Run the rows ``token_ids``, ``positions`` int64 [rows], stopping between two layers: yields how many have
        run. Other passes may run while it stands, and it may be closed there. ``parts``, which tile the rows, attend in
        place of ``ctx`` where the runner can take rows in parts, and ``whole``, all of the rows, where it can hand over
        its layers. ``states``: of the segments' sequences, for layers that keep one; without, these begin here.
        ``take`` gets float32 logits [len(logit_rows), vocab_size]; a frozen row's are those of its hidden state where
        it was frozen. ``segments`` must tile the rows in order; ValueError if they do not. What outlives a stop is its
        own: ``hidden`` and ``delta`` are fresh tensors, and so are the rotary factors of several rows; those of one row
        are lent until the next pass."""
        check_rows(token_ids, positions, segments)
        device, llama = self.device, self.llama
        positions = sent(positions, device)
        token_ids = sent(token_ids, device)
        embedded = self.embed(token_ids)
        hidden, beside = self.around.begin(embedded), self.around.by_layer(token_ids, embedded)
        rotary = self.rotary.embed(hidden, positions, segments)
        kernels = None if llama is None else llama.kernels(hidden.shape[0])
        done = False  # without this loop
        if llama is not None and kernels is not None:
            if parts is not None:
                llama.run_parts(hidden, rotary.layers, parts, self.turns)
                done = True
            elif whole is not None and kernels.whole is not None and ahead is None and inputs is None:
                done = whole.run_layers(kernels.whole, hidden, rotary.layers, llama.attention)
        elif whole is not None and ahead is None and inputs is None and self.turns is None and states is not None:
            kept = self._kept_step
            if kept is not None and kept.serves(len(positions), states) and (kept.same_bits or not self.exact):
                done = whole.run_layers(kept.given(states), hidden, rotary.layers, kept.attention)
        given = self.turned(ctx)
        pieces = None if self.keeping is None else self.keeping.pieces(states, segments, device)
        delta: Tensor | None = None  # what is still to be added to hidden
        for index in range(0 if done else self.depth):
            number = self._numbers[index]
            if index and len(positions) > 1:
                yield index
            freezes = frozen is not None and number is not None and bool(frozen.skip(number).any())
            if delta is not None and (ahead is not None or freezes or inputs is not None):
                hidden, delta = hidden.add_(delta), None
            if inputs is not None and number is not None:
                inputs.visit(number, self.around.active(hidden)[sent(inputs.rows, device)])
            following = self._numbers[index + 1] if index + 1 < self.depth else None
            if ahead is not None and following is not None:
                ahead.visit(following, self._project(index + 1, hidden, positions, rotary, sent(ahead.rows, device))[0])
            rows, where, pair, live = hidden, positions, rotary.layers[index], None
            own = None if beside is None else beside[:, index]
            if frozen is not None and freezes:
                live = self._store_frozen(index, hidden, positions, rotary, ctx, frozen)
                if not live.numel():
                    continue
                rows, where, pair = hidden[live], positions[live], rotary.rows(index, live)
                own = None if own is None else own[live]
            if llama is None:
                rows = self.modules.run(index, rows, where, pair, given, pieces, own)
            else:
                layer = llama.kernels(len(rows)).layers[index]
                q, k, v = layer.project(rows, *pair, delta)
                if self.turns is not None:
                    self.turns[index].turn(q, k)
                delta = layer.finish(rows, ctx.run(index, q, k, v, llama.attention[index]))
            if live is None:
                hidden = rows
                continue
            hidden.index_copy_(0, live, rows if delta is None else rows.add_(delta))
            delta = None
        if delta is not None:
            hidden.add_(delta)
        if scored is not None:
            for first in range(0, len(scored.rows), SCORED_SLICE):
                scored.visit(first, self.logits(hidden[sent(scored.rows[first : first + SCORED_SLICE], device)]))
        take(self.logits(hidden[sent(logit_rows, device)]))

    def embed(self, token_ids: Tensor) -> Tensor:
        """The embedding of ``token_ids`` [rows]: [rows, channels]."""
        hidden = self._embedding(token_ids) if self.llama is None else self.llama.embed(token_ids)
        if self.family.scale_embedding is not None:
            hidden = hidden * getattr(self.config, self.family.scale_embedding)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """``hidden`` [rows, ...], as the last layer leaves it -> float32 [rows, vocab_size]."""
        if self.llama is not None:
            return self.finish_logits(self.llama.kernels(hidden.shape[0]).logits(hidden, None))
        return self.finish_logits(self._head(self._norm(self.around.end(hidden))))

    def finish_logits(self, raw: Tensor) -> Tensor:
        """The head's output as float32 logits, after the family's last step, which runs in the model's dtype."""
        return self.family.finish_logits(raw, self.config).float()

    def _store_frozen(
        self,
        index: int,
        hidden: Tensor,
        positions: Tensor,
        rotary: RotaryRows,
        ctx: AttentionContext,
        frozen: FrozenRows,
    ) -> Tensor:
        """Have the keys and values stored that rows which skip a layer leave there; returns which rows do not skip
        it, int64 [n]."""
        number = self._numbers[index]
        assert number is not None, "rows skip layers that attend"
        skip = frozen.skip(number)
        stored, live = (sent(part.nonzero()[:, 0], hidden.device) for part in (skip & frozen.projected, ~skip))
        k = v = None
        if stored.numel() and self.spec.stores(number):
            _, k, v = self._project(index, hidden, positions, rotary, stored)
        if k is not None and v is not None:
            ctx.store(number, k, v)
        else:
            heads, width = self.spec.shape(number)
            none = hidden.new_empty(heads, 0, width)
            ctx.store(number, none, none)
        return live

    def _project(
        self, index: int, hidden: Tensor, positions: Tensor, rotary: RotaryRows, rows: Tensor
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """What a layer hands to its attention for ``rows`` int64 [n]: [heads or kv_heads, n, head_dim]; no keys and
        values of one that reads others'."""
        pair = rotary.rows(index, rows)
        q: Tensor
        k: Tensor | None
        v: Tensor | None
        if self.llama is not None:
            q, k, v = self.llama.project(index, hidden[rows], *pair)
        else:
            q, k, v = self.modules.project(index, hidden[rows], positions[rows], pair)
        if self.turns is not None:
            self.turns[index].turn(q, k)
        return q, k, v
