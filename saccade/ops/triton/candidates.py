"""Which candidates a decode step reads, chosen on the device: exact scores, the best of every unit, their lists; and
the weights of what was read. Means what ops/candidates.py and ops/weights.py mean."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from saccade.kv.view import KVView
from saccade.ops.triton.batched_decode import ordered_bits
from saccade.ops.triton.common import LOG2E, also, cap_logits, pad, pool_rows, precision
from saccade.selection import Candidates, Tokens

KEYS = 64  # scored by one program


def choose(
    q: Tensor,
    kv: KVView,
    selection: Candidates,
    *,
    scale: float,
    softcap: float | None = None,
    room: int | None = None,
) -> Tokens:
    """What ``q`` [heads, 1, head_dim] reads: the forced keys and the best candidates of every unit; one list a unit, or
    one a query head where some are idle.

    ``room`` bounds how many keys a list holds; the indices behind the last list then mean nothing. Without it the
    device is asked for their number.
    """
    shape, units, device = selection.shape, selection.units, q.device
    heads, head_dim = shape.heads, q.shape[-1]
    per = heads // units
    first, last = selection.forced
    lost = selection.hidden[1] - selection.hidden[0]
    all_keys = last - first - lost
    width = all_keys if selection.full is not None else min(all_keys, selection.indices.numel())
    counts = selection.offsets.diff()
    if selection.full is not None:
        counts = torch.where(selection.full, all_keys, counts)
    forced = first + shape.k_len - last
    ends = forced if per > 1 else 0  # several heads rank by weights, of which the forced keys have their part
    programs = max(units, shape.kv_heads)
    scores = torch.empty(heads, width + ends, dtype=torch.float32, device=device)
    none = counts
    if width:
        _score[(triton.cdiv(width + ends, KEYS), programs)](
            q,
            kv.k_pool,
            kv.table,
            selection.offsets,
            counts,
            selection.indices,
            none if selection.full is None else selection.full,
            selection.k,
            scores,
            q.stride(0),
            width + ends,
            ends,
            first,
            last,
            selection.hidden[0],
            lost,
            scale * LOG2E,
            softcap or 0.0,
            HEADS=heads,
            KV_HEADS=shape.kv_heads,
            UNITS=units,
            PER=heads // programs,
            PER_PAD=pad(heads // programs),
            D=head_dim,
            D_PAD=pad(head_dim),
            PAGE=kv.block_size,
            KEYS=KEYS,
            FULL=selection.full is not None,
            CAPPED=softcap is not None,
            PRECISION=precision(q.dtype),
            num_warps=4,
        )
    if per > 1:
        top = scores.amax(1, keepdim=True)
        scores = torch.exp2(scores - top)
        scores /= scores.sum(1, keepdim=True)
        if selection.idle is not None:
            scores = scores.masked_fill(selection.idle[:, None], 0.0)
        scores = scores.view(units, per, -1).sum(1)
    sizes = torch.minimum(selection.k.to(counts.dtype), counts) + forced
    lists = units
    if selection.idle is not None:
        lists = heads
        few = min(selection.idle_keys, shape.k_len)
        sizes = torch.where(selection.idle, few, sizes.repeat_interleave(per, output_size=heads))
    offsets = torch.zeros(lists + 1, dtype=torch.int64, device=device)
    torch.cumsum(sizes, 0, out=offsets[1:])
    total = int(offsets[-1]) if room is None else lists * room
    indices = torch.empty(total, dtype=torch.int32, device=device)
    _pick[(lists,)](
        scores,
        counts,
        selection.k,
        selection.offsets,
        selection.indices,
        none if selection.full is None else selection.full,
        none if selection.idle is None else selection.idle,
        offsets,
        indices,
        scores.shape[1],
        first,
        last,
        shape.k_len,
        selection.hidden[0],
        lost,
        PER_LIST=lists // units,
        FULL=selection.full is not None,
        IDLE=selection.idle is not None,
        SPAN=min(2048, pad(width, 64)),
        num_warps=8,
    )
    return Tokens(shape, offsets, indices)


def read_weights(
    q: Tensor, kv: KVView, tokens: Tokens, lse: Tensor, *, scale: float, softcap: float | None = None
) -> Tensor:
    """Softmax weights over what was read, as ``ops.weights.selected_weights`` lays them out: float32 [heads // units,
    indices], 0 where an index means nothing. ``lse`` float32 [heads, 1]."""
    shape = tokens.shape
    heads, units, head_dim = shape.heads, tokens.units, q.shape[-1]
    programs = max(units, shape.kv_heads)
    weights = torch.zeros(heads // units, tokens.indices.numel(), dtype=torch.float32, device=q.device)
    longest = min(tokens.indices.numel(), shape.k_len)
    if longest:
        _weigh[(triton.cdiv(longest, KEYS), programs)](
            q,
            kv.k_pool,
            kv.table,
            tokens.offsets,
            tokens.indices,
            lse,
            weights,
            q.stride(0),
            weights.stride(0),
            scale * LOG2E,
            softcap or 0.0,
            HEADS=heads,
            KV_HEADS=shape.kv_heads,
            UNITS=units,
            PER=heads // programs,
            PER_PAD=pad(heads // programs),
            D=head_dim,
            D_PAD=pad(head_dim),
            PAGE=kv.block_size,
            KEYS=KEYS,
            CAPPED=softcap is not None,
            PRECISION=precision(q.dtype),
            num_warps=4,
        )
    return weights


@triton.jit
def _logits(
    q_ptr, k_pool, table, program, key, valid, q_head, scale_log2, softcap,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, PER: tl.constexpr, PER_PAD: tl.constexpr, D: tl.constexpr,
    D_PAD: tl.constexpr, PAGE: tl.constexpr, CAPPED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Base-2 logits [PER_PAD, keys] of the query heads of ``program``."""
    mine = tl.arange(0, PER_PAD)
    channel = tl.arange(0, D_PAD)
    q = tl.load(
        q_ptr + (program * PER + mine).to(tl.int64)[:, None] * q_head + channel[None, :],
        mask=(mine < PER)[:, None] & (channel[None, :] < D),
        other=0.0,
    )
    kv_head = program * PER // (HEADS // KV_HEADS)
    row = pool_rows(table, key, valid, kv_head, KV_HEADS, PAGE)
    k = tl.load(k_pool + row[:, None] * D + channel[None, :], mask=valid[:, None] & (channel[None, :] < D), other=0.0)
    return cap_logits(tl.dot(q, tl.trans(k), input_precision=PRECISION), scale_log2, softcap, CAPPED)


