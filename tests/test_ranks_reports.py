"""Reports of several ranks are those of one process, whatever becomes of a request on the way."""

from __future__ import annotations

import random

import pytest
import rank_threads
from engine_helpers import finish
from rank_helpers import MIXED, PROMPTS, SPARSE, TIGHT, alike_reports, both, greedy, same
from tiny_models import make_checkpoint, one_thread, random_ids  # noqa: F401

from saccade import ranks
from saccade.kv.tier import LostKV
from saccade.methods.flexprefill.method import FlexPrefill
from saccade.methods.policy import Policy
from saccade.methods.quest import Quest


@pytest.fixture
def folder(tmp_path):
    return make_checkpoint("llama", tmp_path / "model", num_key_value_heads=2, max_position_embeddings=512)


@pytest.fixture(autouse=True)
def threads(monkeypatch):
    """Other ranks are threads, so that what is patched here is patched there."""
    monkeypatch.setattr(ranks, "subprocess", rank_threads.SUBPROCESS)


def test_requests_that_are_preempted_and_cancelled(folder):
    """Half of a prompt, or of an answer, is counted as one process counts it; what is computed again, again."""

    def cancelled(llm):
        said = []
        for policy in MIXED:
            for steps in (2, 8):
                request = llm.engine.add(PROMPTS[0], greedy(20), Policy.parse(policy))
                for _ in range(steps):
                    llm.engine.step()
                llm.engine.cancel(request)
                finish(llm.engine)
                said.append(request.report.as_dict())
                assert said[-1]["prefill"] | {"seconds": 0, "tokens_per_second": 0} == request.report.as_dict()[
                    "prefill"
                ] | {"seconds": 0, "tokens_per_second": 0}
        return said

    for options in ({}, {"kv_host": "8MiB"}):
        for mine, theirs in zip(*both(folder, cancelled, TIGHT, **options), strict=True):
            alike_reports(mine, theirs)
    policies = ["dense", SPARSE, f"{SPARSE}+arkvale(budget=64)"] * 2
    own = both(folder, lambda llm: llm.generate(PROMPTS[:3] * 2, greedy(41), policy=policies), 40)
    same(*own)
    assert sum(one.report["preemptions"] for one in own[1]) > 0
    for mine, theirs in zip(*own, strict=True):
        assert mine.report["preemptions"] == theirs.report["preemptions"]
        alike_reports(mine.report, theirs.report)


@pytest.mark.parametrize("where", ["one rank", "all ranks"])
@pytest.mark.parametrize("options", [{}, {"kv_host": "8MiB"}], ids=["memory", "tiers"])
def test_requests_that_fail(folder, monkeypatch, where, options):
    """In the middle of a chunk, or of a decode step: as far as all ranks came is counted, as in one process."""
    prefill, decode = FlexPrefill.select_prefill, Quest.select_decode

    def fails(part) -> bool:
        return part.is_whole or where == "all ranks" or part.number == 1

    def select_prefill(self, chunk):
        if self.gamma == 0.4 and chunk.layer == 1 and chunk.shape.k_len == 192 and fails(chunk.part):
            raise RuntimeError("no such block")
        return prefill(self, chunk)

    def select_decode(self, query, state):
        if self.budget == 96 and query.layer == 2 and query.shape.k_len == 154 and fails(query.part):
            raise RuntimeError("no such page")
        return decode(self, query, state)

    monkeypatch.setattr(FlexPrefill, "select_prefill", select_prefill)
    monkeypatch.setattr(Quest, "select_decode", select_decode)
    monkeypatch.setattr(Quest, "device_plan", lambda self, spec: None)
    policies = [SPARSE.replace("0.3", "0.4"), "quest(budget=96)", f"{SPARSE}+quest(budget=64)"]
    own = both(folder, lambda llm: llm.generate(PROMPTS[:3], greedy(8), policy=policies), **options)
    for mine, theirs in zip(*own, strict=True):
        assert (mine.error is None) == (theirs.error is None)
        alike_reports(mine.report, theirs.report)
    assert [one.error is None for one in own[0]] == [False, False, True]
    said = own[1][0].error
    assert ("failed in another rank" in said) == (where == "one rank"), said
    assert own[0][0].report["prefill"]["tokens"] == 192


@pytest.mark.parametrize("where", [0, 1])
def test_keys_that_one_rank_has_lost(folder, monkeypatch, where):
    """Are computed again on all of them; what was lost on the way is counted by none."""
    real, times = FlexPrefill.select_prefill, []

    def select_prefill(self, chunk):
        loses = chunk.part.is_whole or chunk.part.number == where
        if loses and chunk.layer == 1 and chunk.shape.k_len == 192 and len(times) < 1:
            times.append(1)
            raise LostKV("a block is gone")
        return real(self, chunk)

    monkeypatch.setattr(FlexPrefill, "select_prefill", select_prefill)

    def ask(llm):
        times.clear()
        return llm.generate(PROMPTS[:2], greedy(5), policy=[SPARSE, "dense"])

    own = both(folder, ask, kv_host="8MiB")
    assert times == [1]
    same(*own)
    for mine, theirs in zip(*own, strict=True):
        alike_reports(mine.report, theirs.report)
    assert any("lost in a tier" in note for note in own[1][0].report["notes"])
    assert own[1][0].report["prefill"]["tokens"] > len(PROMPTS[0])


