"""A model's own queries, keys and values over natural text, and methods that decode over them: what paper_figures.py
measures. Methods run through their hooks (``begin``, ``select_decode``, ``observe``), as the engine's row path does.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from saccade import LLM, SamplingParams
from saccade.engine.core import new_request_id
from saccade.engine.messages import AddRequest
from saccade.engine.observing import observing
from saccade.engine.watch.observe import AttentionCall
from saccade.kv.view import KVView
from saccade.methods.base import Chunk, Method, Query
from saccade.methods.policy import Policy
from saccade.ops import Call, Result, run
from saccade.outputs import finished


@dataclass(frozen=True, eq=False)
class Layer:
    """``q`` [heads, n, head_dim], ``k``, ``v`` [kv_heads, n, head_dim], fp32, post-RoPE; ``number`` from 0."""

    number: int
    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    softcap: float | None

    def weights(self, rows: Tensor) -> Tensor:
        """Dense causal softmax weights of ``rows`` (int64 [r], positions): float64 [heads, r, n]."""
        group = self.q.shape[0] // self.k.shape[0]
        scores = self.q[:, rows].double() @ self.k.double().repeat_interleave(group, 0).mT * self.scale
        if self.softcap is not None:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        hidden = torch.arange(self.k.shape[1]) > rows[:, None]
        return torch.softmax(scores.masked_fill_(hidden, -torch.inf), -1)

    def outputs(self, weights: Tensor) -> Tensor:
        """``weights`` [heads, r, n] times the values: float64 [heads, r, head_dim]."""
        return weights @ self.v.double().repeat_interleave(self.q.shape[0] // self.v.shape[0], 0)


@dataclass(frozen=True, eq=False)
class Captured:
    """A dense run: ``context`` tokens were prefilled, the others are decode steps. ``layers``: those whose attention
    sees everything, of ``count``; where a model's own window decides, no policy acts."""

    context: int
    count: int
    layers: list[Layer]

    @property
    def steps(self) -> Tensor:
        """Positions of the decode steps."""
        return torch.arange(self.context, self.layers[0].q.shape[1])


@dataclass(frozen=True, eq=False)
class Step:
    """One decode step of a method at ``row``: ``ran`` is attention over what it chose, ``state`` has not learnt yet."""

    row: int
    query: Query
    ran: Result
    state: Any

    def mask(self) -> Tensor:
        """bool [heads, row + 1]: what was read."""
        return self.ran.used.mask()[:, 0]


def text_of(path: Path, at: float) -> str:
    """A file from the share ``at`` on; of a folder all Python files, one after the other."""
    files = sorted(path.rglob("*.py")) if path.is_dir() else [path]
    text = "\n".join(file.read_text(encoding="utf-8") for file in files)
    return text[int(at * len(text)) :]


def tokens_of(llm: LLM, text: str, length: int, steps: int, own: bool) -> list[int]:
    """``length`` tokens; with ``own`` the last ``steps`` are the model's greedy continuation of the others."""
    ids = llm.encode(text[: 8 * length])[:length]
    if len(ids) < length:
        raise SystemExit(f"the text has {len(ids)} tokens and --length is {length}; give a longer one")
    if own:
        params = SamplingParams(temperature=0, max_tokens=steps, ignore_eos=True)
        (output,) = llm.generate([ids[: length - steps]], params, policy="dense")
        ids = [*ids[: length - steps], *output.outputs[0].token_ids]
    return ids


def captured(llm: LLM, ids: list[int], steps: int, cache: Path | None) -> Captured:
    """Run ``ids`` densely, the last ``steps`` as decode steps, or read what ``cache`` holds of that run."""
    name = hashlib.sha256(json.dumps([str(llm.model.spec), ids, steps]).encode()).hexdigest()[:24]
    kept = None if cache is None else cache / f"{name}.pt"
    if kept is not None and kept.exists():
        context, count, layers = torch.load(kept)
        return Captured(context, count, [Layer(*parts) for parts in layers])
    rows: dict[int, list[tuple[int, Tensor]]] = defaultdict(list)
    last: dict[int, AttentionCall] = {}
    keys: dict[int, tuple[Tensor, Tensor]] = {}

    def look(call: AttentionCall) -> None:
        window, shape = call.spec.window, call.selection.shape
        if window is not None and window < len(ids):
            return
        rows[call.layer].append((shape.q_start, call.q.float().clone()))
        if shape.k_len == len(ids):
            last[call.layer] = call
            keys[call.layer] = call.kv.keys(0, len(ids)).float().clone(), call.kv.values(0, len(ids)).float().clone()

    message = AddRequest(
        new_request_id(), ids, SamplingParams(temperature=0, max_tokens=1), Policy.parse("dense"), decoded=steps
    )
    with observing(llm.engine, look), llm.loop.asked([message]) as streams:
        (outcome,) = finished(streams)
    if outcome.error is not None:
        raise SystemExit(outcome.error)
    layers = []
    for number in sorted(rows):
        parts = sorted(rows[number], key=lambda one: one[0])
        spec = last[number].spec
        if spec.sinks is not None:
            raise SystemExit("layers with sink logits are not measured here")
        layers.append(Layer(number, torch.cat([q for _, q in parts], 1), *keys[number], spec.scale, spec.softcap))
    found = Captured(len(ids) - steps, llm.model.spec.layers, layers)
    if kept is not None:
        kept.parent.mkdir(parents=True, exist_ok=True)
        torch.save((found.context, found.count, [tuple(vars(layer).values()) for layer in layers]), kept)
    return found


def prompt_chunk(layer: Layer, view: KVView, context: int, rows: int | None = None, **rest: Any) -> Chunk:
    """The last ``rows`` rows (all by default) of the prompt of ``context`` tokens."""
    first = 0 if rows is None else max(0, context - max(1, rows))
    q, kv = layer.q[:, first:context], view.upto(context)
    return Chunk.of(q, kv, layer.scale, softcap=layer.softcap, layer=layer.number, **rest)


def opened(layer: Layer, view: KVView, method: Method, context: int, layers: int) -> Any:
    """The method's state after the prompt."""
    past = method.watch(prompt_chunk(layer, view, context, layers=layers)) if method.watches else None
    return method.begin(prompt_chunk(layer, view, context, method.tail_rows, layers=layers, past=past))


def decoded(captured: Captured, layer: Layer, method: Method) -> Iterator[Step]:
    """The decode steps of one layer under ``method``, which learns from each when the next is asked for."""
    view = KVView.from_tensors(layer.k, layer.v)
    state = opened(layer, view, method, captured.context, captured.count)
    for step, row in enumerate(captured.steps.tolist()):
        seen = view.upto(row + 1)
        query = Query.of(
            layer.q[:, row : row + 1],
            seen,
            layer.scale,
            softcap=layer.softcap,
            layer=layer.number,
            layers=captured.count,
            step=step,
        )
        selection = method.select_decode(query, state)
        ran = run(
            Call(query.q, seen, selection, layer.scale, layer.softcap, threads=1, want_weights=method.wants_weights)
        )
        yield Step(row, query, ran, state)
        method.observe(query, ran.used, ran.weights, state)
