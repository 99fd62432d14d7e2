"""Drafts over layers that keep a state: rows that are taken back leave the state that stood before them, gone on from
with those that stay. And windows of a policy over the layers that attend."""

from __future__ import annotations

import pytest
import torch
from covering import quick
from drafters import Erring, Perfect, Seldom, Wrong, drafting
from engine_helpers import tokens
from test_hybrids import FAMILIES, FAST, GREEDY, Pair, costly
from test_methods_prehoc import hidden_by_the_paper
from tiny_models import make_checkpoint, one_thread, oracle_logits, random_ids  # noqa: F401
from transformers import AttentionInterface

from saccade import SamplingParams
from saccade.kv import sequence_states
from saccade.kv.states import StatePool
from saccade.models.modules import ModuleLayers
from saccade.ops import slotted

LONG = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, logprobs=1)
PROMPTS = [random_ids(length, seed=length) for length in (61, 9, 90)]
QUEST = "lossless(draft=quest(budget=32, block_size=16, dense_layers=0), tokens=4, lookup=2)"
EVICTS = "lossless(draft=h2o(budget=48), tokens=3)"


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request, tmp_path_factory):
    return Pair(make_checkpoint(request.param, tmp_path_factory.mktemp(request.param)))


@pytest.fixture(scope="module", params=[True, False], ids=["exact", "packed"])
def llm(request, pair):
    return pair.llm(exact=request.param)


@pytest.fixture(scope="module")
def plain(llm):
    return llm.generate(PROMPTS, LONG)


def held(pair, llm, plain, outputs) -> None:
    """Answers are those without drafts, to the last bit where rows have passes of their own."""
    for ids, output, other in zip(PROMPTS, outputs, plain):
        pair.check(ids, output)
        assert tokens(output) == tokens(other)
        if llm.engine.worker.exact:
            assert output.outputs[0].logprobs == other.outputs[0].logprobs
        assert output.report["recomputed_tokens"] == 0
    assert llm.pool.states.used == 0


@pytest.mark.parametrize("drafter", quick([Perfect, Erring, Wrong, Seldom], lambda one: one is Erring))
def test_guessed_rows_that_are_taken_back_leave_nothing(pair, llm, plain, drafter):
    right = [ids + tokens(output) for ids, output in zip(PROMPTS, plain)]
    with drafting(llm, drafter(right)):
        outputs = llm.generate(PROMPTS, LONG)
    held(pair, llm, plain, outputs)
    drafted, accepted = (
        sum(output.report[name] for output in outputs) for name in ("drafted_tokens", "accepted_tokens")
    )
    assert drafted > accepted or drafter is Perfect
    assert accepted > 0 or drafter is Wrong


@pytest.mark.parametrize("policy", [QUEST, EVICTS])
def test_lossless_is_dense(pair, llm, plain, policy):
    outputs = llm.generate(PROMPTS, LONG, policy=policy)
    held(pair, llm, plain, outputs)
    assert sum(output.report["speculation"]["drafted"] for output in outputs) > 0
    assert not any("broke" in note or "failed" in note for output in outputs for note in output.report["notes"])


@costly
def test_lossless_turns_edits_and_samples(pair, llm):
    first, second = random_ids(50, seed=1), random_ids(20, seed=2)
    with llm.session(QUEST) as session:
        said = first + tokens(session.generate(first, LONG))
        output = session.generate(second, LONG)
        pair.check(said + second, output)
        assert output.report["recomputed_tokens"] == 0
        edited = said[:66] + random_ids(9, seed=3)
        pair.check(edited, session.complete(edited, LONG))
    params = SamplingParams(temperature=1.0, seed=5, n=3, max_tokens=12, ignore_eos=True, logprobs=1)
    drafted, own = (llm.generate(first, params, policy=policy)[0] for policy in (QUEST, "dense"))
    assert [one.token_ids for one in drafted.outputs] == [one.token_ids for one in own.outputs]
    for number in range(3):
        pair.check(first, drafted, number, greedy=False)


@costly
def test_states_of_modules_without_kernels_are_built_again_by_them(pair, monkeypatch):
    monkeypatch.setattr(slotted, "serves", lambda device: False)
    llm = pair.llm(exact=False)
    plain = llm.generate(PROMPTS, LONG)
    held(pair, llm, plain, llm.generate(PROMPTS, LONG, policy=QUEST))


@costly
def test_snapshots_are_of_tokens_that_stay(pair, monkeypatch):
    """One is due within nearly every verification."""
    monkeypatch.setattr(sequence_states, "EVERY", 5)
    llm, ids = pair.llm(), PROMPTS[0]
    with llm.session() as session:
        said = ids + tokens(session.generate(ids, LONG))
        assert session.sequence.memories[session.sequence.id].kept.snapshots[-1] == len(said) - 1
    with drafting(llm, Erring([said])), llm.session() as session:
        assert ids + tokens(session.generate(ids, LONG)) == said
        kept = session.sequence.memories[session.sequence.id].kept
        assert len([at for at in kept.snapshots if at > len(ids)]) > 1
        for cut in (75, 71, 65):
            edited = said[:cut] + random_ids(5, seed=cut)
            output = session.complete(edited, GREEDY)
            pair.check(edited, output)
            assert output.report["cached_tokens"] >= len(ids)


