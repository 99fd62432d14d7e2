"""Lists of the best blocks of many rows: which of three ways to take, and the one for wide lists of many heads, whose
parts are searched apart before what they leave is searched together.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from saccade.ops.layout import flat
from saccade.ops.triton.batch import KeyLists, Pages
from saccade.ops.triton.batched_decode import choose_best, room_for
from saccade.ops.triton.batched_rank import blocks_at, choose_ranked, put_forced
from saccade.ops.triton.common import begin, launched, pad
from saccade.ops.triton.radix_select import best_of
from saccade.selection.readings import Choice

CHUNK = 2048  # blocks that a program searches at first
WIDE = 8192  # blocks, from which on one program a list takes longer than two launches
MOST_RANKED = 1 << 17  # blocks of all lists that are ranked
FEW_LISTS = 16  # of which one program each leaves most of the device idle


def choose_blocks(scores: Tensor, pages: Pages, choice: Choice, take: Tensor, dense_upto: Tensor) -> KeyLists:
    """The lists of batched_decode.choose_best, in some order, the way that is fastest at this size (tried on an H100
    with 8 to 256 lists of 1,024 to 32,768 blocks; benchmarks/gpu/choices.py)."""
    rows, units, blocks = scores.shape
    return way_of(rows, units, blocks, choice.take or 0)(scores, pages, choice, take, dense_upto)


def way_of(rows: int, units: int, blocks: int, take: int) -> Callable[..., KeyLists]:
    """To rank blocks pays where few lists take few of them; to search parts where lists are long."""
    lists = rows * units
    few = lists <= FEW_LISTS
    if take <= 64 and blocks <= 2 * WIDE and (few or lists * blocks <= MOST_RANKED):
        return choose_ranked
    if take <= 128 and few and 2048 < blocks <= 9 * 1024:
        return choose_ranked
    if blocks >= WIDE and triton.cdiv(blocks, CHUNK) * pad(take) <= blocks // 2:
        return choose_in_parts
    return choose_best


def choose_in_parts(
    scores: Tensor, pages: Pages, choice: Choice, take: Tensor, dense_upto: Tensor, chunk: int = CHUNK
) -> KeyLists:
    """The lists of batched_decode.choose_best, in another order: a program finds the best of every ``chunk`` (a power
    of two), and another one the best of those."""
    scores = flat(scores, torch.float32)
    rows, units, blocks = scores.shape
    longest, lists, room = room_for(choice, pages), rows * units, pad(choice.take or 0)
    chunks = triton.cdiv(blocks, chunk)
    left = torch.empty(lists, chunks * room, dtype=torch.float32, device=scores.device)
    their = torch.empty(lists, chunks * room, dtype=torch.int32, device=scores.device)
    counts = torch.empty(lists, dtype=torch.int32, device=scores.device)
    indices = torch.empty(lists, longest, dtype=torch.int32, device=scores.device)
    numbers = pages.lengths, take, dense_upto
    form = {"UNITS": units, "SIZE": choice.size, "FIRST": choice.first, "LAST": choice.last, "ROOM": room}
    _search_chunks[(chunks, units, rows)](
        scores, *numbers, left, their, blocks, CHUNK=chunk, num_warps=4, **form, **launched(scores.device)
    )
    width = pad(chunks * room)
    _search_left[(units, rows)](
        left, their, *numbers, counts, indices, chunks, longest, WIDTH=width, LISTED=pad(longest, 1),
        num_warps=4 if width <= 1024 else 8, **form, **launched(scores.device),
    )  # fmt: skip
    return KeyLists(None, counts, indices, units, choice.size, longest)


@triton.jit(do_not_specialize=["blocks"], do_not_specialize_on_alignment=["lengths", "takes", "denses"])
def _search_chunks(
    scores, lengths, takes, denses, left, their, blocks,
    UNITS: tl.constexpr, SIZE: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr, ROOM: tl.constexpr,
    CHUNK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    begin(EARLY)
    chunk, unit, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    entry = (row * UNITS + unit).to(tl.int64)
    length, _pages, stop = blocks_at(lengths, row, SIZE, LAST, False)
    take = tl.load(takes + row)
    if (length > tl.load(denses + row)) & (take > 0):
        block = chunk * CHUNK + tl.arange(0, CHUNK)
        wanted = (block >= FIRST) & (block < stop) & (block < blocks)
        score = tl.load(scores + entry * blocks + block, mask=wanted, other=float("-inf"))
        taken = best_of(score, take)
        place = (entry * tl.num_programs(0) + chunk) * ROOM
        at = place + tl.cumsum(taken.to(tl.int32), 0) - 1
        tl.store(left + at, score, mask=taken)
        tl.store(their + at, block, mask=taken)
        number = tl.arange(0, ROOM)
        none = tl.full([ROOM], float("-inf"), tl.float32)
        tl.store(left + place + number, none, mask=number >= tl.sum(taken.to(tl.int32), 0))


@triton.jit(do_not_specialize=["chunks", "longest"], do_not_specialize_on_alignment=["lengths", "takes", "denses"])
def _search_left(
    left, their, lengths, takes, denses, counts, indices, chunks, longest,
    UNITS: tl.constexpr, SIZE: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr, ROOM: tl.constexpr,
    WIDTH: tl.constexpr, LISTED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    begin(EARLY)
    unit, row = tl.program_id(0), tl.program_id(1)
    entry = (row * UNITS + unit).to(tl.int64)
    length, pages, stop = blocks_at(lengths, row, SIZE, LAST, False)
    dense_upto, take = tl.load(denses + row), tl.load(takes + row)
    out = indices + entry * longest
    count = put_forced(out, length <= dense_upto, pages, stop, FIRST, LISTED)
    if (length > dense_upto) & (take > 0):
        number = tl.arange(0, WIDTH)
        line = entry * chunks * ROOM + number
        score = tl.load(left + line, mask=number < chunks * ROOM, other=float("-inf"))
        taken = best_of(score, take)
        at = out + count + tl.cumsum(taken.to(tl.int32), 0) - 1
        tl.store(at, tl.load(their + line, mask=taken, other=0), mask=taken)
        count += tl.sum(taken.to(tl.int32), 0)
    tl.store(counts + entry, count)
