"""The C++ kernels against the reference, for every shape they claim: dtypes, head sizes, groups, pages, ragged ends."""

import pytest
import torch
from covering import covered
from cpu_helpers import attend_cpu, compare, problem, random_blocks

from saccade.errors import SaccadeError
from saccade.ops import cpu, reference
from saccade.selection import Band, Blocks, Dense, Shape, Tokens

pytestmark = pytest.mark.skipif(not cpu.available(), reason=cpu.why_unavailable() or "-")

ISAS = cpu.supported_isas()
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True)
def _restore_isa():
    yield
    cpu.set_isa(None)


@covered(
    {
        "isa": ISAS,
        "dtype": DTYPES,
        "head_dim": [16, 32, 64, 80, 96, 112, 128, 256],
        "group": [1, 4, 8],
        "q_len": [1, 130],
    },
    strength=3,
)
def test_every_head_size_and_group(isa, dtype, head_dim, group, q_len):
    cpu.set_isa(isa)
    shape = Shape.suffix(group * 2, 2, q_len, 211)
    q, view = problem(shape, head_dim, dtype)
    compare(q, view, Dense(shape))
    for units in (1, 2, group * 2):
        compare(q, view, random_blocks(shape, 64, units))


@covered({"isa": ISAS, "dtype": DTYPES, "page": [16, 32, 64, 128]})
def test_lengths_around_block_boundaries(isa, dtype, page):
    cpu.set_isa(isa)
    for n in (1, 2, 3, 15, 16, 17, 31, 33, 63, 64, 65, 127, 128, 129, 255, 257):
        whole, last = Shape.suffix(4, 2, n, n), Shape.suffix(4, 2, 1, n)
        for shape in (whole, last):
            q, view = problem(shape, 32, dtype, page, seed=n)
            compare(q, view, Dense(shape))
            compare(q, view, random_blocks(shape, 64, 2, seed=n))
            compare(q, view, Band(shape, window=30, sinks=4))


@covered(
    {
        "isa": ISAS,
        "dtype": DTYPES,
        "block_size": [16, 32, 64, 128, 256],
        ("q_start", "q_len"): [(0, 300), (1, 127), (63, 2), (100, 29), (128, 128), (200, 333), (517, 1)],
    }
)
def test_rows_anywhere_and_keys_beyond_them(isa, dtype, block_size, q_start, q_len):
    cpu.set_isa(isa)
    for extra in (0, 77):  # keys after the last row must not be seen
        shape = Shape(4, 2, q_len, q_start + q_len + extra, q_start)
        q, view = problem(shape, 64, dtype, seed=q_start)
        compare(q, view, Dense(shape))
        for units in (1, 4):
            compare(q, view, random_blocks(shape, block_size, units, 0.4, seed=q_len))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("window", "sinks"), [(1, 0), (5, 3), (64, 0), (128, 70), (1000, 5), (100, 1000)])
def test_bands(isa, dtype, window, sinks):
    cpu.set_isa(isa)
    for q_start, q_len in ((0, 260), (700, 1), (701, 1), (431, 250), (1500, 1)):
        shape = Shape(2, 1, q_len, q_start + q_len + 3, q_start)
        q, view = problem(shape, 32, dtype)
        compare(q, view, Band(shape, window, sinks))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("q_len", [1, 70])
def test_rows_without_keys(isa, q_len):
    cpu.set_isa(isa)
    shape = Shape.suffix(4, 2, q_len, 200)
    q, view = problem(shape, 32, torch.bfloat16)
    none = torch.zeros(1, 2 if q_len > 1 else 1, 4, dtype=torch.bool)
    compare(q, view, Blocks.from_block_mask(shape, 64, none))
    only_diagonal = none.clone()
    only_diagonal[:, -1, -1] = True  # rows 130..191 of the chunk stay empty
    compare(q, view, Blocks.from_block_mask(shape, 64, only_diagonal))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("q_len", [1, 100])
def test_softcap(isa, dtype, q_len):
    cpu.set_isa(isa)
    shape = Shape.suffix(4, 2, q_len, 300)
    q, view = problem(shape, 64, dtype)
    compare(q, view, Dense(shape), scale=0.3, softcap=20.0)
    compare(q, view, Band(shape, 50, 4), scale=3.0, softcap=5.0)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("q_len", [1, 100])
