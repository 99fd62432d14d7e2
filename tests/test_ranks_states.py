"""Models whose layers keep a state, over ranks that have some of its heads each: forks, prefixes, drafts, sessions."""

from __future__ import annotations

import pytest
import rank_threads
from rank_helpers import PROMPTS, greedy, make, same
from tiny_models import make_checkpoint, one_thread  # noqa: F401

from saccade import SamplingParams, ranks
from saccade.models.loader import load_model
from saccade.models.shards import Share

OTHERS = "bamba", "lfm2_moe", "qwen3_next", "olmo_hybrid", "nemotron_h", "granitemoehybrid"


@pytest.fixture(autouse=True)
def threads(monkeypatch):
    """Other ranks are threads."""
    monkeypatch.setattr(ranks, "subprocess", rank_threads.SUBPROCESS)


@pytest.fixture(params=["qwen3_5_text", *(pytest.param(one, marks=pytest.mark.thorough) for one in OTHERS)])
def folder(request, tmp_path):
    return make_checkpoint(request.param, tmp_path / "model", max_position_embeddings=512)


def both(folder, ask, **options):
    """What ``ask`` gets of an engine of one rank, and of one of two."""
    answers = []
    for count in (1, 2):
        with make(folder, count, **{"kv_memory": "8MiB", "exact": False, **options}) as llm:
            answers.append(ask(llm))
    same(*answers)
    cached = [[one.reports[0]["cached_tokens"] for one in some] for some in answers]
    assert cached[0] == cached[1]
    return answers[1], cached[1]


def test_forks_and_prefixes(folder):
    sampled = SamplingParams(n=3, temperature=1.0, seed=5, max_tokens=9, ignore_eos=True)
    both(folder, lambda llm: llm.generate(PROMPTS[1], sampled))

    def twice(llm):
        return [llm.generate(ids, greedy(5))[0] for ids in (PROMPTS[2], PROMPTS[2] + PROMPTS[3])]

    _, cached = both(folder, twice, enable_prefix_caching=True)
    assert cached == [0, 288]


def test_drafts_go_back(folder):
    policy = "lossless(draft=quest(budget=64), tokens=3)"
    answers, _ = both(folder, lambda llm: llm.generate([PROMPTS[0], PROMPTS[1][:40] * 4], greedy(16), policy=policy))
    assert sum(one.report["speculation"]["drafted"] for one in answers) > 0


def test_less_memory_than_requests_take(folder):
    policy = "flexprefill(min_budget=0)+arkvale(budget=64)"
    both(folder, lambda llm: llm.generate(PROMPTS, greedy(12), policy=policy), kv_memory="1MiB")
    both(folder, lambda llm: llm.generate(PROMPTS, greedy(6)), kv_memory="1MiB", kv_host="8MiB")


@pytest.mark.parametrize("numbers", [(2, 1, 4, 2), pytest.param((1, 2, 2, 4), marks=pytest.mark.thorough)])
def test_sessions_go_on_under_another_number(folder, tmp_path, numbers):
    """States are saved whole; each rank takes its part, or where its number does not divide them, all."""
    said = []
    for counts in ((1, 1, 1, 1), numbers):
        turns = []
        for turn, count in enumerate(counts):
            with make(folder, count, kv_memory="8MiB", exact=False) as llm:
                session = llm.session("quest(budget=64)") if turn == 0 else llm.restore(tmp_path / "saved")
                assert session.note is None
                turns.append(session.generate(PROMPTS[turn % 3][:90], greedy(5)))
                session.save(tmp_path / "saved")
                session.close()
        said.append(turns)
    same(*said)
    assert [one.report["cached_tokens"] for one in said[0]] == [one.report["cached_tokens"] for one in said[1]]
    assert said[1][3].report["cached_tokens"] > 200


def test_states_are_shared_out(tmp_path, caplog):
    """Half of one for each of two ranks; where heads or groups do not divide, all of it, and a line says so."""
    folder = make_checkpoint("bamba", tmp_path, num_attention_heads=8, num_key_value_heads=4, hidden_size=96)
    whole = load_model(folder, "float32").spec.states.nbytes
    for ranks_, share in ((2, 0.5), (4, 1.0)):
        caplog.clear()
        model = load_model(folder, "float32", share=Share(0, ranks_, lambda: None))
        assert model.spec.states.nbytes == share * whole
        assert ("4 processes cannot share out heads or groups" in caplog.text) == (ranks_ == 4)
