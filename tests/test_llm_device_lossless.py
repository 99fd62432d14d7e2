"""``lossless`` where recorded steps draft: CPU tensors, Triton's interpreter, no graphs."""

from __future__ import annotations

import pytest
import torch
import triton_helpers  # noqa: F401  (sets the interpreter up first)
from device_helpers import put_on_device
from engine_helpers import tokens
from helpers import generator
from tiny_models import make_checkpoint, random_ids

from saccade import LLM, SamplingParams
from saccade.engine.rows import attention as host_module
from saccade.engine.rows import together as host_together
from saccade.engine.sampling.sampler import Sampler
from saccade.kv import BlockManager, KVFormat, KVStorage
from saccade.kv.sequence import SequenceKV
from saccade.kv.summaries import summarize_view
from saccade.ops import Call, cpu_rows, run
from saccade.ops.triton import dispatch, few_rows
from saccade.ops.triton.few_rows import attend_few
from saccade.selection import Dense, Shape


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    folder = make_checkpoint(
        "llama", tmp_path_factory.mktemp("llama"), max_position_embeddings=2048, head_dim=32, num_hidden_layers=2
    )
    host, device = (
        LLM(folder, kv_memory="16MiB", prefill_chunk=256, exact=False, enable_prefix_caching=False) for _ in range(2)
    )
    put_on_device(device)
    return host, device


def test_recorded_steps_draft_and_verify(engines, monkeypatch):
    """Greedy, seeded, and with log-probabilities, beside a plain request; tokens are chosen where the logits lie."""
    host, device = engines
    prompts = [random_ids(length, seed=length) for length in (90, 110, 70, 60)]
    common = {"max_tokens": 5, "ignore_eos": True}
    params = [
        SamplingParams(temperature=0, **common),
        SamplingParams(temperature=0.9, seed=4, **common),
        SamplingParams(temperature=0.9, seed=3, logprobs=1, **common),
        SamplingParams(temperature=0, logprobs=1, **common),
    ]
    drafts = ("quest(budget=32, dense_layers=0)", "streaming(sinks=2, window=30)")
    ours = [f"lossless(draft={draft}, tokens=2, lookup=0)" for draft in drafts]
    policies = [*ours, ours[0], "dense"]
    want = host.generate(prompts, params)
    real, chosen = Sampler.sample, []
    monkeypatch.setattr(Sampler, "sample", lambda *args: chosen.append(args) or real(*args))
    got = device.generate(prompts, params, policy=policies)
    assert [one.error for one in got] == [None] * 4
    assert list(map(tokens, got)) == list(map(tokens, want))
    assert len(chosen) == 3  # from the prompts' logits; one is greedy and asks no sampler
    for one, other in zip(got[2].outputs[0].logprobs, want[2].outputs[0].logprobs):
        assert {token: entry.logprob for token, entry in one.items()} == pytest.approx(
            {token: entry.logprob for token, entry in other.items()}, abs=1e-4
        )
    for output in got[:3]:
        said = output.report["speculation"]
        assert said["verifications"] >= 1
        assert said["draft"]["tokens"] == said["drafted"] > 0
        assert any("triton" in name for name in said["draft"]["backends"])
        assert 0 < said["draft"]["density"] < 0.9
        assert output.report["decode"]["density"] == 1.0
        assert all("triton" in name for name in output.report["decode"]["backends"])
    assert device.pool.used_blocks == 0


