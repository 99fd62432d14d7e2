"""FlexPrefill's blocks by the C++ kernels: torch's to the block, and their sums float64's."""

from __future__ import annotations

import pytest
import torch
from covering import covered
from cpu_helpers import problem
from test_cpu_sums import sums_by_hand, weights_of

from saccade.kv.view import KVView
from saccade.methods.base import Chunk
from saccade.methods.flexprefill import FlexPrefill, method
from saccade.methods.flexprefill import cpu as flex_cpu
from saccade.ops import cpu
from saccade.ops.cpu_structs import native
from saccade.ops.scores import block_sums, needed_shares
from saccade.selection import Blocks, Shape

pytestmark = pytest.mark.skipif(not cpu.available(), reason=cpu.why_unavailable() or "-")
DTYPES = [torch.float32, torch.bfloat16]


class Nothing:
    """Kernels that serve no call."""

    @staticmethod
    def serves(*_) -> str:
        return "a test wants plain torch"


@pytest.fixture(autouse=True)
def _restore_isa():
    yield
    cpu.set_isa(None)


def both_ways(flex: FlexPrefill, chunk: Chunk, monkeypatch) -> tuple[Blocks, Blocks]:
    """By the kernels and by plain torch, which count their costs alike."""
    chunk.cost.scored = chunk.cost.estimated = 0
    fast = flex.select_prefill(chunk)
    counted = (chunk.cost.scored, chunk.cost.estimated)
    chunk.cost.scored = chunk.cost.estimated = 0
    with monkeypatch.context() as patch:
        patch.setattr(method, "cpu", Nothing)
        slow = flex.select_prefill(chunk)
    assert counted == (chunk.cost.scored, chunk.cost.estimated)
    assert isinstance(fast, Blocks)
    fast.check()
    return fast, slow


@covered(
    {
        "isa": cpu.supported_isas(),
        "dtype": DTYPES,
        ("q_start", "q_len"): [(0, 1100), (0, 1024), (37, 900), (900, 130), (1000, 1), (1023, 128), (700, 65)],
        ("heads", "kv_heads", "head_dim"): [(4, 2, 32), (6, 1, 80), (2, 2, 64)],
        "size": [64, 128],
        "options": [
            {},
            {"tau": 0.0},
            {"tau": 1.0},
            {"tau": 0.3, "max_budget": 384},
            {"tau": 1.0, "flatten": False, "gamma": 0.5},
            {"min_budget": 0, "gamma": 0.3},
            {"min_budget": 512, "gamma": 0.0},
            {"tau": 1.0, "min_budget": 0, "max_budget": 128},
        ],
    }
)
def test_the_lists_are_torchs(isa, dtype, q_start, q_len, heads, kv_heads, head_dim, size, options, monkeypatch):
    cpu.set_isa(isa)
    shape = Shape.suffix(heads, kv_heads, q_len, q_start + q_len)
    q, view = problem(shape, head_dim, dtype, page=16, seed=q_len)
    q = torch.stack([q, q.roll(1, 1)], 1)[:, 0]  # heads lie apart
    flex = FlexPrefill(**{"gamma": 0.9, "block_size": size, "min_budget": 256, "lines": "block", **options})
    fast, slow = both_ways(flex, Chunk.of(q, view, softcap=20.0 if heads == 6 else None), monkeypatch)
    assert torch.equal(fast.offsets, slow.offsets)
    assert torch.equal(fast.indices, slow.indices)


def test_long_rows_in_parts_of_many_heads_and_threads(monkeypatch):
    """More keys than a task takes, heads of both kinds: torch's lists, on any number of threads."""
    shape = Shape.suffix(4, 2, 300, 20_011)
    q, view = problem(shape, 32, torch.float32)
    q[:2] *= 0.01  # flat: pooled weights come close to the true ones
    q[2:] *= 4
    flex = FlexPrefill(gamma=0.7, lines="block", min_budget=0, tau=0.1)
    chunk = Chunk.of(q, view)
    assert flex.head_kinds(chunk).tolist() == [True, True, False, False]
    fast, slow = both_ways(flex, chunk, monkeypatch)
    assert torch.equal(fast.indices, slow.indices)
    before = torch.get_num_threads()
    try:
        for threads in (1, 3, 7):
            torch.set_num_threads(threads)
            again = flex.select_prefill(chunk)
            assert torch.equal(again.offsets, fast.offsets)
            assert torch.equal(again.indices, fast.indices)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("isa", cpu.supported_isas())
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sharp_gamma_follows_the_true_sums(isa, dtype):
    """The blocks and groups that a gamma just beyond one entry's share wants, by sums in float64."""
    cpu.set_isa(isa)
    shape, size = Shape.suffix(2, 1, 200, 9_000), 128
    q, view = problem(shape, 64, dtype, seed=3)
    weights = weights_of(q, view, shape, 1 / 8)
    columns, slashes = (block_sums(one, size) for one in sums_by_hand(weights, shape, size))
    needed = torch.cat([needed_shares(columns), needed_shares(slashes)], 1)
    last = (shape.k_len - 1) // size
    for head in range(2):
        edges = needed[head].sort().values
        wide = (edges[1:] - edges[:-1] > 1e-4).nonzero()[:8, 0]
        for gamma in ((edges[wide] + edges[wide + 1]) / 2).tolist():
            flex = FlexPrefill(gamma=gamma, tau=0.0, min_budget=0, lines="block")
            mask = flex.select_prefill(Chunk.of(q, view)).block_mask()[head]
            vertical, groups = (one[head] < gamma for one in needed.unflatten(1, (2, -1)).unbind(1))
            for j, row in enumerate(mask):
                own = last - mask.shape[0] + 1 + j
                expected = {0, own, *[b for b in range(own + 1) if vertical[b]]}
                expected |= {own - d for d in range(own + 1) if groups[d] or groups[max(d - 1, 0)]}
                assert set(row.nonzero()[:, 0].tolist()) == expected


def test_keys_that_are_not_finite_read_everything():
    """As plain torch does: what follows sees that, and says so."""
    k = torch.randn(1, 900, 32)
    k[0, 5] = float("nan")
    q = torch.randn(2, 900, 32)
    flex = FlexPrefill(lines="block", min_budget=0)
    assert flex.select_prefill(Chunk.of(q, KVView.from_tensors(k, torch.randn(1, 900, 32)))).density() == 1.0


def test_a_call_that_does_not_fit_is_refused():
    shape = Shape.suffix(2, 1, 300, 300)
    q, view = problem(shape, 32, torch.float32)
    made = {}
    flex = FlexPrefill(lines="block", min_budget=0)
    real = native.FlexChoice

    class Wrong:
        def __new__(cls, **fields):
            return real(**{**fields, **made})

    cases = (({"rows": 129}, "rows=129"), ({"q_blocks": 2}, "do not fit"), ({"block_size": 256}, "divide 128"))
    for wrong, said in cases:
        made.clear()
        made.update(wrong)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(flex_cpu, "native", type("N", (), {"FlexChoice": Wrong, "MarkLists": native.MarkLists}))
            with pytest.raises(ValueError, match=said):
                flex.select_prefill(Chunk.of(q, view))
