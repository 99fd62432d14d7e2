"""What several ranks count: kept by each until a report asks, over tiers too, and then what one process counts."""

from __future__ import annotations

import fork_server
import pytest
import rank_threads
import torch
from engine_helpers import finish
from rank_helpers import LAYERS, PROMPTS, greedy, make, same
from tiny_models import make_checkpoint, one_thread  # noqa: F401

from saccade import SamplingParams, ranks
from saccade.engine.ranks import other
from saccade.engine.ranks.link import RankGroup
from saccade.engine.ranks.worker import FirstRank
from saccade.engine.watch.audit import AuditOptions, Findings, HeadsAudit
from saccade.kv.format import KVFormat
from saccade.kv.tier import LostKV
from saccade.methods.flexprefill.method import FlexPrefill
from saccade.methods.policy import Policy
from saccade.methods.quest import Quest

SPARSE = "flexprefill(min_budget=32, block_size=64, gamma=0.3)"
MIXED = ["dense", SPARSE, f"{SPARSE}+quest(budget=64)", "psa(epsilon=0.3)", "lfps"]
ROOMY, TIGHT = 60, 13  # blocks a layer: more than all requests below take, and less than one takes and another
EXACT = (
    *("tokens", "density", "keys_attended", "keys_causal", "keys_attended_per_row", "density_per_layer"),
    *("density_per_head", "retrievals", "searches", "searchable", "rows_frozen", "backends", "certified"),
)


@pytest.fixture
def folder(tmp_path):
    return make_checkpoint("llama", tmp_path / "model", num_key_value_heads=2, max_position_embeddings=512)


@pytest.fixture
def threads(monkeypatch):
    """Other ranks are threads, so that what is patched here is patched there."""
    monkeypatch.setattr(ranks, "subprocess", rank_threads.SUBPROCESS)


