"""``lossless``: whatever drafts, greedy and seeded answers are dense attention's, and nothing else stays of drafts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engine_helpers import finish, make, start, tokens
from test_engine_drafts import run, same
from tiny_models import make_checkpoint, random_ids

from saccade import LLM, SamplingParams
from saccade.engine.drafts.lookup import Lookup
from saccade.kv.saved import save_kv
from saccade.methods.policy import Policy

DRAFTS = (
    "psa(epsilon=0.2, block_size=16, microbatch=1, rank=cuboid)",
    "quest(budget=64, dense_layers=0)",
    "streaming(sinks=2, window=40)",
    "lfps(k=16, blocks=2, least=16)",
    "cis(k=16, sinks=2, local=4)",
    "h2o(budget=48)",
    "snapkv(capacity=32, window=8)",
)
LONG = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=2)
IDS, NEXT = random_ids(230, seed=230), random_ids(21, seed=21)


def lossless(draft: str, count: int = 4) -> str:
    return f"lossless(draft={draft}, tokens={count}, lookup=2)"


@pytest.fixture(scope="module", params=[True, False], ids=["exact", "packed"])
def any_llm(request, tmp_path_factory) -> LLM:
    """Random weights: drafts are right now and then."""
    folder = make_checkpoint("llama", tmp_path_factory.mktemp("wide"), max_position_embeddings=2048, head_dim=32)
    return make(folder, blocks=2000, exact=request.param)


@pytest.fixture(scope="module")
def dense(any_llm, prompts):
    return any_llm.generate(prompts, LONG)


@pytest.mark.parametrize("draft", DRAFTS)
def test_greedy_answers_and_logprobs_are_dense_ones(any_llm, prompts, dense, draft):
    """Batched and chunked, beside other policies, and alone."""
    # A draft that watches the prefill has all its rows computed in the last layer, which rounds otherwise.
    exact = any_llm.engine.worker.exact and not Policy.parse(draft).decode.watches
    alone = any_llm.generate(prompts[1], LONG, policy=lossless(draft, 3))[0]
    mixed = any_llm.generate(prompts[:4], LONG, policy=[lossless(draft), "dense", lossless(draft, 7), draft])
    for ours, theirs in ((alone, dense[1]), *((mixed[at], dense[at]) for at in (0, 1, 2))):
        assert ours.error is None
        assert tokens(ours) == tokens(theirs)
        for one, other in zip(ours.outputs[0].logprobs, theirs.outputs[0].logprobs):
            if exact:
                assert one == other
            for token in one:
                assert one[token].logprob == pytest.approx(other[token].logprob, abs=1e-4)
    said = [output.report["speculation"] for output in mixed]
    assert said[1] is said[3] is None
    assert all(said[at]["drafted"] > 0 and said[at]["draft"]["density"] < 0.9 for at in (0, 2))
    assert all(mixed[at].report["decode"]["density"] == 1.0 for at in (0, 2))
    assert not [note for at in (0, 2) for note in mixed[at].report["notes"]]
    assert any_llm.pool.used_blocks == 0


def test_the_report_adds_up(any_llm, prompts, dense):
    output = any_llm.generate(
        prompts[0], LONG, policy=lossless("psa(epsilon=0.6, block_size=16, microbatch=1, rank=cuboid)")
    )[0]
    report, said = output.report, output.report["speculation"]
    kept = said["accepted"] + said["accepted_looked_up"]
    assert kept + said["rejected"] == said["drafted"] + said["looked_up"] == report["drafted_tokens"]
    assert report["accepted_tokens"] == kept > 0
    assert said["verified_rows"] == report["drafted_tokens"] + said["verifications"]
    assert said["draft_steps"] == said["drafted"]
    # the first token comes of the prefill, each round gives one more than what was kept, plain steps one
    assert 1 + kept + said["verifications"] + said["plain_steps"] == len(tokens(output))
    assert report["decode"]["tokens"] == len(tokens(output)) - 1
    layers = len(report["decode"]["density_per_layer"])
    rows = range(len(prompts[0]) + 1, len(prompts[0]) + len(tokens(output)))
    assert report["decode"]["keys_attended"] == layers * sum(rows) == report["decode"]["keys_causal"]
    assert said["draft"]["keys_attended"] < said["draft"]["keys_causal"]
    assert (said["off"], said["stops"]) == (None, 0)


@pytest.mark.parametrize("draft", DRAFTS)
def test_two_turns_leave_what_a_fresh_replay_leaves(any_llm, draft):
    """After each step of two turns of a session keys, values, summaries and states are those of the same tokens
    decoded row by row, to the last bit where rows have passes of their own."""
    engine, policy, plain = any_llm.engine, Policy.parse(lossless(draft)), Policy.parse("dense")
    runs = {}
    for name, chosen in (("ours", policy), ("theirs", plain)):
        session = engine.sessions.open()
        runs[name] = [run(any_llm, session, ids, chosen, LONG) for ids in (IDS, NEXT)]
        sequence = list(engine.sessions[session].tokens)
        engine.sessions.forget(session)
    ours, theirs = runs["ours"], runs["theirs"]
    assert [one.request.final_ids for one in ours] == [one.request.final_ids for one in theirs]
    assert ours[0].steps < theirs[0].steps or ours[0].request.report.accepted_tokens == 0
    assert any_llm.pool.used_blocks == 0
    if not engine.worker.exact:
        return
    one_token = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    for computed, kept in ours[0].kept[1::5]:
        session = engine.sessions.open()
        again = run(any_llm, session, sequence[:computed], policy, one_token, decoded=computed - len(IDS))
        kv = engine.sessions[session].kv
        for name in kept[0]:
            if name.startswith("summary/0/"):  # the replay drafts nothing, so nobody has asked for them
                kv.summaries(*(int(part) if part.isdigit() else part for part in name.split("/")[2:]))
        assert again.kept[-1][0] == computed
        assert same(kept, (save_kv(kv).tensors, again.kept[-1][1][1]))
        engine.sessions.forget(session)


def test_a_prefill_policy_stays_as_given(any_llm, prompts):
    prefill = "flexprefill(gamma=0.5, block_size=64, min_budget=0)"
    window, prompts = "psaw(phi=0.4, start_layer=1)", prompts[:2]
    want = any_llm.generate(prompts, LONG, policy=prefill)
    got = any_llm.generate(prompts, LONG, policy=f"{prefill}+{lossless(DRAFTS[0])}+{window}")
    windowed = any_llm.generate(prompts, LONG, policy=f"{prefill}+{window}")
    plain = any_llm.generate(prompts, LONG, policy=f"{prefill}+{lossless(DRAFTS[0])}")
    assert list(map(tokens, plain)) == list(map(tokens, want))
    assert list(map(tokens, got)) == list(map(tokens, windowed))


@pytest.mark.parametrize("policy", [DRAFTS[0], DRAFTS[2]])
def test_rows_that_are_verified_together_see_a_window(any_llm, prompts, policy):
    """One that hides most of what each row would read."""
    window = "psaw(phi=0.1, start_layer=1, sinks=1, local=0, block_size=1)"
    want = any_llm.generate(prompts[:3], LONG, policy=window)
    got = any_llm.generate(prompts[:3], LONG, policy=f"{lossless(policy)}+{window}")
    dense = any_llm.generate(prompts[:3], LONG)
    for ours, theirs, whole in zip(got, want, dense):
        assert tokens(ours) == tokens(theirs) != tokens(whole)
        for one, other in zip(ours.outputs[0].logprobs, theirs.outputs[0].logprobs):
            for token in one:
                assert one[token].logprob == pytest.approx(other[token].logprob, abs=1e-4)
    assert sum(output.report["speculation"]["drafted"] for output in got) > 0


ENDS: tuple[dict[str, Any], ...] = (
    {"max_tokens": 3},
    {"max_tokens": 1},
    {"stop_token_ids": [9]},
    {"repetition_penalty": 1.4, "frequency_penalty": 0.5, "presence_penalty": 0.5, "min_tokens": 6},
    {"logit_bias": {7: 3.0, 9: -5.0}},
    {"temperature": 0.8, "top_p": 0.9, "top_k": 50, "seed": 11},
    {"temperature": 1.2, "min_p": 0.05, "repetition_penalty": 1.2, "seed": 12, "n": 2},
)


@pytest.mark.parametrize("ends", ENDS, ids=lambda ends: "-".join(ends))
def test_ends_penalties_and_seeds_are_dense_ones(any_llm, prompts, dense, ends):
    """A seed keeps its draws, so a sampled answer with one is dense attention's own, too."""
    given = {"temperature": 0, "max_tokens": 10, "ignore_eos": True} | ends
    if "stop_token_ids" in ends:
        given["stop_token_ids"] = [tokens(dense[0])[6]]
    params = SamplingParams(**given)
    want = any_llm.generate(prompts[:3], params)
    got = any_llm.generate(prompts[:3], params, policy=[lossless(DRAFTS[at], 5) for at in (0, 2, 6)])
    for ours, theirs in zip(got, want):
        assert [(one.token_ids, one.finish_reason, one.stop_reason) for one in ours.outputs] == [
            (one.token_ids, one.finish_reason, one.stop_reason) for one in theirs.outputs
        ]


