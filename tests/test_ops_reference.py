"""The reference backend and its front door against float64 brute force; merges."""

from __future__ import annotations

import math

import pytest
import torch
from covering import covered
from helpers import KINDS, brute_force, call, generator, random_selection

from saccade.errors import SaccadeError
from saccade.kv.view import KVView
from saccade.ops import Call, attend, merge_state, run
from saccade.selection import Band, Blocks, Candidates, Dense, Ranking, Shape, Tokens

CLOSE = {"atol": 3e-5, "rtol": 1e-5}  # float32 against float64, where planted logits reach 20


@covered(
    {
        "kind": KINDS,
        ("heads", "kv_heads"): [(2, 2), (8, 2), (8, 1)],
        "head_dim": [32, 80, 128],
        ("q_len", "n"): [(1, 1), (1, 33), (33, 65), (150, 193)],
    }
)
def test_equals_brute_force(kind, heads, kv_heads, head_dim, q_len, n):
    if kind == "ranking":
        q_len = 1
    q, k, v, view = call(heads, kv_heads, q_len, n, head_dim, seed=n + head_dim)
    shape = Shape.suffix(heads, kv_heads, q_len, n)
    for units in {1, kv_heads, heads}:
        selection = random_selection(kind, shape, units, generator(n))
        out, lse = attend(q, view, selection, backend="reference")
        expected, expected_lse = brute_force(q, k, v, selection.mask())
        torch.testing.assert_close(out.double(), expected, **CLOSE)
        torch.testing.assert_close(lse.double(), expected_lse, **CLOSE)


def test_units_that_cut_across_kv_heads():
    """3 lists for 6 query heads over 2 KV heads: heads 2 and 3 share a list but not a KV head."""
    q, k, v, view = call(6, 2, 20, 64, 32, seed=1)
    selection = random_selection("blocks", Shape.suffix(6, 2, 20, 64), 3, generator(2))
    torch.testing.assert_close(
        attend(q, view, selection, backend="reference")[0].double(), brute_force(q, k, v, selection.mask())[0], **CLOSE
    )


@pytest.mark.parametrize("kind", KINDS)
def test_scale_and_softcap_are_honoured(kind):
    q, k, v, view = call(4, 2, 1, 97, 32, seed=3)
    selection = random_selection(kind, Shape.suffix(4, 2, 1, 97), 2, generator(3))
    for options in ({"scale": 0.4}, {"softcap": 2.0}, {"scale": 0.7, "softcap": 3.0}):
        out, lse = attend(q, view, selection, backend="reference", **options)
        expected, expected_lse = brute_force(q, k, v, selection.mask(), **options)
        torch.testing.assert_close(out.double(), expected, **CLOSE)
        torch.testing.assert_close(lse.double(), expected_lse, **CLOSE)


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_storage_is_computed_in_float32(kind):
    q, k, v, _ = call(4, 2, 1, 97, 64, seed=4)
    q, k, v = (part.bfloat16() for part in (q, k, v))
    selection = random_selection(kind, Shape.suffix(4, 2, 1, 97), 4, generator(4))
    out, lse = attend(q, KVView.from_tensors(k, v), selection, backend="reference")
    expected, expected_lse = brute_force(q, k, v, selection.mask())
    assert out.dtype == torch.bfloat16
    assert lse.dtype == torch.float32
    torch.testing.assert_close(out.double(), expected, atol=2e-2, rtol=8e-3)
    torch.testing.assert_close(lse.double(), expected_lse, atol=1e-4, rtol=1e-4)


