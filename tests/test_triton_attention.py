"""The Triton attention kernels against the reference backend, under Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
import triton_helpers  # noqa: F401  (sets the interpreter up first)

from saccade.errors import SaccadeError
from saccade.kv.view import KVView
from saccade.ops import Call, attend, run
from saccade.ops.triton.batch import even_splits
from saccade.ops.triton.decode import attend_decode
from saccade.ops.triton.dispatch import key_lists, pages_of
from saccade.ops.triton.prefill import Config, attend_prefill
from saccade.selection import Band, Blocks, Dense, Lines, Mixed, Ranking, Shape, Tokens

SHAPES = [  # heads, kv_heads, q_len, k_len, head_dim
    (4, 2, 150, 150, 64),
    (4, 4, 70, 203, 80),
    (8, 1, 33, 300, 96),
    (2, 2, 1, 129, 64),
]


def data(heads, kv_heads, q_len, k_len, head_dim, dtype=torch.float32, page=32, seed=0):
    rng = torch.Generator().manual_seed(seed)
    q = torch.randn(heads, q_len, head_dim, generator=rng).to(dtype)
    k, v = torch.randn(2, kv_heads, k_len, head_dim, generator=rng).to(dtype)
    return q, KVView.from_tensors(k, v, block_size=page, shuffle_seed=seed), Shape.suffix(heads, kv_heads, q_len, k_len)


def random_blocks(shape: Shape, size: int, units: int, share: float = 0.5, seed: int = 0) -> Blocks:
    rng = torch.Generator().manual_seed(seed)
    q_blocks = (shape.k_len - 1) // size - shape.q_start // size + 1
    return Blocks.from_block_mask(
        shape, size, torch.rand(units, q_blocks, -(-shape.k_len // size), generator=rng) < share
    )


def agrees(q, view, selection, atol=1e-5, **options) -> None:
    ran = run(Call.of(q, view, selection, **options), "triton")
    out, lse = ran.out, ran.lse
    assert ran.backend == "triton"
    expected, expected_lse = attend(q, view, selection, backend="reference", **options)
    torch.testing.assert_close(out.float(), expected.float(), atol=atol, rtol=atol)
    torch.testing.assert_close(lse, expected_lse, atol=max(atol, 1e-5), rtol=1e-5)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_dense_attention_equals_the_reference(shape, softcap):
    q, view, _ = data(*shape)
    agrees(q, view, None, softcap=softcap)


def test_head_dim_256_and_a_scale_of_its_own():
    q, view, _ = data(2, 1, 40, 75, 256)
    agrees(q, view, None, scale=0.3)
    agrees(q, view, None, scale=-0.2)
    agrees(q, view, None, scale=0.0)


@pytest.mark.parametrize("page", [16, 64, 128])
def test_any_page_size(page):
    q, view, shape = data(2, 1, 70, 150, 64, page=page)
    agrees(q, view, None)
    agrees(q, view, random_blocks(shape, 64, 2))


def test_half_precision_storage():
    q, view, shape = data(4, 2, 90, 130, 64, dtype=torch.float16)
    agrees(q, view, None, atol=2e-3)
    agrees(q, view, random_blocks(shape, 64, 4), atol=2e-3)
    q, view, shape = data(4, 2, 1, 130, 64, dtype=torch.float16)
    agrees(q, view, None, atol=2e-3)


@pytest.mark.parametrize("window", [1, 40, 500])
@pytest.mark.parametrize("sinks", [0, 5])
@pytest.mark.parametrize("q_len", [1, 140])
def test_bands_equal_the_reference(window, sinks, q_len):
    q, view, shape = data(2, 1, q_len, 210, 64)
    agrees(q, view, Band(shape, window=window, sinks=sinks))


@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("units", [1, 2, 4])
@pytest.mark.parametrize("q_len", [300, 77])
def test_block_sparse_prefill_equals_the_reference(size, units, q_len):
    """Random lists: some rows of some units read nothing, and must give (0, -inf)."""
    q, view, shape = data(4, 2, q_len, 300, 64)
    selection = random_blocks(shape, size, units, share=0.4, seed=units)
    assert selection.pairs().min() < shape.causal_pairs
    agrees(q, view, selection)


def test_rows_without_keys_give_zero_and_minus_infinity():
    q, view, shape = data(2, 1, 128, 128, 64)
    none = Blocks.from_block_mask(shape, 64, torch.zeros(1, 2, 2, dtype=torch.bool))
    out, lse = attend(q, view, none, backend="triton")
    assert not out.any()
    assert torch.isneginf(lse).all()
    q, view, shape = data(2, 1, 1, 100, 64)
    none = Blocks.from_lists(shape, 32, [torch.empty(0, dtype=torch.int32)])
    out, lse = attend(q, view, none, backend="triton")
    assert not out.any()
    assert torch.isneginf(lse).all()


@pytest.mark.parametrize("copy", [False, True])
@pytest.mark.parametrize(("rows", "keys"), [(64, 32), (64, 64), (128, 128)])
def test_every_tile_gives_the_same(rows, keys, copy):
    q, view, shape = data(2, 1, 200, 260, 80)
    for selection in (Dense(shape), Band(shape, window=50, sinks=3), random_blocks(shape, 128, 2)):
        expected = attend(q, view, selection, backend="reference")
        got = attend_prefill(q, view, selection, scale=80**-0.5, config=Config(rows, keys, 4, 2, copy))
        torch.testing.assert_close(got[0], expected[0], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(got[1], expected[1], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("size", [16, 32, 128])
@pytest.mark.parametrize("units", [1, 2, 8])
def test_block_decode_equals_the_reference(size, units):
    q, view, shape = data(8, 2, 1, 333, 64)
    agrees(q, view, random_blocks(shape, size, units, seed=size))


@pytest.mark.parametrize("units", [1, 2, 8])
def test_token_decode_equals_the_reference(units):
    q, view, shape = data(8, 2, 1, 333, 96)
    rng = torch.Generator().manual_seed(3)
    lists = [torch.randperm(333, generator=rng)[: 20 + 9 * unit] for unit in range(units)]
    agrees(q, view, Tokens.from_lists(shape, lists))


@pytest.mark.parametrize("splits", [1, 2, 5, 40])
@pytest.mark.parametrize("size", [1, 32])
def test_any_number_of_splits_gives_the_same(size, splits):
    q, view, shape = data(6, 2, 1, 333, 32)
    selection = Tokens.from_lists(shape, [torch.arange(0, 333, 2), torch.arange(3)])
    if size > 1:
        selection = random_blocks(shape, size, 2)
    expected, expected_lse = attend(q, view, selection, backend="reference")
    out, lse = attend_decode(
        q[:, 0][None], pages_of([view]), key_lists(selection), scale=32**-0.5, splits=splits, keys=32
    )
    torch.testing.assert_close(out[0], expected[:, 0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse[0], expected_lse[:, 0], atol=1e-5, rtol=1e-5)


def test_decode_reads_no_further_than_its_row():
    q, view, _ = data(4, 2, 1, 200, 64)
    shape = Shape(4, 2, 1, 200, 150)
    agrees(q, view, Dense(shape))
    agrees(q, view, Blocks.from_lists(shape, 32, [torch.tensor([0, 4])]))


def test_what_has_no_kernel_is_an_error_by_name_and_the_reference_by_default():
    q, view, shape = data(2, 1, 3, 40, 64)
    tokens = Tokens.from_mask(shape, torch.ones(1, 3, 40, dtype=torch.bool))
    with pytest.raises(SaccadeError, match="no kernel for Tokens of 3 rows"):
        attend(q, view, tokens, backend="triton")
    ran = run(Call.of(q, view, tokens))
    assert ran.backend == "reference"


@pytest.mark.parametrize(("q_len", "n"), [(200, 200), (70, 333), (1, 150)])
@pytest.mark.parametrize("units", [1, 4])
def test_vertical_slash_prefill_equals_the_reference(q_len, n, units):
    """Lines at tile borders, columns inside and outside of the tiles that slashes touch, a unit without any line."""
    q, view, shape = data(4, 2, q_len, n, 64)
    columns = [torch.tensor([0, 1, 63, 64, 100, n - 1]), torch.empty(0, dtype=torch.int32), torch.arange(0, n, 2)]
    distances = [torch.tensor([0, 63, 128]), torch.tensor([1]), torch.empty(0, dtype=torch.int32)]
    columns.append(torch.empty(0, dtype=torch.int32))
    distances.append(torch.empty(0, dtype=torch.int32))
    lines = Lines.from_lists(shape, columns[:units], distances[:units])
    lines.check()
    agrees(q, view, lines)
    agrees(q, view, lines, softcap=2.0)


def test_heads_of_different_kinds():
    q, view, shape = data(4, 2, 200, 300, 64)
    empty = torch.empty(0, dtype=torch.int32)
    lines = Lines.from_lists(shape, [torch.tensor([3, 70])] * 2 + [empty] * 2, [torch.tensor([0, 9])] * 2 + [empty] * 2)
    blocks = random_blocks(shape, 64, 4)
    agrees(q, view, Mixed(shape, (lines, blocks), torch.tensor([0, 0, 1, 1])))


def test_no_tensor_of_the_host_code_follows_an_ambient_device():
    """The front door runs it without one, so a tensor that needed one would land on the CPU beside a GPU's."""
    q, view, shape = data(4, 2, 70, 130, 32)
    last, ranking = Shape.suffix(4, 2, 1, 130), torch.arange(4, dtype=torch.int32)
    choice = torch.tensor([0, 1, 0, 1])
    lines = Lines.from_lists(shape, [torch.tensor([3, 70])] * 2, [torch.tensor([0, 65])] * 2)
    whole = [Dense(shape), Band(shape, window=9), random_blocks(shape, 64, 2), lines]
    whole.append(Mixed(shape, (whole[2], lines), choice))
    one = [Dense(last), random_blocks(last, 32, 2), Tokens.from_lists(last, [torch.tensor([5, 129])] * 2)]
    one.append(Ranking(last, 32, ranking[3:].expand(2, -1), ranking[:3].expand(2, -1), epsilon=0.5, microbatch=1))
    for rows, selections in ((q, whole), (q[:, -1:], one)):
        for selection in selections:
            expected, _ = attend(rows, view, selection, backend="reference")
            with torch.device("meta"):
                out, _ = attend(rows, view, selection, backend="triton")
            torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("lists", "most", "expected"), [
    (8, 128, 64),  # 512 programs of 528
    (64, 128, 8),  # twice as many would be as even
    (256, 128, 2),
    (8, 10, 10),  # too few keys to fill it
    (1, 20, 20),
    (2000, 128, 1),
])  # fmt: skip
def test_splits_leave_little_of_the_device_idle(lists, most, expected):
    assert even_splits(lists, 528, most) == expected