def test_a_stop_string_inside_a_draft(any_llm, prompts, dense):
    text = dense[0].outputs[0].text
    stop = text[len(text) // 2 :][:3]
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, stop=[stop])
    want, got = (any_llm.generate(prompts[0], params, policy=one)[0] for one in ("dense", lossless(DRAFTS[0], 9)))
    assert (got.outputs[0].text, tokens(got)) == (want.outputs[0].text, tokens(want))
    assert got.outputs[0].finish_reason == "stop"


class OnlyEven:
    """A matcher that allows tokens of one parity in turns."""

    def begin(self):
        return self

    def allowed(self, answer):
        return (torch.arange(256) + len(answer)) % 2 == 0

    def accepts(self, answer):
        return True


def test_a_constraint_holds(any_llm, prompts):
    vocab = any_llm.model.spec.vocab_size

    class Turns(OnlyEven):
        def allowed(self, answer):
            return (torch.arange(vocab) + len(answer)) % 2 == 0

    answers = []
    for policy in ("dense", lossless(DRAFTS[0])):
        request = any_llm.engine.add(prompts[0], LONG, Policy.parse(policy), constraint=Turns())
        finish(any_llm.engine)
        assert request.error is None
        answers.append(request.final_ids)
    assert answers[0] == answers[1]


