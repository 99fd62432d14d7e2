"""Keys and values in 8 bits: what is stored, and that all that reads it computes what it computes of the values that
the codes stand for, held in a plain pool."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from coded_rows import rounded, same_values, views
from engine_helpers import GREEDY, tokens
from helpers import KINDS, brute_force, generator, planted_heads, random_selection
from tiny_models import make_checkpoint, random_ids

from saccade import LLM, SaccadeError, SamplingParams
from saccade.engine.settings.config import EngineConfig
from saccade.kv import BlockManager, KVFormat, KVStorage, KVView, SequenceKV
from saccade.kv.row_formats import AUTO, HALF, INT8
from saccade.kv.saved import SavedKV, load_kv, save_kv
from saccade.methods.labels.store import Labels
from saccade.ops import Call, cpu, cpu_rows, cpu_sums, run
from saccade.ops.movers import row_mover
from saccade.ops.rounding import attention_error
from saccade.ops.scores import antidiagonal_shares, line_sums, row_logits
from saccade.ops.truth import by_torch, group_truth
from saccade.pools import make_pool
from saccade.selection import Blocks, Dense, Shape

DTYPES = torch.float32, torch.bfloat16
CPU = pytest.mark.skipif(not cpu.available(), reason="needs the C++ kernels")


def adversarial(dtype: torch.dtype, head_dim: int = 64) -> torch.Tensor:
    """Rows [n, head_dim]: zeros, ties between codes, one outlier, the smallest and the largest numbers, none at all."""
    rows = torch.randn(12, head_dim, generator=generator(3))
    rows[0] = 0
    rows[1] = torch.arange(head_dim) % 5 - 2.5
    rows[1, 0] = 127.0  # a scale of 1: halves are ties
    rows[2, 7] = 4e4
    rows[3] *= 1e-39
    rows[4] *= 1e-44
    rows[5] *= 3e37
    rows[6, 3] = math.inf
    rows[7, 5] = math.nan
    rows[8] = -1.0
    return rows.to(dtype)


@pytest.mark.parametrize("head_dim", [16, 64, 80, 128])
@pytest.mark.parametrize("dtype", DTYPES)
def test_codes_are_the_nearest_multiples_of_a_127th_of_the_largest_value(dtype, head_dim):
    rows = adversarial(dtype, head_dim)
    stored = INT8.encode(rows, torch.int8)
    assert stored.dtype == torch.int8
    scales = -(-head_dim // 64)
    assert stored.shape == (12, head_dim + 2 * scales + 2 * (scales % 2)) == (12, INT8.width(head_dim))
    assert INT8.head_dim(stored.shape[1]) == head_dim
    read = INT8.decode(stored, dtype)
    assert read.dtype == dtype
    for row, kept, back in zip(rows.double(), stored, read):
        for part, first in enumerate(range(0, head_dim, 64)):
            values, codes = (one[:head_dim].double()[first : first + 64] for one in (row, kept))
            scale = float(kept[head_dim:].contiguous().view(torch.bfloat16)[part])
            if not values.isfinite().all():
                assert math.isnan(scale)
                assert back[first : first + 64].isnan().all()
                continue
            assert scale == pytest.approx(float(values.abs().max()) / 127, rel=2**-8, abs=1e-40)
            assert codes.abs().max() <= 127
            if scale > 1e-38:
                assert ((values - codes * scale).abs() <= scale / 2 * (1 + 1e-6)).all()
                assert codes.abs().max() in (126, 127)
            exact = (codes.float() * scale).to(dtype)
            assert torch.equal(back[first : first + 64], exact)
    assert torch.equal(read[0], torch.zeros(head_dim, dtype=dtype))
    assert torch.equal(read[1, :6], rows[1, :6].float().round())
    assert torch.equal(INT8.encode(stored, torch.int8), stored)  # what is stored goes back as it is


@CPU
@pytest.mark.parametrize("head_dim", [64, 80, 128])
@pytest.mark.parametrize("dtype", DTYPES)
def test_cpp_stores_the_same_bytes(dtype, head_dim):
    rows = adversarial(dtype, head_dim)[None].expand(2, -1, -1)
    pools = torch.zeros(2, 3, 2, 16, INT8.width(head_dim), dtype=torch.int8)
    cpu_rows.store(rows, rows, *pools, [(i, 1, i) for i in range(12)])
    for pool in pools:
        ours, theirs = pool[1, :, :12], INT8.encode(rows, torch.int8)
        values = slice(0, head_dim)  # a scale that is not a number may be any of those
        assert torch.equal(ours[..., values], theirs[..., values])
        scales = [one[..., head_dim:].contiguous().view(torch.bfloat16) for one in (ours, theirs)]
        assert torch.equal(*(one.nan_to_num(-1) for one in scales))
        assert not pool[[0, 2]].any()
        assert not pool[1, :, 12:].any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_views_give_the_values(dtype):
    _, coded, plain = views(dtype, 77, rows=INT8)
    assert coded.dtype == dtype
    assert coded.format.block_bytes == 2 * 2 * 32 * 68
    for ours, theirs in same_values(coded, plain):
        assert torch.equal(ours, theirs)
    for kind in ("minmax", "cuboid", "mean_value"):
        assert torch.equal(coded.upto(64).summary(kind, 16), plain.upto(64).summary(kind, 16))


@CPU
@pytest.mark.parametrize("head_dim", [64, 80])
@pytest.mark.parametrize("dtype", DTYPES)
def test_kernels_compute_what_they_do_of_the_values(dtype, head_dim):
    """To the bit, but where decode multiplies codes as they lie: decode and prefill of every selection, in calls of few
    rows and of many."""
    n = 333
    q, coded, plain = views(dtype, n, head_dim, rows=INT8)
    rng = generator(0)
    for rows in (1, 3, 150):
        shape = Shape.suffix(8, 2, rows, n)
        for kind in KINDS if rows == 1 else KINDS[:6]:
            selection = random_selection(kind, shape, 2, rng)
            ours, theirs = (
                run(Call.of(q[:, -rows:], view, selection, threads=2), "auto" if kind == "tokens" else "cpu")
                for view in (coded, plain)
            )
            if dtype == torch.bfloat16 and head_dim == 64:
                assert torch.allclose(ours.out.float(), theirs.out.float(), rtol=2e-2, atol=8e-2), (kind, rows)
                assert torch.allclose(ours.lse, theirs.lse, atol=5e-2), (kind, rows)
            else:
                assert torch.equal(ours.out, theirs.out), (kind, rows)
                assert torch.equal(ours.lse, theirs.lse), (kind, rows)


def spread(n: int, head_dim: int, kind: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries [8, 1, head_dim] and rows of two KV heads. ``tail``: one key has as much weight as all others together;
    ``outlier``: channels of queries and keys of a thousand times the others' size; ``zero``: rows and a query of 0."""
    q, k, v = planted_heads(8, 2, n, head_dim, seed=n)
    q = q[:, -1:].clone()
    if kind == "tail":
        q[:] = torch.nn.functional.normalize(q, dim=-1) * head_dim**0.5
        k *= 0.05
        for head in range(2):
            at = q[4 * head, 0]
            k[head, n // 3] = at * (math.log(n) * head_dim**0.5 / at.square().sum())
    elif kind == "outlier":
        q[..., 5] *= 30
        k[..., 5] *= 30
        k[..., 40] *= 300
        q[..., 40] /= 300
        v[..., 9] *= 1000
    elif kind == "zero":
        k[:, ::3] = 0
        v[:, 1::3] = 0
        q[2] = 0
    return tuple(part.bfloat16() for part in (q, k, v))


@CPU
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("kind", ["planted", "tail", "outlier", "zero"])
def test_decode_of_codes_is_float64s_attention_over_their_numbers(kind, head_dim):
    """And no further from it than decode of 16-bit rows that are those numbers, rounded."""
    for n in (1, 31, 333, 4500):
        q, k, v = spread(n, head_dim, kind) if n > 3 or kind == "planted" else spread(31, head_dim, "planted")
        n = k.shape[1]
        coded = KVView.from_tensors(k, v, 32, shuffle_seed=1, rows=INT8)
        exact = [INT8.decode(part, torch.float32) for part in coded.stored()]
        wanted, lse = brute_force(q, *exact, torch.ones(1, n, dtype=torch.bool))
        plain = KVView.from_tensors(rounded(k, INT8), rounded(v, INT8), 32, shuffle_seed=2)
        shape, size = Shape.suffix(8, 2, 1, n), wanted.abs().amax(-1)
        ours, theirs = (run(Call.of(q, view, Dense(shape), threads=2), "cpu") for view in (coded, plain))
        # A query's channels are off by at most half a 32767th of its largest one.
        most = (
            q.double().abs().amax(-1) / 65534 * exact[0].double().abs().sum(-1).amax(-1).repeat_interleave(4)[:, None]
        )
        assert ((ours.lse - lse).abs() <= most * head_dim**-0.5 + 1e-4 * (1 + lse.abs())).all(), (kind, n)
        if kind != "outlier":  # where rounding a query moves weights, as it does in 16 bits
            errors = [float(((one.out.double() - wanted).abs().amax(-1) / size).amax()) for one in (ours, theirs)]
            assert errors[0] <= 1.2 * errors[1] + 4e-3, (kind, n)


@CPU
def test_numbers_that_are_none_stay_none():
    """A row that reads as NaN makes what reads it NaN, and nothing else."""
    q, k, v = spread(333, 64, "planted")
    k[0, 200, 7] = math.inf
    v[1, 100, 3] = math.nan
    view = KVView.from_tensors(k, v, 32, rows=INT8)
    out = run(Call.of(q, view, Dense(Shape.suffix(8, 2, 1, 333))), "cpu").out
    assert out[:4].isnan().all()
    assert out[4:].isnan().all()
    blocks = Blocks.from_block_mask(Shape.suffix(8, 2, 1, 333), 32, torch.arange(11).expand(2, 1, -1) != 6)
    out = run(Call.of(q, view, blocks), "cpu").out
    assert out[:4].isfinite().all()
    q[5, 0, 9] = math.nan
    whole = KVView.from_tensors(k.nan_to_num(posinf=0), v.nan_to_num(0), rows=INT8)
    out = run(Call.of(q, whole, Dense(Shape.suffix(8, 2, 1, 333))), "cpu").out
    assert out.isnan().all(-1).flatten().tolist() == [head == 5 for head in range(8)]


@CPU
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_chooses_reads_the_values_too(dtype):
    n, scale = 333, 0.125
    q, coded, plain = views(dtype, n, rows=INT8)
    shape, last = Shape.suffix(8, 2, 70, n), q[:, -1]
    for make in (
        lambda view: line_sums(q[:, -70:], view, shape, 20, scale),
        lambda view: [antidiagonal_shares(q[:, -70:], view, shape, 8, 64, scale)],
        lambda view: [row_logits(q[:, -70:], view, shape, 1, 3, 9, scale)],
        lambda view: cpu_sums.line_sums(q[:, -70:], view, shape, 20, scale, None),
        lambda view: group_truth(last, view, 1, scale=scale),
        lambda view: by_torch(last[4:], view, 1, scale=scale),
        lambda view: [labels(view, 4), labels(view, 8)],
    ):
        for ours, theirs in zip(make(coded), make(plain), strict=True):
            assert torch.equal(ours, theirs)


def labels(view: KVView, bits: int) -> torch.Tensor:
    made = Labels(torch.arange(0, 64, 4).expand(2, -1).contiguous(), bits)
    made.extend(view)
    return made._codes


@CPU
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_summaries_of_all_layers_and_heads_with_slots_of_their_own(dtype, apart):
    sequences = []
    for rows in (INT8, AUTO):
        storage = KVStorage(KVFormat(dtype, 2, 64, 16, rows, rows), 40, mover=row_mover(torch.device("cpu")))
        kv = SequenceKV(BlockManager(storage, 2, heads_apart=apart))
        kv.reserve(50)
        for layer in range(2):
            k, v = torch.randn(2, 2, 50, 64, generator=generator(layer)).to(dtype)
            k, v = (k, v) if rows is INT8 else (rounded(k, INT8), rounded(v, INT8))
            kv.append(layer, k[:, :49], v[:, :49])
            kv.append(layer, k[:, 49:], v[:, 49:])
        sequences.append(kv)
    coded, plain = sequences
    for layer in range(2):
        assert torch.equal(coded.view(layer).keys(), plain.view(layer).keys())
        for kind in ("minmax", "moments", "mean", "mean_value"):
            assert torch.equal(coded.view(layer).summary(kind, 16), plain.view(layer).summary(kind, 16))
    saved, child = save_kv(coded), coded.fork()
    other = load_kv(coded.pool, saved)
    child.reserve(51)
    child.append(0, *torch.ones(2, 2, 1, 64, dtype=dtype))
    for layer in range(2):  # the very bytes
        for ours, theirs in zip(coded.view(layer).stored(), other.view(layer).stored()):
            assert ours.dtype == torch.int8
            assert torch.equal(ours, theirs)
    with pytest.raises(SaccadeError, match="k_rows='int8', but this storage has 'auto'"):
        load_kv(plain.pool, saved)
    with pytest.raises(SaccadeError, match="k_rows='auto', but this storage has 'int8'"):
        load_kv(coded.pool, save_kv(plain))
    without = SavedKV(saved.tensors, {k: v for k, v in saved.metadata.items() if not k.endswith("_rows")})
    with pytest.raises(SaccadeError, match="k_rows='auto'"):
        load_kv(coded.pool, without)


@pytest.mark.parametrize("outlier", [1.0, 30.0])
def test_attention_stays_within_the_bound(outlier):
    """A key's logit is off by at most |q|_1 * scale / 2, a value by half its scale; weights by what logits are."""
    n, d = 200, 64
    q, k, v = planted_heads(4, 2, n, d)
    k[..., 9] *= outlier
    exact, _ = brute_force(q[:, -1:], k, v, torch.ones(1, n, dtype=torch.bool))
    view = KVView.from_tensors(k, v, rows=INT8)
    found = run(Call.of(q[:, -1:], view, Dense(Shape.suffix(4, 2, 1, n)))).out.double()
    off = q[:, -1].abs().sum(-1) * k.abs().amax((1, 2)).repeat_interleave(2) / 127 / 2 * d**-0.5
    largest = v.abs().amax((1, 2)).repeat_interleave(2).double()
    bound = largest * (torch.exp(2 * off.double()) - 1) + largest / 127 / 2
    error = (found - exact).abs().amax((1, 2))
    assert (error <= bound + 1e-5).all()
    assert (error > 0).all()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_checkpoint(
        "llama", tmp_path_factory.mktemp("wide"), max_position_embeddings=1024, head_dim=16, tie_word_embeddings=False
    )


OPTIONS = {"dtype": "float32", "kv_memory": "8MiB", "prefill_chunk": 64, "block_size": 16}


def test_prefixes_batches_and_tiers_change_no_token(model, tmp_path):
    common = random_ids(160, seed=1)
    prompts = [common + random_ids(9, seed=seed) for seed in range(3)]
    with LLM(model, **OPTIONS, kv_dtype="int8", exact=True) as llm:
        alone = [tokens(llm.generate(ids, GREEDY, policy="psa(epsilon=0.5)")[0]) for ids in prompts]
        assert [tokens(one) for one in llm.generate(prompts, GREEDY, policy="psa(epsilon=0.5)")] == alone
    with LLM(model, **OPTIONS, kv_dtype="int8", exact=True, enable_prefix_caching=True) as llm:
        assert [tokens(llm.generate(ids, GREEDY, policy="psa(epsilon=0.5)")[0]) for ids in prompts] == alone
    block = KVFormat(torch.float32, 2, 16, 16, INT8, INT8).block_bytes
    for tier in ({"kv_disk": f"{tmp_path}:8MiB"}, {"kv_host": "8MiB"}):
        small = OPTIONS | {"kv_memory": 40 * block}
        with LLM(model, **small, **tier, kv_dtype="int8", exact=True) as llm:
            assert [tokens(llm.generate(ids, GREEDY, policy="psa(epsilon=0.5)")[0]) for ids in prompts] == alone


def test_saved_sessions_hold_the_bytes_or_are_computed_again(model, tmp_path):
    ids, policy = random_ids(150, seed=9), "psa(epsilon=0.5)"
    answers = {}
    with LLM(model, **OPTIONS, kv_dtype="int8") as llm, llm.session(policy=policy) as session:
        first = session.generate(ids, GREEDY)
        session.save(tmp_path / "one")
        answers["going on"] = tokens(session.generate(ids[:20], GREEDY))
        with llm.restore(tmp_path / "one") as other:
            again = other.generate(ids[:20], GREEDY)
            answers["restored"] = tokens(again)
            assert "computed again" not in str(again.report["notes"])
            assert len(other.token_ids) == len(ids) + len(tokens(first)) + 20 + 10
    assert answers["restored"] == answers["going on"]


@pytest.mark.parametrize(("saved", "opened"), [("auto", "int8"), ("int8", "auto"), ("bf16", "int8")])
def test_sessions_of_another_format_are_computed_again_by_name(model, tmp_path, saved, opened):
    """Their report and their note name both formats and the settings that read what is saved, and what is said then is
    what the other format says; they are not read as bytes of it."""
    ids, more = random_ids(150, seed=9), random_ids(20, seed=10)
    with LLM(model, **OPTIONS, kv_dtype=saved) as llm, llm.session() as session:
        session.generate(ids, GREEDY)
        session.save(tmp_path / "one")
        known = list(session.token_ids)
    with LLM(model, **OPTIONS, kv_dtype=opened) as llm:
        (want,) = llm.generate([known + more], GREEDY)
        with llm.restore(tmp_path / "one") as other:
            way = f"kv_dtype='{saved}' with kv_rotate={saved == 'int8'} reads it"
            said = f"k_rows='{saved}', but this storage has '{opened}'; {way}"
            assert said in other.note
            got = other.generate(more, GREEDY)
            assert said in str(got.report["notes"])
            assert got.report["cached_tokens"] == 0
            assert tokens(got) == tokens(want)


def test_a_store_counts_the_tokens_of_another_format_as_computed_again(model, tmp_path):
    ids = random_ids(150, seed=9)
    with LLM(model, **OPTIONS, session_dir=str(tmp_path)) as llm, llm.session(name="one") as session:
        session.generate(ids, GREEDY)
    with LLM(model, **OPTIONS, session_dir=str(tmp_path), kv_dtype="int8") as llm, llm.session(name="one") as session:
        output = session.generate(ids[:20], GREEDY)
        said = str(output.report["notes"])
        assert "computed again" in said
        assert "kv_dtype='auto' with kv_rotate=False reads it" in said
        assert llm.sessions.counts["tokens_recomputed"] >= len(ids)


def test_what_it_refuses(model):
    with pytest.raises(SaccadeError, match="kv_dtype='int4' is unknown; known: auto, bf16, fp8, int8"):
        EngineConfig(kv_dtype="int4")
    shape = {"dtype": torch.float32, "kv_heads": 2, "head_dim": 64, "layers": 3, "stored": 3, "family": "minicpm3"}
    others = "'auto' or 'fp8' or 'int8'"
    for name, device, backend, latents, said in (
        (
            "bf16",
            "cuda",
            "auto",
            None,
            f"'bf16' is read by C\\+\\+ .* a GPU's kernels would read it here; give .*{others}",
        ),
        ("bf16", "cpu", "triton", None, "a GPU's kernels would read it here"),
        ("int8", "cuda", "auto", 32, "'int8': minicpm3 stores latents, .* leave kv_dtype at 'auto'"),
        ("fp8", "cpu", "triton", 32, "'fp8': minicpm3 stores latents, .* leave kv_dtype at 'auto'"),
    ):
        there = SimpleNamespace(spec=SimpleNamespace(**shape, value_dim=latents), device=torch.device(device))
        with pytest.raises(SaccadeError, match=said) as raised:
            make_pool(EngineConfig(kv_dtype=name, backend=backend), there, 100)
        assert "\n" not in str(raised.value)
    q, k, v = planted_heads(8, 2, 40, 64)
    with pytest.raises(SaccadeError, match="no bf16 rows"):
        run(Call.of(q[:, -1:], KVView.from_tensors(k, v, rows=HALF), Dense(Shape.suffix(8, 2, 1, 40))), "triton")


@pytest.mark.parametrize("rows", [INT8, HALF])
def test_nothing_is_certified_of_numbers_with_too_few_digits(rows):
    """Scales and numbers below bfloat16's least normal one are rounded by more than their format says."""
    q, k, v = planted_heads(4, 2, 40, 64)
    for size, known in ((1.0, True), (1e-38, False), (0.0, True)):
        view = KVView.from_tensors(k, torch.cat([v[:, :39], v[:, 39:] * size], 1), rows=rows)
        assert math.isfinite(attention_error(q[:2, -1], view, 0, 0.125)) == known


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_what_rounding_adds_counts_what_reading_rounds(dtype):
    """A code times its scale has more digits than bfloat16, so that what is read may lie nearly a step from the key:
    then two keys move apart by more than their codes' rounding."""
    torch.manual_seed(0)
    worst = 0.0
    for largest in (1.0625, 1.125, 1.25):
        for size in (1.0078125, 0.9921875, 0.8046875):
            for sign in (-0.5, 0.5):
                k = torch.full((1, 2, 64), size)
                k[:, 1] *= -1
                k[..., 0] = largest
                q, v = torch.full((1, 64), sign), torch.zeros(1, 2, 64)
                q[:, 0] = 0
                v[0, 0 if sign < 0 else 1, 0] = 127
                q, k, v = (one.to(dtype) for one in (q, k, v))
                view = KVView.from_tensors(k, v, rows=INT8)
                read, exact = (torch.softmax(q.double() @ keys[0].double().T, -1) for keys in (view.keys(), k))
                outs = [weights @ v[0].double() for weights in (read, exact)]
                error = float((outs[0] - outs[1]).norm() / (read @ v[0].double().norm(dim=-1)))
                bound = attention_error(q, view, 0, 1.0)
                assert error <= bound < 2, (largest, size, sign)
                worst = max(worst, error / bound)
    assert worst > 0.4  # or this shows nothing


@pytest.mark.parametrize("size", [1e-15, 1e-22, 1e-30, 1e-37])
def test_what_rounding_adds_to_small_values(size):
    """Their squares are no numbers of float32."""
    v = torch.full((1, 1, 64), 0.4956)
    v[..., 0] = 1
    view = KVView.from_tensors(torch.zeros(1, 1, 64), v * size, rows=INT8)
    read = view.values()[0, 0].double()
    error = float((read - (v * size)[0, 0].double()).norm() / read.norm())
    assert 0 < error <= attention_error(torch.zeros(1, 64), view, 0, 1.0)


def test_a_certificate_says_what_rounding_adds(model):
    """In the report, and no less than what it was over keys and values that are not rounded."""
    n, d = 300, 64
    q, k, v = planted_heads(4, 2, n, d)
    k *= 0.2
    exact = brute_force(q[:, -1:], k, v, torch.ones(1, n, dtype=torch.bool))[0]
    view = KVView.from_tensors(k, v, rows=INT8)
    found = brute_force(q[:, -1:], view.keys(), view.values(), torch.ones(1, n, dtype=torch.bool))[0]
    logits = (q[:, -1].double()[:, None] * view.keys().double().repeat_interleave(2, 0)).sum(-1) * d**-0.5
    sizes = (torch.softmax(logits, -1) * view.values().double().norm(dim=-1).repeat_interleave(2, 0)).sum(-1)
    error = (found - exact).double().norm(dim=-1)[:, 0] / sizes
    for head in range(2):
        bound = attention_error(q[2 * head : 2 * head + 2, -1], view, head, d**-0.5)
        assert 0 < error[2 * head : 2 * head + 2].max() <= bound < 2
    assert attention_error(q[:2, -1], KVView.from_tensors(k, v), 0, d**-0.5) == 0
    asked = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, certify=(0.3, 0.1))
    for name, known in (("int8", True), ("auto", False)):
        with LLM(model, **OPTIONS, kv_dtype=name) as llm:
            said = llm.generate(random_ids(200, seed=1), asked, policy="vattention")[0].report["decode"]["certified"]
        assert ("rounding" in said) == known
        assert not known or said["rounding"] > 0