@pytest.mark.parametrize("rows", [2, 16])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_few_rows_of_several_sequences(rows, softcap):
    """Ragged, with queries that lie row by row, against the reference one by one; 64 rows of a KV head take the larger
    tile."""
    rng = generator(rows)
    lengths = (rows + 1, 70, 200)
    format_ = KVFormat(torch.float32, 2, 32, 32)
    pool = BlockManager(KVStorage(format_, 40), 1)
    views = []
    for length in lengths:
        kv = SequenceKV(pool)
        kv.reserve(length)
        k, v = torch.randn(2, 2, length, 32, generator=rng)
        kv.append(0, k, v)
        views.append(kv.view(0))
    q = torch.randn(3 * rows, 8, 32, generator=rng).transpose(0, 1)
    out, lse = attend_few(q, views, scale=0.2, softcap=softcap)
    for number, view in enumerate(views):
        here = slice(number * rows, (number + 1) * rows)
        want = run(Call.of(q[:, here], view, scale=0.2, softcap=softcap), "reference")
        torch.testing.assert_close(out[:, here], want.out, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(lse[:, here], want.lse, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("start", "count"), [(70, 2), (101, 33), (96, 128)])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_a_short_chunk_over_many_keys_goes_in_groups_of_rows(monkeypatch, start, count, softcap):
    """Through the call that a prefill makes, under a view that ends later, with queries that lie row by row."""
    monkeypatch.setattr(few_rows, "FEWEST_KEYS", 64)
    rng = generator(count)
    pool = BlockManager(KVStorage(KVFormat(torch.float32, 2, 32, 32), 10), 1)
    kv = SequenceKV(pool)
    kv.reserve(start + count + 5)
    kv.append(0, *torch.randn(2, 2, start + count + 5, 32, generator=rng))
    q = torch.randn(count, 8, 32, generator=rng).transpose(0, 1)
    selection = Dense(Shape(8, 2, count, start + count, start, q.device))
    asked = []
    monkeypatch.setattr(dispatch, "attend_groups", lambda *a, **o: asked.append(1) or few_rows.attend_groups(*a, **o))
    call = Call.of(q, kv.view(0).upto(start + count), selection, scale=0.2, softcap=softcap)
    got, want = run(call, "triton"), run(call, "reference")
    assert asked
    torch.testing.assert_close(got.out, want.out, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(got.lse, want.lse, atol=1e-5, rtol=1e-5)


def test_verifications_share_calls_by_their_number_of_rows(engines, monkeypatch):
    """As on a GPU; on CPU tensors under the interpreter."""
    host, _ = engines
    counts = []

    def takes(self, q, chosen):
        if not chosen.rows.together:
            return False
        self.waiting.setdefault((chosen.chunk.shape.q_len, None), []).append(chosen)
        return True

    def counted(q, views, **options):
        counts.append((len(views), q.shape[1]))
        return attend_few(q, views, **options)

    prompts = [random_ids(length, seed=length) for length in (90, 110, 70)]
    params = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for count in (5, 5, 5)]
    want = host.generate(prompts, params)
    monkeypatch.setattr(host_together.TogetherRows, "takes", takes)
    monkeypatch.setattr(host_module, "batches", lambda rows, q: rows.together)
    monkeypatch.setattr(cpu_rows, "stores", lambda *args: False)  # else a CPU's kernels have all rows
    monkeypatch.setattr(few_rows, "attend_few", counted)
    got = host.generate(prompts, params, policy="lossless(draft=quest(budget=32, dense_layers=0), tokens=3, lookup=0)")
    assert list(map(tokens, got)) == list(map(tokens, want))
    assert (3, 12) in counts
    assert all(one.report["decode"]["density"] == 1.0 for one in got)
    assert any("triton" in name for name in got[0].report["decode"]["backends"])


def test_what_recorded_rounds_leave_is_what_single_steps_leave(engines):
    """Keys, values and the draft's summaries after rounds that crossed blocks, against plain steps and summaries made
    anew. Draft steps follow each other on the device; some of their tokens are rejected."""
    host, device = engines
    prompts = [random_ids(length, seed=length) for length in (95, 89)]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    left, kept = [], []
    ours = "lossless(draft=quest(budget=64, dense_layers=0), tokens=3, lookup=2)"
    for llm, policy in ((host, "dense"), (device, ours)):
        sessions = [llm.session(policy=policy) for _ in prompts]
        outputs = [session.generate(ids, params) for session, ids in zip(sessions, prompts)]
        left.append([(tokens(output), session.sequence.kv) for session, output in zip(sessions, outputs)])
        kept.append(sessions)
    for (want, plain), (got, ours) in zip(*left):
        assert got == want
        assert ours.length == plain.length
        for layer in range(ours.layers):
            for name in ("keys", "values"):
                rows = [getattr(kv.view(layer), name)() for kv in (ours, plain)]
                torch.testing.assert_close(*rows, atol=1e-5, rtol=1e-5)
        full = ours.summarized_blocks("minmax", 16)
        assert full == ours.length // 16 > 5
        for layer, made in enumerate(ours.summaries("minmax", 16)):
            assert torch.equal(made[:full], summarize_view(ours.view(layer), "minmax", 16, 0, full))
    for session in (one for some in kept for one in some):
        session.close()
