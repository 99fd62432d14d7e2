"""Many turns over one context: what is kept equals what would be computed afresh."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import pytest
import torch
from covering import quick
from engine_helpers import interrupt
from method_matrix import MATRIX
from tiny_models import make_checkpoint, oracle, oracle_greedy, random_ids

from saccade import LLM, SamplingParams
from saccade.errors import CapacityError, PolicyError, RequestError
from saccade.kv.format import KVFormat
from saccade.methods.policy import Policy

BLOCK_BYTES = KVFormat(torch.float32, 2, 16, 32).block_bytes
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
POLICIES = (
    *(Policy.parse(case.methods()[0]).text for case in MATRIX),
    "flexprefill(gamma=0.5, block_size=64, min_budget=0)+psa(epsilon=0.4, block_size=16, microbatch=1)",
)
# One policy for each kind of state that a turn changes: none, summaries, tables, anchors, evicted keys. That every
# method's state is computed again as it was, preemptions show (test_engine_batch).
STATES = [one for one in POLICIES if one.split("(")[0].split("+")[-1] in ("dense", "psa", "lfps", "cis", "h2o")]
TURNS = [random_ids(length, seed=length) for length in (201, 33, 1, 90)]


def make(folder, blocks: int = 400, **options) -> LLM:
    return LLM(
        folder,
        dtype="float32",
        kv_memory=blocks * BLOCK_BYTES,
        **{"enable_prefix_caching": False, "prefill_chunk": 64, **options},
    )


def tokens(output) -> list[int]:
    return output.outputs[0].token_ids


@pytest.fixture(scope="module")
def llm(tiny_llama):
    engine = make(tiny_llama)
    yield engine
    assert engine.engine.pool.used_blocks == 0
    assert not engine.engine.busy


@pytest.mark.parametrize("chunk", [7, 64, 2048])
def test_later_turns_equal_fresh_runs_on_the_whole_context(tiny_llama, chunk):
    llm, theirs = make(tiny_llama, prefill_chunk=chunk), oracle(tiny_llama)
    context: list[int] = []
    with llm.session() as session:
        for turn in TURNS:
            output = session.generate(turn, GREEDY)
            stored = max(0, len(context) - 1)  # the last answer token was sampled but not computed
            context += turn
            assert output.report["prompt_tokens"] == len(context)
            assert output.report["cached_tokens"] == stored
            assert output.report["prefill"]["tokens"] == len(context) - stored
            assert tokens(output) == tokens(llm.generate(context, GREEDY)[0])
            context += tokens(output)
            assert session.token_ids == context
    no_eos = oracle_greedy(theirs, context[:201], 8)
    assert context[201 : 201 + len(no_eos)] == no_eos
    assert llm.engine.pool.used_blocks == 0


def turns_of(llm: LLM, policy: str, between=lambda session: None) -> list[list[int]]:
    answers = []
    with llm.session(policy) as session:
        for turn in TURNS:
            answers.append(tokens(session.generate(turn, GREEDY)))
            between(session)
    return answers


@pytest.fixture(scope="module")
def undisturbed(llm) -> Callable[[str], list[list[int]]]:
    """A policy's answers to all turns, when nothing happens between them."""
    return cache(partial(turns_of, llm))


@pytest.mark.parametrize("policy", quick(POLICIES, lambda policy: policy in STATES or "+" in policy))
def test_an_evicted_session_goes_on_as_if_it_had_stayed(undisturbed, tiny_llama, policy):
    """Idle keys are taken by somebody else between any two turns; what is computed again is what was there."""
    kept = undisturbed(policy)
    small = make(tiny_llama, blocks=3 * 14)
    evictions = []

    def crowd_out(session):
        small.generate(random_ids(400, seed=9), SamplingParams(temperature=0, max_tokens=2, ignore_eos=True))
        evictions.append(session.sequence.kv.blocks == 0)

    assert turns_of(small, policy, crowd_out) == kept
    assert all(evictions)
    assert small.engine.pool.used_blocks == 0


@pytest.mark.parametrize("policy", quick(POLICIES, lambda policy: policy in STATES))
@pytest.mark.parametrize("after", [2, 7])
def test_a_cancelled_turn_leaves_no_trace(llm, undisturbed, policy, after):
    """Cancelled in the prefill (3 chunks and a bit) or while decoding, then the next turn is as without it."""
    kept = undisturbed(policy)
    with llm.session(policy) as session:
        answers = [tokens(session.generate(TURNS[0], GREEDY))]
        before = session.token_ids
        long = SamplingParams(temperature=0, max_tokens=1000, ignore_eos=True)  # the engine does not wait for readers
        stream = session.stream(random_ids(200, seed=77), long)
        for _ in range(after):
            next(stream)
        stream.close()
        assert session.token_ids == before
        answers += [tokens(session.generate(turn, GREEDY)) for turn in TURNS[1:]]
    assert answers == kept


