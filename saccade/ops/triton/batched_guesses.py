"""What blocks of many rows are guessed to weigh, as ranks and PSA's stopping rule take it: of each unit the largest
share of any of its heads, and in the order of the ranks the guesses and what is left of them."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from saccade.ops.triton.common import LOG2E, begin, launched
from saccade.ops.triton.decode import Pages
from saccade.ops.triton.stop_rule import power
from saccade.selection.readings import Choice


class Guesses(NamedTuple):
    """``blocks`` float32 [rows, heads, m]: base-2 log of what each block of the order of a head's unit is guessed to
    weigh. ``left`` float32 [rows, heads, p]: of what is left of them after each microbatch, before the first to after
    the last."""

    blocks: Tensor
    left: Tensor

    @classmethod
    def of(cls, estimates: Tensor, microbatch: int) -> Guesses:
        """Of natural logs [heads, m] in order, of one row."""
        blocks = estimates.float() * LOG2E
        rest = torch.logcumsumexp(estimates.double().flip(1), 1).flip(1)[:, ::microbatch] * LOG2E
        return cls(blocks[None], torch.nn.functional.pad(rest.float(), (0, 1), value=-torch.inf)[None])


def largest_shares(estimates: Tensor, pages: Pages, choice: Choice, dense_upto: Tensor) -> Tensor:
    """``estimates`` float32 [rows, heads, n], natural logs -> float32 [rows, units, n]: the log of the largest share
    that a head of the unit is guessed to give each block, -inf where a block is not to be ranked, as in all of a row
    of up to ``dense_upto`` keys (int32 [rows])."""
    rows, heads, blocks = estimates.shape
    scores = torch.empty(rows, choice.units, blocks, dtype=torch.float32, device=estimates.device)
    each = heads // choice.units
    members = triton.next_power_of_2(each)
    _share[(choice.units, rows)](
        estimates, pages.lengths, dense_upto, scores, blocks, UNITS=choice.units, EACH=each, MEMBERS=members,
        SIZE=choice.size, FIRST=choice.first, LAST=choice.last, SPAN=max(128, 4096 // members), num_warps=8,
        **launched(estimates.device),
    )  # fmt: skip
    return scores


def ordered_guesses(estimates: Tensor, order: Tensor, counts: Tensor, microbatch: int) -> Guesses:
    """``estimates`` float32 [rows, heads, n] of blocks, natural logs, by ``order`` int32 [rows * units, n], of which
    ``counts`` int32 [2, rows * units] entries count (batched_rank.rank_blocks). What lies beyond means nothing."""
    rows, heads, blocks = estimates.shape
    device, parts = estimates.device, -(-blocks // microbatch) + 1
    ordered = torch.empty(rows, heads, blocks, dtype=torch.float32, device=device)
    left = torch.empty(rows, heads, parts, dtype=torch.float32, device=device)
    units = order.shape[0] // rows
    _in_order[(heads, rows)](
        estimates, order, counts, ordered, left, blocks, order.stride(0), parts, UNITS=units, HEADS=heads,
        MICROBATCH=microbatch, SPAN=1024, num_warps=4, **launched(device),
    )  # fmt: skip
    return Guesses(ordered, left)


@triton.jit(do_not_specialize=["blocks"], do_not_specialize_on_alignment=["lengths", "denses", "estimates", "scores"])
def _share(
    estimates, lengths, denses, scores, blocks,
    UNITS: tl.constexpr, EACH: tl.constexpr, MEMBERS: tl.constexpr, SIZE: tl.constexpr, FIRST: tl.constexpr,
    LAST: tl.constexpr, SPAN: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    begin(EARLY)
    unit, row = tl.program_id(0), tl.program_id(1)
    length = tl.load(lengths + row)
    stop = tl.where(length > tl.load(denses + row), length // SIZE - LAST, 0)
    at, member = tl.arange(0, SPAN), tl.arange(0, MEMBERS)
    real = (member < EACH)[:, None]
    lines = estimates + ((row * UNITS + unit) * EACH + member).to(tl.int64)[:, None] * blocks
    top = tl.full([MEMBERS, SPAN], float("-inf"), tl.float32)
    weight = tl.zeros([MEMBERS, SPAN], tl.float32)
    for start in tl.range(FIRST, stop, SPAN):
        block = start + at
        guess = tl.load(lines + block[None, :], mask=real & (block < stop)[None, :], other=float("-inf"))
        higher = tl.maximum(top, guess)
        anchor = tl.where(higher == float("-inf"), 0.0, higher)
        weight = weight * tl.exp(top - anchor) + tl.exp(guess - anchor)
        top = higher
    peak = tl.max(top, 1)
    peak = tl.where(peak == float("-inf"), 0.0, peak)
    total = tl.sum(weight * tl.exp(top - peak[:, None]), 1)
    log = peak + tl.log(tl.where(total > 0.0, total, 1.0))
    out = scores + (row * UNITS + unit).to(tl.int64) * blocks
    for start in tl.range(0, blocks, SPAN):
        block = start + at
        inside = (block >= FIRST) & (block < stop)
        guess = tl.load(lines + block[None, :], mask=real & inside[None, :], other=float("-inf"))
        tl.store(out + block, tl.max(guess - log[:, None], 0), mask=block < blocks)


@triton.jit(
    do_not_specialize=["blocks", "order_row", "parts"],
    do_not_specialize_on_alignment=["estimates", "order", "counts", "ordered", "left"],
)
def _in_order(
    estimates, order, counts, ordered, left, blocks, order_row, parts,
    UNITS: tl.constexpr, HEADS: tl.constexpr, MICROBATCH: tl.constexpr, SPAN: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    begin(EARLY)
    head, row = tl.program_id(0), tl.program_id(1)
    unit = row * UNITS + head // (HEADS // UNITS)
    ranked = tl.load(counts + UNITS * tl.num_programs(1) + unit)
    line = (row * HEADS + head).to(tl.int64)
    estimates, ordered, left = estimates + line * blocks, ordered + line * blocks, left + line * parts
    order += unit.to(tl.int64) * order_row
    at = tl.arange(0, SPAN)
    tops = tl.full([SPAN], float("-inf"), tl.float32)
    for start in tl.range(0, ranked, SPAN):
        inside = start + at < ranked
        block = tl.load(order + start + at, mask=inside, other=0)
        guess = tl.load(estimates + block, mask=inside, other=float("-inf")) * 1.4426950408889634
        tl.store(ordered + start + at, guess, mask=inside)
        tops = tl.maximum(tops, guess)
    top = tl.max(tops, 0)
    top = tl.where(top == float("-inf"), 0.0, top)
    tl.debug_barrier()  # other threads have written the guesses
    rest = tl.full([], 0.0, tl.float64)  # of what comes behind, over 2**top
    spans = tl.cdiv(ranked, SPAN)
    for turn in tl.range(0, spans):
        place = (spans - 1 - turn) * SPAN + at
        weight = power(tl.load(ordered + place, mask=place < ranked, other=float("-inf")) - top)
        behind = tl.cumsum(weight, 0, reverse=True) + rest
        rest += tl.sum(weight, 0)
        log = top + tl.log2(behind).to(tl.float32)
        tl.store(left + place // MICROBATCH, log, mask=(place < ranked) & (place % MICROBATCH == 0))
    tl.store(left + tl.cdiv(ranked, MICROBATCH), float("-inf"))
