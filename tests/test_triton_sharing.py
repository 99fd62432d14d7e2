"""CIS's kernels against what shared keys are by definition, under Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
import triton_helpers  # noqa: F401  (sets the interpreter up first)
from helpers import generator
from test_methods_cis_sharing import DIM, HEADS, LOCAL, SINKS, UNITS, expected_sets, retrieved

from saccade.methods.cis import triton_sharing
from saccade.methods.cis.anchors import Anchors
from saccade.methods.cis.sharing import keep, share


@pytest.mark.parametrize(
    ("best", "reach", "dtype"), [(0, 1, torch.float32), (7, 1, torch.float16), (500, 2, torch.float32)]
)
def test_shared_sets_follow_their_definition(best, reach, dtype):
    """Three anchors, whose directions are axes; later queries lean on one of them, or on none."""
    n, anchors, sets = 200, Anchors.empty(UNITS, 2 * DIM, capacity=200), []
    for number in range(3):
        length = n + 2 * number
        q = torch.zeros(HEADS, DIM, dtype=dtype)
        q[:, number] = 3.0 + number
        anchors.reserve()
        assert bool(triton_sharing.share(anchors, q, 0.8, LOCAL, length, True)[2].all())  # axes are not alike
        has = torch.tensor([True, number > 0, number < 2, False])
        read, weights = retrieved(length, (40, 1, 60, 0), seed=number)
        anchors.has[number], anchors.positions[number] = has, length - 1
        anchors.first, anchors.count = n - 1, number + 1
        triton_sharing.keep(anchors, number, anchors.has[number], read, weights, (SINKS, length - LOCAL), best, reach)
        sets.append(expected_sets(read, weights, has, length, best, reach))
    for axis, spread, cover in ((0, 0.0, True), (1, 0.5, True), (2, 0.5, False), (1, 1.0, True), (5, 0.0, True)):
        q = torch.zeros(HEADS, DIM, dtype=dtype)
        q[:, axis], q[:, 9] = 1.0, spread  # cosine 1, 0.894 or 0.707
        anchors.reserve()
        offsets, keys, searching = triton_sharing.share(anchors, q, 0.8, LOCAL, 210, cover)
        for unit in range(UNITS):
            alike = axis < 3 and spread < 0.75 and bool(anchors.has[axis, unit])
            assert bool(searching[unit]) == (not alike)
            left = n + 2 * axis - LOCAL
            gap = range(left, 210 - LOCAL) if alike and cover else ()
            found = keys[offsets[unit] : offsets[unit + 1]].tolist()
            assert found == (sorted({*sets[axis][unit], *gap}) if alike else [])


def test_the_most_recent_of_several_counts():
    anchors, read = Anchors.empty(UNITS, 2 * DIM, capacity=100), None
    q = torch.randn(HEADS, DIM, generator=generator(3))
    for number in range(2):
        anchors.reserve()
        triton_sharing.share(anchors, q, 0.8, LOCAL, 100 + number, False)
        read, weights = retrieved(100 + number, (20, 20, 20, 20), seed=number)
        anchors.has[number], anchors.positions[number], anchors.count = True, 99 + number, number + 1
        triton_sharing.keep(anchors, number, anchors.has[number], read, weights, (SINKS, 100 - LOCAL), 0, 0)
    anchors.reserve()
    offsets, keys, _ = triton_sharing.share(anchors, q, 0.8, LOCAL, 110, False)
    for unit, keys_read in enumerate(read.lists()):
        wanted = [key for key in keys_read.tolist() if SINKS <= key < 100 - LOCAL]
        assert keys[offsets[unit] : offsets[unit + 1]].tolist() == wanted


@pytest.mark.parametrize(("best", "reach", "follow", "cover"), [(7, 1, 2, True), (1, 0, 0, False), (40, 2, 30, True)])
def test_the_best_keys_move_along_as_on_a_cpu(best, reach, follow, cover):
    """Three anchors with room for more best keys than there are; what each later query shares, and its room."""
    host, device = (Anchors.empty(UNITS, 2 * DIM, capacity=200, most=best + 3) for _ in range(2))
    for number in range(3):
        length = 200 + 3 * number
        q = torch.zeros(HEADS, DIM)
        q[:, number] = 1.0
        share(host, q, 0.8, LOCAL, length, cover, (follow, SINKS))
        device.reserve()
        triton_sharing.share(device, q, 0.8, LOCAL, length, cover, (follow, SINKS))
        has = torch.tensor([True, number > 0, number < 2, True])
        read, weights = retrieved(length, (40, 3, 60, 9), seed=number)
        keep(host, read, weights, has, length - 1, (SINKS, length - LOCAL), best, reach)
        device.has[number], device.positions[number] = has, length - 1
        device.first, device.count = host.first, number + 1
        triton_sharing.keep(device, number, device.has[number], read, weights, (SINKS, length - LOCAL), best, reach)
        assert torch.equal(device.moving[number][has], host.moving[number][has])
    for axis, length in ((0, 206), (1, 209), (2, 230), (5, 230)):
        q = torch.zeros(HEADS, DIM)
        q[:, axis] = 1.0
        wanted = share(host, q, 0.8, LOCAL, length, cover, (follow, SINKS))
        device.reserve()
        offsets, keys, searching = triton_sharing.share(device, q, 0.8, LOCAL, length, cover, (follow, SINKS))
        assert torch.equal(searching, wanted[2])
        assert torch.equal(offsets, wanted[0])
        assert torch.equal(keys[: int(offsets[-1])], wanted[1])


@pytest.mark.parametrize(("most", "dtype"), [(0, torch.float32), (9, torch.float16)])
def test_what_is_passed_on_is_passed_on_as_on_a_cpu(most, dtype):
    """Queries of every unit wander by themselves; who resembles none of those before it retrieves, all others pass on
    what they share. What is shared, by whom it was retrieved, and what a step without passing on makes of that."""
    host, device = (Anchors.empty(UNITS, 2 * DIM, capacity=200, most=most) for _ in range(2))
    rng, moves, passed = generator(5), (1, SINKS), 0
    q = torch.randn(HEADS, DIM, generator=rng)
    for number in range(9):
        length = 150 + number
        turns = torch.rand(UNITS, generator=rng).repeat_interleave(HEADS // UNITS)[:, None] < 0.15
        q = torch.where(
            turns, torch.randn(HEADS, DIM, generator=rng), q + 0.45 * torch.randn(HEADS, DIM, generator=rng)
        )
        asked = q.to(dtype)
        for passes_on in (False, True):
            device.reserve()
            offsets, keys, searching = triton_sharing.share(
                device, asked, 0.8, LOCAL, length, True, moves, passes_on=passes_on
            )
            wanted = share(host, asked, 0.8, LOCAL, length, True, moves, passes_on=passes_on)
            assert torch.equal(searching, wanted[2])
            assert torch.equal(offsets, wanted[0])
            assert torch.equal(keys[: int(offsets[-1])], wanted[1])
        assert torch.equal(device.counts[number], host.counts[number])
        passed += int((host.counts[number] < 0).sum())
        own = host.counts[number].clone()
        read, weights = retrieved(length, (20, 3, 30, 9), seed=number)
        where = (SINKS, length - LOCAL), 5, 1
        keep(host, read, weights, searching, length - 1, *where, passes_on=True)
        triton_sharing.keep(device, number, searching, read, weights, *where)
        assert torch.equal(host.counts[number][~searching], own[~searching])
        device.counts[number] = torch.where(searching, device.counts[number], own)
        assert torch.equal(device.counts[number], host.counts[number])
        device.has[number], device.positions[number] = True, length - 1
        device.first, device.count = host.first, number + 1
    assert UNITS < passed < 8 * UNITS
