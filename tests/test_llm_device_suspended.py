"""Chunks that are suspended beside recorded steps: the steps between two layers touch nothing of theirs. CPU tensors,
Triton's interpreter, no graphs."""

from __future__ import annotations

import pytest
import triton_helpers  # noqa: F401  (sets the interpreter up first)
from device_helpers import put_on_device
from engine_helpers import finish, start
from tiny_models import make_checkpoint, random_ids

from saccade import LLM, SamplingParams
from saccade.engine.device.backend import DeviceBackend
from saccade.engine.scheduling.token_gap import TokenGap

FEW = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
POLICY = "flexprefill(gamma=0.5, block_size=64, min_budget=0)+quest(budget=32)"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    small = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "num_hidden_layers": 2}
    return make_checkpoint("llama", tmp_path_factory.mktemp("llama"), max_position_embeddings=2048, **small)


def test_recorded_steps_run_between_the_layers_of_a_chunk(folder, monkeypatch):
    monkeypatch.setattr(TokenGap, "round", property(lambda self: 0.0))  # a layer at a time
    ran, real = [], DeviceBackend.run
    answers = {}
    for gap in (None, 0.5):
        with LLM(
            folder, kv_memory="16MiB", prefill_chunk=64, exact=False, max_token_gap=gap, enable_prefix_caching=False
        ) as llm:
            put_on_device(llm)

            def noted(self, step, *given, engine=llm.engine, **more):
                ran.append(bool(engine.scheduler.suspended))
                return real(self, step, *given, **more)

            monkeypatch.setattr(DeviceBackend, "run", noted)
            stream = start(llm, random_ids(40, seed=1), SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))
            for _ in range(2):
                llm.engine.step()
            long = start(llm, random_ids(120, seed=2), FEW, POLICY)
            finish(llm.engine)
            assert all(one.error is None for one in (stream, long))
            answers[gap] = [one.final_ids for one in (stream, long)]
            assert (long.report.suspensions > 0) == (gap is not None)
            assert llm.pool.used_blocks == 0
    assert answers[None] == answers[0.5]
    assert sum(ran) > 1
