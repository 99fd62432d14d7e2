"""Attention over candidates: which are read, by brute force, and on every backend alike."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from helpers import brute_force, call, generator
from test_ops_weights import by_head

from saccade.errors import SaccadeError
from saccade.kv.view import KVView
from saccade.ops import Call, attend, cpu, run
from saccade.selection import Candidates, Cone, Shape, Tokens, cut
from saccade.selection.evicted import without

REFERENCE = "reference"


@pytest.fixture(params=[REFERENCE, *cpu.supported_isas()])
def backend(request):
    """Every way the call may run: the reference, and each instruction set's kernels."""
    if request.param == REFERENCE:
        yield REFERENCE
        return
    cpu.set_isa(request.param)
    yield "cpu"
    cpu.set_isa(None)


def some(shape: Shape, units: int, k: list[int], seed: int, **options) -> Candidates:
    """Random lists that keep clear of the forced keys."""
    blank = Candidates.all_keys(shape, units, 1, options.get("sinks", 0), options.get("local", 0))
    first, last = blank.forced
    mask = torch.rand(units, shape.k_len, generator=generator(seed)) < 0.3
    mask[:, :first] = mask[:, last:] = False
    if options.get("full") is not None:
        mask[options["full"]] = False
    lists = Tokens.from_mask(shape, mask[:, None])
    made = Candidates(shape, lists.offsets, lists.indices, torch.tensor((k * units)[:units]), **options)
    made.check()
    return made


