"""Audits: what they estimate is the truth, their intervals hold, and they change no answer."""

from __future__ import annotations

import math

import pytest
import torch
import triton_helpers  # noqa: F401  (sets the interpreter up first)
from device_helpers import put_on_device
from engine_helpers import finish, make, start, tokens
from tiny_models import make_checkpoint, random_ids

from saccade import LLM, SamplingParams
from saccade.engine.observing import observing
from saccade.engine.watch.audit import Audit, AuditOptions
from saccade.engine.watch.estimates import Mean, Share, at_most
from saccade.engine.watch.truth import selected_rows, true_rows
from saccade.errors import RequestError, SaccadeError

SPARSE = "psa(epsilon=0.3, block_size=16, microbatch=1)"
POLICIES = ["dense", SPARSE, "topk(k=24)", "streaming(sinks=2, window=40)", "cis(k=24, sinks=2, local=8)",
            "lfps(k=8, least=1)", "h2o(budget=60)"]  # fmt: skip
PARAMS = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint(
        "llama", tmp_path_factory.mktemp("llama"), max_position_embeddings=2048, head_dim=32, num_hidden_layers=2
    )


@pytest.fixture(scope="module")
def llm(folder):
    return LLM(folder, dtype="float32", kv_memory="16MiB", prefill_chunk=256)


def report_of(llm, policy, **audit):
    return llm.generate(random_ids(230, 5), SamplingParams(**PARAMS, **audit), policy=policy)[0]


@pytest.mark.parametrize("policy", POLICIES)
def test_an_audit_of_everything_gives_the_true_means_and_changes_nothing(llm, policy):
    found = {"mass": [], "error": [], "scaled": []}

    def look(call):
        if call.phase != "decode":
            return
        for true in true_rows(call):
            mask = selected_rows(call.selection, true.heads, true.rows)
            weights = true.weights()
            out = (weights @ true.values)[:, 0]
            off = (call.out[true.heads, 0] - out).norm(dim=-1)
            scale = (weights[:, 0] * true.values.norm(dim=-1)).sum(-1)
            for name, each in (
                ("mass", (weights * mask).sum(-1)[:, 0]),
                ("error", off / out.norm(dim=-1)),
                ("scaled", off / scale),
            ):
                found[name].append(float(each.clamp(max=1).mean()))

    plain = report_of(llm, policy)
    audited = report_of(llm, policy, audit=1.0, audit_steps=1.0)
    with observing(llm.engine, look):
        report_of(llm, policy)
    got = audited.report["audit"]
    assert tokens(audited) == tokens(plain)
    assert audited.report["decode"]["keys_attended"] == plain.report["decode"]["keys_attended"]
    assert audited.report["decode"]["backends"] == plain.report["decode"]["backends"]
    assert got["places"] == 11 * 2 * 2 == got["output_error"]["samples"]
    assert got["steps"] == 11
    for name, key in (("error", "output_error"), ("scaled", "output_error_scaled"), ("mass", "retained_mass")):
        if key == "retained_mass" and policy.startswith("lfps"):
            assert got[key] is None
        else:
            assert got[key]["mean"] == pytest.approx(sum(found[name]) / len(found[name]), abs=2e-4), key
    assert got["agreement"]["samples"] == 11
    assert (policy == "dense") == (got["agreement"]["mean"] == 1 and got["divergence"]["mean"] < 1e-6)


def test_a_replay_is_a_dense_step_after_the_same_prompt(llm):
    """The second token of a sparse answer beside what dense attention says there."""
    dense = llm.generate(random_ids(230, 5), SamplingParams(**PARAMS), policy="dense")[0]
    sparse = report_of(llm, SPARSE, audit_steps=1.0)
    assert tokens(sparse)[0] == tokens(dense)[0]  # both after a dense prefill
    first = report_of(llm, SPARSE, audit_steps=1.0) if tokens(sparse)[1] == tokens(dense)[1] else sparse
    audit = llm.generate(
        random_ids(230, 5), SamplingParams(**{**PARAMS, "max_tokens": 2}, audit_steps=1.0), policy=SPARSE
    )[0]
    assert audit.report["audit"]["agreement"]["mean"] == float(tokens(first)[1] == tokens(dense)[1])


@pytest.mark.parametrize(
    "policy",
    [
        "quest(budget=64, dense_layers=1)",
        pytest.param(SPARSE.replace("16", "32"), marks=pytest.mark.thorough),
        pytest.param("cis(k=24, sinks=2, local=8)", marks=pytest.mark.thorough),
    ],
)
def test_recorded_steps_are_audited_as_those_of_the_host_are(llm, folder, policy):
    device = LLM(folder, dtype="float32", kv_memory="16MiB", prefill_chunk=256, exact=False)
    put_on_device(device)
    few = {**PARAMS, "max_tokens": 3, "seed": 7}
    outs = [
        one.generate(random_ids(230, 5), SamplingParams(**few, audit=0.7, audit_steps=0.5), policy=policy)[0]
        for one in (llm, device)
    ]
    host, there = (one.report["audit"] for one in outs)
    assert tokens(outs[0]) == tokens(outs[1])
    assert list(outs[1].report["decode"]["backends"]) == ["triton"]  # not launched kernel by kernel
    for name in ("retained_mass", "output_error", "output_error_scaled", "agreement", "divergence"):
        assert (host[name] or {}).get("samples") == (there[name] or {}).get("samples")
        if host[name]:
            assert there[name]["mean"] == pytest.approx(host[name]["mean"], abs=1e-4), name