@triton.jit
def _candidate(number, valid, listed, first, hidden, lost, everything, FULL: tl.constexpr):
    """The ``number``-th candidate of a list that begins at ``listed``, or of all keys but the hidden ones."""
    key = tl.load(listed + number, mask=also(valid, everything == 0) if FULL else valid, other=0)
    if FULL:
        plain = first + number
        key = tl.where(everything != 0, plain + tl.where(plain >= hidden, lost, 0), key)
    return key


@triton.jit(do_not_specialize=["width", "ends", "first", "last", "hidden", "lost"])
def _score(
    q_ptr, k_pool, table, offsets, counts, indices, full, k, scores, q_head, width, ends, first, last, hidden, lost,
    scale_log2, softcap,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, UNITS: tl.constexpr, PER: tl.constexpr, PER_PAD: tl.constexpr,
    D: tl.constexpr, D_PAD: tl.constexpr, PAGE: tl.constexpr, KEYS: tl.constexpr, FULL: tl.constexpr,
    CAPPED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(1)
    unit = program * PER // (HEADS // UNITS)
    count = tl.load(counts + unit).to(tl.int32)
    everything = 0
    if FULL:
        everything = tl.load(full + unit).to(tl.int32)
    number = tl.program_id(0) * KEYS + tl.arange(0, KEYS)
    mine = tl.arange(0, PER_PAD)
    out = scores + (program * PER + mine).to(tl.int64)[:, None] * width + number[None, :]
    stored = (mine < PER)[:, None] & (number < width)[None, :]
    if tl.load(k + unit) >= count:
        pass  # all are read, whatever they score
    elif tl.program_id(0) * KEYS < count + ends:
        listed = indices + tl.load(offsets + unit)
        key = _candidate(number, number < count, listed, first, hidden, lost, everything, FULL)
        end = number - count  # the forced keys come behind the candidates
        key = tl.where(end < 0, key, tl.where(end < first, end, end - first + last))
        valid = number < count + ends
        found = _logits(
            q_ptr, k_pool, table, program, key, valid, q_head, scale_log2, softcap, HEADS, KV_HEADS, PER, PER_PAD, D,
            D_PAD, PAGE, CAPPED, PRECISION,
        )  # fmt: skip
        tl.store(out, tl.where(valid[None, :], found, float("-inf")), mask=stored)
    else:
        tl.store(out, tl.full([PER_PAD, KEYS], float("-inf"), tl.float32), mask=stored)


@triton.jit(do_not_specialize=["width", "first", "last", "k_len", "hidden", "lost"])
def _pick(
    scores, counts, k, offsets, indices, full, idle, starts, out, width, first, last, k_len, hidden, lost,
    PER_LIST: tl.constexpr, FULL: tl.constexpr, IDLE: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """One list: keys in rising order, sinks first, window last. The bound that the best reach is found eight bits of
    the scores at a time."""
    one = tl.program_id(0)
    unit = one // PER_LIST
    at = tl.arange(0, SPAN)
    place = out + tl.load(starts + one)
    size = (tl.load(starts + one + 1) - tl.load(starts + one)).to(tl.int32)
    resting = 0
    if IDLE:
        resting = tl.load(idle + one).to(tl.int32)
    if resting != 0:
        for start in tl.range(0, size, SPAN):
            tl.store(place + start + at, start + at, mask=start + at < size)
    else:
        count = tl.load(counts + unit).to(tl.int32)
        wanted = tl.minimum(tl.load(k + unit), count).to(tl.int32)
        everything = 0
        if FULL:
            everything = tl.load(full + unit).to(tl.int32)
        listed = indices + tl.load(offsets + unit)
        row = scores + unit.to(tl.int64) * width
        bound = tl.full([], 0, tl.uint32)
        spare = wanted  # how many of those that equal the bound in the bits known so far are still wanted
        if (wanted < count) & (wanted > 0):
            digits = tl.arange(0, 256)
            for step in tl.static_range(4):
                shift = 24 - 8 * step
                found = tl.zeros([512], tl.int32)
                for start in tl.range(0, count, SPAN):
                    inside = start + at < count
                    order = ordered_bits(tl.load(row + start + at, mask=inside, other=0.0) + 0.0)
                    digit = ((order >> shift) & 255).to(tl.int32)
                    if step > 0:
                        inside = inside & ((order >> (shift + 8)) == (bound >> (shift + 8)))
                    found += tl.histogram(tl.where(inside, digit, 256), 512)
                found = tl.sum(tl.reshape(found, [2, 256]) * (tl.arange(0, 2) == 0)[:, None].to(tl.int32), 0)
                reach = tl.sum(found, 0) - tl.cumsum(found, 0) + found  # entries of this digit and above
                best = tl.max(tl.where(reach >= spare, digits, 0), 0)
                spare -= tl.sum(tl.where(digits > best, found, 0), 0)
                bound = bound | (best.to(tl.uint32) << shift)
        for start in tl.range(0, first, SPAN):
            tl.store(place + start + at, start + at, mask=start + at < first)
        place += first
        level_before = 0
        for start in tl.range(0, count, SPAN):
            number = start + at
            inside = number < count
            taken = inside
            if wanted < count:
                order = ordered_bits(tl.load(row + number, mask=inside, other=0.0) + 0.0)
                level = inside & (order == bound)
                earlier = level_before + tl.cumsum(level.to(tl.int32), 0)
                taken = (inside & (order > bound)) | (level & (earlier <= spare))
                taken = also(taken, wanted > 0)
                level_before += tl.sum(level.to(tl.int32), 0)
            key = _candidate(number, taken, listed, first, hidden, lost, everything, FULL)
            tl.store(place + tl.cumsum(taken.to(tl.int32), 0) - 1, key, mask=taken)
            place += tl.sum(taken.to(tl.int32), 0)
        for start in tl.range(0, k_len - last, SPAN):
            tl.store(place + start + at, last + start + at, mask=start + at < k_len - last)


@triton.jit
def _weigh(
    q_ptr, k_pool, table, offsets, indices, lse, weights, q_head, weight_row, scale_log2, softcap,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, UNITS: tl.constexpr, PER: tl.constexpr, PER_PAD: tl.constexpr,
    D: tl.constexpr, D_PAD: tl.constexpr, PAGE: tl.constexpr, KEYS: tl.constexpr, CAPPED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(1)
    PER_UNIT: tl.constexpr = HEADS // UNITS
    unit = program * PER // PER_UNIT
    start = tl.load(offsets + unit)
    count = (tl.load(offsets + unit + 1) - start).to(tl.int32)
    number = tl.program_id(0) * KEYS + tl.arange(0, KEYS)
    if tl.program_id(0) * KEYS < count:
        valid = number < count
        key = tl.load(indices + start + number, mask=valid, other=0)
        found = _logits(
            q_ptr, k_pool, table, program, key, valid, q_head, scale_log2, softcap, HEADS, KV_HEADS, PER, PER_PAD, D,
            D_PAD, PAGE, CAPPED, PRECISION,
        )  # fmt: skip
        head = program * PER + tl.arange(0, PER_PAD)
        mine = tl.arange(0, PER_PAD) < PER
        total = tl.load(lse + head, mask=mine, other=0.0) * 1.4426950408889634
        out = weights + (head % PER_UNIT).to(tl.int64)[:, None] * weight_row + start + number[None, :]
        tl.store(out, tl.exp2(found - total[:, None]), mask=mine[:, None] & valid[None, :])
