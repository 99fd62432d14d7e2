"""RocketKV's kernels on a GPU, at sizes of real models, against its row path step after step."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from helpers import planted_heads

from saccade.kv.view import KVView
from saccade.methods.base import Chunk, Query
from saccade.methods.device_state import REALS, WORDS, Opening
from saccade.methods.rocketkv import RocketKV
from saccade.methods.rocketkv.recorded import RecordedBlocks
from saccade.methods.state import fork
from saccade.ops.triton.batch import Pages
from saccade.ops.triton.batched_rows import LayerRows
from saccade.selection import Tokens

DEVICE, LENGTH, STEPS = "cuda", 20000, 7


@pytest.mark.parametrize(
    "method",
    [
        RocketKV(budget=512),
        RocketKV(budget=256, unit="q_head"),
        RocketKV(capacity=4000, keys=300, block_size=5, channels=0.25),
        RocketKV(capacity=18000, keys=700, block_size=1),  # more blocks than one program holds
    ],
    ids=str,
)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "dtype"),
    [(14, 2, 64, torch.bfloat16), (32, 8, 128, torch.bfloat16), (4, 1, 256, torch.float16), (4, 2, 80, torch.float32)],
)
def test_steps_read_what_the_row_path_reads(heads, kv_heads, dim, dtype, method):
    """But for blocks of equal weight to the last bits: as the two add otherwise, one of a list may differ."""
    q, k, v = (part.to(DEVICE, dtype) for part in planted_heads(heads, kv_heads, LENGTH + STEPS, dim, 0, noise=0.6))
    full = KVView.from_tensors(k, v, 16, shuffle_seed=1)
    before, paged = full.upto(LENGTH), full.paged()
    state = method.begin(Chunk.of(q[:, LENGTH - method.window : LENGTH], before))
    own = fork(state)
    spec = SimpleNamespace(layers=1, heads=heads, kv_heads=kv_heads, head_dim=dim, windows=(None,), value_dim=None)
    kv = SimpleNamespace(view=lambda layer: before, pool=SimpleNamespace(storage=SimpleNamespace(device=k.device)))
    recorded = RecordedBlocks(Opening([own], kv, spec, LENGTH, LENGTH + 1))
    reading = method.device_plan(spec).layers[0]
    same = 0
    for length in range(LENGTH + 1, LENGTH + STEPS + 1):
        words = torch.zeros(2, WORDS, dtype=torch.int64)
        numbers = list(recorded.words(0))
        words[0, : len(numbers)] = torch.tensor(numbers)
        lengths = torch.tensor([length, 0], dtype=torch.int32, device=DEVICE)  # the second row is padding
        tables = paged.block_table[None].expand(2, -1, -1).contiguous()
        none = torch.zeros(2, dtype=torch.int32, device=DEVICE)
        reals, cones = torch.zeros(2, REALS, device=DEVICE), torch.zeros(2, 4, dtype=torch.float64, device=DEVICE)
        rows = torch.stack([q[:, length - 1]] * 2)
        pages = Pages(paged.k, paged.v, tables, lengths, 32768)
        read = reading.read(LayerRows(0, rows, pages, words.to(DEVICE), reals, cones, none, none, dim**-0.5))
        assert torch.isfinite(read.out).all()
        assert int(read.lists.counts.view(2, -1)[1].sum()) == 0
        query = Query.of(q[:, length - 1 : length], full.upto(length))
        selection = method.select_decode(query, state)
        assert isinstance(selection, Tokens)
        assert float(read.estimated[0]) == query.cost.estimated > 0
        for unit, wanted in enumerate(selection.lists()):
            found = read.lists.indices[unit, : int(read.lists.counts[unit])].tolist()
            assert found == sorted(set(found))
            assert found[-1] < length
            differ = set(found) ^ set(wanted.tolist())
            assert len(differ) <= 2 * state.size
            same += not differ
    assert same >= 0.9 * STEPS * len(selection.lists())
    recorded.length = LENGTH + STEPS
    (settled,) = recorded.settle(LENGTH + STEPS)
    state.extend(full, LENGTH + STEPS)
    for mine, theirs in ((settled.low, state.low), (settled.high, state.high)):
        assert all(torch.equal(*pair) for pair in zip(mine, theirs, strict=True))
