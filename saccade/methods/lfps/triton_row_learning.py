"""LFPS's tables in recorded steps: what a step has learnt is left beside them, and the step after takes it in, so that
one that breaks off and runs again learns once. Means what tables.py means."""

from __future__ import annotations

import triton
import triton.language as tl

from saccade.methods.lfps.triton_row_words import MARKS, M, R, W, pointer


@triton.jit
def _threshold(sums, n, a):
    """(mean, tau) of a table, fp64, as ``choosing.threshold``."""
    s1, s2, s3, s4 = tl.load(sums), tl.load(sums + 1), tl.load(sums + 2), tl.load(sums + 3)
    mean = s1 / n
    m2 = s2 - n * mean * mean
    m4 = s4 - 4.0 * mean * s3 + 6.0 * mean * mean * s2 - 3.0 * n * mean * mean * mean * mean
    spread = (n > 1.0) & (m2 > 1e-12 * s2) & (m4 > 0.0)
    tau = a * mean * m2 * m2 / tl.where(spread, m4, 1.0)
    return mean.to(tl.float32), tl.where(spread, tau, float("inf")).to(tl.float32)


@triton.jit
def _powers(after, before, valid):
    """What a table's first four power sums gain: fp64 [4]."""
    x, y = tl.where(valid, after, 0.0).to(tl.float64), tl.where(valid, before, 0.0).to(tl.float64)
    xx, yy = x * x, y * y
    power = tl.arange(0, 4)
    low = tl.where(power == 0, tl.sum(x - y, 0), tl.sum(xx - yy, 0))
    high = tl.where(power == 2, tl.sum(xx * x - yy * y, 0), tl.sum(xx * xx - yy * yy, 0))
    return tl.where(power < 2, low, high)


@triton.jit
def take_in(
    words, reals, lengths, limits, word_row, real_row, unit, row,
    UNITS: tl.constexpr, SPAN: tl.constexpr, TABLE: tl.constexpr,
):  # fmt: skip
    """Take in what the step before has learnt of a ``unit``; ``limits`` float32 [rows * units, 4]: mean and threshold
    of the vertical table, and of the slash table."""
    length = tl.load(lengths + row)
    if length > 0:
        own = words + row.to(tl.int64) * word_row
        decay = tl.load(reals + row.to(tl.int64) * real_row + R.decay)
        marks = pointer(own, W.marks, tl.int64) + unit * MARKS
        until, learnt = tl.load(marks + M.until), tl.load(marks + M.learnt)
        count = tl.load(marks + M.keys).to(tl.int32)
        if (until == length - 1) & (learnt < until):
            tl.store(marks + M.learnt, until)
            capacity, room = tl.load(own + W.capacity), tl.load(own + W.room)
            first = tl.load(own + W.sinks).to(tl.int32)
            vertical = pointer(own, W.vertical, tl.float32) + unit * capacity
            slash = pointer(own, W.slash, tl.float32) + unit * capacity
            if count >= 0:
                sums = pointer(own, W.sums, tl.float64) + unit * 8
                scales = pointer(own, W.scale, tl.float64) + unit
                keys = pointer(own, W.pending, tl.int32) + unit * room
                gains = pointer(own, W.gains, tl.float32) + unit * room
                scale = tl.load(scales) * decay
                at, power = tl.arange(0, TABLE), tl.arange(0, 4)
                sums_v, sums_s = tl.load(sums + power), tl.load(sums + 4 + power)
                if scale < 1e-8:  # the fourth powers of stored values come near the end of float32
                    sums_v, sums_s = tl.zeros([4], tl.float64), tl.zeros([4], tl.float64)
                    for start in tl.range(0, capacity.to(tl.int32), TABLE):
                        inside = start + at < capacity
                        value_v = (tl.load(vertical + start + at, mask=inside, other=0.0) * scale).to(tl.float32)
                        value_s = (tl.load(slash + start + at, mask=inside, other=0.0) * scale).to(tl.float32)
                        tl.store(vertical + start + at, value_v, mask=inside)
                        tl.store(slash + start + at, value_s, mask=inside)
                        sums_v += _powers(value_v, tl.zeros([TABLE], tl.float32), inside)
                        sums_s += _powers(value_s, tl.zeros([TABLE], tl.float32), inside)
                    scale = scale * 0.0 + 1.0
                    tl.debug_barrier()  # other threads read the entries
                tl.store(scales, scale)
                number = tl.arange(0, SPAN)
                key_after = tl.load(keys + number, mask=number < count, other=0)
                gain_after = tl.load(gains + number, mask=number < count, other=0.0)
                for start in tl.range(0, count, SPAN):
                    inside = start + number < count
                    key, gain = key_after, (gain_after.to(tl.float64) / scale).to(tl.float32)
                    distance = until.to(tl.int32) - 1 - key
                    ahead = inside & (distance >= 0)
                    before_v = tl.load(vertical + key - first, mask=inside, other=0.0)
                    before_s = tl.load(slash + distance, mask=ahead, other=0.0)
                    following = start + SPAN + number  # on their way meanwhile
                    key_after = tl.load(keys + following, mask=following < count, other=0)
                    gain_after = tl.load(gains + following, mask=following < count, other=0.0)
                    tl.store(vertical + key - first, before_v + gain, mask=inside)
                    tl.store(slash + distance, before_s + gain, mask=ahead)
                    sums_v += _powers(before_v + gain, before_v, inside)
                    sums_s += _powers(before_s + gain, before_s, ahead)
                tl.store(sums + power, sums_v)
                tl.store(sums + 4 + power, sums_s)
                tl.debug_barrier()  # other threads read them
        n = (length - tl.load(own + W.sinks).to(tl.int32)).to(tl.float64)
        a = tl.load(reals + row.to(tl.int64) * real_row + R.a)
        for table in tl.static_range(2):
            mean, tau = _threshold(pointer(own, W.sums, tl.float64) + unit * 8 + table * 4, n, a)
            tl.store(limits + (row * UNITS + unit) * 4 + table * 2, mean)
            tl.store(limits + (row * UNITS + unit) * 4 + table * 2 + 1, tau)
