"""A pool sized by a profiling run: what steps take is measured, and the rest is for keys and values."""

from __future__ import annotations

import mmap

import pytest
from engine_helpers import tokens
from tiny_models import make_checkpoint, random_ids

from saccade import LLM, SamplingParams
from saccade.cli.options import say_device
from saccade.engine.core import Engine
from saccade.errors import CapacityError, SaccadeError

SOME = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
MIB = 1 << 20
SETTINGS = {"dtype": "float32", "device": "cpu", "max_requests": 3, "prefill_chunk": 64, "max_model_len": 200}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint("llama", tmp_path_factory.mktemp("llama"), max_position_embeddings=8192)


def profiled(folder, monkeypatch, free: int, **options) -> LLM:
    monkeypatch.setattr("saccade.profiling.available_bytes", lambda: free)
    return LLM(folder, kv_memory="profile", **{**SETTINGS, **options})


def test_what_a_step_takes_is_not_given_to_keys(folder, monkeypatch, capsys):
    step, extra, seen = Engine.step, 32 * MIB, []

    def greedy(engine: Engine):
        held = mmap.mmap(-1, extra)  # what a step needs for itself, of no allocator that has it already
        held[::4096] = bytes(extra // 4096)
        seen.append(sorted(len(one.sequence.tokens) for one in engine.scheduler.running))
        outputs = step(engine)
        held.close()
        return outputs

    monkeypatch.setattr(Engine, "step", greedy)
    with profiled(folder, monkeypatch, 100 * MIB, max_requests=16, max_model_len=8000) as llm:
        found = llm.memory_profile
        assert found.steps > 0.9 * extra
        assert found.free == 100 * MIB
        assert found.kv == int(found.share * found.free) - found.steps < 52 * MIB
        assert 0 <= found.kv - llm.pool.num_blocks * llm.pool.format.block_bytes < llm.pool.format.block_bytes
        assert (found.prefill_rows, found.decode_rows) == (64, 15)
        assert any(len(lengths) == 16 and lengths[-1] >= 64 for lengths in seen)  # the widest step did run
        monkeypatch.setattr(Engine, "step", step)
        prompt = random_ids(150, seed=1)
        (done,) = llm.generate([prompt], SOME)
        with LLM(folder, kv_memory="8MiB", **SETTINGS) as other:
            assert other.memory_profile is None
            assert tokens(done) == tokens(other.generate([prompt], SOME)[0])
        say_device(llm)
        assert f"15 decode rows takes {found.steps / MIB:.1f} MiB" in capsys.readouterr().err


def test_no_more_than_requests_can_use_and_beside_host_memory(folder, monkeypatch):
    with profiled(folder, monkeypatch, 1 << 30, kv_host="64MiB", kv_pool="per_layer") as llm:
        found, pool = llm.memory_profile, llm.pool
        assert found.free == (1 << 30) - 64 * MIB
        assert pool.storage.num_blocks == 3 * pool.layers * pool.format.blocks(200)
        assert pool.layers_apart
        assert pool.tiers.slots == pool.storage.num_blocks - 1


def test_what_cannot_be_is_said(folder, monkeypatch):
    with pytest.raises(CapacityError, match="lower prefill_chunk or max_requests"):
        profiled(folder, monkeypatch, 10_000)

    def breaks(engine: Engine):
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(Engine, "step", breaks)
    with pytest.raises(SaccadeError, match=r"profiling run failed \(no such kernel\); give kv_memory in bytes"):
        profiled(folder, monkeypatch, 1 << 30)
