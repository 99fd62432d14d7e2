"""What passes between the layer loop and what supplies attention: rows, segments, and the attention context."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from saccade.kv.state_journal import Again
from saccade.kv.states import StateFormat
from saccade.ops.layer_rows import WholeLayers


@dataclass(frozen=True)
class ModelSpec:
    """The shape of a checkpoint as the engine needs it. ``layers`` are those that attend over keys and values, and only
    these have numbers: ``windows[i]`` is layer i's sliding window in tokens, or None. ``places[i]``, where the model
    has other layers, too: which of all its ``depth`` layers that is. ``states``: what others keep of a sequence, if
    any do. ``shapes[i]``, where layers differ: layer i's KV heads and head_dim, while ``kv_heads`` and ``head_dim`` are
    the first's. ``value_dim``: None, or that values are the first so many channels of the keys (latent attention), as
    of a KVFormat.

    ``reads``: empty where every layer stores keys and values and reads its own. Else it has, by layer, the one whose
    keys and values it reads: the first ``stored`` layers store and read their own, those after them store nothing and
    read one of these (Gemma 3n, Gemma 4). Memory, tiers and sessions hold the layers that store."""

    family: str
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    max_position: int
    dtype: torch.dtype
    windows: tuple[int | None, ...]
    places: tuple[int, ...] = ()
    states: StateFormat | None = None
    depth: int = 0
    value_dim: int | None = None
    shapes: tuple[tuple[int, int], ...] = ()
    reads: tuple[int, ...] = ()

    def shape(self, layer: int) -> tuple[int, int]:
        """KV heads and head_dim of a layer that attends."""
        return self.shapes[layer] if self.shapes else (self.kv_heads, self.head_dim)

    @property
    def stored(self) -> int:
        """How many layers store keys and values."""
        return max(self.reads, default=self.layers - 1) + 1

    def stores(self, layer: int) -> bool:
        """Whether a layer stores keys and values, which it then reads."""
        return layer < self.stored

    @property
    def ends_attending(self) -> bool:
        """Whether the model's last layer attends, and keeps no state: rows whose output is not read may skip it
        then."""
        if self.states is None:
            return True
        return self.places[-1] == self.depth - 1 and len(self.places) + self.states.layers <= self.depth


@dataclass(frozen=True, eq=False)
class StateRows:
    """Where layers that keep a state find it in one pass: ``parts`` by name, [state layers, slots, ...], changed in
    place; ``slots``: of each sequence; ``spans``: its first packed row, and how many it has, where that is not what the
    pass's segments say: drafted rows are segments each, behind each other. ``inner``, by sequence:
    after how many of its rows a copy goes to which slot. ``journals``, by sequence: where layers note what they do, for
    rows of which some may be taken back."""

    parts: Mapping[str, Tensor]
    slots: Sequence[int]
    spans: Sequence[tuple[int, int]] | None = None
    inner: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    journals: Mapping[int, list[Again]] = field(default_factory=dict)


@dataclass(frozen=True)
class Segment:
    """Rows ``start .. start + length - 1`` of a packed batch belong to one sequence.

    ``rope_length`` is the sequence length that decides length-dependent rotary factors (longrope): the whole prompt's
    while prefilling, the current length while decoding. It never depends on what else is in the batch.
    """

    start: int
    length: int
    rope_length: int


def check_rows(token_ids: Tensor, positions: Tensor, segments: Sequence[Segment]) -> None:
    """ValueError unless ``token_ids`` and ``positions`` are of one shape [rows], which ``segments`` tile in order."""
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


@dataclass(eq=False)
class LatentRows:
    """The rows of one pass at a layer whose keys are latents, as a backend may read them instead: by the keys and
    values of every head, where many rows read the same tokens.

    ``queries`` [heads, rows, key channels]: the rows' own, as they meet such keys. ``expand(stored, heads)`` makes of
    latents as they are stored [n, head_dim] the keys [heads, n, key channels] and values [heads, n, value_dim] of some
    heads. ``pays_from``: of how many rows on that takes fewer products where all keys are read. Rows attended so are
    taken (:meth:`take`); what ``run`` returns for them does not count.
    """

    queries: Tensor
    expand: Callable[[Tensor, slice], tuple[Tensor, Tensor]]
    value_dim: int
    pays_from: int
    taken: list[tuple[slice, Tensor]] = field(default_factory=list)

    def take(self, rows: slice, out: Tensor) -> None:
        """``out`` [heads, n, value_dim] is what the n ``rows`` of the pass have read; rows rise from call to call."""
        self.taken.append((rows, out))

    def finish(self, others: Callable[[slice], Tensor]) -> Tensor:
        """[heads, rows, value_dim]: what was taken, and of the rows between that ``others(rows)``."""
        count, parts, done = self.queries.shape[1], list[Tensor](), 0
        for rows, out in [*self.taken, (slice(count, count), None)]:
            if done < rows.start:
                parts.append(others(slice(done, rows.start)))
            if out is not None:
                parts.append(out)
            done = rows.stop
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


@dataclass(frozen=True)
class LayerAttention:
    """What a layer asks of its attention beyond q, k and v."""

    scale: float
    window: int | None = None  # sliding window in tokens: row p reads keys p - window + 1 .. p
    softcap: float | None = None  # logits become softcap * tanh(logits / softcap)
    sinks: Tensor | None = None  # [heads] extra logits that take part in the softmax and carry no value
    latent: LatentRows | None = None  # of layers whose keys are latents


@dataclass(frozen=True, eq=False)
class FrozenRows:
    """Rows that skip layers, attention and MLP, from some depth on, their hidden state unchanged.

    ``first`` int64 [rows]: the first layer that a row skips, the number of layers where it skips none. ``projected``
    bool [rows]: whether a skipped layer still projects the row's key and value.
    """

    first: Tensor
    projected: Tensor

    def skip(self, layer: int) -> Tensor:
        """bool [rows]: who skips ``layer``."""
        return self.first <= layer


@dataclass(frozen=True)
class ScoredRows:
    """Rows whose logits are looked at and dropped: those of a whole prompt would not fit in memory.

    ``visit(first, logits)`` gets float32 [n, vocab_size] for the rows ``rows[first : first + n]``, a slice at a time.
    """

    rows: Tensor  # int64 [count]
    visit: Callable[[int, Tensor], None]


@dataclass(frozen=True)
class AheadRows:
    """Rows whose queries are wanted a layer early: what a layer makes of the input of the layer before it.

    ``visit(layer, q)`` gets [heads, n, head_dim], post-RoPE, for the rows ``rows`` int64 [n], before layer - 1 runs.
    """

    rows: Tensor
    visit: Callable[[int, Tensor], None]


@dataclass(frozen=True, eq=False)
class InputRows:
    """Rows whose hidden states are wanted as each layer takes them in, before its norm.

    ``visit(layer, hidden)`` gets [n, channels] for the rows ``rows`` int64 [n], before the layer runs.
    """

    rows: Tensor
    visit: Callable[[int, Tensor], None]


class RowsPart(Protocol):
    """Some of a pass's rows, whose attention another device computes: meanwhile others' rows run on the device."""

    rows: slice  # of the packed ones

    def begin(self, layer: int, q: Tensor, k: Tensor, v: Tensor, spec: LayerAttention) -> None:
        """Have the rows' keys and values stored and their queries attended; shapes as of AttentionContext.run."""
        ...

    def end(self, layer: int, spec: LayerAttention) -> Tensor:
        """What that gave, once it is there: [heads, rows, head_dim]."""
        ...

    def drop(self) -> None:
        """Wait for what was begun; its result is not wanted."""
        ...


