"""Micro metrics: what a method kept of the true attention, per layer, head and phase, on a seeded sample of rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from saccade.engine.observing import observing
from saccade.engine.watch.observe import AttentionCall
from saccade.engine.watch.truth import selected_rows, true_rows
from saccade.errors import SaccadeError
from saccade.eval.capture import token_ids, watch
from saccade.eval.predict import Setting, answer
from saccade.eval.render import render
from saccade.eval.samples import Sample
from saccade.llm import LLM, Prompt
from saccade.methods.base import Chunk
from saccade.methods.flexprefill import FlexPrefill
from saccade.methods.loopserve import LoopServe
from saccade.methods.policy import Policy, PolicyLike

GAMMAS = (0.5, 0.8, 0.9, 0.95, 0.99)
ALPHAS = (0.9, 0.955, 0.99, 0.995, 0.999)


class Measures(NamedTuple):
    """Per query head and row, fp32 [heads, r] on the CPU.

    ``mass``: share of the dense softmax weight that lies on the keys read (sink logits carry none). ``error``: L2
    distance between sparse and dense output, relative to the dense one, for the same q, k and v. ``overlap``: share of
    the keys read that are among the equally many heaviest ones (ties: lower position). ``density``: keys read over
    those dense attention reads.
    """

    mass: Tensor
    error: Tensor
    overlap: Tensor
    density: Tensor


def measure(call: AttentionCall, rows: Tensor | None = None) -> Measures:
    """The metrics of the call's ``rows`` (int64, sorted, numbers within the call; all by default)."""
    shape, device = call.selection.shape, call.q.device
    chosen = torch.arange(shape.q_len, device=device) if rows is None else rows.to(device)
    out = torch.empty(4, shape.heads, chosen.numel(), device=device)
    for true in true_rows(call, chosen):
        read = selected_rows(call.selection, true.heads, true.rows)
        at = torch.searchsorted(chosen, true.rows)
        dense = true.weights()
        dense_out = dense @ true.values
        difference = true.weights(read) @ true.values - dense_out
        visible = ~torch.isneginf(true.scores)
        count = (read & visible).sum(-1)
        heaviest = read.gather(-1, torch.sort(true.scores, dim=-1, descending=True, stable=True).indices)
        hits = (heaviest & (torch.arange(shape.k_len, device=device) < count[..., None])).sum(-1)
        out[0, true.heads, at] = (dense * read).sum(-1) / dense.sum(-1)
        out[1, true.heads, at] = difference.norm(dim=-1) / dense_out.norm(dim=-1).clamp(min=1e-20)
        out[2, true.heads, at] = hits / count.clamp(min=1)
        out[3, true.heads, at] = count / visible.sum(-1)
    return Measures(*out.cpu())


class Meter:
    """An observer that measures the rows at ``positions`` (int64, absolute) of every prefill that it sees, and those of
    the first ``steps`` decode steps of every request. Rows that a preempted run computes again count once."""

    def __init__(self, positions: Tensor, steps: int = 0) -> None:
        self.positions = torch.unique(positions)
        self.steps = steps
        self._seen: dict[tuple[str, int, int], set[int]] = {}  # (phase, layer, request) -> first rows
        self._taken: dict[tuple[str, int], list[Measures]] = {}  # by (phase, layer)

    def __call__(self, call: AttentionCall) -> None:
        shape = call.selection.shape
        seen = self._seen.setdefault((call.phase, call.layer, call.request), set())
        if shape.q_start in seen or (call.phase == "decode" and len(seen) >= self.steps):
            return
        seen.add(shape.q_start)
        inside = (self.positions >= shape.q_start) & (self.positions < shape.q_start + shape.q_len)
        rows = self.positions[inside] - shape.q_start if call.phase == "prefill" else None
        if rows is None or rows.numel():
            self._taken.setdefault((call.phase, call.layer), []).append(measure(call, rows))

    def values(self, phase: str) -> dict[int, Measures]:
        """What one phase measured: layer -> metrics [heads, rows]."""
        found = {}
        for (name, layer), taken in sorted(self._taken.items()):
            if name == phase:
                found[layer] = Measures(*(torch.cat(parts, 1) for parts in zip(*taken)))
        return found

    def records(self, **tags: Any) -> list[dict[str, Any]]:
        """One plain record per phase, layer and head, ``tags`` first: mean and bad 5th percentile of each metric."""
        return [
            {
                **tags,
                "phase": phase,
                "layer": layer,
                "head": head,
                "rows": values.mass.shape[1],
                **_summary(values, head),
            }
            for phase in ("prefill", "decode")
            for layer, values in self.values(phase).items()
            for head in range(values.mass.shape[0])
        ]


