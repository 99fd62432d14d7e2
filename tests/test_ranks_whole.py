"""What several processes say and keep of a whole model: audits, drafts, certificates, maps, and sessions that go on
under another number of them; KV heads that several have."""

from __future__ import annotations

import base64
import logging
from dataclasses import replace

import fork_server
import numpy as np
import pytest
import torch
from engine_helpers import EVERY, finish
from rank_helpers import PROMPTS, alike_reports, greedy, make, same
from tiny_models import VOCAB, make_checkpoint, random_ids

from saccade import SamplingParams, ranks
from saccade.engine.messages import MapOrder
from saccade.errors import PolicyError
from saccade.methods.policy import Policy


@pytest.fixture(scope="module", autouse=True)
def quickly_started():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranks, "subprocess", fork_server.SUBPROCESS)
        yield


@pytest.fixture(scope="module")
def pair(tiny_llama, quickly_started):
    """An engine of one process and one of two."""
    made = [make(tiny_llama, count, exact=False, kv_memory="8MiB") for count in (1, 2)]
    yield made
    for llm in made:
        assert llm.pool.used_blocks == 0
        llm.close()


@pytest.mark.parametrize(
    "policy",
    [
        "lossless(draft=psa(epsilon=0.3, rank=cuboid), tokens=3)",
        "lossless(draft=lfps(k=24, blocks=2, least=1), tokens=2, lookup=0)",
        "lossless(draft=snapkv(capacity=70), tokens=4, lookup=0)",
        "flexprefill(min_budget=0)+lossless(draft=arkvale(budget=64), tokens=3)",
        "lossless(draft=vattention(sinks=16, local=16), tokens=3)",
    ],
)
def test_drafts(pair, policy):
    """Tokens and counts of what was verified, and of what drafts chose as they learnt from it, as of one process;
    look-ups among them."""
    prompts = [PROMPTS[0], PROMPTS[1][:40] * 4]
    own = [llm.generate(prompts, greedy(24), policy=policy) for llm in pair]
    same(*own)
    for mine, theirs in zip(*own, strict=True):
        left, right = mine.report["speculation"], theirs.report["speculation"]
        assert right["drafted"] == left["drafted"] > 0
        assert right["accepted"] == left["accepted"]
        alike_reports(mine.report, theirs.report)


def test_drafts_of_samples(pair):
    params = SamplingParams(n=2, temperature=0.8, seed=3, max_tokens=12, ignore_eos=True)
    policy = "lossless(draft=quest(budget=64), tokens=3)"
    same(*(llm.generate(PROMPTS[2], params, policy=policy) for llm in pair))


@pytest.mark.parametrize(
    "policy", ["quest(budget=64)", "topk(k=24)", "arkvale(budget=64)", "vattention(sinks=16, local=16)"]
)
def test_audits(pair, policy):
    """Of all heads: the same places are drawn, and what is found there is the same."""
    params = greedy(12, seed=7, audit=0.5, audit_steps=0.5)
    audits = []
    for llm in pair:
        out = llm.generate(PROMPTS[:2], params, policy=policy)
        audits.append([one.report["audit"] for one in out])
        assert [one.error for one in out] == [None, None]
    for mine, theirs in zip(*audits, strict=True):
        for name in ("places", "left_out", "steps", "rate"):
            assert mine[name] == theirs[name], name
        assert mine["places"] == 11 * 3 * 2
        for name in ("retained_mass", "output_error", "output_error_scaled", "agreement", "divergence"):
            assert _numbers(mine[name]) == pytest.approx(_numbers(theirs[name]), abs=2e-5), name
    assert audits[1][0]["output_error"]["samples"] > 10


