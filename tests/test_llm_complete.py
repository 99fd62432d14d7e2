"""Completing a whole context: what is stored already is kept, and its last tokens may run as decode steps."""

from __future__ import annotations

import pytest
from engine_helpers import GREEDY, make, tokens
from tiny_models import random_ids

from saccade.errors import RequestError

CONTEXT, QUESTION, OTHER = (random_ids(length, seed=length) for length in (200, 9, 13))
PSA = "psa(epsilon=0.4, block_size=16, microbatch=1, rank=cuboid)"
SPARSE = "flexprefill(gamma=0.5, block_size=64, min_budget=0)"


def test_decoded_tokens_are_counted_as_decode_steps(llm):
    with llm.session(PSA) as session:
        output = session.complete([*CONTEXT, *QUESTION], GREEDY, decoded=len(QUESTION))
    report = output.report
    assert report["prompt_tokens"] == 209
    assert report["prefill"]["tokens"] == 200
    assert report["prefill"]["density"] == 1.0
    assert report["decode"]["tokens"] == 9 + 9  # the question, and every answer token but the last
    assert report["decode"]["density"] < 0.9
    # rows 201 .. 218 of three layers, each sees itself and all before it
    assert report["decode"]["keys_causal"] == 3 * sum(range(201, 219))


def test_dense_decode_steps_answer_as_a_dense_prefill_does(llm):
    whole = tokens(llm.generate([*CONTEXT, *QUESTION], GREEDY)[0])
    with llm.session() as session:
        assert tokens(session.complete([*CONTEXT, *QUESTION], GREEDY, decoded=len(QUESTION))) == whole


def test_a_sparse_question_reads_less_than_a_dense_one(llm):
    """The same policy and prompt: with the question prefilled it has seen everything, with it decoded it has not."""
    with llm.session(PSA) as session:
        output = session.complete([*CONTEXT, *QUESTION], GREEDY)
    assert output.report["prefill"]["tokens"] == 209
    assert output.report["decode"]["tokens"] == 9
    assert output.report["decode"]["keys_causal"] == 3 * sum(range(210, 219))


@pytest.mark.parametrize("policy", ["dense", PSA, f"{SPARSE}+{PSA}"])
@pytest.mark.parametrize("decoded", [False, True])
def test_questions_over_one_context_do_not_meet(llm, policy, decoded):
    """Each question gives what it gives alone over the same context, computed as a stretch of its own."""

    def ask(session, question):
        steps = len(question) if decoded else 0
        return session.complete([*CONTEXT, *question], GREEDY, keep=len(CONTEXT), decoded=steps)

    alone = []
    for question in (QUESTION, OTHER, QUESTION):
        with llm.session(policy) as session:
            session.complete(CONTEXT, GREEDY)
            alone.append(tokens(ask(session, question)))
    with llm.session(policy) as session:
        session.complete(CONTEXT, GREEDY)
        outputs = [ask(session, question) for question in (QUESTION, OTHER, QUESTION)]
    assert [tokens(output) for output in outputs] == alone
    for output, question in zip(outputs, (QUESTION, OTHER, QUESTION)):
        assert output.report["cached_tokens"] == 200
        assert output.report["decode" if decoded else "prefill"]["tokens"] == len(question) + (9 if decoded else 0)


def test_a_sparse_stretch_is_kept_whole_or_not_at_all(llm):
    """What a sparse prefill chose for row 3 may hang on row 199, so a cut at 100 keeps nothing of it."""
    changed = [*CONTEXT[:100], *random_ids(100, seed=5)]
    for policy, kept in (("dense", 100), (PSA, 100), (SPARSE, 0)):
        with llm.session(policy) as session:
            session.complete(CONTEXT, GREEDY)
            output = session.complete(changed, GREEDY)
        assert output.report["cached_tokens"] == kept
        assert tokens(output) == tokens(llm.generate(changed, GREEDY, policy=policy)[0])


def test_an_evicted_context_is_computed_again_as_it_was(llm, tiny_llama):
    policy = f"{SPARSE}+{PSA}"
    with llm.session(policy) as session:
        session.complete(CONTEXT, GREEDY)
        kept = tokens(session.complete([*CONTEXT, *QUESTION], GREEDY, keep=200, decoded=9))
    small = make(tiny_llama, blocks=3 * 14)
    with small.session(policy) as session:
        session.complete(CONTEXT, GREEDY)
        small.generate(random_ids(400, seed=9), GREEDY)
        assert session.sequence.kv.blocks == 0
        output = session.complete([*CONTEXT, *QUESTION], GREEDY, keep=200, decoded=9)
    assert tokens(output) == kept
    assert output.report["cached_tokens"] == 0


@pytest.mark.parametrize("decoded", [-1, 10, 209])
def test_decoded_tokens_must_be_new_and_follow_a_prefill(llm, decoded):
    with llm.session() as session, pytest.raises(RequestError, match=f"decoded={decoded}"):
        llm.engine.add([*QUESTION], GREEDY, session.policy, session.sequence, decoded=decoded)
    with llm.session() as session, pytest.raises(RequestError, match="decoded=3"):
        session.complete([1, 2, 3], GREEDY, decoded=3)


def test_a_method_with_state_begins_it_anew_for_every_question(odd_llama, monkeypatch):
    """A state that saw one question's rows must not choose for the next one's."""
    from saccade.methods.psa import PSA as Method

    llm = make(odd_llama)
    monkeypatch.setattr(Method, "begin", lambda self, segment: [])
    monkeypatch.setattr(
        Method, "observe", lambda self, query, selection, weights, state: state.append(query.shape.k_len)
    )
    with llm.session("psa") as session:
        session.complete(CONTEXT, GREEDY)
        session.complete([*CONTEXT, *QUESTION], GREEDY, keep=200, decoded=9)
        session.complete([*CONTEXT, *OTHER], GREEDY, keep=200, decoded=13)
        assert session.sequence.memories[session.sequence.id].states[0] == list(range(201, 201 + 13 + 9))