def micro_records(
    llm: LLM,
    prompt: Prompt,
    policy: PolicyLike = None,
    *,
    max_tokens: int = 17,
    rows: int = 64,
    seed: int = 0,
    ignore_eos: bool = False,
    **tags: Any,
) -> list[dict[str, Any]]:
    """Run a prompt under a policy and measure ``rows`` of its prefill rows, drawn uniformly from ``seed``, and the
    first ``rows`` of its ``max_tokens - 1`` decode steps: one record per phase, layer and head (see
    ``Meter.records``), ``tags`` and the policy's text first. Raises SaccadeError for ``rows < 1``, and as ``watch``."""
    return _metered(llm, prompt, policy, max_tokens, rows, seed, ignore_eos).records(
        **tags, policy=_policy(llm, policy).text
    )


def micro_samples(
    llm: LLM, samples: Iterable[Sample], setting: Setting, *, rows: int = 64, seed: int = 0
) -> Iterator[dict[str, Any]]:
    """Records of evaluation samples, each answered as ``predict`` would (all turns, the setting's policy and protocol).
    Prefill rows are drawn from the length of the first turn's prompt; of every request ``rows`` decode steps count."""
    for sample in samples:
        length = len(render(llm.tokenizer, [], sample.turns[0]).ids)
        meter = Meter(sample_positions(length, rows, seed), rows)
        with observing(llm.engine, meter):
            record, _ = answer(llm, sample, setting)
        tags = {name: record[name] for name in ("id", "task", "length", "protocol")}
        yield from meter.records(**tags, policy=setting.policy.text)


