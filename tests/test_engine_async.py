"""Several requests for one asyncio task, log-probabilities as they come, and answers that follow a constraint."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
import torch
from engine_helpers import GREEDY, make
from tiny_models import EOS, VOCAB, random_ids

from saccade import SamplingParams
from saccade.engine import inbox
from saccade.engine.core import new_request_id
from saccade.engine.messages import AddRequest
from saccade.errors import RequestError
from saccade.methods.policy import Policy

DENSE = Policy.parse("dense")


def messages(ids: list[int], params: SamplingParams, count: int, **options) -> list[AddRequest]:
    first = new_request_id()
    more = [
        AddRequest(new_request_id(), ids, params.for_sample(index), DENSE, shares=first, **options)
        for index in range(1, count)
    ]
    return [AddRequest(first, ids, params.for_sample(0), DENSE, **options), *more]


async def gathered(llm, asked):
    outputs, got = await llm.loop.submit(asked), {one.request_id: [] for one in asked}
    while not outputs.finished:
        for output in await outputs.take():
            got[output.request_id].append(output)
    assert await outputs.take() == []
    return [got[one.request_id] for one in asked]


def test_samples_of_a_task_equal_those_of_generate(llm, prompts):
    params = SamplingParams(n=3, temperature=0.9, seed=5, max_tokens=7, logprobs=2, ignore_eos=True)
    asked = messages(prompts[0], params, 3)
    want = llm.generate([prompts[0]], params)[0]
    for got, sample in zip(asyncio.run(gathered(llm, asked)), want.outputs):
        assert [token for output in got for token in output.new_tokens] == sample.token_ids
        assert "".join(output.new_text for output in got) == sample.text
        assert [entry for output in got for entry in output.new_logprobs] == sample.logprobs
        assert [output.finished for output in got] == [False] * (len(got) - 1) + [True]


def test_a_closed_stream_frees_its_blocks_and_says_that_it_was_cancelled(llm, prompts):
    async def leave() -> list[str]:
        outputs = await llm.loop.submit(messages(prompts[1], replace(GREEDY, n=2, max_tokens=1500), 2))
        await outputs.take()
        outputs.close()
        reasons = []
        while not outputs.finished:
            reasons += [one.outcome.finish_reason for one in await outputs.take() if one.outcome is not None]
        return reasons

    assert asyncio.run(leave()) == ["cancelled", "cancelled"]
    assert llm.loop.running == llm.loop.waiting == 0


def test_a_task_that_ends_before_its_requests_are_let_in_leaves_nothing(llm, prompts):
    async def give_up() -> None:
        task = asyncio.ensure_future(llm.loop.submit(messages(prompts[1], replace(GREEDY, max_tokens=1500), 1)))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(give_up())
    llm.generate(prompts[0], GREEDY)  # whatever the letters did, they are read before this ends
    assert llm.loop.running == llm.loop.waiting == 0


def test_a_letter_that_cannot_be_served_raises_where_it_is_awaited(llm):
    async def ask() -> None:
        await llm.loop.submit(messages([5, VOCAB], GREEDY, 1))

    with pytest.raises(RequestError, match="token id 288"):
        asyncio.run(ask())


class Alphabet:
    """Allows ``letters``, each once and in order, and then the end; remembers the answers that it was asked about."""

    def __init__(self, letters: list[int]) -> None:
        self.letters = letters
        self.begun = 0

    def begin(self):
        self.begun += 1
        return self

    def allowed(self, answer):
        mask = torch.zeros(VOCAB, dtype=torch.bool)
        mask[[*self.letters, EOS][len(answer)]] = True
        assert answer == self.letters[: len(answer)]
        return mask

    def accepts(self, answer):
        return answer == self.letters


def test_an_answer_follows_its_constraint_whatever_else_is_asked(tiny_llama):
    llm = make(tiny_llama)
    letters = llm.tokenizer.encode("ABCB", add_special_tokens=False)
    alphabet = Alphabet(letters)
    params = SamplingParams(n=2, temperature=1.0, max_tokens=20, logit_bias={90: 100.0}, logprobs=1)
    constrained = messages(random_ids(70, 1), params, 2, constraint=alphabet)
    free = messages(random_ids(90, 2), GREEDY, 1)
    first, second, other = asyncio.run(gathered(llm, [*constrained, *free]))
    for got in (first, second):
        outcome = got[-1].outcome
        assert (outcome.token_ids, outcome.text, outcome.finish_reason) == ([*letters, EOS], "ABCB", "stop")
    assert other[-1].outcome.token_ids == llm.generate(random_ids(90, 2), GREEDY)[0].outputs[0].token_ids
    assert alphabet.begun == 2


def test_a_constraint_that_fails_or_forbids_all_costs_its_own_request(tiny_llama):
    class Nothing(Alphabet):
        def allowed(self, answer):
            return torch.zeros(VOCAB, dtype=torch.bool)

    class Broken(Alphabet):
        def allowed(self, answer):
            raise RequestError("the grammar is too hard")

    llm = make(tiny_llama)
    for constraint, said in ((Nothing([]), "forbid every token"), (Broken([]), "too hard")):
        asked = [*messages([5, 6], GREEDY, 1, constraint=constraint), *messages([5, 6], GREEDY, 1)]
        failed, fine = asyncio.run(gathered(llm, asked))
        assert said in failed[-1].outcome.error
        assert fine[-1].outcome.finish_reason == "length"


def test_requests_on_their_way_are_waited_for_by_an_engine_with_nothing_to_do(llm, prompts, monkeypatch):
    """Not by one that is at work, nor for longer than a step takes, nor where no more are said to come."""
    loop, real, steps = llm.loop._loop, llm.engine.step, []

    def step():
        steps.append(len(llm.engine.scheduler.waiting))
        return real()

    monkeypatch.setattr(llm.engine, "step", step)
    monkeypatch.setattr(inbox, "EACH_COMING", 60.0)
    monkeypatch.setattr(inbox, "MOST_GATHERED", 60.0)
    monkeypatch.setattr(loop, "gathers", True)

    async def ask(*coming: int) -> int:
        steps.clear()
        outputs = []
        for number, left in enumerate(coming):  # each is let in before the next one is written
            outputs.append(await llm.loop.submit(messages(prompts[number], GREEDY, 1), left))
        for one in outputs:
            while not one.finished:
                await one.take()
        return steps[0]

    loop.firsts.append(60.0)
    assert asyncio.run(ask(2, 1, 0)) == 3
    assert asyncio.run(ask(0)) == 1
    monkeypatch.setattr(inbox, "EACH_COMING", 0.01)
    assert asyncio.run(ask(3)) == 1  # who was to come has not
    monkeypatch.setattr(inbox, "EACH_COMING", 60.0)
    loop.firsts.clear()
    assert asyncio.run(ask(3)) == 1  # no step was seen yet: nobody waits for one
    assert loop.firsts
