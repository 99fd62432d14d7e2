"""Several rows of a request on models with sliding windows, on a GPU: the kernel against float64, and recorded steps
against rows one by one and against transformers."""

from __future__ import annotations

import pytest
import torch
from engine_helpers import tokens
from gpu_helpers import BOUND
from helpers import brute_force
from tiny_models import make_checkpoint, oracle, oracle_greedy, random_ids

from saccade import LLM, SamplingParams
from saccade.engine.steps.paths import RECORDED
from saccade.kv.row_formats import FORMATS
from saccade.kv.view import KVView
from saccade.ops.triton.few_rows import LARGE, attend_few
from saccade.selection import Band, Shape


def data(dtype, head_dim, rows, keys, stored):
    """Queries, a view of the keys in blocks of 32 tokens, and what it holds in float32, on a CPU."""
    rng = torch.Generator().manual_seed(keys + rows)
    q = torch.randn(8, rows, head_dim, generator=rng).to("cuda", dtype)
    k, v = torch.randn(2, 2, keys, head_dim, generator=rng).to("cuda", dtype)
    view = KVView.from_tensors(k, v, 32, shuffle_seed=1, rows=FORMATS[stored])
    return q, view, view.keys().float().cpu(), view.values().float().cpu()


def forget(view: KVView, upto: int) -> None:
    """Have the blocks before key ``upto`` hold what would be seen in any result."""
    paged = view.paged()
    for pool in (paged.k, paged.v):
        pool[paged.block_table[0, : upto // 32].long()] = 0xFF if pool.dtype == torch.uint8 else (
            127 if pool.dtype == torch.int8 else float("nan")
        )  # fmt: skip


@pytest.mark.parametrize("window", [1, 9, 512, 4000])
@pytest.mark.parametrize(
    ("dtype", "head_dim", "rows", "keys", "stored"),
    [
        (torch.bfloat16, 256, 2, 3000, "auto"), (torch.bfloat16, 128, 16, 20_000, "auto"),
        (torch.float16, 64, 5, 3000, "auto"), (torch.float32, 80, 8, 700, "auto"),
        (torch.bfloat16, 256, 8, 3000, "int8"), (torch.bfloat16, 128, 2, 20_000, "fp8"),
        (torch.bfloat16, 64, 16, 3000, "int8"),
        (torch.float16, 128, 64, 3000, "fp8"), (torch.bfloat16, 64, 1, 3000, "auto"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("softcap", [None, 30.0])
def test_rows_read_their_last_keys(dtype, head_dim, rows, keys, stored, window, softcap):
    """Blocks before the first row's window are never read."""
    q, view, k, v = data(dtype, head_dim, rows, keys, stored)
    options = {"scale": head_dim**-0.5, "softcap": softcap}
    want, sums = brute_force(q.cpu(), k, v, Band(Shape.suffix(8, 2, rows, keys), window).mask(), **options)
    forget(view, max(0, keys - rows - window + 1))
    out, lse = attend_few(q, [view], **options, window=window)
    bound = max(BOUND[dtype], 0 if stored == "auto" else 6e-3)
    assert float((out.cpu().double() - want).norm() / want.norm()) < bound
    torch.testing.assert_close(lse.cpu().double(), sums, atol=2e-2, rtol=1e-2)


def test_a_window_of_a_long_text_takes_the_time_of_its_keys():
    """512 of 131,072 keys: far less than a tenth of the time that all of them take."""
    q, view, *_ = data(torch.bfloat16, 256, 4, 131_072, "auto")
    seconds = []
    for window in (None, 512):
        for _ in range(3):
            attend_few(q, [view], scale=0.06, window=window)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            attend_few(q, [view], scale=0.06, window=window)
        graph.replay()
        begin.record()
        for _ in range(20):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        seconds.append(begin.elapsed_time(end))
    assert seconds[1] < seconds[0] / 2, seconds


def test_tiles_of_many_rows_fit():
    """Those of rows that do not fit few registers."""
    q, view, k, v = data(torch.bfloat16, 128, 16, 900, "auto")
    from saccade.ops.triton.batch import pages_of
    from saccade.ops.triton.few_rows import attend_rows

    limits = torch.arange(885, 901, dtype=torch.int32, device="cuda")
    out, _ = attend_rows(q.transpose(0, 1), pages_of([view]), limits, scale=0.1, tiles=LARGE, window=100)
    want, _ = brute_force(q.cpu(), k, v, Band(Shape.suffix(8, 2, 16, 900), 100).mask(), scale=0.1)
    assert float((out.transpose(0, 1).cpu().double() - want).norm() / want.norm()) < BOUND[torch.bfloat16]


FAMILIES = {"mistral": {}, "gemma2": {}, "gemma3_text": {}, "gpt_oss": {}}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory):
    """Heads of 32 channels, windows of 20 keys, which prompts and answers cross."""
    wide = {"head_dim": 32, "sliding_window": 20, "max_position_embeddings": 2048}
    return make_checkpoint(request.param, tmp_path_factory.mktemp(request.param), **wide)


@pytest.mark.parametrize("kv_dtype", ["auto", "int8", "fp8"])
def test_verifications_are_recorded(family, kv_dtype):
    """Prompts within a window and beyond; tokens are those of dense steps, and of transformers over plain keys."""
    options = {"kv_memory": "64MiB", "dtype": "float32", "device": "cuda", "kv_dtype": kv_dtype}
    prompts = [random_ids(length, seed=length) for length in (300, 13, 129)]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    with LLM(family, exact=False, enable_prefix_caching=False, prefill_chunk=64, **options) as llm:
        want = llm.generate(prompts, params)
        for _ in range(2):  # the second time steps are replayed
            got = llm.generate(
                prompts, params, policy="lossless(draft=streaming(sinks=2, window=64), tokens=3, lookup=2)"
            )
        kinds = llm.engine.worker.device.kinds._kinds
        assert any(
            kind.graph is not None and kind.groups[0].each > 1 and not key.prefill for key, kind in kinds.items()
        )
        assert llm.pool.used_blocks == 0
    for ours, theirs in zip(got, want):
        assert ours.error is None
        assert tokens(ours) == tokens(theirs)
        assert ours.report["speculation"]["verifications"] > 1
        assert RECORDED in {one["path"] for one in ours.report["decode"]["paths"]}
        assert ours.report["decode"]["keys_attended"] == theirs.report["decode"]["keys_attended"]
    if kv_dtype == "auto":
        reference = oracle(family)
        for prompt, ours in zip(prompts, got):
            assert tokens(ours) == oracle_greedy(reference, prompt, len(tokens(ours)))


def test_questions_after_a_shared_prefix_are_recorded(family):
    """As tests/gpu/test_gpu_engine.py has it for models without windows."""
    options = {"kv_memory": "64MiB", "dtype": "float32", "prefill_chunk": 256}
    document = random_ids(512, seed=1)
    asked = [document + random_ids(length, seed=length) for length in (20, 31, 60, 7, 1, 100)]
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    with LLM(family, device="cpu", **options) as llm:
        want = llm.generate(asked, params)
    with LLM(family, device="cuda", exact=False, enable_prefix_caching=True, **options) as llm:
        llm.generate(document, params)
        for _ in range(3):
            got = llm.generate(asked, params)
        kinds = [kind for key, kind in llm.engine.worker.device.kinds._kinds.items() if key.prefill]
        assert kinds
        assert any(kind.graph is not None for kind in kinds) or llm.model.spec.family == "gpt_oss"
    for ours, theirs in zip(got, want):
        assert tokens(ours) == tokens(theirs)
        assert RECORDED in {one["path"] for one in ours.report["prefill"]["paths"]}