def micro_table(records: Sequence[dict[str, Any]], by: Sequence[str] = ("policy", "phase")) -> list[dict[str, Any]]:
    """Records averaged over whatever ``by`` does not name (heads weigh alike); the lowest head's mass beside it."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for record in records:
        groups.setdefault(tuple(record[name] for name in by), []).append(record)
    table = []
    for key, members in groups.items():
        means = {name: sum(one[name] for one in members) / len(members) for name in _summary_names()}
        worst = min(one["mass"] for one in members)
        table.append({**dict(zip(by, key)), "heads": len(members), **means, "mass_lowest_head": worst})
    return table


def promised_against_measured(
    llm: LLM,
    prompts: Sequence[Prompt],
    *,
    gammas: Sequence[float] = GAMMAS,
    alphas: Sequence[float] = ALPHAS,
    rows: int = 64,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """What FlexPrefill (``gamma``, without a minimum budget) and LoopServe (``alpha``) promise to keep, beside the mass
    they did keep.

    ``own_rows``: mean mass of the rows that the method looked at when it chose, over all layers, heads and prompts, and
    ``heads_short``, the share of heads whose own rows kept less than promised (query-aware heads of FlexPrefill promise
    pooled weights instead). ``measured``, ``measured_p5`` and ``rows_below_promise``: mean, 5th percentile and share
    below the promise over ``rows`` prefill rows drawn uniformly; ``density``: of those rows. Raises SaccadeError
    without prompts."""
    if not prompts:
        raise SaccadeError("no prompts: give at least one to measure on")
    offers: list[tuple[float, FlexPrefill | LoopServe]] = []
    offers += [(gamma, FlexPrefill(gamma=gamma, min_budget=0)) for gamma in gammas]
    offers += [(alpha, LoopServe(alpha=alpha)) for alpha in alphas]
    table = []
    for promised, method in offers:
        own: list[Tensor] = []
        found: list[Measures] = []
        for prompt in prompts:
            ids = token_ids(llm, prompt)
            meter = _Promise(sample_positions(len(ids), rows, seed), method)
            watch(llm, ids, meter, Policy(prefill=method))
            found += meter.values("prefill").values()
            own += meter.own.values()
        heads = torch.cat(own)
        mass = torch.cat([values.mass.flatten() for values in found])
        density = torch.cat([values.density.flatten() for values in found])
        table.append(
            {
                "method": method.name,
                "promised": promised,
                "own_rows": float(heads.mean()),
                "heads_short": float((heads < promised - 1e-4).float().mean()),
                "measured": float(mass.mean()),
                "measured_p5": float(mass.quantile(0.05)),
                "rows_below_promise": float((mass < promised).float().mean()),
                "density": float(density.mean()),
            }
        )
    return table


class _Promise(Meter):
    """A meter that also keeps ``own``, fp32 [heads] by layer and first row: the mean mass of the prefill rows that
    ``method`` looked at when it chose for that chunk. A chunk that ran dense counts with what it kept, all."""

    def __init__(self, positions: Tensor, method: FlexPrefill | LoopServe) -> None:
        super().__init__(positions)
        self.method = method
        self.own: dict[tuple[int, int], Tensor] = {}

    def __call__(self, call: AttentionCall) -> None:
        super().__call__(call)
        place = call.layer, call.selection.shape.q_start
        if call.phase == "prefill" and place not in self.own:
            chunk = Chunk(call.q, call.kv, call.selection.shape, call.spec.scale, layer=call.layer)
            self.own[place] = measure(call, self.method.sample(chunk)).mass.mean(1)


def text_table(rows: Sequence[dict[str, Any]]) -> str:
    """Records of equal keys as a Markdown table; numbers get four digits."""
    if not rows:
        return ""
    names = list(rows[0])
    cells = [[f"{row[n]:.4f}" if isinstance(row[n], float) else str(row[n]) for n in names] for row in rows]
    lines = [names, ["---"] * len(names), *cells]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def sample_positions(length: int, rows: int, seed: int, first: int = 0) -> Tensor:
    """``rows`` of the positions ``first .. length - 1`` (all if they are no more), sorted, int64, drawn uniformly."""
    if rows < 1:
        raise SaccadeError(f"rows={rows} must be at least 1")
    if length - first <= rows:
        return torch.arange(first, max(first, length))
    drawn = np.random.default_rng([seed, first, length]).choice(length - first, rows, replace=False)
    return torch.from_numpy(np.sort(drawn)) + first


def _metered(
    llm: LLM, prompt: Prompt, policy: PolicyLike, max_tokens: int, rows: int, seed: int, ignore_eos: bool
) -> Meter:
    ids = token_ids(llm, prompt)
    meter = Meter(sample_positions(len(ids), rows, seed), rows)
    watch(llm, ids, meter, policy, max_tokens=max_tokens, ignore_eos=ignore_eos)
    return meter


def _policy(llm: LLM, policy: PolicyLike) -> Policy:
    return llm.policy if policy is None else Policy.parse(policy)


def _summary(values: Measures, head: int) -> dict[str, float]:
    mass, error, overlap, density = (part[head] for part in values)
    numbers = (
        mass.mean(),
        mass.quantile(0.05),
        error.mean(),
        error.quantile(0.95),
        overlap.mean(),
        overlap.quantile(0.05),
        density.mean(),
    )
    return {name: round(float(number), 6) for name, number in zip(_summary_names(), numbers)}


def _summary_names() -> tuple[str, ...]:
    return ("mass", "mass_p5", "error", "error_p95", "overlap", "overlap_p5", "density")
