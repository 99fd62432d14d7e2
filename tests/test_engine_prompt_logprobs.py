"""Log-probabilities of the prompt's own tokens against one forward pass of transformers."""

from __future__ import annotations

import pytest
import torch
from engine_helpers import GREEDY, finish, make, start, tokens
from tiny_models import oracle, oracle_logits, random_ids

from saccade import SamplingParams
from saccade.engine.rows.layers_pass import _prompt_scores
from saccade.engine.steps.step import RequestResult, ScheduledRequest, StepResult
from saccade.errors import RequestError
from saccade.methods.policy import Policy

PROMPT = random_ids(300, seed=8)  # five chunks of 64, and more rows than one slice of the head


@pytest.fixture(scope="module")
def expected(tiny_llama):
    """[n, vocab]: row p is the log-distribution of token p + 1 of the prompt."""
    model = oracle(tiny_llama)
    return lambda ids: torch.log_softmax(oracle_logits(model, ids), -1)


def chosen(output) -> list[float | None]:
    pairs = zip(output.prompt_logprobs, output.prompt_token_ids, strict=True)
    return [None if entries is None else entries[token].logprob for entries, token in pairs]


def test_every_prompt_token_is_scored_given_those_before_it(llm, expected):
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=3)
    output = llm.generate(PROMPT, params)[0]
    logprobs = expected(PROMPT)
    assert output.prompt_logprobs[0] is None
    for place in range(1, len(PROMPT)):
        row, entries = logprobs[place - 1], output.prompt_logprobs[place]
        for token, entry in entries.items():
            assert entry.logprob == pytest.approx(float(row[token]), abs=1e-4)
            assert entry.rank == 1 + int((row > row[token]).sum())
        assert {token for token, entry in entries.items() if entry.rank <= 3} == set(row.topk(3).indices.tolist())
        assert set(entries) <= {PROMPT[place], *row.topk(3).indices.tolist()}


def test_scoring_may_begin_late_and_changes_no_token(llm, expected):
    late = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, prompt_logprobs=0, prompt_logprobs_start=290)
    scored, plain = (llm.generate(PROMPT, params)[0] for params in (late, GREEDY))
    assert tokens(scored) == tokens(plain)
    assert plain.prompt_logprobs is None
    assert chosen(scored)[:290] == [None] * 290
    logprobs = expected(PROMPT)
    wanted = [float(logprobs[place - 1, PROMPT[place]]) for place in range(290, 300)]
    assert chosen(scored)[290:] == pytest.approx(wanted, abs=1e-4)


def test_requests_of_one_batch_are_scored_apart(tiny_llama, expected):
    llm = make(tiny_llama, exact=False)
    prompts = [PROMPT[:70], PROMPT[70:150], PROMPT[150:200]]
    params = [
        SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=count, prompt_logprobs_start=first)
        for count, first in ((0, 0), (5, 60), (2, 49))
    ]
    for ids, wanted, output in zip(prompts, params, llm.generate(prompts, params)):
        logprobs = expected(ids)
        for place, entries in enumerate(output.prompt_logprobs):
            if place < max(1, wanted.prompt_logprobs_start):
                assert entries is None
            else:
                assert entries[ids[place]].logprob == pytest.approx(float(logprobs[place - 1, ids[place]]), abs=1e-4)
                assert len(entries) in (wanted.prompt_logprobs, wanted.prompt_logprobs + 1)


def test_a_preempted_request_keeps_its_scores(tiny_llama):
    llm = make(tiny_llama, blocks=3 * 11)  # 11 blocks of 32 tokens a layer: two requests of 200 tokens do not fit
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, prompt_logprobs=0)
    prompts = [PROMPT[:150], PROMPT[:160]]
    alone = [llm.generate(ids, params)[0].prompt_logprobs for ids in prompts]
    two = [start(llm, ids, params) for ids in prompts]
    finish(llm.engine)
    assert two[1].report.preemptions > 0
    assert [request.prompt_logprobs for request in two] == alone


def test_rows_that_are_computed_again_are_not_scored_again(llm):
    """After a restart with other rotary factors they would give other values."""
    request = start(llm, PROMPT[:20], SamplingParams(max_tokens=1, prompt_logprobs=0, prompt_logprobs_start=4))

    def rows(start: int, stop: int) -> list[int]:
        scored = request.to_score(start, stop)
        assert [token for _, token in scored] == [PROMPT[row + 1] for row, _ in scored]
        return [row for row, _ in scored]

    assert rows(0, 10) == [3, 4, 5, 6, 7, 8, 9]
    request.prompt_scores[6] = {PROMPT[6]: (-1.0, 1)}
    assert rows(0, 10) == [3, 4, 6, 7, 8, 9]
    assert rows(10, 64) == list(range(10, 19))
    llm.engine.cancel(request)


def test_a_later_turn_scores_its_first_token_too(llm, expected):
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, prompt_logprobs=0)
    with llm.session() as session:
        session.generate(PROMPT[:100], params)
        first = len(session.token_ids)
        output = session.generate(PROMPT[100:130], params)
        ids = session.token_ids[: first + 30]
    logprobs = expected(ids)
    wanted = [float(logprobs[place - 1, ids[place]]) for place in range(first, first + 30)]
    assert chosen(output) == pytest.approx(wanted, abs=1e-4)


def test_only_the_first_of_several_samples_scores_the_prompt(llm):
    params = SamplingParams(n=3, seed=1, max_tokens=2, prompt_logprobs=0)
    assert [one.prompt_logprobs for one in (params.for_sample(0), params.for_sample(1))] == [0, None]
    assert len(llm.generate(PROMPT[:40], params)[0].prompt_logprobs) == 40


@pytest.mark.parametrize("options", [{"prompt_logprobs": -1}, {"prompt_logprobs": 101}, {"prompt_logprobs_start": -1}])
def test_values_out_of_range_are_named(options):
    with pytest.raises(RequestError, match=r"prompt_logprobs\w*=-?\d+ must be an integer"):
        SamplingParams(**options)


def test_the_ranks_of_equals_do_not_hang_on_what_others_ask_for():
    """Of 40 tokens only three differ; a request is scored alone and beside one that asks for more."""
    logits = torch.zeros(4, 40)
    logits[:, [7, 21, 30]] = torch.tensor([2.0, 1.0, -1.0])

    def asked(number: int, top: int) -> ScheduledRequest:
        whole = Policy.parse("dense")
        return ScheduledRequest(number, number, 0, 2, "prefill", whole, 0, 2, 2, scored=((0, 12), (1, 21)), top=top)

    def scores(*requests: ScheduledRequest) -> dict[int, dict]:
        result = StepResult({one.request_id: RequestResult() for one in requests})
        scored = [(0, row, token, one) for one in requests for row, token in one.scored]
        _prompt_scores(scored, result).visit(0, logits[: len(scored)])
        return {number: one.prompt_scores for number, one in result.requests.items()}

    few, many = asked(1, 2), asked(2, 9)
    alone = scores(few) | scores(many)
    assert set(alone[1][0]) >= {7, 21, 12}
    assert alone[1][1][21] == (pytest.approx(float(logits[1].log_softmax(0)[21])), 2)
    assert scores(few, many) == alone
