"""The kernels of the host tier under Triton's interpreter: blocks between two memories."""

from __future__ import annotations

import pytest
import torch
import triton_helpers  # noqa: F401  (sets the interpreter up first)
from tier_helpers import nothing_left

from saccade.kv import BlockManager, KVFormat, KVStorage, SequenceKV
from saccade.kv.host import HostTier
from saccade.ops.triton import pages


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(1, 16, 16), (3, 32, 48), (8, 32, 128)])
def test_blocks_are_copied_whole_and_none_beside_them(dtype, shape):
    source, target = (tuple(torch.randn(count, *shape).to(dtype) for _ in range(2)) for count in (9, 7))
    want = [part.clone() for part in target]
    which, where = torch.tensor([8, 1, 4]), torch.tensor([0, 6, 2])
    pages.copy_blocks(source, which, target, where)
    for ours, expected, got in zip(source, want, target):
        expected[where] = ours[which]
        assert torch.equal(got, expected)
    pages.copy_blocks(source, which[:0], target, where[:0])
    which = torch.tensor([3, -1, 5, 7])  # the second is passed over, the last is not counted
    pages.launch_copies(source, which, target, torch.tensor([5, 5, 1, 3]), torch.tensor([3]), 4)
    for ours, expected, got in zip(source, want, target):
        expected[[5, 1]] = ours[[3, 5]]
        assert torch.equal(got, expected)


def test_a_sequence_over_two_memories_by_kernels():
    form = KVFormat(torch.float32, 2, 16, 16)
    storage = KVStorage(form, 11, "cpu", pages)
    pool = BlockManager(storage, 2, tier=HostTier(1 << 18, storage), debug=True)
    kv, rows = SequenceKV(pool), torch.randn(2, 2, 2, 150, 16)
    for start, stop in ((0, 70), (70, 71), (71, 150)):
        kv.reserve(stop)
        for layer, (k, v) in enumerate(rows):
            kv.append(layer, k[:, start:stop], v[:, start:stop])
    for layer, (k, v) in enumerate(rows):
        view = kv.view(layer)
        assert torch.equal(view.keys(3, 149), k[:, 3:149])
        assert torch.equal(view.values(), v)
        some = torch.tensor([149, 0, 77])
        assert torch.equal(view.take(some, 1)[1], v[1, some])
    assert pool.tiers.counts.misses > 20
    kv.free()
    nothing_left(pool)
