"""From weights to lists of blocks and lines on the device: cumulative selection, budgets, compaction; no number goes
to the host."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from saccade.ops.layout import flat
from saccade.ops.triton.common import also, pad
from saccade.selection import Blocks, Lines, Shape

CHUNK = 8192  # entries one program sums in one pass
ONE_PASS = 1 << 16  # entries up to which one program does all passes over a row: launches would cost more


def mass_threshold(mass: Tensor, share: float, active: Tensor) -> Tensor:
    """The greatest t whose entries >= t hold ``share`` of each row of ``mass`` (fp32 [rows, m], not negative): fp32
    [rows]. Rows that are not ``active`` (bool [rows]) are skipped and get 0.

    Four bits of t a pass, over the order-preserving bit patterns of the floats; equal entries stand or fall together.
    """
    rows, m = mass.shape
    mass, active = flat(mass, torch.float32), flat(active, torch.bool)
    share = max(share, 1e-9)  # the heaviest of all is wanted even by a share of 0
    if m <= ONE_PASS:
        found = torch.empty(rows, dtype=torch.float32, device=mass.device)
        _threshold[(rows,)](mass, active, found, m, share, SPAN=min(512, pad(m)), num_warps=8)
        return found
    chunks = -(-m // CHUNK)
    parts = torch.empty(rows, chunks, 16, dtype=torch.float32, device=mass.device)
    bits = torch.zeros(rows, dtype=torch.int32, device=mass.device)
    target = torch.zeros(rows, dtype=torch.float32, device=mass.device)
    for shift in range(28, -4, -4):
        _mass_above[(rows, chunks)](mass, active, bits, parts, m, chunks, shift, SPAN=min(1024, pad(m)), CHUNK=CHUNK)
        _next_bits[(rows,)](active, bits, target, parts, chunks, share, shift, CHUNKS=pad(chunks, 1))
    return bits.view(torch.float32)


def choose_blocks(
    shape: Shape,
    block_size: int,
    vertical: Tensor | None,
    diagonal: Tensor | None,
    pooled: Tensor,
    by_pooled: Tensor,
    threshold: Tensor,
    gamma: float,
    least: int,
    most: int | None,
) -> Blocks:
    """Block lists of every query head and query block, never read back to the host.

    A head reads key block c of query block r if ``min(vertical[c], diagonal[r - c]) < gamma`` (fp32 [heads, k_blocks]:
    the gamma from which on the line is wanted), or, where ``by_pooled`` (bool [heads]), if ``pooled`` (fp32 [heads,
    q_blocks, k_blocks]) is at least ``threshold``: fp32 [heads], or [heads, q_blocks] for one a query block. Every
    query block keeps its first and its diagonal block, at least ``least`` blocks and at most ``most``, in the order in
    which a growing gamma would add them (ties to the lower block). Without ``vertical`` and ``diagonal`` the lists of
    heads that do not go by ``pooled`` are empty.
    """
    heads, q_blocks, k_blocks = pooled.shape
    by_line = vertical is not None
    pooled, threshold = flat(pooled, torch.float32), flat(threshold, torch.float32)
    by_pooled = flat(by_pooled, torch.bool)
    vertical, diagonal = (pooled if part is None else flat(part, torch.float32) for part in (vertical, diagonal))
    taken = torch.empty(heads, q_blocks, k_blocks, dtype=torch.int8, device=pooled.device)
    per_row = threshold.dim() == 2
    _choose[(q_blocks, heads)](
        vertical,
        diagonal,
        pooled,
        by_pooled,
        threshold,
        taken,
        shape.q_start // block_size,
        q_blocks,
        k_blocks,
        max(gamma, 1e-9),
        least,
        k_blocks if most is None else most,
        PER_ROW=per_row,
        BY_LINE=by_line,
        WIDTH=pad(k_blocks),
        num_warps=4 if k_blocks <= 2048 else 8,
    )
    return compact(shape, block_size, taken)


def compact(shape: Shape, block_size: int, taken: Tensor) -> Blocks:
    """Block lists from ``taken`` [units, q_blocks, k_blocks] (int8 or bool, causal). ``indices`` keeps room for every
    block, since only the device knows how many there are."""
    return Blocks(shape, block_size, *lists_of(taken.flatten(0, 1)))


def compact_lines(shape: Shape, columns: Tensor, distances: Tensor) -> Lines:
    """Lines from bool [units, k_len] each, with room like :func:`compact`'s."""
    return Lines(shape, *lists_of(columns), *lists_of(distances))