def test_float64_queries_are_computed_in_float64():
    q, k, v, _ = call(4, 2, 9, 97, 32, seed=5)
    q, k, v = (part.double() for part in (q, k, v))
    selection = random_selection("tokens", Shape.suffix(4, 2, 9, 97), 2, generator(5))
    out, lse = attend(q, (k, v), selection)
    expected, expected_lse = brute_force(q, k, v, selection.mask())
    torch.testing.assert_close(out, expected, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(lse, expected_lse, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("kind", ["tokens", "blocks"])
def test_rows_without_keys_give_zero_and_minus_infinity(kind):
    q, _, _, view = call(4, 2, 3, 97, 32, seed=6)
    shape = Shape.suffix(4, 2, 3, 97)
    if kind == "tokens":  # row 1 of each unit is empty, then everything is
        some = torch.zeros(2, 3, 97, dtype=torch.bool)
        some[:, ::2, 5] = True
        mixed, none = Tokens.from_mask(shape, some), Tokens.from_mask(shape, some & False)
        out, lse = attend(q, view, mixed, backend="reference")
        assert torch.isneginf(lse[:, 1]).all()
        assert (out[:, 1] == 0).all()
        assert torch.isfinite(lse[:, ::2]).all()
    else:
        none = Blocks.from_block_mask(shape, 32, torch.zeros(1, 2, 4, dtype=torch.bool))
    out, lse = attend(q, view, none, backend="reference")
    assert (out == 0).all()
    assert torch.isneginf(lse).all()


def test_huge_logits_neither_overflow_nor_give_nan():
    q, k, v, _ = call(2, 1, 5, 70, 32, seed=7)
    q = q * 300
    for selection in (None, random_selection("tokens", Shape.suffix(2, 1, 5, 70), 1, generator(0))):
        out, lse = attend(q, (k, v), selection, backend="reference")
        mask = Dense(Shape.suffix(2, 1, 5, 70)).mask() if selection is None else selection.mask()
        torch.testing.assert_close(out.double(), brute_force(q, k, v, mask)[0], atol=1e-2, rtol=1e-3)
        assert not torch.isnan(lse).any()


def test_unwritten_slots_never_matter():
    """from_tensors poisons what is not stored; every kind reads up to a partial last block."""
    q, _, _, view = call(4, 2, 1, 65, 32, seed=8)
    assert torch.isnan(view.paged().k).any()
    for kind in KINDS:
        out, lse = attend(q, view, random_selection(kind, Shape.suffix(4, 2, 1, 65), 2, generator(8)))
        assert not torch.isnan(out).any()
        assert not torch.isnan(lse).any()


# --- merge_state


def split_masks(shape: Shape, parts: int, seed: int) -> list[torch.Tensor]:
    owner = torch.randint(0, parts, (shape.heads, shape.q_len, shape.k_len), generator=generator(seed))
    return [owner.eq(part) & shape.causal_mask() for part in range(parts)]


def test_disjoint_parts_merge_to_the_whole_in_any_order():
    q, k, v, view = call(4, 2, 6, 90, 32, seed=9)
    shape = Shape.suffix(4, 2, 6, 90)
    parts = [attend(q, view, Tokens.from_mask(shape, mask)) for mask in split_masks(shape, 3, 1)]
    left = merge_state(*merge_state(*parts[0], *parts[1]), *parts[2])
    right = merge_state(*parts[0], *merge_state(*parts[1], *parts[2]))
    swapped = merge_state(*merge_state(*parts[2], *parts[0]), *parts[1])
    whole = brute_force(q, k, v, Dense(shape).mask())
    for out, lse in (left, right, swapped):
        torch.testing.assert_close(out.double(), whole[0], **CLOSE)
        torch.testing.assert_close(lse.double(), whole[1], **CLOSE)


def test_merging_with_an_empty_part_changes_nothing():
    q, _, _, view = call(4, 2, 2, 50, 32, seed=10)
    out, lse = attend(q, view)
    nothing = torch.zeros_like(out), torch.full_like(lse, -math.inf)
    for merged in (merge_state(out, lse, *nothing), merge_state(*nothing, out, lse)):
        assert torch.equal(merged[0], out)
        assert torch.equal(merged[1], lse)
    out, lse = merge_state(*nothing, *nothing)
    assert (out == 0).all()
    assert torch.isneginf(lse).all()


def test_merging_far_apart_states_does_not_overflow():
    a, b = torch.full((1, 4), 1.0), torch.full((1, 4), 2.0)
    out, lse = merge_state(a, torch.tensor([1e4]), b, torch.tensor([-1e4]))
    assert torch.equal(out, a)
    assert float(lse) == 1e4


# --- the front door


def test_dense_is_the_default_and_equals_torch():
    q, k, v, view = call(4, 2, 40, 90, 64, seed=11)
    mask = Dense(Shape.suffix(4, 2, 40, 90)).mask()[None]
    sdpa = torch.nn.functional.scaled_dot_product_attention
    expected = sdpa(q[None], k[None], v[None], attn_mask=mask, enable_gqa=True)[0]
    for kv in (view, (k, v)):
        torch.testing.assert_close(attend(q, kv)[0], expected, **CLOSE)


def test_a_batch_equals_its_members():
    calls = [call(4, 2, 3, n, 32, seed=n) for n in (40, 65, 33)]
    q = torch.stack([one[0] for one in calls])
    views = [one[3] for one in calls]
    selections = [random_selection("tokens", Shape.suffix(4, 2, 3, n), 2, generator(n)) for n in (40, 65, 33)]
    out, lse = attend(q, views, selections)
    assert (out.shape, lse.shape) == (q.shape, q.shape[:3])
    for i in range(3):
        alone = attend(q[i], views[i], selections[i])
        assert torch.equal(out[i], alone[0])
        assert torch.equal(lse[i], alone[1])
    k, v = torch.stack([calls[0][1]] * 3), torch.stack([calls[0][2]] * 3)
    shared = Band(Shape.suffix(4, 2, 3, 40), window=7)
    assert torch.equal(attend(q, (k, v), shared)[0][2], attend(q[2], (k[2], v[2]), shared)[0])


def test_the_result_names_the_backend_and_what_was_read():
    q, _, _, view = call(4, 2, 1, 320, 32, seed=12)
    ranking = random_selection("ranking", Shape.suffix(4, 2, 1, 320), 2, generator(1))
    ran = run(Call.of(q, view, ranking), "reference")
    assert ran.backend == "reference"
    assert isinstance(ran.used, Blocks)
    tokens = random_selection("tokens", Shape.suffix(4, 2, 1, 320), 2, generator(1))
    ran = run(Call.of(q, view, tokens))
    assert ran.used is tokens


def test_errors_say_what_does_not_fit():
    q, k, v, view = call(4, 2, 3, 40, 32, seed=13)
    dense = Dense(Shape.suffix(4, 2, 3, 40))
    bad = [
        ((q[0], view), "must be"),
        ((q, k), "pair of tensors"),
        ((q, [k, v]), "pair of tensors"),
        ((q, (k, v[:, :5])), "k and v must both be"),
        ((q, (k[0], v[0])), "k and v must both be"),
        ((q, view, [dense]), "one selection"),
        ((q[:, :2], view, dense), "do not fit"),
        ((q[..., :16], view, dense), "do not fit"),
        ((q, view.upto(39), dense), "do not fit"),
        ((q, view, Dense(Shape.suffix(4, 1, 3, 40))), "do not fit"),
        (
            (q, view, Tokens(dense.shape, torch.arange(10), torch.zeros(9).int())),
            "3 units .* cannot serve 4 query heads",
        ),
        ((q, view, Ranking(dense.shape, 16, torch.zeros(1, 1).int(), torch.ones(1, 1).int(), 0.5)), "got q_len=3"),
        ((q, view, Candidates.all_keys(dense.shape, 2, 5)), "got q_len=3"),
        ((q[None], view, dense), "list of views"),
        ((q[None], [view, view], dense), "batch of 1 but 2"),
        ((q[None], [view], [dense, dense]), "2 selections"),
        ((torch.stack([q, q]), (torch.stack([k, k]), torch.stack([v, v, v]))), "as many"),
        ((q[None], [(k, v)], dense), "list of views"),
        ((q[None], [view, None], dense), "list of views"),
    ]
    for arguments, message in bad:
        with pytest.raises(SaccadeError, match=message):
            attend(*arguments)
    for number in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(SaccadeError, match=r"softcap=.* above 0 and finite"):
            attend(q, view, dense, softcap=number)
    for number in (math.inf, math.nan):
        with pytest.raises(SaccadeError, match=r"scale=.* finite"):
            attend(q, view, dense, scale=number)
    with pytest.raises(SaccadeError, match="known: auto, cpu, reference, triton"):
        attend(q, view, dense, backend="gpu")
    with pytest.raises(SaccadeError, match="backend 'cpu' cannot run Tokens"):
        attend(q, view, random_selection("tokens", dense.shape, 1, generator(0)), backend="cpu")
