"""Drafted rows at the edges: where answers end, where room is short, and where something fails or is cancelled."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import ClassVar

import pytest
from covering import quick
from drafters import Counting, Erring, Overlong, Perfect, Wrong, counted, drafting
from engine_helpers import EVERY, GREEDY, LAYERS, finish, make, start, tokens
from tiny_models import random_ids

from saccade import LLM, SamplingParams
from saccade.methods.base import Method
from saccade.methods.policy import Policy
from saccade.selection import Dense

LONG = SamplingParams(temperature=0, max_tokens=36, ignore_eos=True)
LFPS = "lfps(k=16, blocks=2, least=16)"
KINDS = (Perfect, Wrong, Erring)
STATEFUL = ("dense", "h2o(budget=48)", LFPS)
IDS = random_ids(205, seed=3)


@pytest.fixture(scope="module")
def text(llm) -> list[int]:
    """The prompt and a long answer to it."""
    return [*IDS, *tokens(llm.generate(IDS, LONG)[0])]


@pytest.mark.parametrize(
    ("policy", "kind"),
    quick([*product(STATEFUL, [Erring, Perfect])], lambda policy, kind: (policy == LFPS) == (kind is Perfect)),
)
def test_answers_end_where_they_would(llm, kind, policy):
    """By a stop token, a stop string, the end token or the number of tokens: in the middle of accepted drafts."""
    whole = llm.generate(IDS, LONG, policy=policy)[0].outputs[0]
    stops = [
        SamplingParams(temperature=0, max_tokens=40, stop_token_ids=[whole.token_ids[at]], ignore_eos=True)
        for at in (1, 9, 23)
    ]
    stops += [
        SamplingParams(temperature=0, max_tokens=40, stop=whole.text[at : at + 3], ignore_eos=True) for at in (5, 20)
    ]
    stops += [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for count in (1, 2, 3, 18, 19)]
    for params in stops:
        with llm.session(policy) as session:
            plain, after = session.generate(IDS, params), session.generate(IDS[:40], GREEDY)
            held = session.token_ids
        with drafting(llm, kind([[*IDS, *whole.token_ids], held])), llm.session(policy) as session:
            steps = list(session.stream(IDS, params))
            drafted = steps[-1].outcome
            assert session.token_ids == held[: len(IDS) + len(drafted.token_ids)]
            assert session.generate(IDS[:40], GREEDY).outputs == after.outputs
            assert session.token_ids == held
        assert (drafted.token_ids, drafted.text) == (plain.outputs[0].token_ids, plain.outputs[0].text)
        assert drafted.finish_reason == plain.outputs[0].finish_reason
        assert [token for step in steps for token in step.new_tokens] == drafted.token_ids
        assert "".join(step.new_text for step in steps) == drafted.text
        assert counted(drafted.report) == counted(plain.report)
    assert llm.pool.used_blocks == 0


def test_drafts_stay_within_the_models_length(tiny_llama):
    llm = make(tiny_llama, max_model_len=220)
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    plain = llm.generate(IDS, params)[0]
    with drafting(llm, Overlong([[*IDS, *tokens(plain)]])) as drafter:
        drafted = llm.generate(IDS, params)[0]
    assert drafted.outputs == plain.outputs
    assert len(tokens(drafted)) == 15
    assert drafter.asked == [13]


def test_drafts_take_the_rows_that_are_left(tiny_llama):
    """Steps of at most 8 + 4 rows: drafts never displace another request's rows."""
    llm = make(tiny_llama, chunk=8, max_requests=4)
    prompts = [random_ids(length, seed=length) for length in (12, 30, 61, 90)]
    plain = llm.generate(prompts, LONG)
    knows = [[*ids, *tokens(output)] for ids, output in zip(prompts, plain)]
    rows = []
    real = llm.engine.worker.run
    llm.engine.worker.run = lambda step: rows.append([one.length for one in step.scheduled]) or real(step)
    with drafting(llm, Perfect(knows)):
        drafted = llm.generate(prompts, LONG)
    assert [one.outputs for one in drafted] == [one.outputs for one in plain]
    assert max(map(sum, rows)) == 12
    assert any(8 in step and len(step) > 1 for step in rows)  # a chunk, and others that decode


