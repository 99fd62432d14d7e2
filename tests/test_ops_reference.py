"""The reference backend and its front door against float64 brute force; merges; the progressive op against Alg. 1."""

from __future__ import annotations

import math

import pytest
import torch
from helpers import KINDS, Planted, brute_force, generator, planted_heads, random_selection

from saccade.errors import SaccadeError
from saccade.kv.view import KVView
from saccade.ops import Trace, attend, merge_state
from saccade.ops.scores import block_sums, cuboid_scores, mean_keys, row_logits, slash_sums
from saccade.selection import Band, Blocks, Dense, Ranking, Shape, Tokens

CLOSE = {"atol": 3e-5, "rtol": 1e-5}  # float32 against float64, where planted logits reach 20


def call(heads, kv_heads, q_len, n, head_dim, seed, block_size=32):
    q, k, v = planted_heads(heads, kv_heads, n, head_dim, seed)
    return q[:, n - q_len :], k, v, KVView.from_tensors(k, v, block_size, shuffle_seed=seed)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (8, 2), (8, 1)])
@pytest.mark.parametrize("head_dim", [32, 80, 128])
@pytest.mark.parametrize(("q_len", "n"), [(1, 1), (1, 33), (33, 65), (150, 193)])
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
    assert torch.isnan(view.k_pool).any()
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


def test_trace_names_the_backend_and_what_was_read():
    q, _, _, view = call(4, 2, 1, 320, 32, seed=12)
    trace, ranking = Trace(), random_selection("ranking", Shape.suffix(4, 2, 1, 320), 2, generator(1))
    attend(q, view, ranking, trace=trace)
    assert trace.backend == "reference"
    assert isinstance(trace.used, Blocks)
    trace, tokens = Trace(), random_selection("tokens", Shape.suffix(4, 2, 1, 320), 2, generator(1))
    attend(q, view, tokens, trace=trace)
    assert trace.used is tokens


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
    with pytest.raises(SaccadeError, match=r"softcap=0"):
        attend(q, view, dense, softcap=0.0)
    with pytest.raises(SaccadeError, match="known: auto, reference, cpu"):
        attend(q, view, dense, backend="gpu")
    with pytest.raises(SaccadeError, match="backend 'cpu' cannot run Tokens"):
        attend(q, view, random_selection("tokens", dense.shape, 1, generator(0)), backend="cpu")


# --- scores


def test_line_and_block_sums_equal_loops():
    rng = generator(2)
    for g, r, n in ((2, 5, 23), (1, 1, 7), (3, 16, 16), (2, 1, 1)):
        first = n - r
        causal = torch.arange(n)[None] <= first + torch.arange(r)[:, None]
        weights = torch.rand(g, r, n, generator=rng) * causal
        slashes = torch.zeros(g, n)
        for row in range(r):
            for key in range(first + row + 1):
                slashes[:, first + row - key] += weights[:, row, key]
        torch.testing.assert_close(slash_sums(weights, first), slashes)
        blocks = torch.stack([part.sum(-1) for part in weights.split(4, -1)], -1)
        torch.testing.assert_close(block_sums(weights, 4), blocks)


def test_row_logits_are_the_exact_causal_logits():
    q, k, _, view = call(8, 2, 20, 90, 32, seed=14)
    shape = Shape.suffix(8, 2, 20, 90)
    for softcap in (None, 2.0):
        scores = q[4:8, 3:7] @ k[1].T * 0.3
        scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
        expected = scores.masked_fill(~shape.causal_mask(3, 7), -math.inf)
        torch.testing.assert_close(row_logits(q, view, shape, 1, 3, 7, 0.3, softcap), expected)


@pytest.mark.parametrize("n", [31, 32, 33, 64, 100])
def test_mean_keys_average_the_real_keys_of_each_block(n):
    _, k, _, view = call(2, 2, 1, n, 32, seed=15, block_size=16)
    expected = torch.stack([part.mean(1) for part in k.split(32, 1)], 1)
    torch.testing.assert_close(mean_keys(view, 32), expected)


def arkvale_scores(q: torch.Tensor, k: torch.Tensor, size: int) -> torch.Tensor:
    """Criticality by the formula, a channel's interval at a time: [heads, full blocks]."""
    full = k.shape[1] // size
    keys = k[:, : full * size].unflatten(1, (full, size))
    center = (keys.amax(2) + keys.amin(2)) / 2
    spread = (center[:, :, None] - keys).abs().mean(2)
    group = torch.arange(q.shape[0]) // (q.shape[0] // k.shape[0])
    bounds = [q[:, None] * (center + sign * spread)[group] for sign in (1, -1)]  # [heads, full, d]
    return torch.maximum(*bounds).sum(-1)


