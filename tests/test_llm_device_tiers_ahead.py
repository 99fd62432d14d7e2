"""Steps over KV most of which lies in host memory, launched before they are asked for: answers are those of an engine
whose device holds everything, and what requests count is what they count step by step. CPU tensors, Triton's
interpreter, no graphs."""

from __future__ import annotations

import pytest
import torch
import triton_helpers  # noqa: F401  (sets the interpreter up first)
from device_helpers import device_of, put_on_device
from engine_helpers import finish, start, tokens
from tier_helpers import nothing_left
from tiny_models import make_checkpoint, random_ids

from saccade import LLM, SamplingParams
from saccade.engine.device.ahead import Ahead
from saccade.kv import listed
from saccade.kv.format import KVFormat
from saccade.ops.triton import pages

SLOT = KVFormat(torch.float32, 2, 32, 16).block_bytes
QUEST = "quest(budget=64, block_size=16, dense_layers=0)"
PROMPTS = [random_ids(length, seed=length) for length in (390, 300, 280)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    small = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32, "num_hidden_layers": 2}
    return make_checkpoint("llama", tmp_path_factory.mktemp("llama"), max_position_embeddings=1024, **small)


@pytest.fixture
def asked(monkeypatch):
    """Whether each step that was launched ahead, and looks for absent blocks, was the one that came."""
    monkeypatch.setattr(pages, "COPIERS", 2)  # the interpreter runs one after the other
    monkeypatch.setattr(listed, "SHARE", 2)  # long lists, where there are few slots
    seen: list[bool] = []
    real = Ahead.serves

    def noted(self, step, placed, key):
        came = real(self, step, placed, key)
        if self.launched.key.absent:
            seen.append(came)
        return came

    monkeypatch.setattr(Ahead, "serves", noted)
    return seen


def engine(folder, slots: int | None, unit: str = "block", ahead: bool = True) -> LLM:
    settings = {"dtype": "float32", "prefill_chunk": 256, "exact": False, "block_size": 16, "device": "cpu"}
    if slots is None:
        return LLM(folder, kv_memory="16MiB", **{"enable_prefix_caching": False, **settings})
    made = LLM(
        folder, kv_memory=slots * SLOT, kv_host="16MiB", kv_unit=unit, **{"enable_prefix_caching": False, **settings}
    )
    made.pool.slots = made.pool.slots.clone()  # as a GPU has it
    put_on_device(made)
    device_of(made).runs_ahead = ahead
    return made


def greedy(count: int, **options) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, **options)


@pytest.mark.parametrize(
    ("policy", "unit", "slots"),
    [
        (QUEST, "head", 44),
        ("arkvale(budget=96, block_size=32)", "block", 44),
        pytest.param(QUEST, "block", 44, marks=pytest.mark.thorough),
        pytest.param("arkvale(budget=96, block_size=32)", "head", 44, marks=pytest.mark.thorough),
        pytest.param("streaming(sinks=2, window=40)", "head", 44, marks=pytest.mark.thorough),
        pytest.param("quest(budget=64, block_size=16, dense_layers=1)", "block", 46, marks=pytest.mark.thorough),
        pytest.param("psa(epsilon=0.05, block_size=16, microbatch=1)", "block", 46, marks=pytest.mark.thorough),
        pytest.param("psa(epsilon=0.05, block_size=16, microbatch=1)", "head", 46, marks=pytest.mark.thorough),
    ],
)
def test_answers_and_counts_are_those_of_steps_that_wait(folder, asked, policy, unit, slots):
    """A block fills on the way."""
    with engine(folder, None) as whole:
        (want,) = whole.generate(PROMPTS[:1], greedy(16), policy=policy)
    reports = []
    for ahead in (False, True):
        with engine(folder, slots, unit, ahead) as llm:
            (done,) = llm.generate(PROMPTS[:1], greedy(16), policy=policy)
            assert done.error is None
            assert tokens(done) == tokens(want)
            reports.append(done.report)
            nothing_left(llm.pool)
        assert ahead or not asked
    if "psa" not in policy:  # whose steps may take more than lists of so few slots are sure to have for two
        assert asked.count(True) >= 2
    one, other = reports
    for name in ("tokens", "keys_attended", "keys_causal", "keys_estimated", "density_per_head", "selections"):
        assert one["decode"][name] == other["decode"][name], name
    short = any("wanted at once" in note for report in reports for note in report["notes"])  # the host counts, too
    if "psa" not in policy and not short:  # rankings bring in what earlier steps have shown
        before, after = (report["tiers"]["hits"] + report["tiers"]["misses"] for report in reports)
        assert before == after, reports[1]["notes"]  # whoever leaves hangs on when lists are made


@pytest.mark.parametrize("unit", ["head", pytest.param("block", marks=pytest.mark.thorough)])
def test_requests_that_come_and_go_and_sessions_that_go_on(folder, asked, unit):
    """A request joins, another one is cancelled, one is preempted, turns of a session come in between."""
    with engine(folder, None) as whole:
        want = [tokens(one) for one in whole.generate(PROMPTS, greedy(9), policy=QUEST)]
        with whole.session(policy=QUEST) as session:
            turns = [tokens(session.generate(PROMPTS[1], greedy(4))), tokens(session.generate([5, 6, 7], greedy(4)))]
    with engine(folder, 60, unit) as llm:
        core = llm.engine
        first, gone = start(llm, PROMPTS[0], greedy(9), QUEST), start(llm, PROMPTS[1], greedy(9), QUEST)
        for _ in range(5):
            core.step()
        core.cancel(gone)  # whatever is on its way
        core.step()
        second = start(llm, PROMPTS[2], greedy(9), QUEST)
        for _ in range(3):
            core.step()
        core.scheduler.preempt(second)
        finish(core)
        assert [first.output_ids, second.output_ids] == [want[0], want[2]]
        assert gone.output_ids == want[1][: len(gone.output_ids)]
        with llm.session(policy=QUEST) as session:
            assert tokens(session.generate(PROMPTS[1], greedy(4))) == turns[0]
            (between,) = llm.generate(PROMPTS[:1], greedy(9), policy=QUEST)
            assert tokens(between) == want[0]
            assert tokens(session.generate([5, 6, 7], greedy(4))) == turns[1]
        assert llm.pool.tiers.counts.misses > 0
        assert True in asked
        nothing_left(llm.pool)