class WholeRows(Protocol):
    """A pass's rows whose attention needs nothing from outside between two layers."""

    def run_layers(
        self,
        layers: WholeLayers,
        hidden: Tensor,
        rotary: Sequence[tuple[Tensor, Tensor]],
        attention: Sequence[LayerAttention],
    ) -> bool:
        """Take ``hidden`` [rows, channels] through all ``layers``, in place, where layer i has cos and sin
        ``rotary[i]`` [rows, head_dim] and asks its attention for ``attention[i]``. False where that cannot be after
        all: nothing has happened then."""
        ...


class Stopwatch(Protocol):
    """Adds up the time of named stretches."""

    def begin(self, name: str) -> None: ...

    def end(self) -> None: ...


class AttentionContext(Protocol):
    """Supplied by the engine for one packed forward pass."""

    def run(self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None, spec: LayerAttention) -> Tensor:
        """Store the new rows' ``k``, ``v`` [kv_heads, rows, head_dim] and attend for ``q`` [heads, rows, head_dim].

        All are post-RoPE, rows of all segments packed in order, frozen ones left out. Both are None of a layer that
        stores nothing: the layer that it reads (ModelSpec.reads) has run for these rows, with those that skip this one.
        Returns [heads, rows, head_dim] in q's dtype.
        """
        ...

    def store(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Take the keys and values of the frozen rows of ``layer`` that are projected, [kv_heads, n, head_dim], packed
        in order. Called before the layer's ``run``, for every layer that has frozen rows (n may be 0)."""
        ...
