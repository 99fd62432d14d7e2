"""Turns that break are as if they had never begun: asked again, a session answers as one that nothing happened to."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from drafters import Perfect, draft_by
from engine_helpers import make, tokens
from storm.breaks import SPARSE, Bench, breaks
from tiny_models import make_checkpoint, random_ids

from saccade import LLM, SamplingParams
from saccade.engine.rows.attention import RowAttention
from saccade.errors import SaccadeError
from saccade.kv.sequence import SequenceKV

FEW = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=0)
TURNS = random_ids(40, seed=3), random_ids(21, seed=4)
LEARNING = (
    "h2o(budget=16)",
    "lfps(k=8, blocks=2, least=1, block_size=4)",
    "snapkv(capacity=20, window=8, kernel=3)",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Heads of 12 channels, whose rows no kernel joins: every step goes layer by layer."""
    return make_checkpoint("llama", tmp_path_factory.mktemp("llama"), num_hidden_layers=2, head_dim=12)


@pytest.fixture(scope="module")
def small(folder) -> Iterator[LLM]:
    llm = make(folder, blocks=100, chunk=32)
    yield llm
    assert llm.pool.used_blocks == 0


def say(session, ids: list[int]) -> tuple[list[int], float]:
    output = session.generate(ids, FEW)
    assert output.error is None
    return tokens(output), output.outputs[0].cumulative_logprob


@pytest.mark.parametrize("policy", LEARNING)
def test_a_turn_that_breaks_while_lost_keys_are_computed_again_teaches_nothing(small, monkeypatch, policy):
    """In every layer of every step: some layers had seen a step's rows, others not, and the retry went on from that."""
    real, call = RowAttention.run, 0

    def run(self, *rest):
        nonlocal call
        out = real(self, *rest)
        call += 1
        if call == last:
            raise RuntimeError("planted")
        return out

    with small.session(policy) as session:
        say(session, TURNS[0])
        want = say(session, TURNS[1])
    for last in range(1, 100):
        with small.session(policy) as session:
            say(session, TURNS[0])
            session.sequence.drop_kv()  # as for others that need the room
            call = 0
            with monkeypatch.context() as patch:
                patch.setattr(RowAttention, "run", run)
                broken = session.generate(TURNS[1], FEW)
            if broken.error is None:
                break
            assert say(session, TURNS[1]) == want, f"broken in call {last}"
    assert 10 < last < 100


@pytest.mark.parametrize("policy", ["h2o(budget=16)", "xattention(threshold=0.5, block_size=32)"])
@pytest.mark.parametrize("broken", [False, True])
def test_an_edit_that_is_taken_back_leaves_the_session_as_it_was(small, monkeypatch, policy, broken):
    """What it had cut off came back as a prompt's tokens, in one stretch: decoded tokens read otherwise."""
    with small.session(policy) as session:
        say(session, TURNS[0])
        want = say(session, TURNS[1])
    with small.session(policy) as session:
        say(session, TURNS[0])
        before = session.token_ids
        if broken:
            with monkeypatch.context() as patch:
                patch.setattr(RowAttention, "run", lambda *_: 1 // 0)
                assert session.complete(random_ids(30, seed=9), FEW).error is not None
        else:
            edit = session.sequence
            request = small.engine.add([7, 8, 9], FEW, session.policy, edit, keep=0)
            small.engine.step()
            small.engine.cancel(request)
        assert session.token_ids == before
        assert say(session, TURNS[1])[0] == want[0]


def test_a_step_begins_where_the_states_stand(small):
    """Whatever made them differ: an error, never an answer by chance."""
    with small.session("h2o(budget=16)") as session:
        say(session, TURNS[0])
        memory = session.sequence.memories[session.sequence.id]
        assert memory.stands == session.sequence.computed == len(session.token_ids) - 1
        with pytest.raises(SaccadeError, match="built from 43 tokens cannot go on at token 42"):
            memory.begin_step(42, decodes=True)
        memory.stands = 42
        with pytest.raises(SaccadeError, match="the state of layer 0 has learnt from 43 of 42 tokens"):
            memory.begin_step(42, decodes=True)
        memory.stands = 43
        memory.states[1].length += 1
        with pytest.raises(SaccadeError, match="the state of layer 1 has learnt from 44 of 43 tokens"):
            memory.begin_step(43, decodes=True)


def test_blocks_that_cannot_be_had_for_drafts_are_gone_without(folder, monkeypatch):
    """The engine's step raised, which ended every request that ran."""
    llm = make(folder, blocks=100)
    many = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    want = tokens(llm.generate(TURNS[0], many)[0])
    draft_by(llm.engine, Perfect([[*TURNS[0], *want]]))
    real, refused = SequenceKV.reserve, []

    def reserve(self, count):
        if count > self.length + 1 > len(TURNS[0]):
            refused.append(count)
            raise MemoryError("no memory for drafts")
        real(self, count)

    monkeypatch.setattr(SequenceKV, "reserve", reserve)
    output = llm.generate(TURNS[0], many)[0]
    assert (output.error, tokens(output)) == (None, want)
    assert refused


def test_turns_that_break_anywhere():
    """A part of ``make storm``: one place or two, while keys are dropped, saved, shared and drafted."""
    counts, wrong = breaks(45, seed=7, each=1)
    assert not wrong, "\n".join(wrong)
    assert counts["answered"] == 3 * 45
    assert counts["failed"] > 60


FEW_POLICIES = ("topk(k=8)", "h2o(budget=16)", "lossless(draft=h2o(budget=16), tokens=3)", f"{SPARSE}+h2o(budget=16)")


def test_turns_that_break_over_layers_that_keep_a_state():
    counts, wrong = breaks(12, seed=5, policies=FEW_POLICIES, each=1, family="qwen3_5_text")
    assert not wrong, "\n".join(wrong)
    assert counts["answered"] == 3 * 12
    assert counts["failed"] > 12
    assert counts["drafted"] > 0
    assert counts["computed again"] > 0


def test_the_sweep_sees_a_state_that_kept_rows_that_were_taken_back(monkeypatch):
    monkeypatch.setattr("saccade.kv.state_journal.StateJournal.run", lambda self, slot, rows: None)
    _, wrong = breaks(8, seed=5, policies=FEW_POLICIES[:1], each=1, family="qwen3_5_text")
    assert len(wrong) > 2


def test_the_sweep_sees_a_session_that_remembers_a_broken_turn(monkeypatch):
    monkeypatch.setattr(
        "saccade.engine.memory.sequence_memory.SequenceMemory._go_back", lambda self, length, stored: True
    )
    _, wrong = breaks(12, seed=7, policies=("h2o(budget=16)",), each=1)
    assert len(wrong) > 2


def test_a_bench_follows_its_script(folder):
    """The answers that cases are compared with are those of a session over a pool that holds everything."""
    bench = Bench(folder)
    script = bench.script("h2o(budget=16)", seed=5)
    llm = make(folder, blocks=200, chunk=32)
    with llm.session("h2o(budget=16)") as session:
        for turn, context, (ids, _) in zip(script.turns, script.contexts, script.answers):
            said = turn.ids if turn.keep is None else context[: turn.keep] + turn.ids
            output = (session.generate if turn.keep is None else session.complete)(said, turn.params)
            assert tokens(output) == ids
        assert session.token_ids == script.contexts[-1]
