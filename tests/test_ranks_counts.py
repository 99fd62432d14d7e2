"""What several ranks count: kept by each until a report asks, over tiers too; the messages of a step are counted."""

from __future__ import annotations

import fork_server
import pytest
import rank_threads
import torch
from rank_helpers import LAYERS, MIXED, PROMPTS, ROOMY, SPARSE, TIGHT, alike_reports, blocks, both, greedy, make, same
from tiny_models import make_checkpoint, one_thread  # noqa: F401

from saccade import SamplingParams, ranks
from saccade.engine.ranks import other
from saccade.engine.ranks.meeting import RankGroup
from saccade.engine.ranks.worker import FirstRank
from saccade.engine.watch.audit import AuditOptions, Findings, HeadsAudit
from saccade.methods.policy import Policy


@pytest.fixture
def folder(tmp_path):
    return make_checkpoint("llama", tmp_path / "model", num_key_value_heads=2, max_position_embeddings=512)


@pytest.fixture
def threads(monkeypatch):
    """Other ranks are threads, so that what is patched here is patched there."""
    monkeypatch.setattr(ranks, "subprocess", rank_threads.SUBPROCESS)


@pytest.fixture
def messages(monkeypatch):
    """How many messages the first rank waited for, those of the model aside, which are floats: a list with the number
    of each step, and a list with the number of all between steps."""
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
        alike_reports(mine.report, theirs.report)
    assert [one.report["prefill"]["density"] < 1 for one in own[1]] == [False, True, True, False, False]
    steps, (reports,) = messages
    assert len(steps) > 12
    assert set(steps) == {1}
    asked = len(PROMPTS) if options else len(PROMPTS) - 1  # dense ranks read alike, but each moves blocks of its own
    assert reports == 2 * 2 * asked
    moved = [one.report["tiers"] is not None for one in own[1]]
    assert any(moved) == (each == TIGHT)


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
    """In few pieces, however many there are; each is told once."""
    audit = HeadsAudit(AuditOptions(), 0)
    for number in range(600):
        audit.found(torch.full((1, 3), float(number)), number % 3 > 0, [(number, 0)])
    audit.left_out = 2
    told = audit.take()
    assert told.left_out == 2
    assert len(told.found) == 6  # two of each 256, and of the rest
    for asked in (False, True):
        found = [(values, places) for values, whole, places in told.found if whole == asked]
        numbers = [number for _, places in found for number, _ in places]
        assert numbers == [number for number in range(600) if (number % 3 > 0) == asked]
        assert torch.cat([values for values, _ in found])[:, 0].tolist() == numbers
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
            alike_reports(request.report.as_dict(), request.report.as_dict())
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
            alike_reports(left, right)
    assert set(messages[0]) == {1}
