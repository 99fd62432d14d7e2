"""Slots far behind a pool's beginning: what kernels of a GPU compute of places beyond 32 bits is what they do of small
ones. The memory between is asked for and never touched."""

from __future__ import annotations

import mmap

import pytest
import torch
import triton_helpers  # noqa: F401  (sets the interpreter up first)
from device_helpers import put_on_device
from engine_helpers import tokens
from helpers import KINDS, generator, planted_heads, random_selection
from tiny_models import make_checkpoint, random_ids

from saccade import LLM, SamplingParams
from saccade.kv import KVView
from saccade.kv.paged import Paged
from saccade.kv.row_formats import AUTO, FP8, INT8, RowFormat
from saccade.ops import Call, run
from saccade.ops.triton import antidiagonals, block_sums, fp8_tiles, pages, row_shares, row_weights
from saccade.ops.triton.batch import pages_of
from saccade.ops.triton.batched_decode import append_rows
from saccade.ops.triton.block_energies import energies
from saccade.ops.triton.block_summaries import summarize
from saccade.ops.triton.few_rows import attend_few
from saccade.ops.triton.line_sums import token_sums
from saccade.selection import Shape

FORMATS = pytest.mark.parametrize("rows", [AUTO, INT8, FP8], ids=lambda rows: rows.name)
BEYOND = 1 << 32  # elements


def far(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A pool like ``shape``, of as many slots more as lie within ``BEYOND`` elements; without memory until written."""
    slots = BEYOND // shape[1:].numel() + shape[0]
    size = slots * shape[1:].numel() * dtype.itemsize
    room = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000)  # MAP_NORESERVE
    return torch.frombuffer(room, dtype=dtype).view(slots, *shape[1:])


def both(rows: RowFormat, n: int = 150, head_dim: int = 32) -> tuple[torch.Tensor, KVView, KVView]:
    q, k, v = planted_heads(4, 2, n, head_dim, seed=n)
    near = KVView.from_tensors(k, v, 16, shuffle_seed=1, rows=rows)
    own, parts = near.paged(), []
    for part in (own.k, own.v):
        parts.append(far(part.shape, part.dtype))
        parts[-1][-len(part) :] = part
    table = own.block_table + (len(parts[0]) - len(own.k))
    return q, near, KVView(Paged(parts[0], parts[1], table, n, own.format))


def same(make, near: KVView, away: KVView) -> None:
    for ours, theirs in zip(make(away), make(near), strict=True):
        torch.testing.assert_close(ours, theirs, atol=0, rtol=0, equal_nan=True)


@pytest.mark.thorough
@FORMATS
def test_attention(rows):
    q, near, away = both(rows)
    for count in (1, 3, 40):
        shape = Shape.suffix(4, 2, count, 150)
        for kind in KINDS if count == 1 else KINDS[:6]:
            selection = random_selection(kind, shape, 2, generator(0))

            def attend(view, count=count, selection=selection):
                done = run(Call.of(q[:, -count:], view, selection), "triton")
                return done.out, done.lse

            same(attend, near, away)
    same(lambda view: attend_few(q[:, -3:], [view], scale=0.1), near, away)


@pytest.mark.thorough
@FORMATS
def test_what_chooses(rows):
    q, near, away = both(rows)
    shape, last, scale = Shape.suffix(4, 2, 70, 150), q[:, -70:], 0.2
    some = torch.tensor([3, 40, 69])
    for make in (
        lambda view: token_sums(last, view, shape, 20, scale),
        lambda view: block_sums.line_sums(last, view, shape, 64, scale),
        lambda view: [antidiagonals.shares(last, view, shape, 8, 64, scale)],
        lambda view: [row_shares.shares(last, view, shape, 4, 64, scale)],
        lambda view: [row_weights.row_weights(last, view, shape, range(1, 3), some, scale)],
        lambda view: [energies(last, view, shape, 64, scale)],
        lambda view: [fp8_tiles.pack_keys(view, 150, 8, True).scale, fp8_tiles.centre(view, 150)],
        lambda view: [summarize(view.paged(), kind, 16, 1, 8) for kind in ("minmax", "cuboid", "mean", "moments")],
    ):
        same(make, near, away)


@FORMATS
def test_rows_are_stored_copied_and_brought_together(rows):
    _, near, away = both(rows)
    k, v = torch.randn(2, 2, 5, 32, generator=generator(2))
    for view in (near, away):
        pages.store(view.paged(), 60, k, v)
        at = pages_of([view])
        append_rows(k[:, 0][None], v[:, 1][None], at)
        own = view.paged()
        which, where = own.block_table[0, :2].long(), own.block_table[0, 2:4].long()
        pages.copy_blocks((own.k, own.v), which, (own.k, own.v), where)

    def gathered(view):
        own = view.paged()
        parts = [pages.gather(part, own.block_table, 3, 150, own.format.dtype) for part in (own.k, own.v)]
        plain = pages.plain_copy(view, 150)
        return [*parts, plain.keys(), plain.values()]

    same(gathered, near, away)
    for part, other in zip(near.stored(), away.stored()):
        assert torch.equal(part, other)


POLICIES = [
    "quest(budget=64, block_size=32, dense_layers=0)",
    "psa(epsilon=0.4, block_size=32, microbatch=1, rank=keys, rest=estimate)",
    "cis(k=20, sinks=3, local=6, tau=0.0, r=2, m=9)",
    "lfps(k=30, least=1, blocks=4, epsilon=0.1)",
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_checkpoint(
        "llama", tmp_path_factory.mktemp("far"), max_position_embeddings=1024, head_dim=32, num_hidden_layers=2
    )


@pytest.mark.thorough
@pytest.mark.parametrize("policy", POLICIES)
def test_recorded_steps(model, policy):
    """With the slots that are handed out last."""
    found, asked = [], SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=1)
    options = {"dtype": "float32", "prefill_chunk": 64, "block_size": 32, "kv_dtype": "int8", "exact": False}
    for memory in ("8MiB", "9GiB"):
        with LLM(model, kv_memory=memory, enable_prefix_caching=False, **options) as llm:
            for free in llm.pool._free_slots:
                free.reverse()
            put_on_device(llm)
            (done,) = llm.generate([random_ids(190, seed=5)], asked, policy=policy)
            assert done.error is None, done.error
            assert set(done.report["decode"]["backends"]) == {"triton"}
            found.append((tokens(done), done.outputs[0].cumulative_logprob, done.report.get("audit")))
            assert memory == "8MiB" or llm.pool.storage.k.numel() > 1 << 32
    assert found[0] == found[1]
