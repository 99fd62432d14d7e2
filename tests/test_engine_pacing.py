"""The parts of speculation, each by itself: the rule of acceptance, look-ups, how much is drafted and when not."""

from __future__ import annotations

import random

import pytest
import torch
from engine_helpers import finish, make, start
from helpers import generator
from test_engine_lossless import DRAFTS, lossless
from tiny_models import make_checkpoint, random_ids

from saccade import SamplingParams
from saccade.engine.drafts.lookup import STRETCH, Lookup
from saccade.engine.drafts.pacing import LEAST, Pace, Pacing
from saccade.engine.drafts.step_times import Kind, Times, forecast, tokens_of_round
from saccade.engine.sampling.acceptance import Proposal, decided, propose
from saccade.kv.view import KVView
from saccade.methods.policy import Policy
from saccade.methods.verified import MOST
from saccade.ops import Call, few_rows, run

CRITICAL = {3: 16.27, 7: 24.32, 15: 37.70, 31: 61.10}  # of chi-square at 0.001, by degrees of freedom


def chi_square(counts: torch.Tensor, expected: torch.Tensor) -> float:
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("kind", ["close", "far", "peaked", "disjoint", "certain"])
def test_the_rule_keeps_the_targets_distribution(kind):
    """Whatever drafts; and the acceptance is the distributions' common mass, sum(min(p, q))."""
    size, draws, rng = 8, 10000, generator(5)
    p = torch.softmax(2 * torch.randn(size, generator=rng, dtype=torch.float64), -1)
    q = {
        "close": torch.softmax(p.log() + 0.3 * torch.randn(size, generator=rng, dtype=torch.float64), -1),
        "far": torch.softmax(2 * torch.randn(size, generator=rng, dtype=torch.float64), -1),
        "peaked": torch.softmax(30 * p, -1),
        "disjoint": torch.eye(size, dtype=torch.float64)[int(p.argmin())],
        "certain": None,
    }[kind]
    counts, kept = torch.zeros(size, dtype=torch.float64), 0
    for position in range(draws):
        proposal = Proposal(3) if q is None else propose(q, 17, 0, position)
        token = decided(proposal, p, 17, 0, position)
        counts[token] += 1
        kept += token == proposal.token
    assert chi_square(counts, draws * p) < CRITICAL[size - 1]
    common = float(p[3]) if q is None else float(torch.minimum(p, q).sum())
    assert kept / draws == pytest.approx(common, abs=0.02)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    folder = make_checkpoint("llama", tmp_path_factory.mktemp("few"), max_position_embeddings=512, head_dim=32)
    return make(folder, blocks=6000, exact=False)