def test_a_turn_that_fails_leaves_the_session_as_it_was(llm, in_the_next_pass):
    kept = turns_of(llm, "psa")
    with llm.session("psa") as session:
        answers = [tokens(session.generate(TURNS[0], GREEDY))]
        before = session.token_ids
        in_the_next_pass(lambda: 1 / 0, phase="decode")
        with pytest.warns(RuntimeWarning, match="ZeroDivisionError"):
            output = session.generate(random_ids(50, seed=3), GREEDY)
        assert output.outputs[0].finish_reason == "error"
        assert session.token_ids == before
        answers += [tokens(session.generate(turn, GREEDY)) for turn in TURNS[1:]]
    assert answers == kept


def test_policies_may_change_from_turn_to_turn(llm):
    with llm.session("streaming(sinks=2, window=40)") as session:
        first = session.generate(TURNS[0], GREEDY)
        second = session.generate(TURNS[1], GREEDY, policy="dense")
        third = session.generate(TURNS[2], GREEDY)
    assert first.report["policy"] == third.report["policy"] == "streaming(sinks=2, window=40)"
    assert second.report["policy"] == "dense"
    assert second.report["decode"]["density"] == 1.0
    assert third.report["decode"]["density"] < 0.3


def test_sessions_side_by_side_do_not_meet(llm, undisturbed):
    policies = [*STATES, *POLICIES[::4]]  # some twice
    alone = [undisturbed(policy) for policy in policies]
    sessions = [llm.session(policy) for policy in policies]
    together: list[list[list[int]]] = [[] for _ in policies]
    for turn in TURNS:
        streams = [session.stream(turn, GREEDY) for session in sessions]
        for answers, parts in zip(together, drain_in_turns(streams)):
            answers.append([token for step in parts for token in step.new_tokens])
    for session in sessions:
        session.close()
    assert together == alone


def drain_in_turns(streams):
    """Drain the streams in turns."""
    parts: list[list] = [[] for _ in streams]
    live = dict(enumerate(streams))
    while live:
        for i in list(live):
            step = next(live[i], None)
            if step is None:
                del live[i]
            else:
                parts[i].append(step)
    return parts


def test_empty_turns_and_too_long_turns_change_nothing(tiny_llama):
    llm = make(tiny_llama, max_model_len=300)
    with llm.session() as session:
        session.generate(TURNS[0], GREEDY)
        before = session.token_ids
        for bad in ([], ""):
            with pytest.raises(RequestError, match="prompt is empty"):
                session.generate(bad, GREEDY)
        with pytest.raises(RequestError, match="the prompt has 309 tokens but max_model_len is 300"):
            session.generate(random_ids(100, seed=1), GREEDY)
        with pytest.raises(RequestError, match="token id 288"):
            session.generate([5, 288], GREEDY)
        with pytest.raises(RequestError, match="n=2"):
            session.generate([5], SamplingParams(n=2))
        with pytest.raises(PolicyError, match="unknown method"):
            session.generate([5], GREEDY, policy="nope")
        assert session.token_ids == before
        assert tokens(session.generate([5], GREEDY)) == tokens(llm.generate([*before, 5], GREEDY)[0])
    small = make(tiny_llama, blocks=3 * 8)
    with small.session() as session:
        session.generate(TURNS[0], GREEDY)
        with pytest.raises(CapacityError, match="holds 256 at most"):
            session.generate(random_ids(100, seed=1), GREEDY)
    assert small.engine.pool.used_blocks == 0


def test_a_closed_session_can_start_again(llm):
    session = llm.session()
    first = tokens(session.generate(TURNS[0], GREEDY))
    session.close()
    assert (session.token_ids, llm.engine.pool.used_blocks) == ([], 0)
    assert tokens(session.generate(TURNS[0], GREEDY)) == first
    session.close()
    session.close()


# --- chat


def test_chat_equals_the_template_over_the_whole_conversation(llm):
    said = ["hello there", "and what else?", "go on"]
    messages: list[dict] = []
    with llm.session() as session:
        for text in said:
            output = session.chat(text, GREEDY)
            messages.append({"role": "user", "content": text})
            whole = llm.chat(messages, GREEDY)[0]
            assert tokens(output) == tokens(whole)
            messages.append({"role": "assistant", "content": output.outputs[0].text})
            assert session.messages == messages
            assert output.report["prompt_tokens"] == len(whole.prompt_token_ids)


def test_chat_computes_only_what_is_new(llm):
    """What the new rendering shares with the stored tokens is kept, and nothing else is counted as cached."""
    with llm.session() as session:
        session.chat("a first question of some length, to be kept", GREEDY)
        stored = session.token_ids
        output = session.chat({"role": "user", "content": "more"}, GREEDY)
        ids = llm.tokenizer.apply_chat_template([*session.messages[:2], {"role": "user", "content": "more"}])
        shared = next(i for i, (ours, theirs) in enumerate(zip([*stored, -1], ids)) if ours != theirs)
        assert shared >= 45
        assert output.report["cached_tokens"] == min(shared, len(stored) - 1)
        assert output.report["prefill"]["tokens"] == len(ids) - output.report["cached_tokens"]
        assert output.report["prompt_tokens"] == len(ids)


