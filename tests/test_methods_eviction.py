"""SnapKV, AdaKV and H2O against their definitions, and what they evict stays unread for good."""

from __future__ import annotations

import math

import pytest
import torch
from covering import covered, spread
from engine_helpers import GREEDY, make, tokens
from helpers import planted_heads, run_method
from tiny_models import random_ids

from saccade import SamplingParams
from saccade.engine.observing import observing
from saccade.errors import PolicyError
from saccade.kv.view import KVView
from saccade.methods.base import Chunk, Query
from saccade.methods.eviction import AdaKV, SnapKV
from saccade.ops import Call, run
from saccade.selection import Dense, Tokens
from saccade_contrib.h2o import H2O

FIRST = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
UNITS = {"q_head": [[0], [1], [2], [3]], "kv_head": [[0, 1], [2, 3]]}


def problem(n: int, seed: int = 1):
    q, k, v = planted_heads(4, 2, n, seed=seed)
    return q, k, KVView.from_tensors(k, v, shuffle_seed=seed)


def weights_of(q, k, head: int, row: int, keys: list[int]) -> dict[int, float]:
    logits = [float(q[head, row].double() @ k[head // 2, i].double()) / math.sqrt(q.shape[-1]) for i in keys]
    top = max(logits)
    total = sum(math.exp(x - top) for x in logits)
    return {i: math.exp(x - top) / total for i, x in zip(keys, logits)}


# --- SnapKV and AdaKV


def snap_scores(q, k, heads: list[int], window: int, kernel: int, gone: set[int] = frozenset()) -> list[float]:
    """Votes of the last rows for the keys before them, then the mean over neighbours, beyond the ends 0."""
    n = k.shape[1]
    votes = [0.0] * (n - window)
    for head in heads:
        for row in range(n - window, n):
            for i, weight in weights_of(q, k, head, row, [i for i in range(row + 1) if i not in gone]).items():
                if i < n - window:
                    votes[i] += weight / len(heads)
    half = kernel // 2
    near = [[votes[j] for j in range(i - half, i + half + 1) if 0 <= j < len(votes)] for i in range(len(votes))]
    return [sum(part) / kernel for part in near]


def best(scores: dict[tuple[int, int], float], count: int) -> set[tuple[int, int]]:
    return set(sorted(scores, key=lambda key: (-scores[key], key))[:count])


@pytest.mark.parametrize("unit", list(UNITS))
@pytest.mark.parametrize(("capacity", "window", "kernel"), [(30, 8, 5), (25, 1, 1), (40, 20, 7)])
def test_snapkv_keeps_the_window_and_what_it_looks_at(unit, capacity, window, kernel):
    n = 90
    q, k, view = problem(n)
    method = SnapKV(capacity=capacity, window=window, kernel=kernel, unit=unit)
    state = method.begin(Chunk.of(q[:, -window:], view))
    selection = method.select_decode(Query.of(q[:, -1:], view), state)
    for heads, got in zip(UNITS[unit], selection.lists()):
        scores = {(i, 0): s for i, s in enumerate(snap_scores(q, k, heads, window, kernel))}
        chosen = {i for i, _ in best(scores, capacity - window)}
        assert got.tolist() == sorted(chosen | set(range(n - window, n)))


@pytest.mark.parametrize("floor", ["beside", "within"])
@pytest.mark.parametrize("safeguard", [0.0, 0.2, 0.7, 1.0])
@pytest.mark.parametrize("unit", list(UNITS))
def test_adakv_shares_one_budget_between_the_heads_of_a_layer(unit, safeguard, floor):
    n, window, capacity = 90, 8, 30
    q, k, view = problem(n, seed=2)
    method = AdaKV(capacity=capacity, window=window, unit=unit, safeguard=safeguard, floor=floor)
    state = method.begin(Chunk.of(q[:, -window:], view))
    got = {(u, i) for u, kept in enumerate(state.positions) for i in kept.tolist()}
    scores = {
        (u, i): s for u, heads in enumerate(UNITS[unit]) for i, s in enumerate(snap_scores(q, k, heads, window, 5))
    }
    beside, within = math.floor(safeguard * (capacity - window) + 1e-9), math.floor(safeguard * capacity + 1e-9)
    least = beside if floor == "beside" else max(0, within - window)
    sure = {key for u in range(len(UNITS[unit])) for key in best({x: s for x, s in scores.items() if x[0] == u}, least)}
    free = best({x: s for x, s in scores.items() if x not in sure}, len(UNITS[unit]) * (capacity - window) - len(sure))
    assert got == sure | free | {(u, i) for u in range(len(UNITS[unit])) for i in range(n - window, n)}
    if safeguard == 1.0:  # even shares: SnapKV
        snap = SnapKV(capacity=capacity, window=window, unit=unit).begin(Chunk.of(q[:, -window:], view))
        assert [a.tolist() for a in snap.positions] == [a.tolist() for a in state.positions]
    else:
        assert len({kept.numel() for kept in state.positions}) > 1


def test_a_later_turn_chooses_among_what_is_left():
    """Keys evicted before neither vote, nor are voted for, nor count."""
    n, window, capacity = 90, 8, 30
    q, k, view = problem(n, seed=3)
    gone = torch.zeros(2, 50, dtype=torch.bool)
    gone[0, 3:40] = gone[1, 7:30] = True
    chunk = Chunk.of(q[:, -window:], view, gone=gone)
    state = SnapKV(capacity=capacity, window=window).begin(chunk)
    for u, heads in enumerate(UNITS["kv_head"]):
        lost = set(gone[u].nonzero()[:, 0].tolist())
        scores = {(i, 0): s for i, s in enumerate(snap_scores(q, k, heads, window, 5, lost)) if i not in lost}
        chosen = {i for i, _ in best(scores, capacity - window)}
        assert state.positions[u].tolist() == sorted(chosen | set(range(n - window, n)))
    assert (state.gone()[:, :50] | ~gone).all()  # what was gone stays gone


def test_snapkv_keeps_what_is_generated():
    q, k, v = planted_heads(4, 2, 100, seed=4)
    method = SnapKV(capacity=20, window=5)
    state = method.begin(Chunk.of(q[:, 75:80], KVView.from_tensors(k[:, :80], v[:, :80])))
    view = KVView.from_tensors(k, v)
    for unit, got in enumerate(method.select_decode(Query.of(q[:, -1:], view), state).lists()):
        assert got.tolist() == [*state.positions[unit].tolist(), *range(80, 100)]


# --- H2O


class Brute:
    """One unit of H2O, a key at a time."""

    def __init__(self, q, k, heads, budget, heavy, prompt):
        self.q, self.k, self.heads, self.budget = q, k, heads, budget
        self.recent = max(1, budget - math.floor(heavy * budget + 0.5))
        self.sums = dict.fromkeys(range(prompt), 0.0)
        for row in range(prompt):
            self.look(row, list(range(row + 1)))
        self.shrink(prompt)

    def look(self, row: int, keys: list[int]) -> None:
        for head in self.heads:
            for i, weight in weights_of(self.q, self.k, head, row, keys).items():
                self.sums[i] += weight / len(self.heads)

    def shrink(self, length: int) -> None:
        old = [i for i in self.sums if i < length - self.recent]
        drop = sorted(old, key=lambda i: (self.sums[i], -i))[: max(0, len(self.sums) - self.budget)]
        for i in drop:
            del self.sums[i]

    def step(self, row: int) -> list[int]:
        self.sums[row] = 0.0
        keys = sorted(self.sums)
        self.look(row, keys)
        self.shrink(row + 1)
        return keys


@covered(
    {
        "unit": list(UNITS),
        ("budget", "heavy"): [(24, 0.5), (24, 0.8), (16, 1.0), (9, 0.0), (45, 0.5)],
        "chunk": [40, 17],
    }
)
def test_h2o_keeps_heavy_and_recent_keys_step_by_step(unit, budget, heavy, chunk):
    prompt, n = 40, 60
    q, k, v = planted_heads(4, 2, n, seed=5)
    method = H2O(budget=budget, heavy=heavy, unit=unit)
    past = None
    for start in range(0, prompt, chunk):
        stop = min(start + chunk, prompt)
        view = KVView.from_tensors(k[:, :stop], v[:, :stop])
        past = method.watch(Chunk.of(q[:, start:stop], view, past=past))
    state = method.begin(
        Chunk.of(q[:, prompt - 1 : prompt], KVView.from_tensors(k[:, :prompt], v[:, :prompt]), past=past)
    )
    brutes = [Brute(q, k, heads, budget, heavy, prompt) for heads in UNITS[unit]]
    for row in range(prompt, n):
        view = KVView.from_tensors(k[:, : row + 1], v[:, : row + 1])
        query = Query.of(q[:, row : row + 1], view, step=row - prompt)
        selection = method.select_decode(query, state)
        mask = selection.mask()[:, 0]
        for heads, brute in zip(UNITS[unit], brutes):
            assert mask[heads[0]].nonzero()[:, 0].tolist() == brute.step(row)
        ran = run(Call.of(query.q, view, selection, want_weights=True), "reference")
        method.observe(query, selection, ran.weights, state)
        kept = [sorted(brute.sums) for brute in brutes]
        assert [part.tolist() for part in state.positions] == kept
        if budget < prompt:
            assert {len(part) for part in kept} == {budget}


def test_a_fraction_is_of_the_context_when_decoding_begins():
    q, _, view = problem(90)
    state = H2O(budget=0.2).begin(Chunk.of(q, view))
    assert [part.numel() for part in state.positions] == [18, 18]
    assert (state.budget, state.recent) == (18, 9)


def test_budgets_of_all_keys_are_dense_and_forget_nothing():
    q, _, view = problem(60)
    for method in (SnapKV(capacity=60, window=8), AdaKV(capacity=60, window=8), H2O(budget=60)):
        segment = Chunk.of(q, view)
        state = method.begin(segment)
        assert isinstance(method.select_decode(Query.of(q[:, -1:], view), state), Dense)
        assert not state.gone().any()
        assert segment.cost.notes == []
        assert isinstance(run_method(method, "decode", q, view, 1)[2], Dense)


# --- in the engine

EVICTING = ("snapkv(capacity=40, window=8)", "adakv(capacity=40, window=8, unit=q_head)", "h2o(budget=40)")
PREFILLS = ("dense", "flexprefill(gamma=0.5, block_size=64, min_budget=0)")


class Ledger:
    """Every (layer, head, key) that a decode step could have read and did not; no later call may."""

    def __init__(self) -> None:
        self.unread: dict[tuple[int, int], set[int]] = {}
        self.calls = 0

    def __call__(self, call) -> None:
        mask = call.selection.mask()
        for head in range(mask.shape[0]):
            before = self.unread.setdefault((call.layer, head), set())
            read = set(mask[head].any(0).nonzero()[:, 0].tolist())
            assert not (read & before), (call.layer, head, call.phase)
            if call.phase == "decode":
                before |= set(range(mask.shape[2])) - read
        self.calls += 1


@pytest.mark.parametrize("prefill", PREFILLS)
@pytest.mark.parametrize("policy", EVICTING)
def test_what_was_evicted_is_never_read_again(llm, policy, prefill):
    """Two turns under the policy, a third one dense in both phases, a fourth under another method that evicts."""
    ledger = Ledger()
    text = f"prefill={prefill}, decode={policy}"
    with observing(llm.engine, ledger), llm.session(text) as session:
        reports = [session.generate(random_ids(150, seed=1), GREEDY).report]
        reports.append(session.generate(random_ids(70, seed=2), GREEDY).report)
        assert all(len(unread) > 50 for unread in ledger.unread.values())
        dense = session.generate(random_ids(20, seed=3), GREEDY, policy="dense").report
        session.generate(random_ids(20, seed=4), GREEDY, policy=EVICTING[0])
    assert all(len(unread) > 100 for unread in ledger.unread.values())
    for report in reports:
        assert any("forgets: it evicted keys for good" in note for note in report["notes"])
    assert any("stay unread" in note for note in dense["notes"])
    assert dense["decode"]["density"] < 1


@pytest.mark.parametrize("policy", EVICTING)
def test_nothing_is_announced_where_nothing_was_forgotten(llm, policy):
    report = llm.generate(random_ids(20, seed=1), GREEDY, policy=policy)[0].report
    assert not any("forgets" in note for note in report["notes"])
    assert report["decode"]["density"] == 1.0


@pytest.mark.parametrize(("policy", "between"), spread(EVICTING, ["stays", "leaves"]))
def test_questions_on_one_context_each_find_it_as_the_first_did(tiny_llama, policy, between):
    """The context once, then questions from there; a question cut off again takes what it evicted back."""
    llm = make(tiny_llama)
    context, questions = random_ids(150, seed=1), [random_ids(15, seed=seed) for seed in (2, 3, 4)]
    alone = []
    for question in questions:
        with llm.session(policy) as session:
            session.complete(context, FIRST)
            alone.append(tokens(session.complete([*context, *question], GREEDY, keep=150)))
    with llm.session(policy) as session:
        session.complete(context, FIRST)
        for question, expected in zip(questions, alone):
            if between == "leaves":
                session.sequence.drop_kv()
            output = session.complete([*context, *question], GREEDY, keep=150)
            assert tokens(output) == expected
            assert output.report["cached_tokens"] == (150 if between == "stays" else 0)
    assert len({tuple(answer) for answer in alone}) > 1


@pytest.mark.parametrize("policy", EVICTING)
@pytest.mark.parametrize("keep", [153, 140])
def test_cut_inside_an_answer_or_before_it_the_rest_is_as_computed_afresh(tiny_llama, policy, keep):
    """SnapKV and AdaKV evict when a prefill ends, so a shorter answer finds the same keys; H2O must look again."""
    llm = make(tiny_llama)
    context, cached, answers = random_ids(150, seed=1), [], []
    for dropped in (False, True):
        with llm.session(policy) as session:
            session.complete(context, GREEDY)
            kept = session.token_ids[:keep]
            if dropped:
                session.sequence.drop_kv()
            output = session.complete([*kept, *random_ids(20, seed=2)], GREEDY)
            answers.append(tokens(output))
            cached.append(output.report["cached_tokens"])
    assert answers[0] == answers[1]
    assert cached == [153 if keep == 153 and not policy.startswith("h2o") else 0, 0]


def test_a_turn_that_fails_in_its_first_layers_takes_back_what_it_evicted(tiny_llama, monkeypatch):
    llm = make(tiny_llama)
    kept = []
    for fails in (False, True):
        with llm.session(EVICTING[0]) as session:
            session.generate(random_ids(150, seed=1), GREEDY)
            if fails:
                with monkeypatch.context() as patch:
                    whole = SnapKV.begin

                    def broken(self, segment, whole=whole):
                        return whole(self, segment) if segment.layer == 0 else 1 / 0

                    patch.setattr(SnapKV, "begin", broken)
                    with pytest.warns(RuntimeWarning, match="ZeroDivisionError"):
                        session.generate(random_ids(9, seed=5), GREEDY)
            kept.append(tokens(session.generate(random_ids(30, seed=2), GREEDY)))
    assert kept[0] == kept[1]


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (SnapKV, {"capacity": 64}),
        (SnapKV, {"capacity": 0}),
        (SnapKV, {"window": 0}),
        (SnapKV, {"kernel": 4}),
        (SnapKV, {"unit": "layer"}),
        (AdaKV, {"safeguard": 1.1}),
        (H2O, {"budget": 0}),
        (H2O, {"budget": 1.5}),
        (H2O, {"heavy": -0.1}),
        (H2O, {"unit": "layer"}),
    ],
)
def test_bad_options(kind, options):
    with pytest.raises(PolicyError, match=next(iter(options))):
        kind(**options)


def test_token_lists_name_what_is_kept():
    q, _, view = problem(90)
    used = run_method(SnapKV(capacity=30, window=8), "decode", q, view, 1)[2]
    assert isinstance(used, Tokens)
    assert used.pairs().tolist() == [30] * 4


@pytest.mark.parametrize("method", [SnapKV(capacity=30, window=8), H2O(budget=30), H2O(budget=30, unit="q_head")])
def test_the_kernels_read_what_is_kept(method):
    """Token lists run on the C++ kernels where there are any, and the weights they give are those of the reference."""
    from saccade.ops import cpu

    q, _, view = problem(90)
    selection = method.select_decode(Query.of(q[:, -1:], view), method.begin(Chunk.of(q, view)))
    call = Call.of(q[:, -1:], view, selection, want_weights=True)
    ours, exact = run(call), run(call, "reference")
    assert ours.backend.startswith("cpu/") or not cpu.available()
    torch.testing.assert_close(ours.out, exact.out, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(ours.weights, exact.weights, atol=1e-5, rtol=1e-4)


def test_a_turn_after_one_that_evicted_nothing_says_nothing(llm):
    with llm.session("snapkv(capacity=100, window=8)") as session:
        reports = [session.generate(random_ids(30, seed=seed), GREEDY).report for seed in (1, 2)]
        assert not any("evicted" in note for report in reports for note in report["notes"])
        notes = session.generate(random_ids(60, seed=3), GREEDY).report["notes"]
    assert any("forgets" in note for note in notes)
    assert not any("earlier turn" in note for note in notes)
