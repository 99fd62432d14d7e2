"""Chunks of several requests in one launch on a GPU: bit for bit what each gets from a call of its own, and the same
tokens from the engine."""

from __future__ import annotations

import pytest
import torch
from gpu_helpers import BOUND, random_blocks
from helpers import brute_force
from tiny_models import make_checkpoint, random_ids

from saccade import LLM, SamplingParams
from saccade.engine.rows import attention as host
from saccade.kv import BlockManager, KVFormat, KVStorage
from saccade.kv.sequence import SequenceKV
from saccade.ops import Call, run
from saccade.ops.triton import prefill_together
from saccade.ops.triton.prefill_together import Part, attend_together
from saccade.selection import Band, Dense, Shape


@pytest.mark.parametrize("kind", ["dense", "band", "blocks64", "blocks128", "units"])
@pytest.mark.parametrize(("head_dim", "dtype"), [(128, torch.bfloat16), (64, torch.float16), (96, torch.float32)])
def test_every_row_gets_what_a_call_of_its_own_gives(kind, head_dim, dtype):
    layout = KVFormat(dtype, 2, head_dim)
    pool = BlockManager(KVStorage(layout, 200, "cuda"), 1)
    parts, keys, first = [], [], 1
    for start, count in ((0, 700), (1001, 333), (0, 129), (640, 2)):
        kv = SequenceKV(pool)
        kv.reserve(start + count)
        k, v = torch.randn(2, 2, start + count, head_dim, device="cuda").to(dtype)
        kv.append(0, k, v)
        shape = Shape.suffix(8, 2, count, start + count)
        if kind == "dense":
            selection = Dense(shape)
        elif kind == "band":
            selection = Band(shape, window=200, sinks=3)
        else:
            selection = random_blocks(shape, 64 if kind == "blocks64" else 128, 2 if kind == "units" else 8)
        parts.append(Part(first, kv.view(0), selection))
        keys.append((k, v))
        first += count
    wide = torch.randn(first + 5, 8, 2, head_dim, device="cuda").to(dtype)
    q = wide[:, :, 1].transpose(0, 1)  # rows that lie apart
    out = torch.full_like(q, 7.0)
    lse = attend_together(q, parts, out, scale=head_dim**-0.5)
    for part, (k, v) in zip(parts, keys):
        here = slice(part.first, part.first + part.selection.shape.q_len)
        alone = run(Call.of(q[:, here], part.kv, part.selection), "triton")
        assert torch.equal(out[:, here], alone.out)
        assert torch.equal(lse[:, here], alone.lse)
        expected, _ = brute_force(q[:, here].cpu(), k.cpu(), v.cpu(), part.selection.mask())
        assert float((out[:, here].cpu().double() - expected).norm() / expected.norm()) < BOUND[dtype]
    assert (out[:, 0] == 7).all()
    assert (out[:, first:] == 7).all()


@pytest.mark.parametrize("policy", ["dense", "xattention(threshold=0.6)", "flashprefill", "streaming(window=256)"])
def test_prompts_of_one_step_share_launches(policy, tmp_path, monkeypatch):
    folder = make_checkpoint("llama", tmp_path, max_position_embeddings=2048, hidden_size=256, head_dim=64)
    prompts = [random_ids(length, seed=length) for length in (600, 900, 1000)]
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    counts, launch = [], attend_together

    def counted(q, parts, out, **options):
        counts.append(len(parts))
        return launch(q, parts, out, **options)

    monkeypatch.setattr(prefill_together, "attend_together", counted)
    found = []
    for waits in (host.waits, lambda *given: False):
        monkeypatch.setattr(host, "waits", waits)
        options = {"kv_memory": "128MiB", "device": "cuda", "dtype": "bfloat16", "enable_prefix_caching": False}
        with LLM(folder, **{"enable_prefix_caching": False, **options}) as llm:
            outs = llm.generate(prompts, params, policy=policy)
        found.append([(one.outputs[0].token_ids, one.report["prefill"]["backends"]) for one in outs])
        assert all(set(backends) == {"triton"} for _, backends in found[-1])
    assert counts
    assert max(counts) == (2 if policy == "flashprefill" else 3)  # which reads everything of the shortest
    assert [ids for ids, _ in found[0]] == [ids for ids, _ in found[1]]