@pytest.mark.parametrize(
    ("policy", "kind"),
    quick(
        [*product([*EVERY[:2], *(one for one in EVERY if one.decode.name in ("h2o", "hshare"))], KINDS)],
        lambda policy, kind: kind is KINDS[len(str(policy)) % 3],
    ),
    ids=str,
)
def test_short_of_blocks_nothing_is_drafted_and_nobody_displaced(tiny_llama, kind, policy):
    """Three requests grow in a pool that holds little more than two."""
    llm = make(tiny_llama, blocks=8 * LAYERS)
    prompts = [random_ids(length, seed=length) for length in (100, 90, 70)]
    plain = llm.generate(prompts, LONG, policy=policy)
    with drafting(llm, kind([[*ids, *tokens(output)] for ids, output in zip(prompts, plain)])):
        drafted = llm.generate(prompts, LONG, policy=policy)
    assert [one.outputs for one in drafted] == [one.outputs for one in plain]
    preempted = [one.report["preemptions"] for one in plain]
    assert sum(preempted) > 0
    assert kind is not Wrong or [one.report["preemptions"] for one in drafted] == preempted
    assert all(one.report["drafted_tokens"] for one in drafted)
    assert llm.pool.used_blocks == 0


def test_a_full_pool_ends_an_answer_where_it_would(tiny_llama):
    llm = make(tiny_llama, blocks=7 * LAYERS)
    plain = llm.generate(IDS, LONG)[0]
    with drafting(llm, Perfect([[*IDS, *tokens(plain), 5, 5, 5, 5]])):
        drafted = llm.generate(IDS, LONG)[0]
    assert len(tokens(plain)) == 7 * 32 - len(IDS) + 1
    assert drafted.outputs == plain.outputs
    assert drafted.report["notes"] == plain.report["notes"] != []


@dataclass
class Odd:
    """A state that is none of ours."""

    rows: int = 0


@dataclass(frozen=True)
class OddMethod(Method):
    name: ClassVar[str] = "odd"
    phases: ClassVar[tuple[str, ...]] = ("decode",)

    def begin(self, segment):
        return Odd()

    def select_decode(self, query, state):
        assert state.rows == query.step
        state.rows += 1
        return Dense(query.shape)


def test_a_state_that_cannot_be_taken_back_decodes_row_by_row(llm, text):
    with drafting(llm, Wrong([text])):
        output = llm.generate(IDS, LONG, policy=Policy(decode=OddMethod()))[0]
    assert tokens(output) == text[len(IDS) :]
    assert output.report["drafted_tokens"] == 0
    assert any("cannot be taken back, so nothing is drafted" in note for note in output.report["notes"])


@dataclass(frozen=True)
class Breaking(Counting):
    """Fails at the row that sees ``length`` keys, in the last layer but one."""

    name: ClassVar[str] = "breaking"

    length: int = 0

    def select_decode(self, query, state):
        if query.layer == 1 and query.kv.length == self.length:
            raise RuntimeError("planted failure")
        return super().select_decode(query, state)


@pytest.mark.filterwarnings("ignore:.*planted failure")
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("kind", [Perfect, Wrong, Erring])
def test_a_row_that_fails_counts_only_if_it_is_accepted(tiny_llama, text, kind, exact):
    llm = make(tiny_llama, exact=exact)
    policy = Policy(decode=Breaking(len(IDS) + 12))
    plain = llm.generate(IDS, LONG, policy=policy)[0]
    assert "planted failure" in plain.error
    assert len(tokens(plain)) == 12
    answer = text[len(IDS) :]
    ended = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, stop_token_ids=[answer[7]])
    with drafting(llm, kind([text])):
        drafted, sooner = llm.generate([IDS, IDS], [LONG, ended], policy=policy)
    assert (drafted.error, drafted.outputs) == (plain.error, plain.outputs)
    assert counted(drafted.report)["decode"]["tokens"] == 12
    assert (sooner.error, sooner.outputs[0].finish_reason) == (None, "stop")
    assert tokens(sooner) == answer[: answer.index(answer[7]) + 1]
    assert llm.pool.used_blocks == 0