def test_sampled_answers_have_dense_attentions_distribution(small):
    """The second and third token of many answers without a seed, by a draft that is often wrong; of the 4 tokens that
    top-k leaves, and penalties that hang on what was drafted before."""
    params = {"temperature": 1.5, "top_k": 4, "max_tokens": 3, "ignore_eos": True, "presence_penalty": 0.5}
    ids, count = random_ids(100, seed=8), 600
    seen = {}
    for name, policy in (("ours", lossless("streaming(sinks=1, window=70)", 2)), ("theirs", "dense")):
        outputs = [small.generate(ids, SamplingParams(n=100, **params), policy=policy) for _ in range(count // 100)]
        answers = [one.token_ids for batch in outputs for output in batch for one in output.outputs]
        seen[name] = [tuple(answer[:place]) for place in (2, 3) for answer in answers], outputs
    said = [report["speculation"] for batch in seen["ours"][1] for output in batch for report in output.reports]
    accepted, drafted = (sum(one[name] for one in said) for name in ("accepted", "drafted"))
    assert 0.15 < accepted / drafted < 0.9
    # two samples of one distribution: chi-square of the table of both, rare prefixes together
    for length in (2, 3):
        ours, theirs = ([one for one in seen[name][0] if len(one) == length] for name in ("ours", "theirs"))
        names = sorted(set(ours) | set(theirs))
        table = torch.tensor([[part.count(one) for one in names] for part in (ours, theirs)], dtype=torch.float64)
        common = table.sum(0) >= 10
        table = torch.cat([table[:, common], table[:, ~common].sum(1, keepdim=True)], 1)
        table = table[:, table.sum(0) > 0]
        expected = table.sum(1, keepdim=True) * table.sum(0, keepdim=True) / table.sum()
        freedom = table.shape[1] - 1
        bound = freedom + 3.1 * (2 * freedom) ** 0.5 + 6  # above the quantile of 0.999
        assert float(((table - expected) ** 2 / expected).sum()) < bound
        assert freedom > 3


def test_look_ups_find_the_last_place_and_survive_cuts():
    rng = random.Random(3)
    tokens = [rng.randrange(4) for _ in range(60)]
    lookup = Lookup(3)
    for _ in range(300):
        if rng.random() < 0.3 and len(tokens) > 20:
            del tokens[len(tokens) - rng.randrange(1, 10) :]
            lookup.cut(len(tokens))
        tokens += [rng.randrange(4) for _ in range(rng.randrange(4))]
        last = tokens[-3:]
        places = [at for at in range(len(tokens) - 3) if tokens[at : at + 3] == last]
        want = tokens[places[-1] + 3 : places[-1] + 8] if places else []
        assert lookup.after(tokens, 5) == want
    assert Lookup(0).after([1, 1, 1, 1]) == []
    assert Lookup(3).after([1, 1, 1]) == []


def test_a_look_up_takes_in_a_long_prompt_piece_by_piece_and_then_finds_all_of_it():
    rng = random.Random(4)
    tokens = [rng.randrange(1 << 31) for _ in range(70_000)]  # more than are compared together
    lookup, found, calls = Lookup(3), [], 0
    for place in (69_000, 40_000, 66_000, 5):
        tokens += tokens[place : place + 3]
        calls += 1
        found = lookup.after(tokens, 4)
        while calls < len(tokens) // STRETCH + 1:  # what a call takes in is bounded
            assert found == []
            assert lookup._known == calls * STRETCH
            calls += 1
            found = lookup.after(tokens, 4)
        assert found == tokens[place + 3 : place + 7]
        tokens.append(rng.randrange(1 << 31))
    assert lookup.after([*tokens, 1, 2, 3], 4) == []


def test_expected_tokens_are_the_sum_of_chances():
    for chance in (0.0, 0.3, 0.9, 1.0):
        for drafts in (1, 4, 16):
            assert tokens_of_round(chance, drafts) == pytest.approx(sum(chance**at for at in range(drafts + 1)))


def measured(pacing: Pacing, kind: Kind, plain: float, draft: float, row: float = 0.02) -> None:
    times = pacing.times(kind)
    for count in (0.0, 16.0, 4.0, 8.0, 12.0):
        times.plain.append(plain)
        times.draft.append(draft)
        times.verify.append((count, plain * (1 + count * row)))


def test_the_length_is_the_best_of_all_and_grows_with_acceptance():
    pacing, kind = Pacing(10**6), Kind.of("psa", [50_000])
    measured(pacing, kind, plain=1.0, draft=0.25)
    times, before = pacing.times(kind), 0
    for chance in (0.5, 0.7, 0.9, 0.98):
        length, speed = times.best([chance])
        speeds = [tokens_of_round(chance, k) / (0.25 * k + 1.0 + 0.02 * k) for k in range(1, MOST + 1)]
        assert speed == pytest.approx(max(speeds), rel=0.01)
        assert speeds[length - 1] > 0.99 * max(speeds)
        assert length >= before
        before = length


def test_small_keys_beside_weights_are_never_tried():
    assert forecast(weights=10**9, keys=10**7) < LEAST < forecast(weights=10**9, keys=10**9)
    pace = Pace(Pacing(10**9), "psa", 0)
    assert not pace.wants(100, Kind.of("psa", [100]), 10**7)
    assert "by bytes" in str(pace.off)
    assert Pace(Pacing(10**9), "psa", 3).wants(100, Kind.of("psa", [100]), 10**7)


@pytest.mark.parametrize("chance", [0.0, 0.4, 0.55, 0.6, 0.98])
@pytest.mark.parametrize("draft", [0.2, 0.6, 2.0])
@pytest.mark.parametrize("fixed", [1.0, 2.5])
def test_it_stops_where_it_loses_and_never_oscillates(chance, draft, fixed):
    """Over 6,000 tokens with noisy times, near the break-even and far from it: what it costs is bounded, and it stops
    and begins again once for each doubling at most."""
    rng, pacing = random.Random(9), Pacing(10**6)
    pace, length, seconds, made, rounds = Pace(pacing, "psa", 0), 4000, 0.0, 0, 0

    def noisy(value: float) -> float:
        return value * rng.uniform(0.97, 1.1)

    while made < 6_000:
        kind = Kind.of("psa", [length])
        times = pacing.times(kind)
        if pace.wants(length, kind, 10**8) and pace.is_timed(kind):
            count, stayed = pace.length(kind), 0
            while stayed < count and rng.random() < chance:
                stayed += 1
            drafts = [noisy(draft) for _ in range(count)]
            verify = noisy(fixed + 0.02 * count)
            times.draft.extend(drafts)
            times.verify.append((float(count), verify))
            seconds += sum(drafts) + verify
            pace.took(count, 0, stayed)
            made, length, rounds = made + stayed + 1, length + stayed + 1, rounds + 1
        else:
            spent = noisy(1.0)
            times.plain.append(spent)
            seconds, made, length = seconds + spent, made + 1, length + 1
    assert pace.stops <= 3  # 4,000 to 10,000 tokens
    best = max(tokens_of_round(chance, k) / (k * draft + fixed + 0.02 * k) for k in range(1, MOST + 1))
    speed = made / seconds * 1.035  # of plain steps, whose noise has this mean
    assert speed > 0.97 * max(1.0, best if best > 1.2 else 1.0)
    if best < 0.9:
        assert pace.off is not None
        assert "with steps as measured" in pace.off or "have lost the time of" in pace.off
        assert rounds < 100
    if best > 1.2:
        assert (pace.off, pace.stops) == (None, 0)


def test_requests_that_gain_nothing_say_so(small):
    """The tiny model's steps cost what its Python costs, so drafting cannot pay; nothing is drafted for long."""
    params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    ids = random_ids(100, seed=3)
    for _ in range(2):
        output = small.generate(ids, params, policy=f"lossless(draft={DRAFTS[2]})")[0]
    said = output.report["speculation"]
    assert output.outputs[0].token_ids == small.generate(ids, params)[0].outputs[0].token_ids
    assert said["off"] is not None or said["verifications"] > 0


def test_an_engine_keeps_the_ledger_and_heeds_it(small):
    """Plain steps and rounds are worth what they give; a draft that has lost too much is told so, its answers stay."""
    params, ids = SamplingParams(temperature=0, max_tokens=80, ignore_eos=True), random_ids(100, seed=3)
    pacing = small.engine.sparse_drafts.pacing
    pacing.forget()
    pacing.weights = 1  # bytes would say no otherwise
    drafts = [f"streaming(sinks=1, window={window})" for window in (40, 50)]
    known, lossy = (pacing.ledger(Policy.parse(draft).decode.text) for draft in drafts)
    known.worth = lossy.worth = 1000.0  # tokens that can bear a first round
    lossy.lost = 1e9
    outputs = [small.generate(ids, params, policy=f"lossless(draft={draft}, lookup=0)")[0] for draft in drafts]
    said = [output.report["speculation"] for output in outputs]
    assert said[0]["verifications"] > 0
    assert 1040 < known.worth <= 1080
    assert said[1]["verifications"] == 0
    assert "have lost the time of" in said[1]["off"]
    assert outputs[0].outputs[0].token_ids == outputs[1].outputs[0].token_ids


def test_a_draft_that_is_given_up_costs_nothing_more(small):
    """Its state is dropped, so plain steps are dense ones."""
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    for draft in ("h2o(budget=20)", "lfps(k=8, blocks=2, least=16)"):
        request = start(small, random_ids(100, seed=3), params, f"lossless(draft={draft})")
        while not request.finished and (request.speculation is None or request.speculation.pace.off is None):
            small.engine.step()
        assert request.speculation.pace.off is not None
        assert not request.sequence.memories[request.sequence.id].has_state
        said = request.report.speculation.as_dict()
        finish(small.engine)
        assert request.report.speculation.as_dict()["verifications"] == said["verifications"]
        assert request.final_ids == small.generate(random_ids(100, seed=3), params)[0].outputs[0].token_ids


def test_plain_times_of_other_lengths_are_scaled_by_bytes():
    pacing = Pacing(1000)
    kind, longer = Kind.of("lfps", [1 << 10]), Kind.of("lfps", [1 << 12])
    pacing.guess_plain(longer)
    assert not pacing.times(longer).plain
    measured(pacing, kind, plain=1.0, draft=0.5)
    pacing.times(kind).bytes = 1000
    pacing.guess_plain(longer)
    assert list(pacing.times(longer).plain) == pytest.approx([2.5, 2.5])
    pacing.guess_plain(Kind.of("psa", [1 << 12]))
    assert not pacing.times(Kind.of("psa", [1 << 12])).plain


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [2, 17])
@pytest.mark.parametrize("keys", [700, 1400, 1410])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_few_rows_read_what_a_chunk_reads(dtype, rows, keys, softcap):
    """Whole and in parts, the last of which begins within the rows (1408 keys are 11 blocks)."""
    rng = generator(rows)
    k, v = (torch.randn(2, keys, 32, generator=rng).to(dtype) for _ in range(2))
    q = torch.randn(rows, 6, 32, generator=rng).to(dtype).transpose(0, 1)  # as the packed rows lie
    call = Call.of(q, KVView.from_tensors(k, v), softcap=softcap, threads=8)
    ours, theirs = few_rows.run(call), run(call, "reference")
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    torch.testing.assert_close(ours.out.float(), theirs.out.float(), atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(ours.lse, theirs.lse, atol=tolerance, rtol=tolerance)
    assert ours.used is call.selection


def test_a_request_less_is_no_beginning():
    """Neighbours of a kind lend it their times, by bytes; kinds far away and other drafts do not."""
    pacing = Pacing(1000)
    kind = Kind.of("psa", [4096] * 8)
    measured(pacing, kind, plain=1.0, draft=0.2)
    pacing.times(kind).bytes = 3000
    less = pacing.times(Kind.of("psa", [4096] * 6))
    assert less.known
    factor = (1000 + 3000 * 2.0 ** (-2 / 4)) / 4000
    assert list(less.plain) == pytest.approx([factor, factor])
    assert [seconds for _, seconds in less.verify] == pytest.approx(
        [factor * seconds for _, seconds in list(pacing.times(kind).verify)[-6:]]
    )
    for other in (Kind.of("psa", [4096]), Kind.of("quest", [4096] * 8)):
        assert not pacing.times(other).known


def test_padded_verifications_cost_what_their_room_costs():
    times = Times(padded=True)
    times.plain.extend([1.0] * 3)
    times.draft.extend([0.1] * 3)
    times.verify.extend([(3.0, 1.1), (3.0, 1.1), (7.0, 1.2), (7.0, 1.2)])
    assert [times.rounded(drafts) for drafts in (1, 2, 3, 4, 7, 8, 15)] == [1, 3, 3, 7, 7, 15, 15]
    assert times.rounds()[5 - 1] == pytest.approx(0.5 + 1.2)
    assert times.rounds()[2 - 1] == pytest.approx(0.2 + 1.1)
    assert 1.2 < times.rounds()[8 - 1] - 0.8 < 2.0  # not measured: on the line through the others
    assert times.best([0.75])[0] == 3
    assert times.best([0.9])[0] == 7