def lists_of(taken: Tensor) -> tuple[Tensor, Tensor]:
    """(offsets int64 [rows + 1], indices int32) of what is taken, int8 or bool [rows, m] of 0 and 1."""
    rows, m = taken.shape
    taken = taken.contiguous() if taken.dtype in (torch.bool, torch.int8) else flat(taken != 0, torch.bool)
    offsets = torch.zeros(rows + 1, dtype=torch.int64, device=taken.device)
    torch.cumsum(taken.sum(-1, dtype=torch.int64), 0, out=offsets[1:])
    indices = torch.empty(taken.numel(), dtype=torch.int32, device=taken.device)
    _compact[(rows,)](taken.view(torch.int8), offsets, indices, m, WIDTH=min(1024 if m <= 4096 else 4096, pad(m)))
    return offsets, indices


def kept_lines(mass: Tensor, gamma: float, forced: int, least: int, most: int | None) -> tuple[Tensor, Tensor]:
    """FlexPrefill's Alg. 3 by token (``methods.flexprefill.modes.token_lines``) from ``mass`` fp32 [2, heads, n], the
    weight by column and by distance: two bool [heads, n].

    Everything is decided in order of falling weight; only the ``max(least, most)`` heaviest lines of a kind can be
    among so many of both.
    """
    n = mass.shape[2]
    values, order = torch.sort(mass, dim=2, descending=True, stable=True)
    upto = values.cumsum(2, dtype=torch.float64)
    total = upto[..., -1:]
    before = torch.where(torch.isfinite(total) & (total > 0), (upto - values) / total, 0.0)
    always = order < forced
    keep = before < max(gamma, 1e-9)  # the heaviest of all is wanted even by gamma=0
    limits = [limit for limit in (most, least) if limit is not None]
    bound = {limit: _among_least(before, always, limit, 2 * min(forced, n)) for limit in limits if 0 < limit < 2 * n}
    if most is not None:
        keep = keep & bound.get(most, keep)
    keep = keep | always
    if least > 0:
        keep = keep | bound.get(least, torch.ones_like(keep))
    marks = torch.empty_like(keep).scatter_(2, order, keep)
    return marks[0], marks[1]


def _among_least(before: Tensor, always: Tensor, count: int, forced: int) -> Tensor:
    """bool like ``before`` fp64 [2, heads, n]: what is among the ``count`` least of both kinds together, of which the
    ``forced`` entries of ``always`` come first."""
    width = min(count, before.shape[2])
    found = torch.zeros_like(always)
    count -= forced
    if count <= 0:
        return found
    heads = before.shape[1]
    head = before[..., :width].masked_fill(always[..., :width], torch.inf)
    both = head.transpose(0, 1).reshape(heads, -1)
    count = min(count, both.shape[1])
    least = torch.topk(both, count, dim=1, largest=False, sorted=False).values.amax(1, keepdim=True)
    below, equal = both < least, both == least
    taken = below | (equal & (equal.cumsum(1) <= count - below.sum(1, keepdim=True)))
    found[..., :width] = taken.view(heads, 2, -1).transpose(0, 1)
    return found