@pytest.mark.parametrize("policy", ["quest(budget=64)", "cis(k=30)+psaw", "arkvale(budget=64)"])
def test_certificates_and_maps(pair, policy):
    """Of all heads, in their order."""
    reports, maps = [], []
    for llm in pair:
        request = llm.engine.add(
            PROMPTS[0], greedy(10, seed=3, bounds=0.7), Policy.parse(policy), map_order=MapOrder((0, 2), 32)
        )
        finish(llm.engine)
        reports.append(request.report.as_dict()["bounds"])
        maps.append(request.maps.as_dict())
    mine, theirs = reports
    assert theirs["steps"] == mine["steps"] > 3
    for name, one in mine["certificates"].items():
        other = theirs["certificates"][name]
        assert (one is None) == (other is None), name
        if one is not None:
            assert _flat(other) == pytest.approx(_flat(one), rel=1e-3, abs=1e-3), name
    assert maps[0].keys() == maps[1].keys()
    assert len(maps[0]["maps"]) == len(maps[1]["maps"]) == 4
    for one, other in zip(*(found["maps"] for found in maps), strict=True):
        assert one["heads"] == other["heads"] == 4
        assert one["density"] == pytest.approx(other["density"])
        assert one["mass"] == pytest.approx(other["mass"], abs=1e-4)
        assert one["share"] == other["share"]
        grids = [np.frombuffer(base64.b64decode(found["read"]), np.uint8).astype(int) for found in (one, other)]
        assert np.abs(grids[0] - grids[1]).max() <= 1


def _flat(found) -> list[float]:
    if isinstance(found, dict):
        return [number for name in sorted(found) for number in _flat(found[name])]
    if isinstance(found, list):
        return [number for one in found for number in _flat(one)]
    return [] if found is None else [float(found)]


def _numbers(found: dict | None) -> dict:
    return {name: value for name, value in (found or {}).items() if isinstance(value, (int, float))}


HEADS = {"num_attention_heads": 8, "num_key_value_heads": 2, "num_hidden_layers": 3, "max_position_embeddings": 512}
MIXED = [
    "dense",
    "flexprefill(min_budget=0)+quest(budget=64)",
    "arkvale(budget=64)",
    "random(k=20)",
    "infllm(sinks=32, window=32, budget=32, block_size=32)+h2o(budget=60)",
    "lossless(draft=quest(budget=64), tokens=2)",
]


@pytest.fixture(scope="module")
def few_heads(tmp_path_factory):
    """A model of two KV heads."""
    return make_checkpoint("llama", tmp_path_factory.mktemp("few"), **HEADS)


@pytest.mark.parametrize("policies", [MIXED[1:3], pytest.param(MIXED, marks=pytest.mark.thorough)], ids=["two", "six"])
def test_more_processes_than_kv_heads(few_heads, caplog, policies):
    """Two processes have each KV head: tokens, counts and audits as of one process, and a line that says so."""
    folder = few_heads
    with make(folder, 1, kv_memory="8MiB", exact=False) as llm:
        answers = {policy: llm.generate(PROMPTS[:2], greedy(8, seed=1), policy=policy) for policy in policies}
    with caplog.at_level(logging.WARNING, "saccade"), make(folder, 4, kv_memory="8MiB", exact=False) as four:
        assert "2 KV heads for tensor_parallel_size=4: each is stored by 2 processes" in caplog.text
        assert four.pool.format.kv_heads == 1
        (_, held), *_ = four.loop.statistics().bytes_by_tier.values()
        assert held == 4 * four.pool.num_blocks * four.pool.format.block_bytes
        for policy, wanted in answers.items():
            own = four.generate(PROMPTS[:2], greedy(8, seed=1), policy=policy)
            same(wanted, own)
            for mine, theirs in zip(wanted, own, strict=True):
                for phase in ("prefill", "decode"):
                    assert mine.report[phase]["keys_attended"] == theirs.report[phase]["keys_attended"]
                    assert mine.report[phase]["keys_causal"] == theirs.report[phase]["keys_causal"]
        audit = four.generate(PROMPTS[0], greedy(6, audit=1.0), policy="topk(k=24)")[0].report["audit"]
        assert audit["output_error"]["samples"] == audit["places"] == 5 * 3 * 2
        order = MapOrder((1,), 16)
        request = four.engine.add(PROMPTS[0], greedy(4), Policy.parse("topk(k=24)"), map_order=order)
        finish(four.engine)
        assert [found["heads"] for found in request.maps.as_dict()["maps"]] == [8, 8]


