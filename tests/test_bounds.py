"""PrHS's certificates: proved ones hold against the truth of every step, and say nothing worse than they must."""

from __future__ import annotations

import math

import pytest
import torch
import triton_helpers  # noqa: F401  (sets the interpreter up first)
from device_helpers import put_on_device
from engine_helpers import make, tokens
from tiny_models import make_checkpoint, random_ids

from saccade import LLM, SamplingParams
from saccade.engine.observing import observing
from saccade.engine.watch.bounds import Certificate, joined
from saccade.engine.watch.truth import selected_rows, true_rows
from saccade.errors import RequestError
from saccade.ops.prehoc import dropped_at_most, fit_changes
from saccade.ops.reference import logits

CIS = "cis(k=24, sinks=2, local=8, tau=-1.0, s=8)"
CPE = f"{CIS}+psaw(start_layer=2, sinks=2, local=8, block_size=16)+etf(start_layer=2, sinks=2, reuse=kv)"
PROVED = ("dropped", "information", "divergence", "sharing", "centroid")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint(
        "llama", tmp_path_factory.mktemp("llama"), max_position_embeddings=2048, head_dim=32, num_hidden_layers=4
    )


@pytest.fixture(scope="module")
def llm(folder):
    return LLM(folder, dtype="float32", kv_memory="16MiB", prefill_chunk=256)


def ask(llm, policy, most=12, **params):
    params = SamplingParams(temperature=0, max_tokens=most, ignore_eos=True, **params)
    return llm.generate(random_ids(230, 5), params, policy=policy)[0]


def certificates(llm, policy, **params):
    return ask(llm, policy, **{"bounds": 1.0, **params}).report["bounds"]["certificates"]


@pytest.mark.parametrize("policy", ["topk(k=100000)", "psa(epsilon=1.0)", "cis(s=1, k=100000)"])
def test_who_reads_everything_may_lose_nothing(llm, policy):
    got = certificates(llm, policy)
    for name in ("dropped", "information", "divergence", *(("sharing",) if "cis" in policy else ())):
        assert got[name]["bound"] == got[name]["error"] == got[name]["vacuous"] == got[name]["broken"] == 0, name
    assert got["window"] is got["freeze"] is None
    assert (got["sharing"] is None) == ("cis" not in policy)


@pytest.mark.parametrize("policy", ["psa(epsilon=0.3, block_size=16, microbatch=1)", "streaming(sinks=2, window=40)",
                                    CIS, CPE])  # fmt: skip
def test_errors_are_the_truth_and_proved_bounds_hold(llm, policy):
    truth = {}

    def look(call):
        if call.phase != "decode":
            return
        for true in true_rows(call):
            weights = true.weights()[:, 0].double()
            mask = selected_rows(call.selection, true.heads, true.rows)[:, 0]
            truth.setdefault(call.layer, []).append((weights * ~mask).sum(1))

    plain = ask(llm, policy)
    with observing(llm.engine, look):
        output = ask(llm, policy, bounds=1.0)
    got = output.report["bounds"]["certificates"]
    assert tokens(output) == tokens(plain)
    assert output.report["decode"]["keys_attended"] == plain.report["decode"]["keys_attended"]
    assert output.report["bounds"]["steps"] == 11
    assert output.report["bounds"]["left_out"] == 0
    assert got["dropped"]["pairs"] == 11 * 4 * 4
    for layer, found in truth.items():
        mean = torch.cat(found).view(11, -1).mean(0)
        torch.testing.assert_close(
            torch.tensor(got["dropped"]["per_head"]["error"][layer]).double(), mean, atol=2e-6, rtol=0
        )
    assert got["dropped"]["error"] > 0.01
    for name in PROVED:
        if got[name] is not None:
            assert got[name]["broken"] == 0, name
            assert got[name]["bound"] >= got[name]["error"] > 0, name
    assert ("cis" in policy) == (got["sharing"] is not None)
    if policy == CIS:
        assert got["sharing"]["vacuous"] < 1  # heads that retrieve lose nothing
        assert got["joint"]["error"] == got["sharing"]["error"]
        assert got["joint"]["bound"] == got["sharing"]["bound"]
    if policy == CPE:
        assert [len(heads) for heads in got["window"]["per_head"]["bound"]] == [0, 0, 4, 4]
        assert [len(heads) for heads in got["freeze"]["per_head"]["bound"]] == [0, 0, 4, 4]
        assert got["window"]["vacuous"] == pytest.approx(
            1 / 11, abs=1e-6
        )  # before the first step nothing is known of decay
        assert 0 < got["window"]["error"] < got["window"]["bound"]
        assert got["freeze"]["error"] is got["joint"]["error"] is None
        total = sum(got[name]["bound"] * got[name]["pairs"] for name in ("sharing", "window", "freeze"))
        assert got["joint"]["bound"] == pytest.approx(total / got["joint"]["pairs"], rel=1e-4)


