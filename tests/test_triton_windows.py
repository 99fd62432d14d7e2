"""Several rows of a request on models with sliding windows, as recorded steps read them: the kernel against float64,
verifications and short chunks of prompts against the row path. CPU tensors, Triton's interpreter, no graphs."""

from __future__ import annotations

import pytest
import torch
import triton_helpers  # noqa: F401  (sets the interpreter up first)
from device_helpers import put_on_device
from engine_helpers import tokens
from helpers import brute_force, generator
from test_llm_device_prefill import asked, same
from tiny_models import make_checkpoint, random_ids

from saccade import LLM, SamplingParams
from saccade.engine.device.placed import Arranging
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


FAMILIES = {
    "gemma2": {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]},  # softcaps
    "gpt_oss": {"num_hidden_layers": 2, "layer_types": ["full_attention", "sliding_attention"]},  # sinks
    "mistral": {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1},  # all layers
}


@pytest.fixture(scope="module", params=FAMILIES)
def engines(request, tmp_path_factory):
    """Windows of 7 keys: fewer than the rows of a piece of a chunk."""
    family = request.param
    folder = make_checkpoint(family, tmp_path_factory.mktemp(family), max_position_embeddings=512, **FAMILIES[family])
    options = {"prefill_chunk": 32, "exact": False, "enable_prefix_caching": False, "dtype": "float32"}
    made = [LLM(folder, kv_memory="8MiB", device="cpu", **options) for _ in range(2)]
    put_on_device(made[1])
    return made


@pytest.fixture
def arranged(monkeypatch):
    """How many rows of how many requests each recorded step has."""
    seen: list[tuple[str, list[int]]] = []
    real = Arranging.step

    def noted(self, step, memories, results, times):
        seen.append((step.scheduled[0].phase, [one.length for one in step.scheduled]))
        return real(self, step, memories, results, times)

    monkeypatch.setattr(Arranging, "step", noted)
    return seen


def logprobs_agree(ours, theirs) -> None:
    for one, other in zip(ours.outputs[0].logprobs, theirs.outputs[0].logprobs):
        for token in one.keys() & other.keys():
            assert one[token].logprob == pytest.approx(other[token].logprob, abs=1e-4)


def test_verifications_are_recorded(engines, arranged):
    """Prompts within the window, at its end and beyond; tokens, log-probabilities and counts are those of rows one by
    one under dense attention."""
    host, device = engines
    prompts = [random_ids(length, seed=length) for length in (4, 40, 21)]
    params = SamplingParams(temperature=0, max_tokens=14, ignore_eos=True, logprobs=2)
    want = host.generate(prompts, params)
    got = device.generate(prompts, params, policy="lossless(draft=streaming(sinks=1, window=16), tokens=3, lookup=1)")
    assert [one.error for one in got] == [None] * 3
    assert list(map(tokens, got)) == list(map(tokens, want))
    together = [rows for phase, rows in arranged if phase == "decode" and max(rows) > 1]
    assert len(together) > 1
    assert max(map(len, together)) > 1
    for ours, theirs in zip(got, want):
        logprobs_agree(ours, theirs)
        ours, theirs = ours.report["decode"], theirs.report["decode"]
        assert {one["path"] for one in ours["paths"]} == {RECORDED}
        for name in ("keys_attended", "keys_causal", "density_per_head", "tokens"):
            assert ours[name] == theirs[name]
    assert got[1].report["speculation"]["verifications"] > 1
    assert device.pool.used_blocks == 0


def test_short_chunks_of_prompts_are_recorded(engines, arranged):
    """Chunks that follow 32 rows, within one piece and over several, with and without what a method learns."""
    host, device = engines
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    for policy in ("dense", "tri_shape(sinks=8, window=16, last=40)", "dense+snapkv(capacity=40, window=24)"):
        arranged.clear()
        ours, theirs = (one.generate(asked(1, 17, 5), params, policy=policy) for one in (device, host))
        for one, other in zip(ours, theirs):
            same(other, one)
        assert ("prefill", [1, 17, 5]) in arranged
        assert {one["path"] for one in ours[1].report["prefill"]["paths"]} == {RECORDED, "chunk"}


def test_forks_and_turns_leave_what_the_row_path_leaves(engines):
    """Samples of one prompt, and keys after two turns of a session, whose last rows were verified."""
    policy = "lossless(draft=streaming(sinks=1, window=16), tokens=3, lookup=1)"
    params = SamplingParams(temperature=0.8, seed=3, n=2, max_tokens=6, ignore_eos=True)
    found, stored = [], []
    for one, mine in zip(engines, ("dense", policy)):
        (output,) = one.generate(random_ids(39, seed=9), params, policy=mine)
        found.append([part.token_ids for part in output.outputs])
        with one.session(policy=mine) as session:
            for turn in (random_ids(45, seed=7), random_ids(20, seed=8)):
                found[-1].append(tokens(session.generate(turn, SamplingParams(temperature=0, max_tokens=7))))
            (kept,) = one.engine.sessions.values()
            stored.append([getattr(kept.kv.view(layer), part)() for layer in (0, 1) for part in ("keys", "values")])
    assert found[0] == found[1]
    for left, right in zip(*stored):
        torch.testing.assert_close(left, right, atol=1e-4, rtol=1e-4)


def test_verifications_outside_of_recorded_steps_share_calls_by_window(engines, monkeypatch):
    """As on a GPU whose model has no recorded step; on CPU tensors under the interpreter."""
    host, _ = engines
    calls = []

    def counted(q, views, **options):
        calls.append((len(views), q.shape[1], options["window"]))
        return attend_few(q, views, **options)

    real = host_together.TogetherRows.takes
    monkeypatch.setattr(host_together.triton, "serves", lambda *given: None)
    monkeypatch.setattr(host_together.TogetherRows, "takes", lambda *given: given[2].rows.together and real(*given))
    monkeypatch.setattr(host_module, "batches", lambda rows, q: rows.together)
    monkeypatch.setattr(cpu_rows, "stores", lambda *args: False)  # else a CPU's kernels have all rows
    monkeypatch.setattr(few_rows, "attend_few", counted)
    prompts = [random_ids(length, seed=length) for length in (40, 21, 30)]
    params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
    want = host.generate(prompts, params)
    got = host.generate(prompts, params, policy="lossless(draft=streaming(sinks=1, window=16), tokens=3, lookup=0)")
    assert list(map(tokens, got)) == list(map(tokens, want))
    assert {window for *_, window in calls} == set(host.model.runner.spec.windows)
    assert max(views for views, *_ in calls) > 1
    for ours, theirs in zip(got, want):
        assert ours.report["decode"]["keys_attended"] == theirs.report["decode"]["keys_attended"]
