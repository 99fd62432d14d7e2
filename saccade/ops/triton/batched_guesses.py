"""What blocks of many rows are guessed to weigh, as ranks and PSA's stopping rule take it: of each unit the largest
share of any of its heads, and in the order of the ranks the guesses and what is left of them."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from saccade.ops.triton.batch import Pages
from saccade.ops.triton.common import LOG2E, begin, launched
from saccade.ops.triton.stop_rule import power
from saccade.selection.readings import Choice

SPAN = 512  # blocks whose shares a program finds
HELD = 4096  # blocks that a program has in its hands at a time


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


class Estimates(NamedTuple):
    """``blocks`` float32 [rows, heads, n]: natural log of what each block that is ranked is guessed to weigh. ``sums``
    float32 [rows, heads, parts, 2]: of the guesses of each program that made some, the greatest, and the sum of all
    over that (0 where it made none)."""

    blocks: Tensor
    sums: Tensor


def largest_shares(estimates: Estimates, pages: Pages, choice: Choice, dense_upto: Tensor) -> Tensor:
    """float32 [rows, units, n]: the log of the largest share that a head of the unit is guessed to give each block,
    -inf where a block is not to be ranked, as in all of a row of up to ``dense_upto`` keys (int32 [rows])."""
    rows, heads, blocks = estimates.blocks.shape
    scores = torch.empty(rows, choice.units, blocks, dtype=torch.float32, device=estimates.blocks.device)
    each, parts = heads // choice.units, estimates.sums.shape[2]
    _share[(triton.cdiv(blocks, SPAN), choice.units, rows)](
        *estimates, pages.lengths, dense_upto, scores, blocks, parts, UNITS=choice.units, EACH=each,
        PARTS=triton.next_power_of_2(parts), SIZE=choice.size, FIRST=choice.first, LAST=choice.last, SPAN=SPAN,
        num_warps=4, **launched(scores.device),
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
    span = max(256, min(HELD, triton.next_power_of_2(blocks)))
    _in_order[(heads, rows)](
        estimates, order, counts, ordered, left, blocks, order.stride(0), parts, UNITS=units, HEADS=heads,
        MICROBATCH=microbatch, SPAN=span, num_warps=span // 256, **launched(device),
    )  # fmt: skip
    return Guesses(ordered, left)


@triton.jit
def put_sums(sums, parts, part, head, real, top, weight):
    """Write down what the guesses of program ``part`` of ``parts`` come to, of each ``head`` that is ``real``."""
    place = sums + (head * parts + part) * 2
    tl.store(place, top, mask=real)
    tl.store(place + 1, weight, mask=real)


@triton.jit
def add_guesses(top, weight, guess):
    """``top`` and ``weight`` [n], as :class:`Estimates` has them, with those of ``guess`` [n, m], -inf for none."""
    higher = tl.maximum(top, tl.max(guess, 1))
    anchor = tl.where(higher == float("-inf"), 0.0, higher)
    return higher, weight * tl.exp(top - anchor) + tl.sum(tl.exp(guess - anchor[:, None]), 1)


@triton.jit(
    do_not_specialize=["blocks", "parts"],
    do_not_specialize_on_alignment=["lengths", "denses", "estimates", "sums", "scores"],
)
def _share(
    estimates, sums, lengths, denses, scores, blocks, parts,
    UNITS: tl.constexpr, EACH: tl.constexpr, PARTS: tl.constexpr, SIZE: tl.constexpr, FIRST: tl.constexpr,
    LAST: tl.constexpr, SPAN: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    begin(EARLY)
    unit, row = tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths + row)
    stop = tl.where(length > tl.load(denses + row), length // SIZE - LAST, 0)
    block = tl.program_id(0) * SPAN + tl.arange(0, SPAN)
    inside = (block >= FIRST) & (block < stop)
    part = tl.arange(0, PARTS)
    known = (part < parts) & (tl.zeros([PARTS], tl.int32) + stop > tl.program_id(0) * SPAN)
    most = tl.full([SPAN], float("-inf"), tl.float32)
    for member in tl.static_range(EACH):
        head = ((row * UNITS + unit) * EACH + member).to(tl.int64)
        own = sums + (head * parts + part) * 2
        guess = tl.load(estimates + head * blocks + block, mask=inside, other=float("-inf"))
        tops, weights = tl.load(own, mask=known, other=float("-inf")), tl.load(own + 1, mask=known, other=0.0)
        top = tl.max(tops, 0)
        top = tl.where(top == float("-inf"), 0.0, top)
        total = tl.sum(weights * tl.exp(tops - top), 0)
        most = tl.maximum(most, guess - (top + tl.log(tl.where(total > 0.0, total, 1.0))))
    tl.store(scores + (row * UNITS + unit).to(tl.int64) * blocks + block, most, mask=block < blocks)


@triton.jit
def _log2(x):
    """float32 of float64's range: the exponent, and the logarithm of the rest."""
    bits = x.to(tl.int64, bitcast=True)
    rest = ((bits & 4503599627370495) | 4607182418800017408).to(tl.float64, bitcast=True)
    log = ((bits >> 52) - 1023).to(tl.float32) + tl.log2(rest.to(tl.float32))
    return tl.where(x > 0.0, log, tl.where(x == 0.0, float("-inf"), float("nan")))


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
        log = top + _log2(behind)
        tl.store(left + place // MICROBATCH, log, mask=(place < ranked) & (place % MICROBATCH == 0))
    tl.store(left + tl.cdiv(ranked, MICROBATCH), float("-inf"))