@pytest.mark.parametrize(
    "policy",
    ["flexprefill(gamma=0.3,block_size=64,min_budget=0)", "loopserve(alpha=0.5)", "snapkv(capacity=40,window=8)"],
)
def test_a_chat_that_goes_on_elsewhere_keeps_no_part_of_a_sparse_prefill(llm, policy):
    """A message whose end was edited: what a sparse prefill chose for its beginning saw the rows that are gone."""
    long = " ".join(f"word{number % 37}" for number in range(60))
    with llm.session(policy) as session, llm.session(policy) as fresh:
        session.chat(long + " and then this ending, which is long enough to matter", GREEDY)
        messages = [{"role": "user", "content": long + " or that"}, {"role": "assistant", "content": "yes"}]
        session.messages, fresh.messages = list(messages), list(messages)
        output, whole = (one.chat("go on", GREEDY) for one in (session, fresh))
        assert output.report["cached_tokens"] == 0
        assert tokens(output) == tokens(whole)
        assert torch.equal(session.sequence.kv.view(1).keys(), fresh.sequence.kv.view(1).keys())


@pytest.mark.parametrize("raw", ["generate", "stream", "complete"])
def test_chat_drops_no_text_that_was_not_said_in_messages(llm, raw):
    with llm.session() as session:
        session.chat("hello", GREEDY)
        said = session.token_ids
        list(session.stream(TURNS[1], GREEDY)) if raw == "stream" else getattr(session, raw)(TURNS[1], GREEDY)
        held, messages = session.token_ids, list(session.messages)
        for chat in (session.chat, lambda *args: list(session.stream_chat(*args))):
            with pytest.raises(RequestError, match="chat\\(\\) would drop it: say that text as a message"):
                chat("and now?", GREEDY)
        assert session.token_ids == held != said
        assert session.messages == messages
        session.generate(TURNS[2], GREEDY)  # which goes on from all of it
        session.close()
        assert tokens(session.chat("and now?", GREEDY)) != []
        assert tokens(session.chat("once more", GREEDY)) != []


@pytest.mark.parametrize("how", ["n", "policy", "cancel", "long"])
def test_a_chat_turn_that_comes_to_nothing_leaves_the_session(tiny_llama, how, in_the_next_pass):
    llm = make(tiny_llama, max_model_len=200)
    with llm.session() as session, make(tiny_llama).session() as other:
        for one in (session, other):
            one.chat("first", GREEDY)
        before, messages = session.token_ids, list(session.messages)
        if how == "n":
            with pytest.raises(RequestError, match="n=2"):
                session.chat("x", SamplingParams(n=2))
            with pytest.raises(RequestError, match=r"a message is text or .*, got 5"):
                session.chat(5)
        elif how == "policy":
            with pytest.raises(PolicyError):
                session.chat("x", GREEDY, policy="nope")
        elif how == "long":
            with pytest.raises(RequestError, match="max_model_len is 200"):
                session.chat("x" * 300, GREEDY)
        else:
            in_the_next_pass(interrupt)
            with pytest.raises(KeyboardInterrupt):
                session.chat("x", SamplingParams(temperature=0, max_tokens=100, ignore_eos=True))
        assert session.token_ids == before
        assert session.messages == messages
        assert tokens(session.chat("second", GREEDY)) == tokens(other.chat("second", GREEDY))


# --- rotary factors that depend on length


def test_turns_across_a_change_of_rotary_factors_equal_fresh_runs(tmp_path):
    """longrope, 64 trained positions: a turn that passes them computes every key again, with the long factors."""
    half = 6
    folder = make_checkpoint(
        "phi3",
        tmp_path,
        max_position_embeddings=512,
        original_max_position_embeddings=64,
        sliding_window=None,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0 + 0.1 * i for i in range(half)],
            "long_factor": [3.0 + 0.5 * i for i in range(half)],
            "original_max_position_embeddings": 64,
        },
    )
    llm = LLM(folder, dtype="float32", kv_memory="20MiB", prefill_chunk=16, enable_prefix_caching=False)
    context: list[int] = []
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    with llm.session() as session:
        for turn in (random_ids(30, seed=1), random_ids(25, seed=2), random_ids(20, seed=3), random_ids(9, seed=4)):
            output = session.generate(turn, params)
            context += turn
            assert tokens(output) == tokens(llm.generate(context, params)[0])
            context += tokens(output)


def test_a_dropped_session_gives_its_blocks_back(tiny_llama):
    llm = LLM(tiny_llama, dtype="float32", kv_memory="4MiB", enable_prefix_caching=False)
    session = llm.session()
    session.generate([1, 2, 3], SamplingParams(max_tokens=2))
    held = llm.engine.pool.used_blocks
    assert held > 0
    del session
    llm.generate([5, 6], SamplingParams(max_tokens=2))
    assert llm.engine.pool.used_blocks == 0