@pytest.mark.parametrize(
    ("policy", "exact"),
    quick([*product(STATEFUL, [True, False])], lambda policy, exact: exact == (policy != "dense")),
)
def test_a_broken_pass_is_taken_back(tiny_llama, prompts, in_the_next_pass, policy, exact):
    """What breaks it is no request's own: packed rows are tried again without drafts, each request alone; an interrupt
    leaves everything as it was before the step."""
    llm = make(tiny_llama, exact=exact)
    want = [tokens(output) for output in llm.generate(prompts[:3], LONG, policy=policy)]

    def too_much() -> None:
        raise MemoryError("too little memory for so many rows")

    def broken() -> None:
        raise SystemExit("broken")

    with drafting(llm, Erring([[*ids, *answer] for ids, answer in zip(prompts, want)])):
        requests = [start(llm, ids, LONG, policy) for ids in prompts[:3]]
        while any(len(request.output_ids) < 5 for request in requests):
            llm.engine.step()
        in_the_next_pass(broken)
        with pytest.raises(SystemExit):
            llm.engine.step()
        assert all(request.sequence.memories[request.sequence.id].history.lengths == [] for request in requests)
        if not exact:
            in_the_next_pass(too_much, phase="decode")
        finish(llm.engine)
    assert [request.final_ids for request in requests] == want
    assert all(request.report.accepted_tokens for request in requests)
    assert llm.pool.used_blocks == 0


@pytest.mark.parametrize("policy", STATEFUL)
def test_a_lone_drafted_pass_that_breaks_is_tried_without_drafts(tiny_llama, text, in_the_next_pass, policy):
    llm = make(tiny_llama, exact=False)
    want = tokens(llm.generate(IDS, LONG, policy=policy)[0])
    drafted = []

    def too_much() -> None:
        raise MemoryError("too little memory for so many rows")

    with drafting(llm, Wrong([[*IDS, *want]])):
        request = start(llm, IDS, LONG, policy)
        while len(request.output_ids) < 3:
            llm.engine.step()
        in_the_next_pass(too_much)
        real = llm.engine.worker.run

        def run(step):
            if step.scheduled[0].wants_logits:
                drafted.append(len(step.scheduled[0].drafts) > 0)
            return real(step)

        llm.engine.worker.run = run
        finish(llm.engine)
    assert drafted[0]
    assert not any(drafted[1:])
    assert any("a step with them broke" in note for note in request.report.notes)
    assert (request.error, request.final_ids) == (None, want)


@pytest.mark.parametrize("steps", [5, 6])
def test_cancelling_leaves_others_and_the_session_as_they_were(llm, text, steps):
    """A turn that is cancelled between steps with drafts."""
    session = llm.engine.sessions.open()
    sequence = llm.engine.sessions[session]
    first = llm.engine.add(IDS, GREEDY, Policy.parse("h2o(budget=48)"), sequence)
    finish(llm.engine)
    before, after = list(sequence.tokens), random_ids(50, seed=50)
    again = llm.engine.add(after, LONG, Policy.parse("h2o(budget=48)"), sequence)
    finish(llm.engine)
    known, want = list(sequence.tokens), list(again.final_ids)
    llm.engine.sessions.forget(session)
    with drafting(llm, Erring([known, text])):
        session = llm.engine.sessions.open()
        sequence = llm.engine.sessions[session]
        llm.engine.add(IDS, GREEDY, first.policy, sequence)
        finish(llm.engine)
        assert sequence.tokens == before
        beside = start(llm, IDS, LONG)
        gone = llm.engine.add(after, LONG, first.policy, sequence)
        for _ in range(steps):
            llm.engine.step()
        assert gone.report.drafted_tokens > 0
        llm.engine.cancel(gone)
        assert sequence.tokens == before
        again = llm.engine.add(after, LONG, first.policy, sequence)
        finish(llm.engine)
        llm.engine.sessions.forget(session)
    assert again.final_ids == want
    assert beside.final_ids == text[len(IDS) :]
    assert llm.pool.used_blocks == 0


def test_samples_that_go_on_from_a_decoded_prompt(llm):
    """The prompt's last rows run as decode steps: nothing is drafted where other samples wait to share them."""
    policy, params = Policy.parse("lfps(k=16, blocks=2, least=16)"), SamplingParams(n=3, seed=4, max_tokens=12)

    def ask(llm: LLM):
        first = llm.engine.add(IDS, params.for_sample(0), policy, decoded=5)
        rest = [llm.engine.add(IDS, params.for_sample(at), policy, decoded=5, shares=first) for at in (1, 2)]
        finish(llm.engine)
        return [first, *rest]

    plain = ask(llm)
    with drafting(llm, Erring([[*IDS, *one.final_ids] for one in plain])):
        drafted = ask(llm)
    assert [one.final_ids for one in drafted] == [one.final_ids for one in plain]
    assert [one.report.cached_tokens for one in drafted] == [0, len(IDS), len(IDS)]
    assert [counted(one.report.as_dict()) for one in drafted] == [counted(one.report.as_dict()) for one in plain]
    assert all(one.report.accepted_tokens for one in drafted)
    assert llm.pool.used_blocks == 0