@pytest.mark.parametrize(
    ("options", "numbers"),
    [
        pytest.param({}, (2, 1, 4, 2), marks=pytest.mark.thorough),
        ({"kv_dtype": "int8"}, (1, 4, 2)),
        pytest.param({"kv_host": "8MiB", "kv_memory": "192KiB"}, (4, 2, 1), marks=pytest.mark.thorough),
    ],
    ids=["plain", "int8", "tiers"],
)
def test_sessions_go_on_under_another_number(few_heads, tmp_path, options, numbers):
    """Saved by one number of processes, restored by the next; the last answer is that of a session that stayed."""
    folder = few_heads
    settings = {"kv_memory": "8MiB", "exact": False, **options}
    policy, plain = (
        "flexprefill(min_budget=0)+quest(budget=64, dense_layers=0)",
        {**settings, "kv_memory": "8MiB", "kv_host": None},
    )
    with make(folder, 1, **plain) as llm, llm.session(policy) as session:
        wanted = [session.generate(PROMPTS[turn % 3][:90], greedy(5)) for turn in range(len(numbers))]
    path = tmp_path / "saved"
    for turn, number in enumerate(numbers):
        with make(folder, number, **settings) as llm:
            session = llm.session(policy) if turn == 0 else llm.restore(path)
            assert session.note is None
            answer = session.generate(PROMPTS[turn % 3][:90], greedy(5))
            same([wanted[turn]], [answer])
            assert answer.report["cached_tokens"] == wanted[turn].report["cached_tokens"]
            session.save(path)
            session.close()


@pytest.mark.parametrize("policy", ["snapkv(capacity=60, window=16)", "h2o(budget=60)", "lfps", "loopserve(alpha=0.8)"])
def test_what_a_method_knew_of_all_heads_is_computed_again(pair, tmp_path, policy):
    """Each process has some of them: keys that were evicted of the first one's alone were read by others."""
    one, two = pair
    with one.session(policy) as session:
        session.generate(PROMPTS[1], greedy(3))
        session.save(tmp_path / "saved")
        wanted = session.generate(PROMPTS[3], greedy(5))
    with two.restore(tmp_path / "saved") as session:
        assert "tensor_parallel_size=2 shares out; tensor_parallel_size=1 goes on from it" in session.note
        assert "are computed again" in session.note
        same([wanted], [session.generate(PROMPTS[3], greedy(5))])


def test_evicted_keys_are_not_saved_as_the_first_process_has_them(pair):
    """Nor where the method that evicted them is gone."""
    _, two = pair
    sequence = two.engine.sessions[number := two.engine.sessions.open()]
    for ids, policy in ((PROMPTS[0], "snapkv(capacity=70)"), (PROMPTS[3], "dense")):
        two.engine.add(ids, greedy(3), Policy.parse(policy), sequence)
        finish(two.engine)
    with pytest.raises(
        PolicyError, match="of which keys were evicted cannot be saved with tensor_parallel_size=2; use"
    ):
        two.engine.sessions.save(number)
    two.engine.sessions.forget(number)


def test_summaries_without_heads_are_made_again(pair):
    """As earlier versions saved them: the first process's alone."""
    policy, answers = "flexprefill(min_budget=0)", []
    for llm in pair:
        session = llm.session(policy)
        session.generate(PROMPTS[4], greedy(3))
        saved = llm.engine.sessions.save(session.id)
        session.close()
        kept = {name: tensor for name, tensor in saved.tensors.items() if "summary" in name}
        assert kept
        assert {tensor.shape[-2] for tensor in kept.values()} == {2}
        if llm.engine.link is not None:
            saved = replace(saved, tensors=saved.tensors | {name: part[:, :, :1] for name, part in kept.items()})
        number, note = llm.engine.sessions.restore(saved, [], False)
        assert note is None
        request = llm.engine.add(PROMPTS[0], greedy(4), Policy.parse(policy), llm.engine.sessions[number])
        finish(llm.engine)
        answers.append((request.final_ids, request.report.as_dict()["prefill"]["keys_attended"]))
        llm.engine.sessions.forget(number)
    assert answers[0] == answers[1]