def test_preempted_and_cancelled(tmp_path_factory):
    """A pool that holds two of the three answers: the last one yields, and computes all again."""
    folder = make_checkpoint("llama", tmp_path_factory.mktemp("narrow"), max_position_embeddings=2048, head_dim=32)
    roomy, tight = make(folder, blocks=2000, exact=True), make(folder, blocks=90, exact=True)
    prompts = [random_ids(200, seed=seed) for seed in (1, 2, 3)]
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    want = [tokens(one) for one in roomy.generate(prompts, params)]
    policies = [lossless(draft) for draft in (DRAFTS[0], DRAFTS[5], DRAFTS[3])]
    got = tight.generate(prompts, params, policy=policies)
    assert [tokens(one) for one in got] == want
    assert sum(one.report["preemptions"] for one in got) > 0
    assert tight.pool.used_blocks == 0
    kept = start(roomy, prompts[0], params, policies[0])
    gone = start(roomy, prompts[1], params, policies[1])
    while len(gone.output_ids) < 9:
        roomy.engine.step()
    roomy.engine.cancel(gone)
    finish(roomy.engine)
    assert kept.final_ids == want[0]
    assert roomy.pool.used_blocks == 0


@pytest.mark.parametrize("happens", [MemoryError, SystemExit])
def test_a_draft_step_that_breaks_costs_nothing_but_drafts(any_llm, prompts, dense, monkeypatch, happens):
    """The request goes on with plain steps; an interrupt leaves all as it was before the step."""
    real, calls = any_llm.engine.worker.run, []

    def broken(step, times=1):
        if any(one.policy.decode.text == DRAFTS[5] for one in step.scheduled if one.phase == "decode"):
            calls.append(len(step))
            if len(calls) == 6:
                result = real(step, times)
                raise happens("planted") if result else None
        return real(step, times)

    monkeypatch.setattr(any_llm.engine.worker, "run", broken)
    request = start(any_llm, prompts[0], LONG, lossless(DRAFTS[5]))
    if happens is SystemExit:
        with pytest.raises(SystemExit):
            finish(any_llm.engine)
        assert request.sequence.kv.length in (0, request.sequence.computed)
    finish(any_llm.engine)
    assert request.final_ids == tokens(dense[0])
    assert any("planted" in note for note in request.report.notes) == (happens is MemoryError)
    assert any_llm.pool.used_blocks == 0


FAMILIES: dict[str, dict[str, Any]] = {"mistral": {}, "gpt_oss": {}, "gemma2": {}, "qwen3_moe": {}}


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_families(tmp_path, family, exact):
    """Sliding windows, sinks, softcaps, experts."""
    folder = make_checkpoint(family, tmp_path / family, **FAMILIES[family])
    llm = LLM(folder, dtype="float32", kv_memory="4MiB", prefill_chunk=16, exact=exact, enable_prefix_caching=False)
    prompts = [random_ids(length, seed=length) for length in (90, 75)]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    want = [tokens(one) for one in llm.generate(prompts, params)]
    drafts = ("streaming(sinks=2, window=24)", "h2o(budget=24)")
    got = llm.generate(prompts, params, policy=[lossless(draft) for draft in drafts])
    assert [one.error for one in got] == [None, None]
    assert [tokens(one) for one in got] == want
    assert all(one.report["speculation"]["verifications"] > 1 for one in got)
    assert llm.pool.used_blocks == 0


@pytest.mark.parametrize("right", [4, 20])
def test_look_ups_go_on_for_the_draft(any_llm, prompts, dense, monkeypatch, right):
    """A look-up that foretells what is drafted, and is right for so many tokens and then wrong."""
    whole = [*prompts[0], *tokens(dense[0])]

    def after(self, ids, most=16):
        known = whole[len(ids) : len(ids) + most]
        return [token if at < right else (token + 1) % 256 for at, token in enumerate(known)]

    monkeypatch.setattr(Lookup, "after", after)
    output = any_llm.generate(prompts[0], LONG, policy=lossless("psa(epsilon=0.9, block_size=16, rank=cuboid)", 2))[0]
    said = output.report["speculation"]
    assert tokens(output) == tokens(dense[0])
    assert said["accepted_looked_up"] > 0
    assert said["looked_up"] == said["accepted_looked_up"] or right == 4
    assert said["rejected"] > 0 or right == 20
    assert said["verified_rows"] == said["drafted"] + said["looked_up"] + said["verifications"]