def test_cuboid_scores_follow_arkvales_formula():
    q, k, _, view = call(8, 2, 1, 200, 32, seed=16, block_size=16)
    for size in (16, 32, 64):
        scores = cuboid_scores(q[:, 0], view.summary("cuboid", size))
        torch.testing.assert_close(scores, arkvale_scores(q[:, 0], k, size), atol=1e-4, rtol=1e-4)


# --- the progressive op (PSA, Alg. 1)


def alg1(q, k, v, ranking: Ranking, unit: int) -> tuple[torch.Tensor, int]:
    """PSA's Algorithm 1 as printed, with plain sums of exponentials in float64, for the query heads of one unit."""
    shape, size, n = ranking.shape, ranking.block_size, k.shape[1]
    per_unit = shape.heads // ranking.units
    heads = torch.arange(unit * per_unit, (unit + 1) * per_unit)
    of = heads // shape.group
    terms = torch.exp((k[of].double() @ q[heads, 0, :, None].double())[..., 0] / math.sqrt(q.shape[-1]))  # [h, n]
    sums = torch.nn.functional.pad(terms, (0, -n % size)).unflatten(1, (-1, size)).sum(-1)  # [h, blocks]
    read = ranking.always[unit].tolist()
    as_acc = sums[:, read].sum(1)
    as_min = torch.full_like(as_acc, math.inf)
    order, used = ranking.order[unit].tolist(), 0
    while used < len(order):
        batch = order[used : used + ranking.microbatch]
        used += len(batch)
        read += batch
        as_acc = as_acc + sums[:, batch].sum(1)
        least = sums[:, batch].amin(1)
        as_min = torch.minimum(as_min, least) if ranking.rest == "min" else sums[:, batch].amax(1)
        coverage = as_acc / (as_acc + as_min * (len(order) - used))
        if float(coverage.min() if ranking.stop == "all" else coverage.mean()) > ranking.epsilon:
            break
    kept = torch.isin(torch.arange(n) // size, torch.tensor(read))
    weights = terms * kept / as_acc[:, None]
    return (weights[:, None] @ v[of].double())[:, 0], used


def psa_ranking(q, view, size, units, *, always=(0, 1), **options) -> Ranking:
    """Order by ArkVale's score over everything but ``always``, the last full and the partial block."""
    heads, n = q.shape[0], view.length
    full, partial = divmod(n, size)
    fixed = [*always, full - 1, *([full] if partial else [])]
    scores = arkvale_scores(q[:, 0], view.keys(), size).unflatten(0, (units, -1)).mean(1)
    rest = [block for block in range(full) if block not in fixed]
    order = torch.tensor(rest)[scores[:, rest].argsort(dim=1, descending=True, stable=True)]
    shape = Shape.suffix(heads, view.kv_heads, 1, n)
    return Ranking(shape, size, torch.tensor(fixed).expand(units, -1).int(), order.int(), **options)


@pytest.mark.parametrize("rest", ["min", "last_max"])
@pytest.mark.parametrize("stop", ["all", "mean"])
@pytest.mark.parametrize("units", [1, 2, 8])
@pytest.mark.parametrize("n", [640, 671])
def test_the_progressive_op_is_alg_1(rest, stop, units, n):
    q, k, v, view = call(8, 2, 1, n, 32, seed=n)
    for epsilon, microbatch in ((0.5, 4), (0.9, 3), (0.95, 1)):
        ranking = psa_ranking(q, view, 32, units, epsilon=epsilon, microbatch=microbatch, rest=rest, stop=stop)
        ranking.check()
        trace = Trace()
        out, lse = attend(q, view, ranking, trace=trace)
        used = trace.used
        assert isinstance(used, Blocks)
        counts = used.block_mask()[:, 0].sum(1) - ranking.always.shape[1]
        for unit in range(units):
            expected, read = alg1(q, k, v, ranking, unit)
            assert int(counts[unit]) == read
            heads = slice(unit * 8 // units, (unit + 1) * 8 // units)
            torch.testing.assert_close(out[heads, 0].double(), expected, **CLOSE)
        # what was read, attended as plain blocks, is the same attention
        again, again_lse = attend(q, view, used, backend="reference")
        torch.testing.assert_close(out, again, **CLOSE)
        torch.testing.assert_close(lse, again_lse, **CLOSE)


def test_epsilon_one_reads_all_and_zero_one_microbatch():
    q, _, _, view = call(8, 2, 1, 700, 32, seed=20)
    for microbatch in (1, 4, 7):
        for epsilon, expected in ((1.0, 18), (0.0, microbatch)):
            trace = Trace()
            ranking = psa_ranking(q, view, 32, 2, epsilon=epsilon, microbatch=microbatch)
            out, _ = attend(q, view, ranking, trace=trace)
            assert trace.used.block_mask()[:, 0].sum(1).tolist() == [4 + expected] * 2
            if epsilon == 1.0:
                torch.testing.assert_close(out, attend(q, view)[0], **CLOSE)


def test_epsilon_one_reads_all_even_where_the_unread_underflow():
    """A dominant sink makes the estimate exactly 1.0 in float32; the comparison is strict, so reading goes on."""
    q, k, v = planted_heads(2, 1, 400, pattern=Planted(sink=200.0), seed=1)
    view = KVView.from_tensors(k, v)
    trace = Trace()
    attend(q[:, -1:], view, psa_ranking(q[:, -1:], view, 32, 1, epsilon=1.0, microbatch=1), trace=trace)
    assert int(trace.used.block_mask().sum()) == 13


def test_used_blocks_never_fall_as_epsilon_rises():
    for seed in range(2):
        q, _, _, view = call(8, 2, 1, 900, 32, seed=seed)
        for rest in ("min", "last_max"):
            before = torch.zeros(2, 1, 29, dtype=torch.bool)
            for epsilon in (0.0, 0.3, 0.6, 0.8, 0.9, 0.95, 0.99, 1.0):
                trace = Trace()
                attend(q, view, psa_ranking(q, view, 32, 2, epsilon=epsilon, microbatch=1, rest=rest), trace=trace)
                now = trace.used.block_mask()
                assert not (before & ~now).any()
                before = now


def test_a_one_token_last_block_does_not_stop_the_reading():
    """It is always read and stays out of the estimate, so 640 and 641 tokens read as many ranked blocks (P2)."""
    q, k, v = planted_heads(4, 2, 641, seed=6)
    counts = []
    for n in (640, 641):
        view = KVView.from_tensors(k[:, :n], v[:, :n])
        trace = Trace()
        attend(q[:, 600:601], view, psa_ranking(q[:, 600:601], view, 32, 2, epsilon=0.9, microbatch=1), trace=trace)
        counts.append(trace.used.block_mask()[:, 0].sum(1) - int(n > 640))
    assert torch.equal(*counts)


def test_an_oracle_ranking_gives_a_lower_bound_of_coverage():
    q, k, _, view = call(4, 4, 1, 640, 32, seed=21)
    logits = (q @ k.transpose(1, 2))[:, 0] / math.sqrt(32)
    block_lse = torch.logsumexp(logits.unflatten(1, (-1, 32)), -1)
    order = block_lse[:, :-1].argsort(dim=1, descending=True, stable=True)
    shape = Shape.suffix(4, 4, 1, 640)
    for epsilon in (0.5, 0.9, 0.95, 0.99):
        trace = Trace()
        ranking = Ranking(shape, 32, torch.full((4, 1), 19).int(), order.int(), epsilon=epsilon, microbatch=1)
        _, lse = attend(q, view, ranking, trace=trace)
        coverage = torch.exp(lse[:, 0] - torch.logsumexp(logits, -1))
        assert (coverage >= epsilon).all()


def test_ranking_with_empty_always_and_with_empty_order():
    q, k, v, view = call(4, 2, 1, 96, 32, seed=22)
    shape = Shape.suffix(4, 2, 1, 96)
    none = torch.empty(2, 0, dtype=torch.int32)
    every = torch.arange(3).int().expand(2, -1)
    dense = brute_force(q, k, v, Dense(shape).mask())[0]
    for always, order in ((none, every), (every, none)):
        out, _ = attend(q, view, Ranking(shape, 32, always, order, epsilon=1.0))
        torch.testing.assert_close(out.double(), dense, **CLOSE)
    out, lse = attend(q, view, Ranking(shape, 32, none, none, epsilon=1.0))
    assert (out == 0).all()
    assert torch.isneginf(lse).all()
