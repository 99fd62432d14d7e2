"""Several rows of a request on models with sliding windows, as recorded steps read them: the kernel against float64,
verifications and short chunks of prompts against the row path. CPU tensors, Triton's interpreter, no graphs."""

from __future__ import annotations

import pytest
import torch
import triton_helpers  # noqa: F401  (sets the interpreter up first)
from device_helpers import device_of, put_on_device
from engine_helpers import tokens
from helpers import brute_force, generator
from test_llm_device_prefill import asked, same
from tiny_models import make_checkpoint, random_ids

from saccade import LLM, SamplingParams
from saccade.engine.device.backend import DeviceBackend
from saccade.engine.rows import attention as host_module
from saccade.engine.rows import together as host_together
from saccade.engine.steps.paths import RECORDED
from saccade.errors import SaccadeError
from saccade.kv import BlockManager, KVFormat, KVStorage
from saccade.kv.row_formats import FORMATS
from saccade.kv.sequence import SequenceKV
from saccade.ops import cpu_rows
from saccade.ops.triton import few_rows
from saccade.ops.triton.batch import pages_of
from saccade.ops.triton.decode import Tiles, attend_decode
from saccade.ops.triton.few_rows import attend_few, attend_rows
from saccade.selection import Band, Shape

LENGTHS = (17, 70, 200, 333)
WINDOWS = (1, 3, 40, 1000)  # of less than a chunk's rows, and of more than all keys
GROUPED = Tiles(keys=32, warps=4, stages=2, registers=None, resident=1)  # two runs of 16 keys of codes


def sequences(rows: str, kv_heads: int = 2, head_dim: int = 32, lengths=LENGTHS):
    """Views of sequences of one pool, in blocks of 16 tokens; their slots mixed."""
    rng, kind = generator(len(rows)), FORMATS[rows]
    pool = BlockManager(KVStorage(KVFormat(torch.float32, kv_heads, head_dim, 16, kind, kind), 60), 1)
    made = [SequenceKV(pool) for _ in lengths]
    for at in range(0, max(lengths), 16):
        for kv, length in zip(made, lengths):
            count = min(16, length - at)
            if count > 0:
                kv.reserve(at + count)
                kv.append(0, *torch.randn(2, kv_heads, count, head_dim, generator=rng))
    return [kv.view(0) for kv in made]


def forget(views, window: int, rows: int) -> None:
    """Have blocks that no row sees hold what would be seen in any result."""
    for view in views:
        paged, first = view.paged(), max(0, view.length - rows - window + 1)
        for slot in paged.block_table[0, : first // 16].tolist():
            for pool in (paged.k, paged.v):
                pool[slot] = 0xFF if pool.dtype == torch.uint8 else 127 if pool.dtype == torch.int8 else float("nan")


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize(
    ("stored", "rows", "softcap", "tiles"),
    [
        ("auto", 5, None, None), ("auto", 16, 2.0, few_rows.LARGE), ("int8", 5, 2.0, GROUPED), ("fp8", 5, None, None),
        ("fp8", 2, None, GROUPED), ("auto", 1, None, None),
    ],
)  # fmt: skip
def test_rows_read_their_last_keys(stored, rows, softcap, tiles, window):
    """Of ragged sequences, over parts of the keys, against float64; blocks before the window are never read."""
    views = sequences(stored)
    expected = []
    rng = generator(rows)
    q = torch.randn(8, rows * len(views), 32, generator=rng)
    for number, view in enumerate(views):
        here = q[:, number * rows : (number + 1) * rows]
        mask = Band(Shape.suffix(8, 2, rows, view.length), window).mask()
        expected.append(brute_force(here, view.keys(), view.values(), mask, scale=0.3, softcap=softcap))
    forget(views, window, rows)
    pages = pages_of(views)
    limits = (pages.lengths[:, None] + torch.arange(1 - rows, 1)).flatten().int()
    queries = q.transpose(0, 1)
    found = [attend_rows(queries, pages, limits, scale=0.3, softcap=softcap, tiles=tiles, window=window)]
    found += [
        attend_decode(queries, pages, None, scale=0.3, softcap=softcap, splits=splits, limits=limits, window=window)
        for splits in (1, 3)
    ]
    if tiles is None:
        out, lse = attend_few(q, views, scale=0.3, softcap=softcap, window=window)
        found.append((out.transpose(0, 1), lse.transpose(0, 1)))
    want, sums = (torch.cat(parts, 1).transpose(0, 1) for parts in zip(*expected))
    bound = 1e-5 if stored == "auto" else 2e-2
    for out, lse in found:
        assert float((out.double() - want).norm() / want.norm()) < bound
        torch.testing.assert_close(lse.double(), sums, atol=bound, rtol=bound)


def test_rows_of_padding_read_nothing_and_choose_no_tile():
    """Padding stands behind a sequence's rows, or is all of a sequence."""
    views = sequences("auto", lengths=(100, 90))
    pages, q = pages_of(views), torch.randn(8, 8, 32, generator=generator(3))
    limits = torch.tensor([98, 99, 100, 0, 0, 0, 0, 0], dtype=torch.int32)
    out, lse = attend_rows(q, pages, limits, scale=0.3, window=20)
    mask = Band(Shape.suffix(8, 2, 3, 100), 20).mask()
    want, sums = brute_force(q[:3].transpose(0, 1), views[0].keys(), views[0].values(), mask, scale=0.3)
    torch.testing.assert_close(out[:3].double(), want.transpose(0, 1), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse[:3].double(), sums.transpose(0, 1), atol=1e-5, rtol=1e-5)
    assert (out[3:] == 0).all()
    assert (lse[3:] == -torch.inf).all()


def test_a_window_is_at_least_a_key_and_of_all_of_them():
    pages, q = pages_of(sequences("auto", lengths=(40,))), torch.zeros(2, 8, 32)
    with pytest.raises(SaccadeError, match="window must be at least 1, got 0"):
        attend_rows(q, pages, torch.tensor([39, 40]).int(), scale=1.0, window=0)