@pytest.mark.parametrize("second", ["dense", "lossless(draft=quest(budget=64), tokens=2)"])
@pytest.mark.parametrize("first", ["snapkv(capacity=70)", "adakv(capacity=70)"])
def test_turns_after_keys_were_evicted(folder, first, second):
    """Not even dense rows read alike in all heads then, nor do those that verify drafts, which are verified one by one
    in both engines here: one process counts drafts that it rejects, where it reads all rows at once."""

    def turns(llm):
        sequence = llm.engine.sessions[llm.engine.sessions.open()]
        said = []
        for ids, policy in ((PROMPTS[0], first), (PROMPTS[1][:40] * 2, second)):
            request = llm.engine.add(ids, greedy(8), Policy.parse(policy), sequence)
            finish(llm.engine)
            assert request.error is None
            said.append(request)
        return said

    own = both(folder, turns, exact=True)
    for mine, theirs in zip(*own, strict=True):
        assert mine.final_ids == theirs.final_ids
        alike_reports(mine.report.as_dict(), theirs.report.as_dict())
    report = own[1][1].report.as_dict()
    assert report["prefill"]["density"] < 1
    assert report["accepted_tokens"] > 0 or second == "dense"


@pytest.mark.parametrize("options", [{}, {"kv_host": "8MiB"}, {"kv_dtype": "int8"}], ids=["memory", "tiers", "int8"])
def test_certificates_and_estimates(folder, options):
    """What rules believed they covered, and what certificates rest on: of the heads of all ranks."""
    policies = ["vattention(sinks=16, local=16)", f"{SPARSE}+psa(epsilon=0.5)"]
    params = [greedy(10, seed=5, certify=(0.2, 0.1)), greedy(10)]
    own = both(folder, lambda llm: llm.generate(PROMPTS[2::2], params, policy=policies), TIGHT, **options)
    certified = [one[0].report["decode"].pop("certified") for one in own]
    rounding = [one.pop("rounding", None) for one in certified]
    assert certified[0] == certified[1]
    assert certified[0]["heads"] > 0
    assert rounding[1] == (None if rounding[0] is None else pytest.approx(rounding[0], rel=1e-3))
    assert (rounding[0] is not None) == ("kv_dtype" in options)
    for one in own:
        one[0].report["decode"]["certified"] = None
    for mine, theirs in zip(*own, strict=True):
        alike_reports(mine.report, theirs.report)
    assert own[1][1].report["decode"]["coverage_estimated"] is not None


WILD = [*MIXED, "snapkv(capacity=70)", "arkvale(budget=64, unit=kv_head)", f"{SPARSE}+quest(budget=64)+etf"]
PLACES = {
    "memory": {},
    "host": {"kv_host": "8MiB"},
    "heads": {"kv_host": "8MiB", "kv_unit": "head"},
    "disk": {"kv_host": "64KiB", "kv_disk": "tier:8MiB"},
}


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("place", PLACES)
def test_requests_that_come_and_go(folder, tmp_path, monkeypatch, place, seed):
    """Ragged ones of many methods, some cancelled, in less memory than they take."""
    monkeypatch.chdir(tmp_path)
    rng = random.Random(seed)
    each, chunk = rng.choice([13, 17]), rng.choice([32, 64, 100])
    plan = []
    for _ in range(10):
        ids = random_ids(rng.randrange(5, 340), seed=rng.randrange(6))
        lasts = rng.choice([None, None, None, rng.randrange(1, 9)])
        plan.append((rng.randrange(25), ids, rng.choice(WILD), rng.randrange(1, 20), lasts))

    def ask(llm):
        asked, step = {}, 0
        while len(asked) < len(plan) or llm.engine.busy:
            for number, (begins, ids, policy, tokens, _) in enumerate(plan):
                if begins == step:
                    asked[number] = llm.engine.add(ids, greedy(tokens), Policy.parse(policy))
            for number, request in asked.items():
                begins, *_, lasts = plan[number]
                if lasts is not None and step - begins == lasts and not request.finished:
                    llm.engine.cancel(request)
            llm.engine.step()
            step += 1
        assert llm.pool.used_blocks == 0
        return [(one.final_ids, one.report.as_dict()) for _, one in sorted(asked.items())]

    own = both(folder, ask, each, prefill_chunk=chunk, **PLACES[place])
    for (ids, mine), (others, theirs) in zip(*own, strict=True):
        assert ids == others
        assert theirs["preemptions"] == mine["preemptions"]
        alike_reports(mine, theirs)
