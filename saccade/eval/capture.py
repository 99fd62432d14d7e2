"""True attention beside what a method read: watching a run, keeping its calls, and their dense weights in blocks.

Everything here is the layer's own dense attention: causal, within its sliding window, soft-capped and with its sink
logits where it has them, in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from saccade.engine.observe import AttentionCall, Observer, observing
from saccade.engine.params import SamplingParams
from saccade.errors import RequestError, SaccadeError
from saccade.kv.view import KVView
from saccade.llm import LLM, Prompt
from saccade.methods.policy import PolicyLike
from saccade.ops.reference import logits
from saccade.outputs import RequestOutput, request_output, warn_of_failures
from saccade.selection import Selection

BLOCK_ENTRIES = 2**22  # scores of one block of rows: 16 MiB in float32


@dataclass(frozen=True, eq=False)
class TrueRows:
    """Dense attention of some rows of one KV head's group.

    ``heads``: the query heads; ``rows`` int64 [r], numbers within the call; ``scores`` fp32 [group, r, n], -inf where
    the layer may not look; ``values`` fp32 [n, head_dim]; ``sinks`` [group], extra logits that carry no value, or None.
    """

    heads: slice
    rows: Tensor
    scores: Tensor
    values: Tensor
    sinks: Tensor | None

    def weights(self, mask: Tensor | None = None) -> Tensor:
        """Softmax weights fp32 [group, r, n]; with ``mask`` (bool, like scores) those of a run that reads only what it
        allows. A row that may read nothing has weights 0."""
        scores = self.scores if mask is None else self.scores.masked_fill(~mask, -torch.inf)
        total = torch.logsumexp(scores, -1, keepdim=True)
        if self.sinks is not None:
            total = torch.logaddexp(total, self.sinks[:, None, None])
        return torch.exp(scores - torch.where(torch.isneginf(total), 0.0, total))


def true_rows(call: AttentionCall, rows: Tensor | None = None, entries: int = BLOCK_ENTRIES) -> Iterator[TrueRows]:
    """Dense attention of the call's ``rows`` (int64, sorted, numbers within the call; all by default), one KV head at
    a time in blocks of at most ``entries`` scores (at least one row)."""
    shape, spec, device = call.selection.shape, call.spec, call.q.device
    chosen = torch.arange(shape.q_len, device=device) if rows is None else rows.to(device)
    step = max(1, entries // (shape.group * shape.k_len))
    columns = torch.arange(shape.k_len, device=device)
    for kv_head in range(shape.kv_heads):
        heads = slice(kv_head * shape.group, (kv_head + 1) * shape.group)
        keys, values = (part.float() for part in call.kv.take(columns, kv_head))
        sinks = None if spec.sinks is None else spec.sinks[heads].float()
        for part in chosen.split(step):
            scores = logits(call.q[heads, part].float(), keys, spec.scale, spec.softcap)
            distance = (shape.q_start + part)[:, None] - columns
            hidden = distance < 0 if spec.window is None else (distance < 0) | (distance >= spec.window)
            yield TrueRows(heads, part, scores.masked_fill_(hidden, -torch.inf), values, sinks)


def selected_rows(selection: Selection, heads: slice, rows: Tensor) -> Tensor:
    """bool [heads, r, n]: what a selection reads in some rows (int64 [r], sorted, numbers within the call)."""
    per_unit = selection.shape.heads // selection.units
    units = [head // per_unit for head in range(heads.start, heads.stop)]
    masks = {unit: torch.cat([selection.row_mask(unit, a, b) for a, b in _runs(rows)]) for unit in set(units)}
    return torch.stack([masks[unit] for unit in units])


def _runs(rows: Tensor) -> list[tuple[int, int]]:
    """Sorted numbers as half-open runs."""
    listed = rows.tolist()
    starts = [row for i, row in enumerate(listed) if i == 0 or listed[i - 1] != row - 1]
    stops = [row + 1 for i, row in enumerate(listed) if i == len(listed) - 1 or listed[i + 1] != row + 1]
    return list(zip(starts, stops))


def token_ids(llm: LLM, prompt: Prompt) -> list[int]:
    """Text as the model's token ids, special tokens included; ids as they are. RequestError for an empty text."""
    return llm.encode(prompt)


