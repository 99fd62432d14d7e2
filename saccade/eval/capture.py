"""Watching a run, and keeping its calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from saccade.engine.observing import observing
from saccade.engine.sampling.params import SamplingParams
from saccade.engine.watch.observe import AttentionCall, Observer
from saccade.errors import RequestError, SaccadeError
from saccade.kv.view import KVView
from saccade.llm import LLM, Prompt
from saccade.methods.policy import PolicyLike
from saccade.outputs import RequestOutput, request_output, warn_of_failures


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