@pytest.mark.thorough
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_every_method_in_four_processes(tmp_path, kv_heads):
    """Of four and of two KV heads, which two processes have each."""
    folder = make_checkpoint("llama", tmp_path, **{**HEADS, "num_key_value_heads": kv_heads})
    with make(folder, 1, kv_memory="8MiB", exact=False) as one, make(folder, 4, kv_memory="8MiB", exact=False) as four:
        for policy in EVERY:
            own = [llm.generate(PROMPTS[:2], greedy(8), policy=policy) for llm in (one, four)]
            same(*own)
            for mine, theirs in zip(*own, strict=True):
                for phase in ("prefill", "decode"):
                    assert mine.report[phase]["keys_attended"] == theirs.report[phase]["keys_attended"], policy.text


@pytest.mark.parametrize(
    "params",
    [
        {"certify": (0.2, 0.1), "policy": "vattention(sinks=16, local=16)"},
        {"target": 0.9, "policy": "quest(budget=64)"},
        {"prompt_logprobs": 1, "policy": "topk(k=24)"},
    ],
    ids=lambda params: next(iter(params)),
)
def test_what_requests_ask_for(pair, params):
    """Certificates, targets, scored prompts."""
    asked = dict(params)
    policy = asked.pop("policy", "dense")
    own = [llm.generate(PROMPTS[:2], greedy(10, seed=5, **asked), policy=policy) for llm in pair]
    same(*own)
    for mine, theirs in zip(*own, strict=True):
        assert mine.report["decode"].get("certified") == theirs.report["decode"].get("certified")


class EveryThird:
    """A grammar by which a token is followed by those that leave the same rest by 3."""

    name = "the grammar of response_format"

    def begin(self):
        return self

    def allowed(self, answer):
        return torch.arange(VOCAB) % 3 == (answer[-1] % 3 if answer else 1)

    def accepts(self, answer):
        return True


def test_grammars(pair):
    answers = []
    for llm in pair:
        policy = Policy.parse("flexprefill(min_budget=0)+arkvale(budget=64)")
        request = llm.engine.add(PROMPTS[0], greedy(8), policy, constraint=EveryThird())
        finish(llm.engine)
        assert request.error is None
        answers.append(request.final_ids)
    assert answers[0] == answers[1]
    assert {token % 3 for token in answers[0]} == {1}


@pytest.mark.thorough
def test_preemption(tiny_llama):
    """More than memory holds: requests give their blocks up and begin again, in all processes."""
    policies = ["arkvale(budget=64)", "h2o(budget=60)", "lossless(draft=lfps, tokens=2)"]
    answers = []
    for count in (1, 2):
        with make(tiny_llama, count, exact=False) as llm:
            answers.append(llm.generate(PROMPTS[:3] * 2, greedy(41), policy=policies * 2))
            assert llm.engine.link is None or sum(one.reports[0]["preemptions"] for one in answers[-1]) > 0
    same(*answers)


@pytest.mark.parametrize(
    ("policy", "phase"),
    [
        ("flexprefill(gamma=0.9, block_size=64, min_budget=0, tau=0.2)", "prefill"),
        ("vattention(epsilon=0.3, sinks=4, local=20, heavy=16, block_size=8)", "decode"),
        ("vattention(epsilon=0.5, sinks=0, local=1, heavy=8, base=0.2, block_size=8, follow=2, seed=3)", "decode"),
    ],
)
def test_kinds_and_costs_of_heads_that_choose_unlike(tmp_path, policy, phase):
    """A process of few heads may have one kind where all heads have a mixture; costs are means over all heads, however
    few keys or blocks a head's share of them is."""
    sizes = {**HEADS, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 16}
    folder, reports = make_checkpoint("llama", tmp_path, **sizes), []
    for count in (1, 4):
        with make(folder, count, kv_memory="16MiB", exact=False, prefill_chunk=128) as llm:
            found = llm.generate([random_ids(420, 1), random_ids(281, 2)], greedy(8, seed=3), policy=policy)
            reports.append([{**one.report[phase], "notes": one.report["notes"]} for one in found])
    seen = set()
    for mine, theirs in zip(*reports, strict=True):
        seen.update(mine["selections"])
        assert theirs["selections"] == mine["selections"]
        assert theirs["notes"] == mine["notes"]  # which do not tell of the first process' heads alone
        for name in ("keys_scored", "keys_estimated"):
            assert theirs[name] == pytest.approx(mine[name], abs=8, rel=2e-3), name
    assert seen != {"dense"}