def watch(
    llm: LLM,
    prompt: Prompt,
    observer: Observer,
    policy: PolicyLike = None,
    *,
    max_tokens: int = 1,
    ignore_eos: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> RequestOutput:
    """Run a prompt greedily while ``observer`` sees every attention call. One token of output needs no decode step, so
    ``max_tokens`` means at most ``max_tokens - 1`` of them. ``progress`` is told how many tokens of how many are
    computed. Raises RequestError if the run fails."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=ignore_eos)
    outcome, made = None, 0
    with observing(llm.engine, observer):
        for step in llm.stream(prompt, params, policy=policy):
            outcome, made = step.outcome, made + len(step.new_tokens)
            if progress is not None:
                whole = step.prefill_total + max_tokens
                progress(whole if step.finished else step.prefilled + made, whole)
    assert outcome is not None, "a stream ends with an outcome"
    warn_of_failures([outcome])
    output = request_output(prompt if isinstance(prompt, str) else None, [outcome])
    if output.error is not None:
        raise RequestError(f"the run to be watched failed: {output.error}")
    return output


@dataclass(frozen=True, eq=False)
class Capture:
    """A run's attention calls, in order, with their own copies of queries and keys on the CPU, and what the run
    answered."""

    calls: list[AttentionCall]
    output: RequestOutput

    def of(self, layer: int | None = None, phase: str | None = None) -> list[AttentionCall]:
        """The calls of one layer, of one phase, or both."""
        return [c for c in self.calls if layer in (None, c.layer) and phase in (None, c.phase)]


def capture(
    llm: LLM,
    prompt: Prompt,
    policy: PolicyLike = None,
    *,
    max_tokens: int = 1,
    ignore_eos: bool = False,
    layers: Sequence[int] | None = None,
) -> Capture:
    """Run a prompt and keep every attention call of ``layers`` (all by default).

    Memory: queries and outputs of every row, and keys and values once a layer, in the model's dtype. Measures that can
    be taken call by call should ``watch`` instead. Raises as ``watch``, and SaccadeError for layers the model lacks.
    """
    keep = set(check_layers(layers, llm.model.spec.layers))
    calls: dict[tuple[int, int], AttentionCall] = {}  # by layer and first row: a preempted run shows rows twice
    stored: dict[int, list[tuple[Tensor, Tensor]]] = {layer: [] for layer in keep}
    lengths = dict.fromkeys(keep, 0)
    cpu = torch.device("cpu")

    def observe(call: AttentionCall) -> None:
        start, layer, length = call.selection.shape.q_start, call.layer, call.kv.length
        if layer not in keep or (layer, start) in calls:
            return
        q, out = (part.to(cpu, copy=True) for part in (call.q, call.out))
        calls[layer, start] = replace(call, q=q, out=out, selection=call.selection.to(cpu))
        if length > lengths[layer]:  # frozen rows store keys without a call of their own
            stored[layer].append((call.kv.keys(lengths[layer]).to(cpu), call.kv.values(lengths[layer]).to(cpu)))
            lengths[layer] = length

    output = watch(llm, prompt, observe, policy, max_tokens=max_tokens, ignore_eos=ignore_eos)
    views = {}
    for layer, parts in stored.items():
        keys, values = (torch.cat(side, 1) for side in zip(*parts))
        views[layer] = KVView.from_tensors(keys, values)
    kept = [replace(call, kv=views[call.layer].upto(call.kv.length)) for call in calls.values()]
    return Capture(kept, output)


def check_layers(layers: Sequence[int] | None, count: int) -> list[int]:
    """Sorted layer numbers, all of ``count`` by default. Raises SaccadeError for one the model does not have."""
    chosen = sorted(set(range(count) if layers is None else layers))
    for layer in chosen:
        if not 0 <= layer < count:
            raise SaccadeError(f"layer {layer} does not exist; the model has layers 0 to {count - 1}")
    if not chosen:
        raise SaccadeError(f"no layer was chosen; the model has layers 0 to {count - 1}")
    return chosen
