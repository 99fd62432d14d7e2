"""RocketKV against its definition, key by key in plain Python; its blocks outlive growth, forks and rejected rows."""

from __future__ import annotations

import math

import pytest
import torch
from helpers import planted_heads
from test_methods_eviction import UNITS, best, problem, weights_of

from saccade.errors import PolicyError
from saccade.kv.view import KVView
from saccade.methods.base import Chunk, Query
from saccade.methods.rocketkv import RocketKV
from saccade.methods.state import fork, load, save
from saccade.selection import Dense


def kept_by_hand(q, k, heads: list[int], capacity: int, window: int, kernel: int) -> list[int]:
    """The window, and the keys with the heaviest neighbour."""
    n = k.shape[1]
    votes = [0.0] * (n - window)
    for head in heads:
        for row in range(n - window, n):
            for i, weight in weights_of(q, k, head, row, list(range(row + 1))).items():
                if i < n - window:
                    votes[i] += weight
    near = [max(votes[max(0, i - kernel // 2) : i + kernel // 2 + 1]) for i in range(len(votes))]
    chosen = best({(i, 0): score for i, score in enumerate(near)}, capacity - window)
    return sorted({i for i, _ in chosen} | set(range(n - window, n)))


def read_by_hand(q, k, heads: list[int], entries: list[int], size: int, keys: int, channels: int) -> list[int]:
    """Of the keys ``entries``, those of the blocks with the greatest mean estimate, from the query in the last row."""
    rows = {head: [float(x) for x in q[head, -1].double()] for head in heads}
    d, kv_head = len(rows[heads[0]]), heads[0] // 2
    strength = [sum(abs(rows[head][c]) for head in heads) for c in range(d)]
    which = sorted(sorted(range(d), key=lambda c: (-strength[c], c))[:channels])
    blocks = [entries[at : at + size] for at in range(0, len(entries), size)]
    scores = [0.0] * len(blocks)
    for row in rows.values():
        logits = []
        for block in blocks:
            total = 0.0
            for c in which:
                values = [float(k[kv_head, i, c]) for i in block]
                toward = max(values) if sum(rows[head][c] for head in heads) > 0 else min(values)
                total += row[c] * toward
            share = sum(abs(row[c]) for c in which) / sum(map(abs, row))
            logits.append(total / math.sqrt(d * share))
        top = max(logits)
        whole = sum(len(block) * math.exp(x - top) for block, x in zip(blocks, logits))
        for at, x in enumerate(logits):
            scores[at] += math.exp(x - top) / whole / len(heads)
    order = sorted(range(len(blocks)), key=lambda at: (-scores[at], at))[: -(-keys // size)]
    return sorted(i for at in order for i in blocks[at])


@pytest.mark.parametrize("unit", list(UNITS))
@pytest.mark.parametrize(
    ("capacity", "window", "kernel", "size", "keys", "channels"),
    [(40, 8, 9, 4, 12, 1.0), (37, 1, 1, 5, 13, 0.25), (33, 16, 21, 1, 9, 0.5), (200, 8, 3, 8, 20, 0.03125)],
)
def test_both_stages_by_hand(unit, capacity, window, kernel, size, keys, channels):
    n, prompt = 90, 83
    q, k, v = planted_heads(4, 2, n, seed=5)
    method = RocketKV(
        capacity=capacity, window=window, kernel=kernel, keys=keys, block_size=size, channels=channels, unit=unit
    )
    state = method.begin(Chunk.of(q[:, prompt - window : prompt], KVView.from_tensors(k[:, :prompt], v[:, :prompt])))
    for length in (prompt + 1, prompt + 2, n):  # a step, the next, and one after several that it did not see
        view = KVView.from_tensors(k[:, :length], v[:, :length], shuffle_seed=length)
        selection = method.select_decode(Query.of(q[:, length - 1 : length], view), state)
        for heads, got in zip(UNITS[unit], selection.lists()):
            if capacity < prompt:
                kept = kept_by_hand(q[:, :prompt], k[:, :prompt], heads, capacity, window, kernel)
            else:
                kept = list(range(prompt))
            entries = [*kept, *range(prompt, length)]
            expected = read_by_hand(q[:, :length], k, heads, entries, size, keys, int(channels * q.shape[-1]))
            assert got.tolist() == expected


def test_what_is_left_is_read_whole_where_it_is_no_more_than_a_step_reads():
    q, _, view = problem(90)
    few = RocketKV(capacity=30, window=8, keys=64)
    selection = few.select_decode(Query.of(q[:, -1:], view), few.begin(Chunk.of(q[:, -8:], view)))
    assert [len(one) for one in selection.lists()] == [30, 30]
    every = RocketKV(capacity=90, window=8, keys=90)
    assert isinstance(every.select_decode(Query.of(q[:, -1:], view), every.begin(Chunk.of(q[:, -8:], view))), Dense)


def test_a_later_turn_has_blocks_of_what_earlier_ones_left():
    """Units keep unlike numbers of keys then."""
    q, k, view = problem(90, seed=3)
    gone = torch.zeros(2, 50, dtype=torch.bool)
    gone[0, 3:40] = gone[1, 7:30] = True
    method = RocketKV(capacity=80, window=8, kernel=1, keys=16)
    state = method.begin(Chunk.of(q[:, -8:], view, gone=gone))
    assert [len(one) for one in state.positions] == [53, 67]
    selection = method.select_decode(Query.of(q[:, -1:], view), state)
    for unit, got in enumerate(selection.lists()):
        entries = [i for i in range(90) if i >= 50 or not gone[unit, i]]
        assert got.tolist() == read_by_hand(q, k, UNITS["kv_head"][unit], entries, 4, 16, q.shape[-1])


def test_blocks_after_forks_saves_and_rejected_rows_are_those_of_a_straight_run():
    q, k, v = planted_heads(4, 2, 120, seed=6)
    method = RocketKV(capacity=40, window=8, kernel=3, keys=12)
    state = method.begin(Chunk.of(q[:, 80:88], KVView.from_tensors(k[:, :88], v[:, :88])))

    def step(state, length: int) -> list[list[int]]:
        view = KVView.from_tensors(k[:, :length], v[:, :length])
        return [one.tolist() for one in method.select_decode(Query.of(q[:, length - 1 : length], view), state).lists()]

    straight = fork(state)
    wanted = {length: step(straight, length) for length in range(89, 121)}
    other = k.clone()
    other[:, 95:] += 3.0  # drafted keys, none of which stays
    for length in range(89, 104):
        view = KVView.from_tensors((k if length < 95 else other)[:, :length], v[:, :length])
        method.select_decode(Query.of(q[:, length - 1 : length], view), state)
    state.truncate(95)
    state = load(*save(state))
    assert [step(state, length) for length in range(96, 121)] == [wanted[length] for length in range(96, 121)]


def test_a_budget_is_split_as_the_authors_code_splits_it():
    """n = 32768, budget 256: a compression of 128, of which 128**0.62 falls to the first stage."""
    sized, channels = RocketKV(budget=256).sized(32768, 128)
    assert sized.capacity == int(32768 / 128**0.62)
    assert sized.keys == 128
    assert sized.block_size == math.ceil(math.sqrt(sized.capacity / 256))
    assert channels == int(128 * sized.block_size / (sized.capacity / 256))
    short, every = RocketKV(budget=256).sized(200, 64)
    assert (short.capacity, short.keys, short.block_size, every) == (200, 100, 1, 64)
    with pytest.raises(PolicyError, match="budget=256 stands for capacity, keys, block_size, channels together"):
        RocketKV(budget=256, keys=100)


@pytest.mark.parametrize("options", [{"keys": 0}, {"block_size": 0}, {"channels": 0.0}, {"channels": 2}, {"budget": 1}])
def test_bad_options_are_refused(options):
    with pytest.raises(PolicyError, match=next(iter(options))):
        RocketKV(**options)
