"""A dense attention context in a page: plain per-sequence K/V, every key read. What the engine must equal."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from saccade.models.interface import LayerAttention, Segment, StateRows
from saccade.models.runner import HFRunner


class DenseStore:
    """K/V of many sequences, per layer; ``cache[sequence][layer]`` is ``(k, v)``, each [kv_heads, tokens, head_dim]."""

    def __init__(self) -> None:
        self.cache: dict[str, dict[int, tuple[Tensor, Tensor]]] = {}
        self.slots: dict[str, int] = {}  # of the states of layers that keep one
        self.states: dict[str, Tensor] = {}

    def rows(self, runner: HFRunner, sequences: Sequence[str]) -> StateRows | None:
        """Where a pass over ``sequences`` finds their states."""
        if runner.keeping is None:
            return None
        if not self.states:
            self.states = runner.keeping.format.empty(8, runner.device)
            for part in self.states.values():
                part.zero_()
        return StateRows(self.states, [self.slots.setdefault(name, len(self.slots)) for name in sequences])

    def length(self, sequence: str) -> int:
        layers = self.cache.get(sequence)
        return layers[0][0].shape[1] if layers else 0


class DensePass:
    """The attention context of one packed pass over ``store``."""

    def __init__(
        self, store: DenseStore, sequences: Sequence[str], segments: Sequence[Segment], reads: Sequence[int] = ()
    ) -> None:
        self.store, self.reads = store, reads
        self.rows = list(zip(sequences, segments, strict=True))

    def run(self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None, spec: LayerAttention) -> Tensor:
        out = torch.empty_like(q)
        for sequence, segment in self.rows:
            rows = slice(segment.start, segment.start + segment.length)
            layers = self.store.cache.setdefault(sequence, {})
            if k is None or v is None:
                keys, values = layers[self.reads[layer]]
                out[:, rows] = dense_attention(q[:, rows], keys, values, spec)
                continue
            keys, values = k[:, rows], v[:, rows]
            if layer in layers:
                keys = torch.cat([layers[layer][0], keys], dim=1)
                values = torch.cat([layers[layer][1], values], dim=1)
            layers[layer] = (keys, values)
            out[:, rows] = dense_attention(q[:, rows], keys, values, spec)
        return out


def dense_attention(q: Tensor, k: Tensor, v: Tensor, spec: LayerAttention) -> Tensor:
    """Causal attention for the last ``q.shape[1]`` rows of a sequence of ``k.shape[1]`` tokens, by the definition."""
    group = q.shape[0] // k.shape[0]
    k, v = (t.repeat_interleave(group, dim=0).float() for t in (k, v))
    scores = q.float() @ k.transpose(1, 2) * spec.scale
    if spec.softcap is not None:
        scores = torch.tanh(scores / spec.softcap) * spec.softcap
    key = torch.arange(k.shape[1])
    row = torch.arange(k.shape[1] - q.shape[1], k.shape[1])[:, None]
    hidden = key > row
    if spec.window is not None:
        hidden |= key <= row - spec.window
    scores = scores.masked_fill(hidden, float("-inf"))
    if spec.sinks is not None:
        sinks = spec.sinks.float()[:, None, None].expand(-1, q.shape[1], 1)
        weights = torch.cat([scores, sinks], dim=-1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return (weights @ v).to(q.dtype)


def run_packed(
    runner: HFRunner, store: DenseStore, batch: dict[str, Sequence[int]], prompt_lengths: dict[str, int] | None = None
) -> dict[str, Tensor]:
    """Append each sequence's new tokens in one packed pass; returns every new row's logits, [new tokens, vocab].

    ``prompt_lengths`` gives a sequence's whole prompt length where only a chunk of it is appended now.
    """
    segments, tokens, positions, start = [], [], [], 0
    for sequence, ids in batch.items():
        past = store.length(sequence)
        rope_length = (prompt_lengths or {}).get(sequence, past + len(ids))
        segments.append(Segment(start, len(ids), rope_length))
        tokens += list(ids)
        positions += range(past, past + len(ids))
        start += len(ids)
    logits = runner.run(
        torch.tensor(tokens),
        torch.tensor(positions),
        DensePass(store, list(batch), segments, runner.spec.reads),
        segments=segments,
        logit_rows=torch.arange(start),
        states=store.rows(runner, list(batch)),
    )
    return {name: logits[s.start : s.start + s.length] for name, s in zip(batch, segments, strict=True)}


def greedy(
    runner: HFRunner, store: DenseStore, prompts: dict[str, Sequence[int]], count: int, eos: Sequence[int] = ()
) -> dict[str, list[int]]:
    """Append the prompts together, then decode all sequences together, each to ``count`` tokens or an ``eos`` id."""
    out: dict[str, list[int]] = {name: [] for name in prompts}
    batch: dict[str, Sequence[int]] = dict(prompts)
    while batch:
        logits = run_packed(runner, store, batch)
        for name in list(batch):
            out[name].append(int(logits[name][-1].argmax()))
            batch[name] = out[name][-1:]
            if len(out[name]) == count or out[name][-1] in eos:
                del batch[name]
    return out