def expected_keys(q, k, selection: Candidates, head: int, softcap=None) -> list[int]:
    """What a head reads, from the definition."""
    shape, n = selection.shape, selection.shape.k_len
    per_unit = shape.heads // selection.units
    unit, group = head // per_unit, shape.group
    idle = selection.idle.tolist() if selection.idle is not None else [False] * shape.heads
    if idle[head]:
        return list(range(min(selection.idle_keys, n)))
    forced = sorted({i for i in range(n) if i < selection.sinks or i >= n - selection.local})
    full = selection.full is not None and bool(selection.full[unit])
    listed = selection.indices[selection.offsets[unit] : selection.offsets[unit + 1]].tolist()
    listed = [i for i in (range(n) if full else listed) if i not in forced]
    pool = sorted([*forced, *listed])
    score = dict.fromkeys(pool, 0.0)
    voters = [h for h in range(unit * per_unit, (unit + 1) * per_unit) if not idle[h]]
    for voter in voters:
        logits = (q[voter, 0].double() @ k[voter // group, pool].double().T) / math.sqrt(q.shape[-1])
        logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
        values = logits if len(voters) == 1 else torch.softmax(logits, 0)
        for place, value in zip(pool, values.tolist()):
            score[place] += value
    best = sorted(listed, key=lambda i: (-score[i], i))[: int(selection.k[unit])]
    return sorted([*forced, *best])


FLAGS = torch.tensor
CASES = {
    "per head": {"units": 4, "k": [9, 1, 200, 0], "sinks": 2, "local": 3},
    "per kv head": {"units": 2, "k": [17, 5]},
    "nothing forced": {"units": 4, "k": [9, 1, 200, 3]},
    "all keys": {"units": 4, "k": [20, 150, 7, 149], "full": FLAGS([True] * 4), "sinks": 1},
    "some full": {"units": 4, "k": [20, 10, 500, 3], "full": FLAGS([True, False, False, True]), "sinks": 4, "local": 2},
    "full kv head": {"units": 2, "k": [20, 30], "full": FLAGS([False, True]), "local": 8},
    "idle heads": {"units": 2, "k": [12, 8], "sinks": 4, "idle": FLAGS([True, False, True, True]), "idle_keys": 4},
    "idle units": {"units": 4, "k": [12], "sinks": 4, "idle": FLAGS([False, True, False, True]), "idle_keys": 3},
    "forced alone": {"units": 2, "k": [0, 0], "sinks": 4, "local": 2},
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(
    ("n", "softcap", "dtype"), [(150, None, "float32"), (333, 3.0, "float32"), (333, None, "bf16")]
)
def test_the_best_candidates_are_read(backend, name, n, softcap, dtype):
    q, k, v, view = call(4, 2, 1, n, 48, seed=n)
    if dtype == "bf16":
        q, k, v = q.bfloat16(), k.bfloat16(), v.bfloat16()
        view = KVView.from_tensors(k, v, shuffle_seed=1)
    selection = some(Shape.suffix(4, 2, 1, n), seed=n, **CASES[name])
    ran = run(Call.of(q, view, selection, softcap=softcap, want_weights=True), backend)
    out, lse = ran.out, ran.lse
    assert ran.backend.startswith(backend)
    ran.used.check()
    mask = torch.zeros(4, 1, n, dtype=torch.bool)
    for head in range(4):
        mask[head, 0, expected_keys(q, k, selection, head, softcap)] = True
    assert torch.equal(ran.used.mask(), mask)
    want, want_lse = brute_force(q, k, v, mask, softcap=softcap)
    tolerance = {"atol": 1e-5, "rtol": 1e-5} if dtype == "float32" else {"atol": 2e-2, "rtol": 2e-2}
    torch.testing.assert_close(out.double(), want, **tolerance)
    torch.testing.assert_close(lse.double(), want_lse, atol=1e-4, rtol=1e-4)
    scores = (q.double() @ k.double().repeat_interleave(2, 0).transpose(1, 2))[:, 0] / math.sqrt(48)
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    weights = torch.softmax(scores.masked_fill(~mask[:, 0], -torch.inf), -1).nan_to_num(0.0)
    torch.testing.assert_close(by_head(ran.weights, ran.used).double(), weights, atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize("n", [1, 15, 16, 17, 70])
def test_short_contexts_and_budgets_beyond_them(backend, n):
    q, k, v, view = call(4, 2, 1, n, 32, seed=n, block_size=16)
    shape = Shape.suffix(4, 2, 1, n)
    for selection in (
        Candidates.all_keys(shape, 4, 1000, sinks=4, local=6),
        Candidates.all_keys(shape, 2, n, sinks=100),
        Candidates.all_keys(shape, 4, max(0, n - 1), local=1),
    ):
        out, lse = attend(q, view, selection, backend=backend)
        want, want_lse = brute_force(q, k, v, torch.ones(4, 1, n, dtype=torch.bool))
        torch.testing.assert_close(out.double(), want, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(lse.double(), want_lse, atol=1e-5, rtol=1e-5)


def test_ties_go_to_the_lower_index(backend):
    """Five different keys, repeated: nearly every choice is among equals."""
    base = torch.randn(1, 5, 32, generator=generator(1))
    k = base[:, torch.arange(200) % 5].contiguous()
    q = torch.randn(2, 1, 32, generator=generator(2))
    for count in (1, 39, 40, 41, 97, 199):
        selection = Candidates.all_keys(Shape.suffix(2, 1, 1, 200), 2, count)
        ran = run(Call.of(q, (k, k), selection), backend)
        for head, chosen in enumerate(ran.used.lists()):
            order = (q[head] @ base[0].T)[0].argsort(descending=True).tolist()
            ranked = [i for kind in order for i in range(kind, 200, 5)]
            assert chosen.tolist() == sorted(ranked[:count])


@pytest.mark.parametrize("spread", [1e-3, 1.0, 30.0])
def test_any_number_of_a_long_list(backend, spread):
    """Values crowded, even and spread over many powers of two: the bins of the search must hold."""
    n = 3000
    q = torch.zeros(1, 1, 16)
    q[..., 0] = 4.0
    values = torch.randn(n, generator=generator(3)).double() * spread
    values = torch.sign(values) * values.abs() ** 3 if spread > 1 else values + 5
    k = torch.zeros(1, n, 16)
    k[0, :, 0] = values.float()
    order = torch.sort(k[0, :, 0], descending=True, stable=True).indices
    for count in (1, 2, 63, 64, 999, 2999):
        selection = Candidates.all_keys(Shape.suffix(1, 1, 1, n), 1, count)
        ran = run(Call.of(q, (k, k), selection), backend)
        assert torch.equal(ran.used.lists()[0].long(), order[:count].sort().values)


def test_the_estimated_rest_joins_by_log_sum_exp(backend):
    q, _k, _v, view = call(4, 2, 1, 100, 32, seed=0)
    selection = some(Shape.suffix(4, 2, 1, 100), units=4, k=[10], seed=0, sinks=2)
    plain, plain_lse = attend(q, view, selection, backend=backend)
    rest_lse, value = torch.tensor([2.0, -torch.inf, 0.5, 30.0]), torch.randn(4, 32, generator=generator(5))
    with_rest = replace(selection, rest=(rest_lse, value))
    ran = run(Call.of(q, view, with_rest, want_weights=True), backend)
    out, lse = ran.out, ran.lse
    a, b = plain_lse[:, 0].double().exp(), rest_lse.double().exp()
    want = (a[:, None] * plain[:, 0].double() + b[:, None] * value.double()) / (a + b)[:, None]
    torch.testing.assert_close(out[:, 0].double(), want, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse[:, 0].double(), (a + b).log(), atol=1e-5, rtol=1e-5)
    sums = by_head(ran.weights, ran.used).sum(1)
    torch.testing.assert_close(sums, torch.ones(4), atol=1e-5, rtol=0)  # of what was read alone


def test_token_lists_of_one_row(backend):
    """Lists as they are, empty ones too, per query head and per KV head."""
    for units in (2, 4):
        q, k, v, view = call(4, 2, 1, 210, 64, seed=units)
        mask = torch.rand(units, 1, 210, generator=generator(units)) < 0.2
        mask[1] = False
        tokens = Tokens.from_mask(Shape.suffix(4, 2, 1, 210), mask)
        out, lse = attend(q, view, tokens, backend=backend)
        want, want_lse = brute_force(q, k, v, tokens.mask())
        torch.testing.assert_close(out.double(), want, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(lse.double(), want_lse, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("heads", "head_dim", "units"), [(1, 16, 1), (3, 80, 1), (6, 128, 1), (5, 128, 5), (4, 320, 2)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lists_of_every_length_around_a_batch_of_rows(backend, heads, head_dim, units, dtype):
    """Rows are read 64 at a time, in bfloat16 in pairs, 4 heads at a time: none is missed, none read twice, at the
    edges of all three."""
    n = 700
    q, k, v, _ = call(heads, 1, 1, n, head_dim, seed=heads)
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    view = KVView.from_tensors(k, v, shuffle_seed=2)
    tolerance = {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 2e-2, "rtol": 2e-2}
    for count in (1, 2, 63, 64, 65, 127, 129, 256, 257, 321, 699):
        mask = torch.zeros(units, 1, n, dtype=torch.bool)
        for unit in range(units):
            mask[unit, 0, torch.randperm(n, generator=generator(count + unit))[:count]] = True
        tokens = Tokens.from_mask(Shape.suffix(heads, 1, 1, n), mask)
        ran = run(Call.of(q, view, tokens, want_weights=True), backend)
        out, lse = ran.out, ran.lse
        want, want_lse = brute_force(q, k, v, tokens.mask())
        torch.testing.assert_close(out.double(), want, **tolerance)
        torch.testing.assert_close(lse.double(), want_lse, atol=1e-4, rtol=1e-4)
        weights = by_head(ran.weights, tokens)
        torch.testing.assert_close(weights.sum(-1), torch.ones(heads), atol=1e-5, rtol=0)
        assert not weights[~tokens.mask()[:, 0]].any()


def test_threads_do_not_matter():
    if not cpu.available():
        pytest.skip("no kernels")
    q, _, _, view = call(8, 4, 1, 300, 32, seed=3)
    selection = some(Shape.suffix(8, 4, 1, 300), units=8, k=[20], seed=3)
    one, two = (attend(q, view, selection, threads=threads) for threads in (1, 2))
    assert torch.equal(one[0], two[0])
    assert torch.equal(one[1], two[1])


@pytest.mark.parametrize("full", [False, True])
def test_a_window_hides_candidates_before_they_are_ranked(backend, full):
    q, k, _v, view = call(4, 2, 1, 200, 32, seed=8)
    shape = Shape.suffix(4, 2, 1, 200)
    flags = torch.ones(4, dtype=torch.bool) if full else None
    selection = some(shape, units=4, k=[12], seed=8, sinks=4, local=3, full=flags)
    cone = Cone(0.5, sinks=2, local=10)
    narrowed = cut(selection, cone)
    narrowed.check()
    ran = run(Call.of(q, view, narrowed), backend)
    visible = cone.row_mask(shape, 0, 1)[0]
    for head, chosen in enumerate(ran.used.lists()):
        pool = [i for i in selection.listed(head).tolist() if visible[i]]
        scores = (q[head, 0] @ k[head // 2, pool].T).tolist()
        best = [i for _, i in sorted(zip([-s for s in scores], pool))][:12]
        forced = [i for i in (*range(4), *range(197, 200)) if visible[i]]
        assert chosen.tolist() == sorted([*best, *forced])


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("from_key", [0, 10])
def test_evicted_keys_are_no_candidates(backend, full, from_key):
    """Of what is left the best are read, as many as before; forced keys too may be gone."""
    q, k, _, view = call(4, 2, 1, 200, 32, seed=9)
    shape = Shape.suffix(4, 2, 1, 200)
    flags = torch.ones(4, dtype=torch.bool) if full else None
    selection = some(shape, units=4, k=[12], seed=9, sinks=4, local=3, full=flags)
    gone = torch.rand(2, 150, generator=generator(4)) < 0.5
    gone[:, :from_key] = False
    left = without(selection, gone)
    left.check()
    ran = run(Call.of(q, view, left), backend)
    for head, chosen in enumerate(ran.used.lists()):
        hidden = set(gone[head // 2].nonzero()[:, 0].tolist())
        forced = [i for i in (*range(4), *range(197, 200)) if i not in hidden]
        pool = [i for i in selection.listed(head).tolist() if i not in hidden]
        scores = (q[head, 0] @ k[head // 2].T).tolist()
        if from_key:  # the forced keys are all there
            best = sorted(pool, key=lambda i: -scores[i])[:12]
            assert chosen.tolist() == sorted([*best, *forced])
        else:  # what is left of them competes
            best = sorted([*pool, *forced], key=lambda i: -scores[i])[: 12 + len(forced)]
            assert chosen.tolist() == sorted(best)


def test_bad_candidates_are_refused():
    shape = Shape.suffix(4, 2, 1, 50)
    lists = Tokens.from_lists(shape, [torch.tensor([3, 7])] * 4)
    good = Candidates(shape, lists.offsets, lists.indices, torch.full((4,), 1), sinks=3, local=10)
    good.check()
    with pytest.raises(SaccadeError, match="forced"):
        replace(good, sinks=4).check()
    with pytest.raises(SaccadeError, match="outside"):
        replace(good, local=44).check()
    with pytest.raises(SaccadeError, match="budgets"):
        replace(good, k=torch.ones(3)).check()
    with pytest.raises(SaccadeError, match="one query row"):
        replace(good, shape=Shape.suffix(4, 2, 2, 50)).check()