@costly
def test_nothing_is_drafted_without_room_to_go_back_to(pair, monkeypatch):
    monkeypatch.setattr("saccade.pools.StatePool", lambda format, slots, device: StatePool(format, 6, device))
    llm = pair.llm()
    outputs = llm.generate(PROMPTS, LONG, policy=QUEST)
    for ids, output in zip(PROMPTS, outputs):
        pair.check(ids, output)
    assert any("nothing was drafted beside so many" in note for one in outputs for note in one.report["notes"])
    alone = llm.generate(PROMPTS[0], LONG, policy=QUEST)[0]
    pair.check(PROMPTS[0], alone)
    assert alone.report["speculation"]["drafted"] > 0
    assert alone.report["notes"] == []
    assert llm.pool.states.used == 0


@costly
@pytest.mark.parametrize("at", [1, 2, 5])
def test_a_verification_that_breaks_goes_back_to_where_it_began(pair, llm, plain, monkeypatch, at):
    right = [ids + tokens(output) for ids, output in zip(PROMPTS, plain)]
    run, calls = ModuleLayers.run, []

    def breaks(self, index, hidden, positions, *given):
        if index == 2 and int(positions[0]) >= 64:
            calls.append(index)
            if len(calls) == at:
                raise RuntimeError("broken on purpose")
        return run(self, index, hidden, positions, *given)

    monkeypatch.setattr(ModuleLayers, "run", breaks)
    with drafting(llm, Erring(right)):
        output = llm.generate(PROMPTS[0], LONG)[0]
    assert output.error is not None or output.report["recomputed_tokens"] == 0
    monkeypatch.undo()
    with drafting(llm, Erring(right)):
        pair.check(PROMPTS[0], llm.generate(PROMPTS[0], LONG)[0])
    assert llm.pool.states.used == 0


def hides(places: tuple[int, ...], share: float, sinks: int):
    """transformers' attention where rows of layer ``places[-1]`` do not see what PSAW's equation hides."""

    def attend(module, query, key, value, mask, scaling, dropout=0.0, **_):
        key, value = (one.repeat_interleave(query.shape[1] // one.shape[1], 1) for one in (key, value))
        scores = query @ key.transpose(2, 3) * scaling
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        if module.layer_idx == places[-1]:
            for row in range(len(seen)):
                for at in hidden_by_the_paper(share, 1, len(places), len(places), row + 1, sinks):
                    seen[row, at] = False
        return (scores.masked_fill(~seen, -torch.inf).softmax(-1) @ value).transpose(1, 2).contiguous(), None

    return attend


KINDS = {  # two layers that attend, among five
    **dict.fromkeys(("lfm2", "lfm2_moe"), ("conv", "full_attention", "conv", "full_attention", "conv")),
    **dict.fromkeys(("qwen3_5_text", "qwen3_next", "olmo_hybrid"), ("linear_attention", "full_attention") * 2),
}


@pytest.mark.parametrize("family", quick(KINDS, lambda one: one in FAST))
@pytest.mark.parametrize("exact", [True, False])
def test_windows_of_a_policy_narrow_the_layers_that_attend(family, exact, tmp_path):
    """Depth is counted in layers that attend."""
    kinds = KINDS[family]
    pair = Pair(make_checkpoint(family, tmp_path / "model", layer_types=list(kinds), num_hidden_layers=len(kinds)))
    policy = "psaw(phi=0.3, start_layer=1, sinks=3, local=0, block_size=1)"
    with pair.llm(exact=exact) as llm:
        AttentionInterface.register("narrowed", hides(llm.model.spec.places, 0.3, 3))
        whole = oracle_logits(pair.theirs, PROMPTS[2])
        pair.theirs.set_attn_implementation("narrowed")
        assert not torch.allclose(oracle_logits(pair.theirs, PROMPTS[2]), whole, atol=1e-2)
        for ids, output in zip(PROMPTS, llm.generate(PROMPTS, GREEDY, policy=policy)):
            pair.check(ids, output)
        for ids, output in zip(PROMPTS, llm.generate(PROMPTS, GREEDY, policy=f"{QUEST}+{policy}")):
            pair.check(ids, output)
        with llm.session(policy) as session:
            said = PROMPTS[0] + tokens(session.generate(PROMPTS[0], GREEDY))
            edited = said[:63] + PROMPTS[1]
            pair.check(edited, session.complete(edited, GREEDY))
