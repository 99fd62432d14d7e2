"""Partial results of decode merged by log-sum-exp (FlashDecoding, Dao et al., 2023)."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from saccade.ops.triton.common import begin, launched, pad

WIDE = 32  # channels of a head that one program merges: it waits for reads, so many small ones end sooner
CLEARED = 256  # words that a program sets to zero in one go


def merge(
    part_out: Tensor,
    part_lse: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    programs: int,
    stops: Tensor | None = None,
    words: Tensor | None = None,
    planes: int = 1,
    rows: int = 1,
) -> None:
    """Merge states of ``programs`` that took turns, ``part_out`` float32 [..., turns, per, head_dim] with base-2
    ``part_lse`` [..., turns, per], into the first channels of ``out`` [batch, heads, >= head_dim], contiguous, and
    natural ``lse`` [batch, heads]. With ``stops`` int32 [...] only turns before the stop count, of each program its
    last, and ``words`` int64 [..., planes * turns * per] are set to zero."""
    turns, per, head_dim = part_out.shape[-3:]
    width = min(WIDE, pad(head_dim))
    _merge[(lse.numel(), pad(head_dim) // width)](
        part_out,
        part_lse,
        part_lse if stops is None else stops,
        out,
        lse,
        part_lse if words is None else words,
        programs,
        turns,
        out.shape[1] * rows // per,
        turns * planes,
        out.stride(1),
        PER=per,
        ROWS=rows,
        D=head_dim,
        WIDTH=width,
        PARTS=min(32, pad(programs, 1)),
        STOPPED=stops is not None,
        STEP=CLEARED,
        num_warps=1,
        **launched(out.device),
    )


@triton.jit(do_not_specialize=["programs", "turns", "units", "cleared"])
def _merge(
    part_out, part_lse, stops, out, lse, words, programs, turns, units, cleared, out_row, PER: tl.constexpr,
    ROWS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr, STOPPED: tl.constexpr,
    STEP: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0).to(tl.int64)
    listed = head // PER
    first = listed * turns * PER + head % PER
    channel = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    acc = tl.zeros([WIDTH], tl.float32)
    weight = 0.0
    top = float("-inf")
    begin(EARLY)
    stop = programs
    if STOPPED:
        stop = tl.load(stops + listed)
    for start in tl.range(0, tl.minimum(programs, stop), PARTS):
        program = start + tl.arange(0, PARTS)
        turn = program
        if STOPPED:  # each program's last before the stop
            turn += (stop - 1 - program) // programs * programs
        known = (program < programs) & (program < stop)
        place = first + turn * PER
        logs = tl.load(part_lse + place, mask=known, other=float("-inf"))
        rows = tl.load(
            part_out + place[:, None] * D + channel[None, :],
            mask=known[:, None] & (channel[None, :] < D),
            other=0.0,
        )
        higher = tl.maximum(top, tl.max(logs, 0))
        anchor = tl.where(higher == float("-inf"), 0.0, higher)
        shrink = tl.exp2(top - anchor)
        p = tl.exp2(logs - anchor)[:, None]
        acc = acc * shrink + tl.sum(tl.where(p > 0.0, p * rows, 0.0), 0)  # who read nothing wrote no row
        weight = weight * shrink + tl.sum(tl.exp2(logs - anchor), 0)
        top = higher
    total = tl.where(weight == 0.0, 1.0, weight)
    place = head
    if ROWS > 1:
        OWN: tl.constexpr = PER // ROWS
        row = listed // units * ROWS + head % PER // OWN
        place = (row * units + listed % units) * OWN + head % OWN
    tl.store(out + place * out_row + channel, (acc / total).to(out.dtype.element_ty), mask=channel < D)
    natural = tl.where(weight == 0.0, float("-inf"), top + tl.log2(total)) * 0.6931471805599453
    tl.store(lse + place, natural, mask=tl.program_id(1) == 0)
    if STOPPED:
        number = tl.program_id(1) * STEP + tl.arange(0, STEP)
        for start in tl.range(0, cleared, STEP * tl.num_programs(1)):
            word = words + (listed * PER + head % PER) * cleared + start + number
            tl.store(word, tl.zeros([STEP], tl.int64), mask=start + number < cleared)