def test_huge_logits_stay_finite(isa, dtype, q_len):
    """At scale 1e3 a logit's own rounding reaches 1e-2; the winner still takes (nearly) all and nothing overflows."""
    cpu.set_isa(isa)
    shape = Shape.suffix(4, 2, q_len, 300)
    q, view = problem(shape, 64, dtype)
    for selection in (Dense(shape), random_blocks(shape, 64, 2, 0.7), Band(shape, 10, 4)):
        out, lse = attend_cpu(q, view, selection, scale=1e3)
        expected, expected_lse = reference.attend(q.double(), view, selection, scale=1e3)
        assert not out.isnan().any()
        assert torch.equal(lse.isinf(), expected_lse.isinf())
        seen = ~expected_lse.isinf()
        assert float((lse.double() - expected_lse)[seen].abs().max()) < 1e-5 * float(expected_lse[seen].abs().max())
        assert float((out.double() - expected)[seen].abs().max()) < 5e-2


@pytest.mark.parametrize("isa", ISAS)
def test_long_decode_merges_its_splits(isa):
    cpu.set_isa(isa)
    shape = Shape.suffix(8, 2, 1, 5003)
    q, view = problem(shape, 64, torch.float32)
    compare(q, view, Dense(shape))
    compare(q, view, random_blocks(shape, 32, 2, 0.6))
    compare(q, view, random_blocks(shape, 32, 8, 0.9))
    compare(q, view, Band(shape, 3001, 1100))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k_len", [8195, 40_007])
def test_keys_that_all_heads_share_are_read_slot_by_slot(isa, dtype, k_len):
    """From 8192 keys on a task takes all KV heads, beyond 32 * 1024 keys a longer part of them."""
    cpu.set_isa(isa)
    shape = Shape.suffix(6, 2, 1, k_len)
    q, view = problem(shape, 16, dtype)
    shared = (Dense(shape), Band(shape, k_len - 3000, 77), random_blocks(shape, 32, 1, 0.95))
    for selection in shared if k_len < 10_000 else shared[:1]:
        compare(q, view, selection)
        one, many = (attend_cpu(q, view, selection, scale=0.25, threads=threads) for threads in (1, 3))
        assert torch.equal(one[0], many[0])
        assert torch.equal(one[1], many[1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("q_len", [1, 600])
def test_threads_do_not_change_a_bit(dtype, q_len):
    shape = Shape.suffix(8, 2, q_len, 2500)
    q, view = problem(shape, 64, dtype)
    for selection in (Dense(shape), random_blocks(shape, 128, 8)):
        one = attend_cpu(q, view, selection, scale=0.1, threads=1)
        for threads in (2, 5):
            many = attend_cpu(q, view, selection, scale=0.1, threads=threads)
            assert torch.equal(one[0], many[0])
            assert torch.equal(one[1], many[1])


@pytest.mark.parametrize("q_len", [1, 40])
def test_strided_queries(q_len):
    shape = Shape.suffix(4, 2, q_len, 90)
    q, view = problem(shape, 32, torch.float32)
    packed = q.transpose(0, 1).contiguous()  # [Tq, H, d], as projections leave it
    expected = attend_cpu(q, view, Dense(shape), scale=0.2)
    for view_of_q in (packed.transpose(0, 1), torch.stack([q, q], -1)[..., 0]):
        out, lse = attend_cpu(view_of_q, view, Dense(shape), scale=0.2)
        assert torch.equal(out, expected[0])
        assert torch.equal(lse, expected[1])


def test_serves_says_why_the_reference_must_run():
    shape = Shape.suffix(4, 2, 8, 90)
    q, view = problem(shape, 32, torch.float32)
    assert cpu.serves(q, view, Dense(shape)) is None
    assert "Tokens of 8 rows" in cpu.serves(q, view, Tokens.from_mask(shape, shape.causal_mask()[None]))
    assert "torch.float16" in cpu.serves(q.half(), view, Dense(shape))
    assert "queries and keys alike" in cpu.serves(q.bfloat16(), view, Dense(shape))
    odd_q, odd_view = problem(shape, 40, torch.float32)
    assert "got 40" in cpu.serves(odd_q, odd_view, Dense(shape))
    three = Shape.suffix(6, 3, 8, 90)  # 2 units over 3 KV heads: a list would straddle KV heads
    q, view = problem(three, 32, torch.float32)
    assert "2 units cut across 3 KV heads" in cpu.serves(q, view, random_blocks(three, 64, 2))


def test_too_short_a_view_is_an_error():
    shape = Shape.suffix(4, 2, 8, 90)
    q, view = problem(shape, 32, torch.float32)
    with pytest.raises(SaccadeError, match="90 keys"):
        attend_cpu(q, view.upto(80), Dense(shape), scale=1.0)
