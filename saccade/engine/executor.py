"""One packed forward pass: rows of many requests through the layers (their attention: pass_attention.py)."""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from saccade.engine.clock import Clock
from saccade.engine.freezing import frozen_rows
from saccade.engine.observe import Observer
from saccade.engine.pass_attention import PassAttention
from saccade.engine.request import Request, Work
from saccade.engine.sampler import row_logprobs
from saccade.models.calibration import Calibrations
from saccade.models.interface import Runner, ScoredRows, Segment
from saccade.ops import triton

if TYPE_CHECKING:
    from saccade.engine.batched import BatchedDecode


class Executor:
    """Runs steps on a model. ``backend`` and ``threads`` go to ``ops.attend``; ``folder`` is the model's, with its
    calibrations.

    ``exact`` runs the rows of each request by themselves. Matrix products round differently for different numbers of
    rows, so only then is a result the same to the last bit whatever else is in the batch; packed, all rows share
    one pass over the weights.
    """

    def __init__(
        self,
        runner: Runner,
        backend: str = "auto",
        threads: int | None = None,
        exact: bool = False,
        folder: Path | None = None,
        cuda_graphs: bool = True,
    ) -> None:
        self.runner = runner
        self.exact = exact
        self.backend = backend
        self.threads = threads
        self.observer: Observer | None = None  # see engine.observe
        self.clock: Clock | None = None  # see engine.clock
        self.calibrations = Calibrations(runner.spec, folder)
        self.batched = batched_decode(runner, backend, cuda_graphs)

    def run(self, batch: list[Work]) -> dict[int, Tensor | int]:
        """Compute the rows of ``batch``; by request id where a work item ends its sequence, logits fp32 [vocab] on the
        CPU, or the next token where the request takes the likeliest and the device has found it.

        A request whose own attention fails gets ``error`` set and no logits; the others are unaffected.
        """
        logits: dict[int, Tensor | int] = {}
        try:
            for part in [[work] for work in batch] if self.exact else [batch]:
                rest, done = self._run_batched(part)
                logits |= done
                if rest:
                    logits |= self._run_packed(rest)
        except BaseException:  # an interrupt, say: some layers hold the new rows and others do not
            for work in batch:
                work.request.sequence.undo(work)
            raise
        return logits

    def _run_batched(self, batch: list[Work]) -> tuple[list[Work], dict[int, Tensor | int]]:
        """Run the decode rows that one batched step can serve: the others, and the results."""
        batched = self.batched
        if batched is None or self.observer is not None or self.clock is not None:
            return batch, {}
        rest: list[Work] = []
        rows: list[Work] = []
        for work in batch:
            (rows if batched.serves(work) else rest).append(work)
        done: dict[int, Tensor | int] = {}
        for part in batched.parts(rows):
            try:
                done |= batched.run(part)
            except batched.Failed as error:
                for work in part:
                    work.request.report.note(
                        f"decode: the batched step failed and torch served rows one by one: {error}"
                    )
                rest += part
        return rest, done

    def _run_packed(self, batch: list[Work]) -> dict[int, Tensor]:
        token_ids: list[int] = []
        positions: list[Tensor] = []
        segments: list[Segment] = []
        wanted: list[int] = []
        owners: list[Request] = []
        scored: list[tuple[int, Request, int]] = []  # packed row, request, place of the token that it predicts
        for work in batch:
            sequence = work.request.sequence
            # Length-dependent rotary factors follow the whole prefill, as an unchunked run would have it.
            end = work.stop if work.phase == "decode" else _span_stop(work)
            segments.append(Segment(len(token_ids), work.length, end))
            base = len(token_ids) - work.start
            scored += [(base + row, work.request, row + 1) for row in work.request.to_score(work.start, work.stop)]
            token_ids += sequence.tokens[work.start : work.stop]
            positions.append(torch.arange(work.start, work.stop))
            if work.stop == len(sequence.tokens):
                wanted.append(len(token_ids) - 1)
                owners.append(work.request)
        frozen = frozen_rows(batch, self.runner.spec.layers, all_read=self.observer is not None)
        context = PassAttention(batch, segments, self, frozen)
        logits = self.runner.run(
            torch.frombuffer(array("q", token_ids), dtype=torch.int64),  # a tensor of a list looks at every element
            torch.cat(positions),
            context,
            segments=segments,
            logit_rows=torch.tensor(wanted, dtype=torch.long),
            scored=_prompt_scores(scored) if scored else None,
            frozen=frozen,
            ahead=context.ahead_rows(),
        ).cpu()  # sampling draws from generators on the CPU
        for work in batch:
            if work.request.error is None:
                work.request.sequence.advance(work.stop)
        return {owner.id: row for owner, row in zip(owners, logits) if owner.error is None}


def batched_decode(runner: Runner, backend: str, cuda_graphs: bool) -> BatchedDecode | None:
    """Whoever serves batched decode steps; None where the model is on no GPU or the Triton kernels are not to
    run."""
    device = getattr(runner, "device", None)
    if device is None or device.type != "cuda" or backend not in ("auto", "triton") or not triton.available():
        return None
    if runner.spec.head_dim % 16 or runner.spec.head_dim > 256:
        return None  # as for every kernel: see ops.triton.dispatch.supports
    from saccade.engine.batched import BatchedDecode  # needs Triton

    return BatchedDecode(cast(Any, runner), cuda_graphs)


def _prompt_scores(scored: list[tuple[int, Request, int]]) -> ScoredRows:
    def visit(first: int, logits: Tensor) -> None:
        part = scored[first : first + len(logits)]
        count = max(request.params.prompt_logprobs or 0 for _, request, _ in part)
        tokens = [request.sequence.tokens[place] for _, request, place in part]
        for (_, request, place), entries in zip(part, row_logprobs(logits, tokens, count)):
            top = request.params.prompt_logprobs or 0
            chosen = request.sequence.tokens[place]
            request.prompt_scores[place] = {
                token: entry for token, entry in entries.items() if entry[1] <= top or token == chosen
            }

    return ScoredRows(torch.tensor([row for row, _, _ in scored]), visit)


def _span_stop(work: Work) -> int:
    return next(span.stop for span in work.request.sequence.spans if span.start == work.span_start)
