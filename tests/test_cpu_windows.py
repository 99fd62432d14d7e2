"""Several rows of a request on models with sliding windows, on the C++ kernels: one pass over what they see."""

from __future__ import annotations

import pytest
import torch
from engine_helpers import tokens
from helpers import brute_force, generator
from tiny_models import make_checkpoint, oracle, oracle_greedy, oracle_logits, random_ids

from saccade import LLM, SamplingParams
from saccade.engine.rows import calls
from saccade.engine.steps.paths import LAYER, ROW, STEP
from saccade.errors import SaccadeError
from saccade.kv import BlockManager, KVFormat, KVStorage, KVView
from saccade.kv.sequence import SequenceKV
from saccade.methods.quest import Quest
from saccade.ops import Call, cpu, few_rows
from saccade.ops.cpu_plans import PlannedRow, PlannedRows
from saccade.ops.cpu_readings import Readings
from saccade.selection import Band, Blocks, Shape
from saccade.selection.readings import Ends
from saccade.selection.visible import rows_within

pytestmark = pytest.mark.skipif(not cpu.available(), reason="the C++ kernels are not built")
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


@pytest.fixture(params=cpu.supported_isas())
def _isa(request):
    cpu.set_isa(request.param)
    yield
    cpu.set_isa(None)


@pytest.mark.usefixtures("_isa")
@pytest.mark.parametrize(("dtype", "rows"), [(torch.float32, 5), (torch.bfloat16, 17)])
@pytest.mark.parametrize(("window", "sinks"), [(1, 0), (7, 0), (600, 0), (1300, 0), (1300, 5), (100_000, 0)])
def test_a_few_rows_read_their_last_keys(monkeypatch, dtype, rows, window, sinks):
    """Within one part of the keys and over several, against float64; as ``few_rows.run`` decides where that is worth
    it."""
    asked = []
    monkeypatch.setattr(
        few_rows.cpu, "attend_few", lambda *a, real=cpu.attend_few, **o: asked.append(1) or real(*a, **o)
    )
    rng, keys = generator(window), 2500
    k, v = (torch.randn(2, keys, 32, generator=rng).to(dtype) for _ in range(2))
    q = torch.randn(rows, 6, 32, generator=rng).to(dtype).transpose(0, 1)  # as the packed rows lie
    selection = Band(Shape.suffix(6, 2, rows, keys), window, sinks)
    view, options = KVView.from_tensors(k, v, shuffle_seed=2), {"scale": 0.2, "softcap": 3.0}
    want, sums = brute_force(q, k, v, selection.mask(), **options)
    ran = few_rows.run(Call.of(q, view, selection, threads=3, **options))
    assert bool(asked) == (window + sinks >= few_rows.LEAST_KEYS)
    for out, lse in ((ran.out, ran.lse), cpu.attend_few(q, view, selection, threads=2, **options)):
        torch.testing.assert_close(out.double(), want, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
        torch.testing.assert_close(lse.double(), sums, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_a_few_rows_read_no_lists():
    shape = Shape.suffix(4, 2, 2, 64)
    blocks = Blocks.from_block_mask(shape, 32, torch.ones(2, 1, 2, dtype=torch.bool))
    view = KVView.from_tensors(*torch.zeros(2, 2, 64, 16))
    with pytest.raises((ValueError, SaccadeError), match="a few rows read all keys or a band"):
        cpu.attend_few(torch.zeros(4, 2, 16), view, blocks, scale=1.0)


@pytest.mark.usefixtures("_isa")
@pytest.mark.parametrize("rows", [2, 9])
def test_a_step_reads_each_layers_window(rows):
    """Layers without a window, with one of fewer keys than rows, of some keys, and of more than there are. Layers whose
    window hides keys leave weights of 0."""
    windows, length = (None, 3, 600, 5000), 900
    pool = BlockManager(KVStorage(KVFormat(torch.float32, 2, 32, 32), 4 * 40), 4)
    kv, rng = SequenceKV(pool), generator(rows)
    kv.reserve(length)
    for layer in range(4):
        kv.append(layer, *torch.randn(2, 2, length - rows, 32, generator=rng))
    peaks = torch.full((4, rows, 2, -(-length // 32)), torch.nan)
    reads = Readings([rows_within(window, rows) for window in windows])
    planned = PlannedRows(
        [PlannedRow(0, length - rows, kv.tables, reads, length=rows, peaks=peaks, region=32)],
        pool.storage.k,
        pool.storage.v,
    )
    q, (k, v) = torch.randn(4, rows, 32, generator=rng), torch.randn(2, 2, rows, 32, generator=rng)
    out, touched = torch.empty(rows, 4, 32), []
    kv.stored(rows)
    for layer, window in enumerate(windows):
        planned.run(layer, q, k, v, out, 0.3, None, 2)
        touched.append(planned.touched(0))
        view = kv.view(layer)
        mask = Band(Shape.suffix(4, 2, rows, length), window or length).mask()
        want, sums = brute_force(q, view.keys(), view.values(), mask, scale=0.3)
        torch.testing.assert_close(out.double().transpose(0, 1), want, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(planned.lse.double().T, sums, atol=1e-5, rtol=1e-5)
        assert bool(peaks[layer].any()) == (window in (None, 5000))
        assert peaks[layer].isfinite().all()
    first = [length - rows - (window or length) + 1 for window in windows]
    assert touched == [(length - 1) // 32 - max(0, one) // 32 + 1 for one in first]
    quest = Readings(Quest(budget=64, dense_layers=0).device_plan(_Spec).layers)
    choosing = PlannedRow(0, length - rows, kv.tables, quest, kv.summaries("minmax", 16), length=rows)
    with pytest.raises((ValueError, SaccadeError), match="several rows of a sequence read everything or a band"):
        PlannedRows([choosing], pool.storage.k, pool.storage.v)


class _Spec:
    layers, heads, kv_heads, head_dim, windows, value_dim = 4, 4, 2, 32, (None,) * 4, None


def test_rows_within_a_window_are_counted_as_ends_are():
    """What rows of a verification say of themselves is what single rows say."""
    reading, single = rows_within(10, 4), Ends(0, 10)
    assert [reading.cost(n) for n in (3, 10, 11, 50)] == [single.cost(n) for n in (3, 10, 11, 50)]
    assert (reading.each, reading.ends, reading.all_upto, reading.form) == (4, (0, 10), 10, reading)
    shape = Shape.suffix(4, 2, 1, 50)
    assert reading.selection(shape, []).pairs().tolist() == [10] * 4
    assert rows_within(None, 4).ends == (0, None)


FAMILIES = {"mistral": STEP, "gemma2": LAYER, "gemma4_text": LAYER, "gpt_oss": ROW}  # and how rows are verified


@pytest.mark.parametrize("kv_dtype", ["auto", "int8", "fp8"])
@pytest.mark.parametrize("family", FAMILIES)
def test_verifications_are_what_transformers_says(tmp_path, family, kv_dtype):
    """Softcaps, sinks, heads of several sizes; windows of 7 keys, fewer than rows. Tokens, log-probabilities and counts
    are those of rows one by one; over plain keys also those of transformers."""
    folder = make_checkpoint(family, tmp_path / family, max_position_embeddings=512)
    options = {"dtype": "float32", "kv_memory": "8MiB", "prefill_chunk": 16, "kv_dtype": kv_dtype}
    llm = LLM(folder, device="cpu", exact=False, enable_prefix_caching=False, **options)
    prompts = [random_ids(length, seed=length) for length in (90, 4)]
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, logprobs=1)
    want = llm.generate(prompts, params)
    got = llm.generate(prompts, params, policy="lossless(draft=streaming(sinks=2, window=24), tokens=7, lookup=2)")
    assert [one.error for one in got] == [None, None]
    assert FAMILIES[family] in {one["path"] for one in got[0].report["decode"]["paths"]}
    reference = oracle(folder) if kv_dtype == "auto" else None
    for prompt, ours, theirs in zip(prompts, got, want):
        assert tokens(ours) == tokens(theirs)
        assert ours.report["speculation"]["verifications"] > 1
        paths = {one["path"] for one in ours.report["decode"]["paths"]}
        assert FAMILIES[family] in paths or paths == {LAYER}  # beside rows of the other's prompt
        assert family == "gpt_oss" or ROW not in paths
        for name in ("keys_attended", "keys_causal", "density_per_head"):
            assert ours.report["decode"][name] == theirs.report["decode"][name]
        chosen = [one[token].logprob for one, token in zip(ours.outputs[0].logprobs, tokens(ours))]
        other = [one[token].logprob for one, token in zip(theirs.outputs[0].logprobs, tokens(theirs))]
        # Products of many rows may round a key to the code beside the one that a single row's give.
        assert chosen == pytest.approx(other, abs=1e-4 if kv_dtype == "auto" else 2e-3)
        if reference is not None:
            assert tokens(ours) == oracle_greedy(reference, prompt, len(tokens(ours)))
            logits = oracle_logits(reference, [*prompt, *tokens(ours)])[len(prompt) - 1 : -1].log_softmax(-1)
            said = logits.gather(1, torch.tensor(tokens(ours))[:, None])[:, 0].tolist()
            assert chosen == pytest.approx(said, abs=2e-3)


def test_rows_that_a_sink_keeps_apart_are_read_in_parts(tmp_path, monkeypatch):
    """A layer with sinks is attended by itself, its rows all the same at once."""
    folder = make_checkpoint("gpt_oss", tmp_path, max_position_embeddings=2048, sliding_window=600)
    llm = LLM(folder, device="cpu", dtype="float32", kv_memory="16MiB", exact=False, enable_prefix_caching=False)
    bands = []

    def noted(call, backend="auto"):
        if isinstance(call.selection, Band):
            bands.append(call.selection.shape.q_len)
        return few_rows.run(call, backend)

    monkeypatch.setattr(calls, "run_few", noted)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    prompt = random_ids(700, seed=5)
    want = llm.generate(prompt, params)[0]
    got = llm.generate(prompt, params, policy="lossless(draft=streaming(sinks=2, window=64), tokens=3, lookup=2)")[0]
    assert tokens(got) == tokens(want)
    assert max(bands) > 1


@pytest.mark.parametrize("trial", range(20))
def test_a_bands_pairs_are_known_without_its_rows(trial):
    rng = generator(trial)
    rows, before, window, sinks = (int(torch.randint(least, most, (1,), generator=rng)) for least, most in (
        (1, 30), (0, 60), (1, 70), (0, 9)
    ))  # fmt: skip
    band = Band(Shape.suffix(4, 2, rows, before + rows), window, sinks)
    assert band.even_pairs() == int(band.mask()[0].sum()) == int(band.unit_pairs()[0])


def test_a_rejected_row_of_a_band_is_not_counted(tmp_path):
    """Also where rows are attended by calls of their own, such as under a policy's window or beside sinks."""
    folder = make_checkpoint("gpt_oss", tmp_path)
    llm = LLM(folder, device="cpu", dtype="float32", kv_memory="4MiB", exact=False, enable_prefix_caching=False)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    prompt = random_ids(60, seed=2)
    want = llm.generate(prompt, params)[0].report["decode"]
    got = llm.generate(prompt, params, policy="lossless(draft=streaming(sinks=2, window=8), tokens=4, lookup=2)")[0]
    assert got.report["speculation"]["rejected"] > 0
    assert got.report["decode"]["keys_attended"] == want["keys_attended"]
