"""Shared keys: what later queries read of an anchor, by brute force and on both backends alike."""

from __future__ import annotations

import itertools

import pytest
import torch
from helpers import generator

from saccade.kv.view import KVView
from saccade.methods.cis.anchors import Anchors
from saccade.methods.cis.sharing import keep, share
from saccade.ops import Call, cpu, run
from saccade.selection import Candidates, Cone, Shape, Tokens, cut

UNITS, HEADS, DIM, SINKS, LOCAL = 4, 8, 32, 5, 9


@pytest.fixture(params=["kernels", "torch"])
def backend(request, monkeypatch):
    if request.param == "torch":
        monkeypatch.setattr(cpu, "available", lambda: False)
    elif not cpu.available():
        pytest.skip(cpu.why_unavailable())


def retrieved(n: int, counts, seed: int):
    """Rising key lists of the units, sinks and window among them, and weights [2, nnz] that repeat now and then."""
    rng = generator(seed)
    middle = [torch.randperm(n - SINKS - LOCAL, generator=rng)[:count] + SINKS for count in counts]
    ends = torch.cat([torch.arange(SINKS), torch.arange(n - LOCAL, n)])
    read = Tokens.from_lists(Shape.suffix(HEADS, UNITS, 1, n), [torch.cat([ends, part]) for part in middle])
    return read, torch.randint(1, 40, (HEADS // UNITS, read.indices.numel()), generator=rng).float() / 64


def expected_sets(read: Tokens, weights, has, n: int, best: int, reach: int) -> list[set[int]]:
    sets = []
    bounds = read.offsets.tolist()
    for unit, keys in enumerate(read.lists()):
        own = weights[:, bounds[unit] : bounds[unit + 1]].sum(0).tolist()
        middle = [(key, w) for key, w in zip(keys.tolist(), own) if SINKS <= key < n - LOCAL]
        heavy = sorted(middle, key=lambda pair: (-pair[1], pair[0]))[:best]
        near = {key + o for key, _ in heavy for o in range(-reach, reach + 1) if SINKS <= key + o < n - LOCAL}
        sets.append({key for key, _ in middle} | near if has[unit] else set())
    return sets


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("best", "reach"), [(0, 1), (7, 0), (7, 1), (30, 4), (500, 2)])
def test_shared_sets_follow_their_definition(backend, dtype, best, reach):
    """Three anchors, whose directions are axes; later queries lean on one of them, or on none."""
    n, anchors = 200, Anchors.empty(UNITS, 2 * DIM, capacity=200)
    sets, positions = [], []
    for number in range(3):
        length = n + 2 * number
        q = torch.zeros(HEADS, DIM, dtype=dtype)
        q[:, number] = 3.0 + number
        assert bool(share(anchors, q, 0.8, LOCAL, length)[2].all())  # axes are not alike
        has = torch.tensor([True, number > 0, number < 2, False])
        read, weights = retrieved(length, (40, 1, 60, 0), seed=number)
        keep(anchors, read, weights, has, length - 1, (SINKS, length - LOCAL), best, reach)
        sets.append(expected_sets(read, weights, has, length, best, reach))
        positions.append(length - 1)
    for axis, spread, cover in ((0, 0.0, True), (1, 0.5, True), (2, 0.5, False), (1, 1.0, True), (5, 0.0, True)):
        q = torch.zeros(HEADS, DIM, dtype=dtype)
        q[:, axis], q[:, 9] = 1.0, spread  # cosine 1, 0.894 or 0.707
        offsets, keys, searching = share(anchors, q, 0.8, LOCAL, 210, cover)
        shares = axis < 3 and spread < 0.75
        for unit in range(UNITS):
            found = keys[offsets[unit] : offsets[unit + 1]].tolist()
            alike = shares and bool(anchors.has[axis, unit])
            assert bool(searching[unit]) == (not alike)
            gap = range(positions[axis] + 1 - LOCAL, 210 - LOCAL) if alike and cover else ()
            assert found == (sorted({*sets[axis][unit], *gap}) if alike else [])


@pytest.mark.parametrize(("best", "reach", "follow"), [(1, 0, 0), (7, 1, 0), (7, 0, 3), (30, 2, 1), (500, 0, 40)])
def test_the_best_keys_move_along(backend, best, reach, follow):
    """Two anchors; who shares reads the better keys of its anchor where the steps since have moved them, too."""
    n, anchors = 200, Anchors.empty(UNITS, 2 * DIM, capacity=200, most=best)
    made = []
    for number in range(2):
        length = n + 3 * number
        q = torch.zeros(HEADS, DIM)
        q[:, number] = 1.0
        share(anchors, q, 0.8, LOCAL, length, True, (follow, SINKS))
        has = torch.tensor([True, number > 0, number < 1, True])
        read, weights = retrieved(length, (40, 3, 60, 9), seed=number)
        keep(anchors, read, weights, has, length - 1, (SINKS, length - LOCAL), best, reach)
        alone = expected_sets(read, weights, has, length, 0, 0)
        heavy = []  # by falling weight, ties to the lower
        for unit, keys in enumerate(read.lists()):
            at = int(read.offsets[unit])
            own = weights[:, at : at + keys.numel()].sum(0).tolist()
            middle = [(-w, key) for key, w in zip(keys.tolist(), own) if key in alone[unit]]
            heavy.append([key for _, key in sorted(middle)[:best]])
        made.append((expected_sets(read, weights, has, length, best, reach), heavy, has, length - 1))
    for axis, length in ((0, 206), (1, 204), (0, 230), (1, 230)):
        q = torch.zeros(HEADS, DIM)
        q[:, axis] = 1.0
        offsets, keys, searching = share(anchors, q, 0.8, LOCAL, length, True, (follow, SINKS))
        sets, heavy, has, then = made[axis]
        for unit in range(UNITS):
            found = keys[offsets[unit] : offsets[unit + 1]].tolist()
            assert bool(searching[unit]) != bool(has[unit])
            moved = {key + length - 1 - then + o for key in heavy[unit] for o in range(-follow, follow + 1)}
            moved = {key for key in moved if SINKS <= key < length - LOCAL}
            gap = range(then + 1 - LOCAL, length - LOCAL)
            assert found == (sorted({*sets[unit], *gap, *moved}) if has[unit] else [])


def test_the_most_recent_of_several_counts_and_a_new_block_forgets(backend):
    anchors = Anchors.empty(UNITS, 2 * DIM, capacity=100)
    q = torch.randn(HEADS, DIM, generator=generator(3))
    reads = []
    for number in range(5):
        share(anchors, q, -1.0, LOCAL, 150)
        read, weights = retrieved(150, (20, 20, 20, 20), seed=number)
        keep(anchors, read, weights, torch.ones(UNITS, dtype=torch.bool), 149, (SINKS, 150 - LOCAL), 0, 0)
        reads.append(expected_sets(read, weights, [True] * UNITS, 150, 0, 0))
    offsets, keys, _ = share(anchors, q, 0.99, LOCAL, 150)
    assert [set(keys[offsets[u] : offsets[u + 1]].tolist()) for u in range(UNITS)] == reads[-1]
    anchors.count = 0
    assert bool(share(anchors, q, -1.0, LOCAL, 151)[2].all())


@pytest.mark.parametrize("local", [0, 6])
@pytest.mark.parametrize("size", [16, 24], ids=["whole pages", "parts of pages"])
@pytest.mark.parametrize("attention", ["auto", "reference"])
def test_within_a_window_whoever_searches_reads_the_best_visible_keys(attention, size, local):
    """Units that search all keys and units with lists in one call, pages of 16, below a window on another grid."""
    rng, n = generator(7), 400
    q, k, v = (torch.randn(heads, rows, DIM, generator=rng) for heads, rows in ((4, 1), (2, n), (2, n)))
    view = KVView.from_tensors(k, v, block_size=16, shuffle_seed=2)
    shape, cone = Shape.suffix(4, 2, 1, n), Cone(0.5, sinks=20, local=8, block_size=size)
    start = cone.start(n - 1)
    lists = [[], [*range(10, 300, 3)], [150], []]  # the third loses all it has
    offsets = torch.tensor([0, *(len(part) for part in lists)]).cumsum(0)
    full = torch.tensor([True, False, False, True])
    indices = torch.tensor([*itertools.chain(*lists)], dtype=torch.int32)
    selection = cut(Candidates(shape, offsets, indices, torch.full((4,), 12), 4, local, full), cone)
    selection.check()
    ran = run(Call.of(q, view, selection, want_weights=True), attention)
    out, lse = ran.out, ran.lse
    if attention == "auto" and cpu.available():
        assert ran.backend.startswith("cpu/")
    bounds = ran.used.offsets.tolist()
    for head, read in enumerate(ran.used.lists()):
        logits = (k[head // 2].double() @ q[head, 0].double()) / DIM**0.5
        forced = {*range(4), *range(n - local, n)}
        seen = [i for i in range(n) if i < cone.sink_keys or i >= start]
        pool = [i for i in (seen if full[head] else lists[head]) if i in seen and i not in forced]
        best = sorted(pool, key=lambda i: -float(logits[i]))[:12] or ([] if local else [n - 1])
        assert read.tolist() == sorted({*forced, *best})
        weights = torch.softmax(logits[read.long()], 0)
        assert torch.allclose(ran.weights[0, bounds[head] : bounds[head + 1]].double(), weights, atol=1e-5)
        assert torch.allclose(out[head, 0].double(), weights @ v[head // 2, read.long()].double(), atol=1e-5)
        assert float(lse[head, 0]) == pytest.approx(float(torch.logsumexp(logits[read.long()], 0)), abs=1e-4)