def test_the_freeze_is_fitted_to_keys_that_did_not_freeze(llm):
    keys, ends, seen = {}, {2: 0, 3: 0}, []

    def look(call):
        if call.phase == "decode":
            keys[call.layer] = call.kv.keys(0, call.selection.shape.k_len).float()
            if call.layer == 3:
                seen.append((call.q[:, 0].norm(dim=-1) * call.spec.scale, {k: v[:, :-1] for k, v in keys.items()}))

    with observing(llm.engine, look):
        got = certificates(llm, "dense+etf(start_layer=2, sinks=2, reuse=kv)", most=2)["freeze"]
    ((length, keys),) = seen
    for layer in ends:  # copies of the layer before say which tokens froze
        ends[layer] = int(((keys[layer] - keys[layer - 1]).norm(dim=-1).amax(0)[2:] == 0).sum()) + 2
        assert ends[layer] > 2
    changes = [float((keys[at] - keys[at - 1]).norm(dim=-1)[:, end:].amax()) for at, end in ends.items()]
    expected = length * fit_changes(changes, 2).at(3)
    torch.testing.assert_close(torch.tensor(got["per_head"]["bound"][3]), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("keys", [1, 31, 32, 100])
def test_unread_keys_weigh_no_more_than_their_blocks_allow(softcap, keys):
    rng = torch.Generator().manual_seed(keys)
    k = torch.randn(keys, 8, generator=rng) + torch.randn(8, generator=rng)
    q, read = 3 * torch.randn(6, 8, generator=rng), torch.rand(6, keys, generator=rng) < 0.4
    read[:, 0] = True
    read[0] = True
    scores = logits(q, k, 0.35, softcap)
    weights = torch.softmax(scores.double(), -1)
    lse = torch.logsumexp(scores.masked_fill(~read, -torch.inf).double(), -1)
    bound, dropped = dropped_at_most(q, k, read, lse, 0.35, softcap), (weights * ~read).sum(1)
    assert bound[0] == 0
    assert (bound >= dropped - 1e-6).all()
    assert (bound <= 1).all()
    assert keys < 31 or (bound[1:] < 1).any()


def test_recorded_steps_leave_certified_ones_to_the_host(llm, folder):
    device = make(folder, chunk=256, exact=False)
    put_on_device(device)
    there, here = (ask(one, "streaming(sinks=2, window=40)", 4, bounds=0.5, seed=4).report for one in (device, llm))
    assert 0 < there["bounds"]["steps"] == here["bounds"]["steps"] < 3
    assert there["decode"]["backends"]["triton"] == 4 * (3 - there["bounds"]["steps"])
    mine, theirs = (one["bounds"]["certificates"]["dropped"] for one in (here, there))
    assert theirs["bound"] == pytest.approx(mine["bound"], rel=1e-3)
    assert theirs["error"] == pytest.approx(mine["error"], rel=1e-3)


def test_vacuous_and_broken_are_counted_and_samples_joined():
    one = Certificate()
    one.add(1, torch.tensor([0.5, 2.0]), torch.tensor([0.4, 0.3]), 1.0)
    one.add(1, torch.tensor([0.1, 0.2]), torch.tensor([0.4, 0.1]), 1.0)
    got = one.as_dict(2)
    assert got["pairs"] == 4
    assert (got["bound"], got["error"], got["vacuous"], got["broken"]) == (0.7, 0.3, 0.25, 0.25)
    assert got["per_head"]["broken"] == [[], [0.5, 0.0]]
    assert Certificate().as_dict(2) is None
    names = dict.fromkeys((*PROVED, "window", "freeze", "joint"))
    part = {"rate": 1.0, "steps": 2, "left_out": 0, "certificates": {**names, "dropped": got}}
    more = {**got, "pairs": 12, "bound": 1.1}
    both = joined([part, {**part, "certificates": {**names, "dropped": more}}])
    assert both["steps"] == 4
    assert both["certificates"]["dropped"]["pairs"] == 16
    assert both["certificates"]["dropped"]["bound"] == 1.0
    assert both["certificates"]["dropped"]["per_head"] == got["per_head"]
    assert both["certificates"]["joint"] is None


@pytest.mark.parametrize("value", [-0.1, 1.5, math.nan, True])
def test_rates_out_of_range_are_refused(value):
    with pytest.raises(RequestError, match="bounds="):
        SamplingParams(bounds=value)
