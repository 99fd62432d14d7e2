"""PSA's stopping rule as the programs that read follow it: over the unbroken run of microbatches published so far.

A microbatch is published as one 64-bit word a query head, its base-2 log-sum-exp below and the rule's rest above, so
that who sees the one sees the other. A rule that goes by guesses has a second word: above in the first one lies by how
much the microbatch's blocks lay above their guesses, their mean, and below in the second one the sum of the squares of
how far they lay from that mean. All logs are in base 2.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _smaller(a, b):
    return tl.minimum(a, b)


@triton.jit
def log_of(word):
    return word.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def rest_of(word):
    return (word >> 32).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def power(x):
    """2**x of float32 in float64's range, exact but for float32's own rounding, so that all programs find the same."""
    whole = tl.minimum(tl.maximum(tl.floor(x), -1000.0), 1000.0)
    scale = ((whole.to(tl.int64) + 1023) << 52).to(tl.float64, bitcast=True)
    return tl.exp2(x - whole).to(tl.float64) * scale


@triton.jit
def follow(
    words, more, lefts, margin, cursor, anchor, total, least, excess, squares, aim, covered, epsilon, parts, ahead,
    ranked, left_row,
    GROUP: tl.constexpr, FEW: tl.constexpr, MICROBATCH: tl.constexpr, LEAST: tl.constexpr, GUESSED: tl.constexpr,
    MEAN: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Fold the next unbroken run of published microbatches into the rule.

    ``words`` of the unit, 0 where not published, and if GUESSED the second ones at ``more``. ``total`` [FEW] is the sum
    of all before ``cursor`` over 2**anchor, in float64, so that in whatever runs it was added all come to one result;
    so are ``excess`` and ``squares``, the sums over blocks of what they lay above their guesses and of its squares.
    ``least`` [FEW]: the least block's. ``lefts``: what is left of the guesses after so many microbatches, a head every
    ``left_row``. Returns them moved on; ``aim``, the microbatches that the rule will most likely let in; how many it
    does let in (0: not known); and ``covered``, float32, what it believes those cover once they are known.
    """
    at = tl.arange(0, WINDOW)
    head = tl.arange(0, FEW)
    there = (head < GROUP)[:, None] & (cursor + at < parts)[None, :]
    word = tl.load(words + (cursor + at)[None, :] * GROUP + head[:, None], mask=there, other=0, volatile=True)
    published = word != 0
    if GUESSED:
        second = tl.load(more + (cursor + at)[None, :] * GROUP + head[:, None], mask=there, other=0, volatile=True)
        published = published & (second != 0)
    ready = tl.min(tl.where(published | (head >= GROUP)[:, None], 1, 0), 0)
    run = tl.min(tl.where((ready == 0) | (cursor + at >= parts), at, WINDOW), 0)
    logs = log_of(word)
    first = tl.sum(tl.where((at == 0)[None, :], logs, 0.0), 1)
    anchor = tl.where(cursor == 0, first, anchor)
    known = (at < run)[None, :] & (head < GROUP)[:, None]
    weights = tl.where(known, power(logs - anchor[:, None]), 0.0)
    sums = total[:, None] + tl.cumsum(weights, 1)
    ranks = cursor + at >= ahead
    counts = known & ranks[None, :]
    rest = tl.where(counts, rest_of(word), float("inf"))
    share = 1.0 / tl.maximum(epsilon, 1e-6).to(tl.float64) - 1.0
    last = (at == run - 1)[None, :]
    if GUESSED:
        done = tl.minimum((cursor + at + 1 - ahead) * MICROBATCH, ranked)  # blocks, after each
        count = (done - tl.minimum((cursor + at - ahead) * MICROBATCH, ranked)).to(tl.float64)[None, :]
        above = tl.where(counts, rest_of(word), 0.0).to(tl.float64)
        apart = tl.where(counts, log_of(second), 0.0).to(tl.float64)
        summed = excess[:, None] + tl.cumsum(above * count, 1)
        squared = squares[:, None] + tl.cumsum(apart + above * above * count, 1)
        blocks = tl.maximum(done, 1).to(tl.float64)[None, :]
        mean = summed / blocks
        raised = mean + margin * tl.sqrt(tl.maximum(squared / blocks - mean * mean, 0.0))
        log = tl.load(lefts + head[:, None] * left_row + (cursor + at + 1 - ahead)[None, :], mask=counts, other=0.0)
        unread = power((log - anchor[:, None] + raised).to(tl.float32)) / tl.where(sums > 0.0, sums, 1.0)
        unread = tl.where((done < 2)[None, :], float("inf"), unread)  # one block has no deviation
        unread = tl.where((done == ranked)[None, :] | (head >= GROUP)[:, None], 0.0, unread)
        excess += tl.sum(above * count, 1)
        squares += tl.sum(apart + above * above * count, 1)
    if LEAST:
        rest = tl.minimum(tl.associative_scan(rest, 1, _smaller), least[:, None])
        least = tl.minimum(least, tl.min(rest, 1))
    if not GUESSED:
        block = tl.where(counts, power(tl.where(counts, rest - anchor[:, None], 0.0)), float("inf"))
        left = tl.maximum(ranked - (cursor + at + 1 - ahead) * MICROBATCH, 0).to(tl.float64)
        unread = left[None, :] * block / tl.where(sums > 0.0, sums, 1.0)  # over what was read
        unread = tl.where((left == 0.0)[None, :] | (head >= GROUP)[:, None], 0.0, unread)
    if MEAN:
        enough = tl.sum(tl.where((head < GROUP)[:, None], 1.0 / (1.0 + unread), 0.0), 0) / GROUP
    else:  # of the head with most unread: coverage falls with that
        enough = 1.0 / (1.0 + tl.max(unread, 0))
    hit = tl.min(tl.where((enough > epsilon) & (at < run) & ranks, at, WINDOW), 0)
    found = tl.where(hit < WINDOW, cursor + hit + 1, 0)
    if found > 0:
        covered = tl.sum(tl.where(at == hit, enough, 0.0), 0).to(tl.float32)
    if (run > 0) & (found == 0):  # else no unit goes on
        total += tl.sum(weights, 1)
        if GUESSED:  # as if blocks went on to lie above their guesses by the same; looked up at WINDOW places
            stride = tl.maximum(tl.cdiv(parts - cursor - run, WINDOW), 1)
            place = tl.minimum(cursor + run - ahead + (at + 1) * stride, parts - ahead)
            line = lefts + head[:, None] * left_row
            looked = (head < GROUP)[:, None] & (place >= 0)[None, :]
            then = tl.load(line + place[None, :], mask=looked, other=0.0) - anchor[:, None]
            now = tl.load(lefts + head * left_row + tl.maximum(cursor + run - ahead, 0), mask=head < GROUP, other=0.0)
            likely = tl.sum(tl.where(last, mean, 0.0), 1)
            most = power((then + tl.sum(tl.where(last, raised, 0.0), 1)[:, None]).to(tl.float32))
            comes = power((now - anchor + likely).to(tl.float32))[:, None]
            comes = tl.maximum(comes - power((then + likely[:, None]).to(tl.float32)), 0.0)
            holds = (most <= share * (total[:, None] + comes)) | (head >= GROUP)[:, None]
            fits = (tl.min(holds.to(tl.int32), 0) > 0) | (place == parts - ahead)
            wanted = cursor + run + (tl.min(tl.where(fits, at, WINDOW - 1), 0) + 1) * stride
            aim = tl.where(cursor + run > ahead, tl.minimum(wanted, parts), aim)
        else:  # as if all that follows weighed what the last of the run did
            each = tl.sum(tl.where(last, weights, 0.0), 1)
            rival = tl.sum(tl.where(last & known, block, 0.0), 1)
            wanted = rival * (ranked + ahead * MICROBATCH) - share * (total - (cursor + run) * each)
            wanted = wanted / tl.maximum(rival * MICROBATCH + share * each, 1e-300)
            wanted = tl.max(tl.where(head < GROUP, wanted, 0.0), 0)
            aim = tl.where(cursor + run > ahead, tl.minimum(wanted, parts).to(tl.int32) + 1, aim)
    return cursor + run, anchor, total, least, excess, squares, aim, found, covered
