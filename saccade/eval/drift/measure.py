"""One policy's run over a passage: its logits beside dense's, what it read, and what of true attention that kept."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from saccade.engine.core import new_request_id
from saccade.engine.messages import AddRequest
from saccade.engine.observing import observing, observing_logits
from saccade.engine.sampling.params import SamplingParams
from saccade.engine.watch.estimates import departures
from saccade.errors import RequestError
from saccade.eval.drift.kept import KeptWeight
from saccade.eval.micro import sample_positions
from saccade.eval.setting import sparse_in
from saccade.llm import LLM
from saccade.methods.policy import Policy
from saccade.outputs import finished
from saccade.passage import Passage

PREFILL_ROWS = 32  # whose kept weight is measured
ROWS_AT_ONCE = 16  # of logits that are compared in float64
# An estimate of coverage is contradicted where the measured weight lies below it by more than this: on average, in more
# than RARE of the (head, step) pairs, or in a single one.
OFF_MEAN, OFF_STEP, RARE, OFF_ANY = 0.02, 0.05, 0.001, 0.3


def run(llm: LLM, passage: Passage, policy: Policy, *, seed: int = 0, weights: bool = True) -> tuple[Tensor, dict]:
    """Prefill a passage's context and force its other tokens as decode steps, under ``policy``. Returns logits fp32
    [steps, vocab] on the CPU, and plain data on what ran: ``decode`` and ``prefill`` (densities, the share of searches,
    and with ``weights`` the weight kept), ``coverage_estimated``, ``notes``, and ``heads``: of each phase the share
    of their keys that query heads read, by layer. Its ``seconds`` are of a second run where kernels were compiled or
    steps recorded in the first, unless weights are measured. RequestError where the run fails."""
    ids, context = list(passage.ids[:-1]), passage.context
    logits = torch.empty(passage.steps, llm.model.spec.vocab_size)
    seen = torch.zeros(passage.steps, dtype=torch.bool)
    sparse = sparse_in("prefill", policy)
    kept = KeptWeight(sample_positions(context, PREFILL_ROWS, seed) if sparse else torch.empty(0, dtype=torch.int64))

    def take(request: int, position: int, row: Tensor) -> None:
        if row.isnan().any():
            raise RequestError(f"the logits of the token at {position} are not finite")
        logits[position - context] = row.cpu()
        seen[position - context] = True

    def ask() -> dict[str, Any]:
        params = SamplingParams(temperature=0, max_tokens=1)
        message = AddRequest(new_request_id(), ids, params, policy, decoded=passage.steps)
        with llm.loop.asked([message]) as streams:
            (outcome,) = finished(streams)
        if outcome.error is not None:
            raise RequestError(f"'{policy.text}' failed over this text: {outcome.error}")
        return outcome.report

    recorded = llm.loop.statistics().graphs
    with observing_logits(llm.engine, take), observing(llm.engine, kept) if weights else nullcontext():
        report = ask()
    if not bool(seen.all()):
        raise RequestError(f"'{policy.text}' ran {int(seen.sum())} of {passage.steps} forced tokens as decode steps")
    found = _what_ran(report, kept, sparse)
    if not weights and (report["compiled_kernels"] or _records(recorded, llm.loop.statistics().graphs)):
        if report["cached_tokens"] < context:
            llm.reset_prefix_cache()  # what the first run computed, the second is to compute too
        with observing_logits(llm.engine, lambda request, position, row: None):
            again = ask()
        for phase in ("prefill", "decode"):
            if again[phase]["tokens"] == report[phase]["tokens"]:
                found[phase]["seconds"] = again[phase]["seconds"]
    return logits, found


def _records(before: tuple[int, int] | None, after: tuple[int, int] | None) -> bool:
    """Whether steps were recorded in graphs between two counts of these, each with how many there may be: a full store
    stays as it is."""
    return after is not None and (after != before or after[0] == after[1])


def compared(logits: Tensor, dense: Tensor, passage: Passage) -> dict[str, list[float]]:
    """Of logits [steps, vocab] beside dense's, by step: ``kl`` (KL(dense, own) in nats), ``agree`` (1 where the
    likeliest token is the same) and ``nll`` (of the text's own next token, in nats)."""
    targets = torch.tensor(passage.targets)
    kl: list[float] = []
    agree: list[float] = []
    nll: list[float] = []
    for first in range(0, len(logits), ROWS_AT_ONCE):
        own, true = logits[first : first + ROWS_AT_ONCE], dense[first : first + ROWS_AT_ONCE]
        same, off = departures(own, true).unbind(-1)
        kl += [_plain(max(0.0, value)) for value in off.tolist()]
        agree += same.tolist()
        chosen = torch.log_softmax(own.double(), -1).gather(-1, targets[first : first + ROWS_AT_ONCE, None])
        nll += [_plain(-value) for value in chosen[:, 0].tolist()]
    return {"kl": kl, "agree": agree, "nll": nll}


def contradiction(estimated: Mapping[str, float], kept: Any) -> str | None:
    """A sentence where measured weights (``Kept``) contradict what a method estimates to cover; else None."""
    mean, least = kept.as_dict()["mean"], kept.as_dict()["least"]
    low = kept.below(estimated["least"] - OFF_STEP)
    if mean >= estimated["mean"] - OFF_MEAN and low <= RARE and least["weight"] >= estimated["least"] - OFF_ANY:
        return None
    return (
        f"it estimates to cover {estimated['mean']:.3f} of the weight, {estimated['least']:.3f} at least; measured are "
        f"{mean:.3f} on average and {least['weight']:.3f} at least (layer {least['layer']}, head {least['head']}), and "
        f"{100 * low:.2g} % of head-steps lie more than {OFF_STEP:g} below the least that it estimates"
    )


def _what_ran(report: dict[str, Any], kept: KeptWeight, sparse_prefill: bool) -> dict[str, Any]:
    found: dict[str, Any] = {"coverage_estimated": None, "contradiction": None}
    for phase in ("prefill", "decode"):
        counts, measured = report[phase], kept.of(phase)
        causal = counts["keys_causal"]
        dense = phase == "prefill" and not sparse_prefill  # whose rows may have been computed for another policy
        found[phase] = {
            "density": 1.0 if dense else counts["density"],
            "reads": 1.0 if dense else (counts["keys_attended"] + counts["keys_scored"] / 2) / causal,
            "estimated": 0.0 if dense else counts["keys_estimated"] / causal,
            "kept": None if measured is None else measured.as_dict(),
            "search_ratio": counts["search_ratio"],
            "seconds": counts["seconds"],
        }
        if phase == "decode" and counts["coverage_estimated"] is not None:
            found["coverage_estimated"] = said = {
                "mean": counts["coverage_estimated"],
                "least": counts["coverage_estimated_least"],
            }
            found["contradiction"] = None if measured is None else contradiction(said, measured)
    found["notes"] = report["notes"]
    found["heads"] = {phase: report[phase]["density_per_head"] for phase in ("prefill", "decode")}
    return found


def _plain(value: float) -> float:
    return float(f"{value:.9g}")
