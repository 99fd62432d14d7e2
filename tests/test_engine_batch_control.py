"""How much a step takes on: working sets that fit in memory together, turns that come, tokens that are on time."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
from engine_helpers import start, tokens
from test_engine_tiers import small
from tiny_models import make_checkpoint, random_ids

from saccade import LLM, SamplingParams
from saccade.engine.scheduling import batch_control
from saccade.engine.scheduling.batch_control import QUANTUM, ROOM, BatchControl
from saccade.engine.scheduling.token_gap import TokenGap

LONG = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
POLICIES = [
    "quest(budget=64, block_size=16, dense_layers=0)",
    "topk(k=16, sinks=2, local=8)",
    "streaming+arkvale(budget=96)",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint("llama", tmp_path_factory.mktemp("llama"), max_position_embeddings=2048, head_dim=32)


@pytest.fixture(scope="module")
def expected(folder):
    with LLM(folder, dtype="float32", kv_memory="64MiB", prefill_chunk=64, enable_prefix_caching=False) as llm:
        return [tokens(one) for one in llm.generate(PROMPTS, LONG, policy=CHOSEN)]


PROMPTS = [random_ids(330 + 40 * i, seed=i) for i in range(5)]
CHOSEN = [POLICIES[i % len(POLICIES)] for i in range(len(PROMPTS))]


def watched(llm: LLM) -> tuple[list[list[int]], list[bool]]:
    """Who decodes in each step from now on, and whether all that do fit."""
    steps: list[list[int]] = []
    fits: list[bool] = []
    scheduler, schedule = llm.engine.scheduler, llm.engine.scheduler.schedule

    def noted():
        batch = schedule()
        decoding = [request for request, rows in batch if rows.phase == "decode"]
        steps.append([request.id for request in decoding])
        control, pool = scheduler.control, llm.pool
        wanted = sum(control.working_set(request) for request in decoding)
        fits.append(len(decoding) < 2 or not pool.absent or wanted <= ROOM * pool.tiers.slots)
        return batch

    scheduler.schedule = noted
    return steps, fits


@pytest.mark.parametrize("host", [False, True])
def test_working_sets_fit_together_and_everybodys_turn_comes(folder, tmp_path, expected, host):
    with small(folder, tmp_path, 40, host=host) as llm:
        steps, fits = watched(llm)
        requests = [start(llm, ids, LONG, policy) for ids, policy in zip(PROMPTS, CHOSEN)]
        while llm.engine.busy:
            llm.engine.step()
        assert [one.output_ids or one.final_ids for one in requests] == expected
        assert all(fits)
        assert sum(one.report.held_back for one in requests) > 60
        assert all(one.report.preemptions == 0 for one in requests)  # nothing was computed again
        for one in requests:
            ran = [at for at, ids in enumerate(steps) if one.id in ids]
            assert max(after - before for before, after in itertools.pairwise(ran)) <= (len(requests) - 1) * QUANTUM + 1
        assert llm.pool.used_blocks == 0


def test_under_a_bound_between_tokens_requests_queue_instead_of_taking_turns(folder, tmp_path, expected):
    held, order, answers = {}, {}, {}
    for gap in (None, 3600):
        with small(folder, tmp_path, 60, host=True, max_token_gap=gap) as llm:
            steps, _ = watched(llm)
            requests = [start(llm, ids, LONG, POLICIES[0]) for ids in PROMPTS]
            while llm.engine.busy:
                assert llm.engine.step()  # whatever it needs, the first in line runs
            answers[gap] = [one.final_ids for one in requests]
            held[gap] = sum(one.report.held_back for one in requests)
            order[gap] = list(dict.fromkeys(number for ids in steps for number in ids))
            together = max(map(len, steps))
    assert answers[None] == answers[3600]
    assert [answers[None][at] for at in (0, 3)] == [expected[at] for at in (0, 3)]
    assert held[None] > 60
    assert held[3600] < held[None] / 3  # but while it is not known yet what requests read
    assert order[3600] == [one.id for one in requests]  # first come, first served
    assert together > 1


def test_of_a_pool_a_layer_the_greediest_layer_says_who_fits(folder, tmp_path, monkeypatch):
    """Quest reads everything in its first two layers: these layers' shares hold fewer requests than all slots do."""
    policy, learnt = "quest(budget=64, block_size=16, dense_layers=1)", {}
    for pool in ("unified", "per_layer"):
        with small(folder, tmp_path, 61, host=True, kv_pool=pool, max_requests=3) as llm:
            control, seen = llm.engine.scheduler.control, []
            ran = control.ran

            def look(*given, ran=ran, control=control, seen=seen):
                ran(*given)
                seen.extend(min(one) for one in control._working.values())

            monkeypatch.setattr(control, "ran", look)
            for one in llm.generate([ids[:430] for ids in PROMPTS[1:4]], LONG, policy=policy):
                assert one.error is None
            learnt[pool] = min(seen), max(seen)
    assert learnt["per_layer"][0] >= 3 * 12  # of 12 and more blocks at the layer that reads all
    assert learnt["unified"][1] < learnt["per_layer"][1]


def test_turns_save_what_would_be_read_again_and_again(folder, tmp_path, monkeypatch):
    def misses() -> int:
        with small(folder, tmp_path, 40) as llm:
            llm.generate(PROMPTS, LONG, policy=POLICIES[0])
            return llm.pool.tiers.counts.misses

    with_turns = misses()
    monkeypatch.setattr(batch_control, "ROOM", 1e9)
    assert with_turns < 0.9 * misses()


def test_with_memory_for_all_nobody_is_held_back(folder, tmp_path, expected):
    with small(folder, tmp_path, 2000) as llm:
        done = llm.generate(PROMPTS, LONG, policy=CHOSEN)
        assert [tokens(one) for one in done] == expected
        assert all(one.report["held_back"] == 0 for one in done)


def test_turns_are_shorter_where_the_gap_would_be_missed():
    gap = TokenGap(0.1)
    gap.decoded(0.01)
    control = BatchControl(SimpleNamespace(tiers=None, absent=0), gap)
    assert control._quantum(2) == 10
    assert control._quantum(6) == 2
    assert control._quantum(100) == 1
    assert BatchControl(SimpleNamespace())._quantum(9) == QUANTUM