def test_a_preempted_request_is_audited_once_a_step(folder):
    llm = make(folder, blocks=88)  # 22 of them, of 32 tokens and two layers
    params = SamplingParams(**{**PARAMS, "max_tokens": 30}, audit=1.0, seed=1)
    running = [start(llm, random_ids(200, seed), params, "topk(k=24)") for seed in (1, 2, 3)]
    finish(llm.engine)
    assert sum(one.report.preemptions for one in running) > 0
    assert all(one.report.audit.places == 29 * 4 == one.report.audit.error.samples for one in running if not one.error)


def test_intervals_hold_in_a_thousand_simulated_requests():
    """Each request's places are unlike each other: most lose little, some much, and it gets worse half-way."""
    rng = torch.Generator().manual_seed(1)
    layers, kv_heads, steps = 4, 4, 24
    missed = {"mean": 0, "share": 0, "rare": 0}
    bias = []
    for seed in range(1000):
        lost = torch.rand(steps, layers, kv_heads, generator=rng) ** 12
        lost[steps // 2 :] = (2 * lost[steps // 2 :]).clamp(max=1)
        lost[torch.rand(lost.shape, generator=rng) < 0.01] = 0.9
        agrees = torch.rand(steps, generator=rng) < (0.98 if seed % 2 else 0.6)
        audit = Audit(AuditOptions(0.12, 0.25), seed)
        mean, rare, share = Mean(), Mean(), Share()
        for step in range(steps):
            for layer, heads in audit.draw(step, layers, kv_heads).items():
                for head in heads:
                    mean.add(float(lost[step, layer, head]))
                    rare.add(float(lost[step, layer, head] > 0.89))
            if audit.chance(step) < audit.options.steps:
                share.add(bool(agrees[step]))
        assert audit.places == lost.numel()
        bias.append(mean.mean - float(lost.mean()))
        for name, estimate, true in (
            ("mean", mean, lost.mean()),
            ("rare", rare, (lost > 0.89).float().mean()),
            ("share", share, agrees.float().mean()),
        ):
            low, high = estimate.interval()
            missed[name] += not low - 1e-6 <= float(true) <= high + 1e-6
    assert max(missed.values()) <= 50, missed  # 5 % of them may
    bias = torch.tensor(bias)
    assert abs(float(bias.mean())) < 3 * float(bias.std()) / math.sqrt(len(bias))


def test_bounds_of_a_share_and_of_a_mean():
    assert Share(10, 10).interval()[0] == pytest.approx(
        0.025 ** (1 / 10), abs=1e-6
    )  # Clopper and Pearson, in closed form
    assert Share(10, 0).interval() == pytest.approx((0.0, 1 - 0.025 ** (1 / 10)), abs=1e-6)
    assert at_most(2, 5, 0.3) == pytest.approx(sum(math.comb(5, k) * 0.3**k * 0.7 ** (5 - k) for k in range(3)))
    low, high = Share(200, 150).interval()
    assert at_most(150, 200, high) == pytest.approx(0.025, abs=1e-6)
    assert 1 - at_most(149, 200, low) == pytest.approx(0.025, abs=1e-6)
    whole, parts = Mean(), [Mean(), Mean()]
    for at, value in enumerate([0.1, 0.5, 0.2, 0.9, 7.0, 0.0]):
        whole.add(value)
        parts[at % 2].add(value)
    assert Mean().join(parts[0].as_dict()).join(parts[1].as_dict()).as_dict() == pytest.approx(
        whole.as_dict(), abs=1e-5
    )
    assert Mean().interval() == (0.0, 1.0)
    assert Mean().as_dict() is None
    with pytest.raises(ValueError, match="NaN"):
        whole.add(math.nan)


@pytest.mark.parametrize("rate", [0.003, 0.2, 1.0])
def test_places_are_drawn_alike_and_again(rate):
    counts = torch.zeros(5, 3)
    steps = 2000 if rate < 1 else 3
    audit, again = Audit(AuditOptions(rate), 9, sample=2), Audit(AuditOptions(rate), 9, sample=2)
    for step in range(steps):
        drawn = audit.draw(step, 5, 3)
        assert drawn == again.draw(step, 5, 3)
        for layer, heads in drawn.items():
            assert len(set(heads)) == len(heads)
            counts[layer, heads] += 1
    spread = 4.5 * math.sqrt(steps * rate * (1 - rate))
    assert (counts - steps * rate).abs().max() <= spread


def test_rates_out_of_range_are_refused(tiny_llama):
    for name in ("audit", "audit_steps", "target"):
        with pytest.raises(RequestError, match=rf"{name}=1.5 must be a number at least 0 and at most 1"):
            SamplingParams(**{name: 1.5})
        with pytest.raises(SaccadeError, match=f"{name}=-1 must be a number from 0 to 1"):
            make(tiny_llama, **{name: -1})