@triton.jit(do_not_specialize=["m"])
def _threshold(mass, active, found, m, share, SPAN: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    bits = tl.zeros([], tl.int32)
    if tl.load(active + row):
        wanted = 0.0
        for turn in tl.range(0, 8):
            shift = 28 - 4 * turn
            above = tl.zeros([16], tl.float32)
            for start in tl.range(0, m, SPAN):
                at = start + tl.arange(0, SPAN)
                above += _above(mass + row * m, at, m, bits, shift)
            if turn == 0:  # the first candidate of the first pass is 0: all entries lie above it
                wanted = share * tl.max(above, 0)
            digit = tl.maximum(tl.sum((above >= wanted).to(tl.int32), 0) - 1, 0)
            bits += digit << shift
    tl.store(found + row, bits.to(tl.float32, bitcast=True))


@triton.jit
def _above(mass, at, m, known, shift):
    """Weight of entries ``at`` that lie above each of the candidates known + digit << shift."""
    value = tl.load(mass + at, mask=at < m, other=0.0)
    pattern = value.to(tl.int32, bitcast=True)
    # The digit says how many of the candidates this entry reaches.
    digit = tl.where(pattern < known, -1, tl.minimum((pattern - known) >> shift, 15))
    return tl.sum(tl.where(digit[:, None] >= tl.arange(0, 16)[None, :], value[:, None], 0.0), 0)


@triton.jit(do_not_specialize=["m", "chunks", "shift"])
def _mass_above(mass, active, bits, parts, m, chunks, shift, SPAN: tl.constexpr, CHUNK: tl.constexpr):
    row, chunk = tl.program_id(0), tl.program_id(1)
    if tl.load(active + row):
        known = tl.load(bits + row)
        step = tl.arange(0, 16)
        above = tl.zeros([16], tl.float32)
        for start in tl.range(chunk * CHUNK, tl.minimum((chunk + 1) * CHUNK, m), SPAN):
            at = start + tl.arange(0, SPAN)
            above += _above(mass + row.to(tl.int64) * m, at, m, known, shift)
        tl.store(parts + (row * chunks + chunk) * 16 + step, above)


@triton.jit(do_not_specialize=["chunks", "shift"])
def _next_bits(active, bits, target, parts, chunks, share, shift, CHUNKS: tl.constexpr):
    row = tl.program_id(0)
    if tl.load(active + row):
        chunk, step = tl.arange(0, CHUNKS), tl.arange(0, 16)
        above = tl.load(
            parts + (row * chunks + chunk)[:, None] * 16 + step[None, :], mask=(chunk < chunks)[:, None], other=0.0
        )
        above = tl.sum(above, 0)
        if shift == 28:  # the first candidate of the first pass is 0: all entries lie above it
            tl.store(target + row, share * tl.max(above, 0))
        wanted = tl.where(shift == 28, share * tl.max(above, 0), tl.load(target + row))
        digit = tl.maximum(tl.sum((above >= wanted).to(tl.int32), 0) - 1, 0)
        tl.store(bits + row, tl.load(bits + row) + (digit << shift))


@triton.jit
def _first_n(order, count, n):
    """Whether each entry of ``order`` (distinct int64, below 2**47) is among the ``n`` least; all are if n >= count."""
    low = tl.full([], 0, tl.int64)
    high = tl.full([], 1 << 47, tl.int64)
    for _ in tl.range(0, 47):  # the least bound with n entries at or below it
        middle = (low + high) >> 1
        enough = tl.sum((order <= middle).to(tl.int32), 0) >= n
        high = tl.where(enough, middle, high)
        low = tl.where(enough, low, middle + 1)
    return (order <= high) & (n > 0)


@triton.jit(do_not_specialize=["first", "q_blocks", "k_blocks", "least", "most"])
def _choose(
    vertical, diagonal, pooled, by_pooled, threshold, taken, first, q_blocks, k_blocks, gamma, least, most,
    PER_ROW: tl.constexpr, BY_LINE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    q_block, head = tl.program_id(0), tl.program_id(1)
    block = tl.arange(0, WIDTH)
    distance = first + q_block - block
    causal = distance >= 0
    inside = block < k_blocks
    row = head.to(tl.int64) * q_blocks + q_block
    aware = tl.load(by_pooled + head) != 0
    if aware:
        share = tl.load(pooled + row * k_blocks + block, mask=inside, other=0.0)
        bound = tl.load(threshold + row) if PER_ROW else tl.load(threshold + head)
        wanted = share >= bound
        rank = (1 << 30) - share.to(tl.int32, bitcast=True)  # the bits of floats from 0 on order as they do
    elif BY_LINE:
        line = tl.minimum(
            tl.load(vertical + head * k_blocks + block, mask=inside, other=1.0),
            tl.load(diagonal + head * k_blocks + tl.maximum(distance, 0), mask=inside, other=1.0),
        )
        wanted = line < gamma
        rank = line.to(tl.int32, bitcast=True)
    else:
        wanted = block < 0
        rank = block
    forced = (block == 0) | (distance == 0)
    if not BY_LINE:
        forced = also(forced, aware)
        least = tl.where(aware, least, 0)
    # One integer orders blocks: forced ones, then by rank, then by number.
    order = tl.where(forced, 0, rank.to(tl.int64) + 1)
    order = tl.where(causal & inside, order * 32768 + block, 1 << 47)
    chosen = forced | wanted
    visible = tl.minimum(first + q_block + 1, k_blocks)
    if tl.sum((chosen & causal & inside).to(tl.int32), 0) > most:
        chosen = forced | (wanted & _first_n(order, visible, most))
    if tl.sum((chosen & causal & inside).to(tl.int32), 0) < least:
        chosen = chosen | _first_n(order, visible, tl.minimum(least, visible))
    tl.store(taken + row * k_blocks + block, (chosen & causal).to(tl.int8), mask=inside)


@triton.jit(do_not_specialize=["k_blocks"])
def _compact(taken, offsets, indices, k_blocks, WIDTH: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.load(offsets + row)
    for start in tl.range(0, k_blocks, WIDTH):
        block = start + tl.arange(0, WIDTH)
        here = tl.load(taken + row * k_blocks + block, mask=block < k_blocks, other=0).to(tl.int32)
        tl.store(indices + at + tl.cumsum(here, 0) - 1, block, mask=here > 0)
        at += tl.sum(here, 0)