def blocks(count: int, each: int) -> int:
    """Bytes of so many blocks a layer in each of ``count`` processes."""
    return LAYERS * each * KVFormat(torch.float32, max(1, 2 // count), 16, 32).block_bytes


def both(folder, ask, each: int = ROOMY, **options):
    """What ``ask`` gets of an engine of one process, and of one of two."""
    made = []
    for count in (1, 2):
        with make(folder, count, **{"kv_memory": blocks(count, each), "exact": False, **options}) as llm:
            made.append(ask(llm))
    return made


def alike(mine: dict, theirs: dict) -> None:
    """Two reports of the same work. Keys that were scored are means over heads, which are rounded."""
    for phase in ("prefill", "decode"):
        own, others = mine[phase], theirs[phase]
        for name in EXACT:
            assert others[name] == own[name], (phase, name)
        for name in ("coverage_estimated", "coverage_estimated_least"):
            assert others[name] == (None if own[name] is None else pytest.approx(own[name], abs=1e-5)), (phase, name)
        for name in ("keys_scored", "keys_estimated"):
            assert others[name] == pytest.approx(own[name], abs=8 + own[name] / 500), (phase, name)
    assert theirs["cached_bytes"] == mine["cached_bytes"]
    assert (theirs["tiers"] is None) == (mine["tiers"] is None)


@pytest.fixture
def messages(monkeypatch):
    """Of each step of the first rank, how many messages it waited for that are no part of the model: those are floats.
    Behind a 0 those of reports."""
    seen: list[list[int]] = [[], [0]]
    inside: list[int] = []
    run, joins = FirstRank.run, RankGroup._run

    def counted_run(self, *given, **more):
        inside.append(0)
        try:
            return run(self, *given, **more)
        finally:
            seen[0].append(inside.pop())

    def counted(self, part, name):
        if self.rank == 0 and not part.is_floating_point():
            (inside or seen[1])[-1] += 1
        return joins(self, part, name)

    monkeypatch.setattr(FirstRank, "run", counted_run)
    monkeypatch.setattr(RankGroup, "_run", counted)
    return seen


@pytest.mark.parametrize(
    ("each", "options"),
    [(ROOMY, {}), (ROOMY, {"kv_host": "8MiB"}), (TIGHT, {"kv_host": "8MiB"})],
    ids=["memory", "tiers", "tiers that move"],
)
def test_a_step_exchanges_no_counts(folder, monkeypatch, messages, each, options):
    """Of ragged prompts in chunks, dense and sparse ones in the same steps, and of what they decode: a step has one
    message beside the model's, which says whether all ranks came through. Reports take two for each phase, sizes and
    counts, and are those of one process."""
    monkeypatch.setattr(ranks, "subprocess", fork_server.SUBPROCESS)
    own = both(folder, lambda llm: llm.generate(PROMPTS, greedy(6), policy=MIXED), each, **options)
    same(*own)
    for mine, theirs in zip(*own, strict=True):
        alike(mine.report, theirs.report)
        assert theirs.report["prefill"]["density"] == 1 or theirs.report["policy"] != "dense"
    steps, (reports,) = messages
    assert len(steps) > 12
    assert set(steps) == {1}
    asked = len(PROMPTS) if options else len(PROMPTS) - 1  # dense ranks read alike, but each moves blocks of its own
    assert reports == 2 * 2 * asked
    moved = [one.report["tiers"] is not None for one in own[1]]
    assert any(moved) == (each == TIGHT)


def test_requests_that_are_preempted_and_cancelled(folder, threads):
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
            alike(mine, theirs)
    policies = ["dense", SPARSE, f"{SPARSE}+arkvale(budget=64)"] * 2
    own = both(folder, lambda llm: llm.generate(PROMPTS[:3] * 2, greedy(41), policy=policies), 40)
    same(*own)
    assert sum(one.report["preemptions"] for one in own[1]) > 0
    for mine, theirs in zip(*own, strict=True):
        assert mine.report["preemptions"] == theirs.report["preemptions"]
        alike(mine.report, theirs.report)


@pytest.mark.parametrize("where", ["one rank", "all ranks"])
@pytest.mark.parametrize("options", [{}, {"kv_host": "8MiB"}], ids=["memory", "tiers"])
def test_requests_that_fail(folder, threads, monkeypatch, where, options):
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
        alike(mine.report, theirs.report)
    assert [one.error is None for one in own[0]] == [False, False, True]
    said = own[1][0].error
    assert ("failed in another rank" in said) == (where == "one rank"), said
    assert own[0][0].report["prefill"]["tokens"] == 192


@pytest.mark.parametrize("where", [0, 1])
def test_keys_that_one_rank_has_lost(folder, threads, monkeypatch, where):
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
        alike(mine.report, theirs.report)
    assert any("lost in a tier" in note for note in own[1][0].report["notes"])
    assert own[1][0].report["prefill"]["tokens"] > len(PROMPTS[0])


@pytest.mark.parametrize("second", ["dense", "lossless(draft=quest(budget=64), tokens=2)"])
@pytest.mark.parametrize("first", ["snapkv(capacity=70)", "adakv(capacity=70)"])
def test_turns_after_keys_were_evicted(folder, threads, first, second):
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
        alike(mine.report.as_dict(), theirs.report.as_dict())
    report = own[1][1].report.as_dict()
    assert report["prefill"]["density"] < 1
    assert report["accepted_tokens"] > 0 or second == "dense"


@pytest.mark.parametrize("options", [{}, {"kv_host": "8MiB"}, {"kv_dtype": "int8"}], ids=["memory", "tiers", "int8"])
def test_certificates_and_estimates(folder, threads, options):
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
        alike(mine.report, theirs.report)
    assert own[1][1].report["decode"]["coverage_estimated"] is not None


def test_audits_are_asked_for_by_reports(folder, threads, messages):
    """Not by steps: the same places are drawn as in one process, and what is found there is the same."""
    params = greedy(12, seed=7, audit=0.5, audit_steps=0.3)
    own = both(folder, lambda llm: llm.generate(PROMPTS[:2], params, policy="topk(k=24)"))
    for mine, theirs in zip(*own, strict=True):
        one, two = mine.report["audit"], theirs.report["audit"]
        assert (two["places"], two["left_out"], two["steps"]) == (one["places"], one["left_out"], one["steps"])
        assert two["output_error"]["samples"] == one["output_error"]["samples"] > 10
        for name in ("retained_mass", "output_error", "output_error_scaled"):
            assert two[name]["mean"] == pytest.approx(one[name]["mean"], abs=2e-5), name
    steps, _ = messages
    assert set(steps) == {1}


def test_findings_are_kept_until_they_are_asked_for():
    """In one piece of each kind, however many there are; each is told once."""
    audit = HeadsAudit(AuditOptions(), 0)
    for number in range(600):
        audit.found(torch.full((1, 3), float(number)), number % 3 > 0, [(number, 0)])
    assert len(audit.noted) < 260
    audit.left_out = 2
    told = audit.take()
    assert told.left_out == 2
    assert [(whole, len(values), len(places)) for values, whole, places in told.found] == [
        (False, 200, 200),
        (True, 400, 400),
    ]
    for values, _, places in told.found:
        assert values[:, 0].tolist() == [number for number, _ in places]
    assert audit.take() == Findings([], 0)


def test_what_is_kept_goes_with_its_request(folder, threads, monkeypatch):
    """On the other rank, too, replays' among it; and counts that are asked for in between are counted once."""
    made: list[other.OtherRank] = []
    real = other.OtherRank.follow
    monkeypatch.setattr(other.OtherRank, "follow", lambda self, told: made.append(self) or real(self, told))
    looks = []
    for count in (1, 2):
        with make(folder, count, kv_memory=blocks(count, TIGHT), exact=False, kv_host="8MiB") as llm:
            request = llm.engine.add(PROMPTS[0], greedy(9, audit=0.5, audit_steps=0.6, seed=7), Policy.parse(MIXED[2]))
            while not request.finished:
                llm.engine.step()
                looks.append(request.report.as_dict()["decode"]["keys_attended"])
            assert request.audit.agreement.as_dict()["samples"] > 1
            alike(request.report.as_dict(), request.report.as_dict())
            del request
            llm.generate(PROMPTS[1], greedy(3))
            llm.generate(PROMPTS[1], greedy(3))
    half = len(looks) // 2
    assert looks[:half] == looks[half:]
    assert looks[-1] > 0
    (rank,) = made
    assert len({number for number, _ in rank._kept}) <= 2
    assert not rank._audits


@pytest.mark.parametrize("each", [ROOMY, TIGHT])
def test_ranks_have_as_much_memory_as_the_first(folder, threads, monkeypatch, each):
    """However much its tiers hold; a report has what all of them moved."""
    made: list[other.OtherRank] = []
    real = other.OtherRank.follow
    monkeypatch.setattr(other.OtherRank, "follow", lambda self, told: made.append(self) or real(self, told))
    with make(folder, 2, kv_memory=blocks(2, each), exact=False, kv_host="8MiB") as llm:
        out = llm.generate(PROMPTS, greedy(6), policy=MIXED)
        pools = llm.pool, made[0]._pool
        assert pools[0].storage.num_blocks == pools[1].storage.num_blocks == LAYERS * each
        assert pools[0].num_blocks == pools[1].num_blocks
        tiers = [one.report["tiers"] for one in out if one.report["tiers"] is not None]
        assert bool(tiers) == (each == TIGHT)
        for name in ("hits", "misses", "bytes_read"):
            each_moved = [getattr(pool.tiers.counts, name) for pool in pools]
            told = sum(one[name] for one in tiers)
            assert max(each_moved) * bool(tiers) < told <= sum(each_moved) or not tiers


@pytest.mark.parametrize("options", [{}, {"kv_host": "8MiB"}], ids=["memory", "tiers"])
def test_models_that_keep_states(tmp_path, threads, messages, options):
    """Layers that attend are counted, as in one process; steps have the same one message."""
    folder = make_checkpoint("qwen3_5_text", tmp_path / "model", max_position_embeddings=512)
    policies = ["dense", SPARSE, f"{SPARSE}+arkvale(budget=64, unit=kv_head)"]
    sampled = SamplingParams(n=2, temperature=0.8, seed=3, max_tokens=8, ignore_eos=True)

    def ask(llm):
        return [
            *llm.generate(PROMPTS[:3], greedy(6), policy=policies),
            *llm.generate(PROMPTS[3], sampled, policy=policies[1]),
        ]

    own = []
    for count in (1, 2):
        with make(folder, count, kv_memory="1MiB", exact=False, **options) as llm:
            own.append(ask(llm))
    same(*own)
    for mine, theirs in zip(*own, strict=True):
        for left, right in zip(mine.reports, theirs.reports, strict=True):
            alike(left, right)
    assert set(messages[0]) == {1}
