"""Drafted rows: whatever a drafter guesses, answers, counts, keys and method states are those without it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from covering import quick, spread
from drafters import MOST, Counting, Erring, Overlong, Perfect, Wrong, counted, drafting, row_by_row
from engine_helpers import EVERY, FIVE, make
from tiny_models import make_checkpoint, random_ids

from saccade import LLM, SamplingParams
from saccade.engine.request import Request
from saccade.kv.saved import save_kv
from saccade.methods import state as states_of
from saccade.methods.policy import Policy

DRAFTERS = (Perfect, Wrong, Erring, Overlong)
COUNT = 14
PARAMS = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True, logprobs=2)
IDS, NEXT = random_ids(230, seed=230), random_ids(21, seed=21)


PASSES = ("each row by itself", "packed, apart", "packed, joined")


@pytest.fixture(scope="module")
def any_llm(request, tiny_llama, odd_llama) -> LLM:
    """Rows in passes of their own, or in one: attended one by one, or together where C++ kernels store."""
    if request.param == "each row by itself":
        return make(odd_llama)
    llm = make(tiny_llama if request.param == "packed, joined" else odd_llama, blocks=2000, exact=False)
    row_by_row(llm.model.runner.llama)
    return llm


@dataclass
class Run:
    """One turn of a session: what came of it, and what is kept after each step."""

    request: Request
    steps: int
    kept: list[tuple[int, Any]]  # tokens computed, and what was saved

    @property
    def answer(self) -> tuple[Any, ...]:
        one = self.request
        return one.error, one.finish_reason, one.final_ids, one.logprobs, one.text, one.cumulative_logprob

    @property
    def counts(self) -> dict[str, Any]:
        return counted(self.request.report.as_dict())


def run(llm: LLM, session: int, ids: list[int], policy: Policy, params=PARAMS, decoded: int = 0) -> Run:
    engine = llm.engine
    sequence = engine.sessions[session]
    request = engine.add(ids, params, policy, sequence, decoded=decoded)
    steps, kept = 0, []
    while engine.busy:
        engine.step()
        steps += 1
        memory = sequence.memories[sequence.id]
        assert memory.history.lengths == []
        assert memory.kv.length == sequence.computed
        if request.output_ids:
            kept.append((sequence.computed, (save_kv(memory.kv).tensors, states_of.save(memory.states))))
    return Run(request, steps, kept)


def same(one: Any, other: Any) -> bool:
    """Whether keys, values and states are the same to the last bit. Summaries are kept where somebody asked for
    them, and as far."""
    (kv, (tensors, data)), (their_kv, (others, theirs)) = one, other
    rows = {name: min(len(kv[name]), len(their_kv[name])) if "summary" in name else None for name in kv}
    return (
        data == theirs
        and alike(tensors, others)
        and all(torch.equal(kv[name][: rows[name]], their_kv[name][: rows[name]]) for name in kv)
    )


def alike(tensors: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> bool:
    return tensors.keys() == others.keys() and all(torch.equal(part, others[name]) for name, part in tensors.items())


OTHERS = tuple(kind for kind in DRAFTERS if kind is not Erring)


@pytest.mark.parametrize(
    ("policy", "any_llm", "kinds"),
    [
        pytest.param(*row.values, kinds, marks=[*row.marks, *marks])
        for number, row in enumerate(spread([*EVERY, Policy.parse(FIVE[4]), Policy(decode=Counting())], PASSES))
        for kinds, marks in (((Erring, *OTHERS[number % 6 :][:1]), []), (OTHERS, [pytest.mark.thorough]))
    ],
    indirect=["any_llm"],
    ids=lambda value: "-".join(kind.__name__ for kind in value) if isinstance(value, tuple) else str(value),
)
def test_drafts_change_nothing(any_llm, policy, kinds):
    """Two turns. After the steps in which rows were rejected, everything is as in the run without drafts."""
    engine = any_llm.engine
    session = engine.sessions.open()
    plain = [run(any_llm, session, ids, policy) for ids in (IDS, NEXT)]
    tokens = list(engine.sessions[session].tokens)
    engine.sessions.forget(session)
    replay = dict(plain[0].kept)
    for kind in kinds:
        with drafting(any_llm, kind([tokens])):
            session = engine.sessions.open()
            drafted = [run(any_llm, session, ids, policy) for ids in (IDS, NEXT)]
            assert engine.sessions[session].tokens == tokens
            engine.sessions.forget(session)
        assert engine.pool.used_blocks == 0
        for ours, theirs in zip(drafted, plain):
            assert ours.answer == theirs.answer
            assert ours.counts == theirs.counts
            report = ours.request.report
            assert report.drafted_tokens > 0
            assert (report.accepted_tokens == report.drafted_tokens) == (kind not in (Wrong, Erring))
            assert (report.accepted_tokens == 0) == (kind is Wrong)
            assert (ours.steps < theirs.steps) == (kind is not Wrong)
        assert all(same(kept, replay[computed]) for computed, kept in drafted[0].kept)


@pytest.mark.parametrize(("policy", "any_llm"), spread(EVERY, PASSES), indirect=["any_llm"], ids=str)
def test_state_after_rejections_is_that_of_a_fresh_replay(any_llm, policy):
    """The accepted tokens as a prompt whose answer part is decoded row by row."""
    engine = any_llm.engine
    session = engine.sessions.open()
    run(any_llm, session, IDS, policy)
    tokens = list(engine.sessions[session].tokens)
    engine.sessions.forget(session)
    with drafting(any_llm, Erring([tokens])):
        session = engine.sessions.open()
        drafted = run(any_llm, session, IDS, policy)
        engine.sessions.forget(session)
    assert drafted.request.report.accepted_tokens < drafted.request.report.drafted_tokens
    one_token = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    for computed, kept in drafted.kept[1::3]:
        session = engine.sessions.open()
        again = run(any_llm, session, tokens[:computed], policy, one_token, decoded=computed - len(IDS))
        engine.sessions.forget(session)
        assert again.kept[-1][0] == computed
        assert same(kept, again.kept[-1][1])


def test_a_perfect_drafter_saves_steps(llm):
    """230 tokens are 4 chunks, of which the last gives the first token; then up to 17 come at once."""
    long = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    session = llm.engine.sessions.open()
    plain = run(llm, session, IDS, Policy(), long)
    llm.engine.sessions.forget(session)
    with drafting(llm, Perfect([[*IDS, *plain.request.final_ids]])) as drafter:
        session = llm.engine.sessions.open()
        drafted = run(llm, session, IDS, Policy(), long)
        llm.engine.sessions.forget(session)
    assert plain.steps == 4 + 59
    assert drafted.steps == 4 + 4
    assert drafter.asked == [MOST, MOST, MOST, 59 - 3 * (MOST + 1) - 1]
    report = drafted.request.report.as_dict()
    assert (report["drafted_tokens"], report["accepted_tokens"]) == (55, 55)
    assert report["decode"]["tokens"] == 59
    assert plain.request.report.as_dict()["drafted_tokens"] == 0


MIXED = (
    PARAMS,
    SamplingParams(max_tokens=17, seed=3, ignore_eos=True, logprobs=0),
    SamplingParams(max_tokens=9, seed=5, temperature=0.7, top_p=0.9, repetition_penalty=1.4, ignore_eos=True),
    SamplingParams(max_tokens=12, seed=6, temperature=1.3, top_k=40, min_p=0.01, n=3),
    SamplingParams(temperature=0, max_tokens=20, repetition_penalty=1.3, logprobs=3, prompt_logprobs=1),
)


@pytest.mark.parametrize("kind", quick(DRAFTERS, lambda kind: kind is Erring))
def test_a_mixed_batch_of_every_method(llm, prompts, kind):
    """Greedy and sampled, with penalties, log-probabilities and samples that share a prompt, all in one batch."""
    ids = [prompts[number % 5] for number in range(len(EVERY))]
    params = [MIXED[number % 4 if number % 7 else 4] for number in range(len(EVERY))]
    plain = llm.generate(ids, params, policy=EVERY)
    knows = [[*one, *answer.token_ids] for one, output in zip(ids, plain) for answer in output.outputs]
    with drafting(llm, kind(knows)):
        drafted = llm.generate(ids, params, policy=EVERY)
    for ours, theirs in zip(drafted, plain):
        assert ours.outputs == theirs.outputs
        assert ours.prompt_logprobs == theirs.prompt_logprobs
        for report, other in zip(ours.reports, theirs.reports):
            assert {**counted(report), "notes": None} == {**counted(other), "notes": None}
    assert sum(report["drafted_tokens"] for output in drafted for report in output.reports) > 100
    assert llm.pool.used_blocks == 0


FAMILIES: dict[str, dict[str, Any]] = {
    "mistral": {},  # slides
    "gpt_oss": {},  # sinks
    "gemma2": {},  # softcaps
    "qwen3_moe": {},
    "phi3": {
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0 + 0.1 * i for i in range(6)],
            "long_factor": [2.0 + 0.4 * i for i in range(6)],
            "original_max_position_embeddings": 50,
        },
        "original_max_position_embeddings": 50,  # computes all keys again there
    },
}


@pytest.mark.parametrize(("family", "exact"), spread(FAMILIES, [True, False]))
def test_families(tmp_path, family, exact):
    folder = make_checkpoint(family, tmp_path / family, **FAMILIES[family])
    llm = LLM(folder, dtype="float32", kv_memory="4MiB", prefill_chunk=16, exact=exact, enable_prefix_caching=False)
    prompts = [random_ids(length, seed=length) for length in (40, 45)]
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    policies = ["dense", "h2o(budget=24)"]
    plain = llm.generate(prompts, params, policy=policies)
    knows = [[*ids, *output.outputs[0].token_ids] for ids, output in zip(prompts, plain)]
    for kind in (Perfect, Erring):
        with drafting(llm, kind(knows)):
            drafted = llm.generate(prompts, params, policy=policies)
        assert [one.outputs for one in drafted] == [one.outputs for one in plain]
        assert [one.report["notes"] for one in drafted] == [one.report["notes"] for one in plain]
        assert all(one.report["drafted_tokens"] > 8 for one in drafted)
    assert any("rotary" in one.report["notes"][0] for one in plain if one.report["notes"]) == (family == "phi3")
    assert llm.pool.used_blocks == 0
