"""LoopServe's re-selection in decode: when, from what, and what rows read in between."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from engine_helpers import GREEDY, LAYERS, make, tokens
from helpers import planted_heads
from tiny_models import random_ids

from saccade import SamplingParams
from saccade.errors import PolicyError
from saccade.kv.view import KVView
from saccade.methods.base import Chunk, Cost, Query
from saccade.methods.loopserve import LoopServe
from saccade.methods.loopserve.line_cover import cover_rows
from saccade.methods.loopserve.method import AnsweringState, LoopServeState
from saccade.selection import Dense, Shape, Tokens

PROMPT = 90


def steps(method: LoopServe, count: int, heads: int = 4, kv_heads: int = 2, softcap: float | None = None):
    """Yields (step, q, k, query, selection) step by step."""
    q, k, v = planted_heads(heads, kv_heads, PROMPT + count, 32, seed=1)
    view = KVView.from_tensors(k, v, shuffle_seed=1)
    tail = q[:, max(0, PROMPT - method.tail_rows) : PROMPT]
    state = method.begin(Chunk.of(tail, view.upto(PROMPT)))
    for step in range(count):
        at = PROMPT + step
        query = Query.of(q[:, at : at + 1], view.upto(at + 1), step=step, softcap=softcap)
        selection = method.select_decode(query, state)
        selection.check()
        yield step, q, k, query, selection
        method.observe(query, selection, None, state)


def heaviest(
    q, k, position: int, rows: list[int], heads: list[int], budget: int, forced=(), softcap=None, slashes=False
) -> list[tuple[str, int]]:
    """Lines by summed weight of ``rows``: keys before ``position``, and distances above 0; ties to keys, then lower."""
    keys, distances = torch.zeros(position + 1).double(), torch.zeros(position + 1).double()
    for head in heads:
        for row in rows:
            logits = k[head // 2, : row + 1].double() @ q[head, row].double() / math.sqrt(32)
            logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
            weights = torch.softmax(logits, 0)
            keys[: row + 1] += weights
            distances[: row + 1] += weights.flip(0)
    keys[list(forced)] = math.inf
    lines = [("key", i, float(keys[i])) for i in range(position)]
    lines += [("distance", d, float(distances[d])) for d in range(1, position + 1)] if slashes else []
    lines.sort(key=lambda line: (-line[2], line[0] == "distance", line[1]))
    return [line[:2] for line in lines[:budget]]


def reached(lines: list[tuple[str, int]], position: int) -> set[int]:
    """The keys where lines meet the row at ``position``."""
    return {at if kind == "key" else position - at for kind, at in lines}


@pytest.mark.parametrize(
    ("options", "chooses"),
    [
        ({}, [16, 32]),
        ({"n_d": 8}, [16, 24, 32]),
        ({"n_d": 20}, [16, 36]),
        ({"n_d": 8, "at_start": True}, [0, 8, 16, 24, 32]),
        ({"n_d": 12, "at_start": True}, [4, 16, 28]),  # the printed rule, (step - 16) % n_d = 0, at every step
        ({"first": 5, "n_d": 10}, [5, 15, 25, 35]),
    ],
    ids=str,
)
def test_it_is_dense_until_its_first_choice_and_chooses_every_n_d(options, chooses):
    method, chosen = LoopServe(budget=30, **options), []
    for step, _, _, query, selection in steps(method, 38):
        if query.cost.scored:
            chosen.append(step)
        assert isinstance(selection, Dense) == (not chosen)
        assert query.cost.searches == (4 if chosen and chosen[-1] == step else 0 if chosen else None)
    assert chosen == chooses


@pytest.mark.parametrize("unit", ["kv_head", "q_head"])
@pytest.mark.parametrize(
    "options",
    [{}, {"n_d": 5}, {"n_d": 40}, {"observed": 3, "n_d": 8}, {"force": True, "n_d": 6, "sinks": 2}, {"n_d": 1}],
    ids=str,
)
@pytest.mark.parametrize("slashes", [True, False])
def test_rows_read_the_choice_and_everything_since(options, unit, slashes):
    method = LoopServe(budget=25, unit=unit, slashes=slashes, **options)
    index: dict[int, list[tuple[str, int]]] = {}
    since = 0
    for step, q, k, query, selection in steps(method, 34):
        position = PROMPT + step
        if step < 16:
            continue
        if (step - 16) % method.n_d == 0:
            since = position
            seen = min(method.n_d, method.n_d + step)
            rows = list(range(position - seen + 1, position + 1))
            forced = [*range(method.sinks), *(row for row in rows if row < position)] if method.force else []
            if method.observed:
                rows = [rows[len(rows) - 1 - j * len(rows) // method.observed] for j in range(method.observed)]
            assert query.cost.scored == sum(row + 1 for row in rows)
            for u in range(2 if unit == "kv_head" else 4):
                heads = [2 * u, 2 * u + 1] if unit == "kv_head" else [u]
                index[u] = heaviest(q, k, position, rows, heads, 25, forced, slashes=slashes)
        else:
            assert query.cost.scored == 0
        assert isinstance(selection, Tokens)
        for u, read in enumerate(selection.lists()):
            assert read.tolist() == sorted(reached(index[u], position) | set(range(since, position + 1)))


def test_with_one_observed_row_every_step_reads_its_exact_best():
    """n_d = 1 and the row at hand: top-B by its own weights, and its own key."""
    for step, q, k, _, selection in steps(LoopServe(budget=20, n_d=1, first=0, unit="q_head", slashes=False), 10):
        position = PROMPT + step
        for head, read in enumerate(selection.lists()):
            logits = k[head // 2, :position] @ q[head, position]
            best = torch.sort(logits, descending=True, stable=True).indices[:20].sort().values
            assert read.tolist() == [*best.tolist(), position]


def test_softcap_reaches_the_choice():
    method = LoopServe(budget=20, first=2, unit="q_head", slashes=False)
    for step, q, k, _, selection in steps(method, 3, softcap=0.5):
        if step == 2:
            for head, read in enumerate(selection.lists()):
                rows = list(range(PROMPT - 13, PROMPT + 3))
                lines = heaviest(q, k, PROMPT + 2, rows, [head], 20, softcap=0.5)
                assert set(read.tolist()[:-1]) == reached(lines, PROMPT + 2)


def test_a_head_that_copies_finds_keys_that_no_row_has_looked_at():
    """Every row looks 40 keys back. Eq. 7 alone chooses what past rows saw, and misses the key of every row since."""
    n, prompt = 120, 60
    k = torch.eye(n, 128)[None]
    q = 30 * torch.cat([k[:, :40], k[:, : n - 40]], 1)  # row p asks for key p - 40
    view = KVView.from_tensors(k, torch.zeros_like(k))
    found = {}
    for slashes in (True, False):
        method = LoopServe(budget=20, n_d=16, slashes=slashes)
        state = method.begin(Chunk.of(q[:, prompt - 16 : prompt], view.upto(prompt)))
        hits = []
        for position in range(prompt, n):
            query = Query.of(q[:, position : position + 1], view.upto(position + 1), step=position - prompt)
            selection = method.select_decode(query, state)
            hits.append(bool(selection.row_mask(0, 0, 1)[0, position - 40]))
            method.observe(query, selection, None, state)
        found[slashes] = hits
    assert all(found[True])
    assert all(found[False][:17])  # dense, then the row that chooses
    assert not any(found[False][17:32])


@pytest.mark.parametrize("budget", [PROMPT + 17, PROMPT + 16, PROMPT + 40])
def test_short_contexts_never_choose_and_late_ones_wait_for_their_turn(budget):
    """At step 16 the context holds PROMPT + 17 keys: a budget of as many leaves nothing to choose."""
    kinds = [isinstance(selection, Dense) for *_, selection in steps(LoopServe(budget=budget), 34)]
    first = 16 if budget < PROMPT + 17 else 32 if budget < PROMPT + 33 else None
    assert kinds == [step < first if first is not None else True for step in range(34)]


def test_a_key_left_out_may_come_back():
    """Nothing is lost: a key that one choice leaves out is chosen by a later one."""
    chosen = [
        set(selection.lists()[0].tolist())
        for step, *_, selection in steps(LoopServe(budget=15, n_d=3, first=0, slashes=False), 30)
    ]
    choices = chosen[::3]
    returned = [
        key for a, b, c in zip(choices, choices[1:], choices[2:]) for key in (a - b) & c if key < PROMPT
    ]  # fmt: skip
    assert returned


@pytest.mark.parametrize(
    "options",
    [
        {"budget": 0}, {"n_d": 0}, {"first": -1}, {"unit": "layer"},
        {"observed": 0}, {"force": 1}, {"at_start": "x"}, {"sinks": -1},
    ],
)  # fmt: skip
def test_bad_options(options):
    with pytest.raises(PolicyError, match=next(iter(options))):
        LoopServe(**options)


# --- in the engine

POLICY = "decode=loopserve(budget=40, n_d=4, first=4)"
ANSWERS = "loopserve(alpha=0.9, samples=30, last_rows=8, budget=40, answer_rows=5)"


def test_state_follows_preemption_turns_and_cancellation(tiny_llama, llm):
    ids = [random_ids(length, seed=length) for length in (127, 125, 126)]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    alone = [tokens(llm.generate(one, params, policy=POLICY)[0]) for one in ids]
    dense = [tokens(llm.generate(one, params)[0]) for one in ids]
    assert [answer[:5] for answer in alone] == [answer[:5] for answer in dense]
    small = make(tiny_llama, blocks=3 * LAYERS * 4 + LAYERS)
    outputs = small.generate(ids, params, policy=POLICY)
    assert [tokens(output) for output in outputs] == alone
    assert sum(output.report["preemptions"] for output in outputs) > 0
    with llm.session(POLICY) as session:
        session.generate(ids[0], GREEDY)
        second = tokens(session.generate(ids[1], GREEDY))
    with llm.session(POLICY) as session:
        session.generate(ids[0], GREEDY)
        running = session.stream(ids[2], replace(GREEDY, max_tokens=100))  # a late reader gets several at once
        for _ in range(7):
            next(running)
        running.close()
        assert tokens(session.generate(ids[1], GREEDY)) == second


def test_each_turn_counts_its_own_steps(llm):
    """A later turn decodes densely again until its own first choice, by its own prompt's and answer's queries."""
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with llm.session(POLICY) as session:
        for length in (150, 40):
            report = session.generate(random_ids(length, seed=length), params).report["decode"]
            assert report["selections"] == {"dense": 4 * LAYERS, "tokens": 3 * LAYERS}
            assert report["retrievals"] == LAYERS
            assert report["search_ratio"] == pytest.approx(1 / 3)


# --- rows of the last answer in the next turn's choice


def test_the_last_answers_rows_are_among_those_looked_at():
    n, done, m = 260, 160, 6  # keys; keys at the end of the first answer; its rows
    q, k, v = planted_heads(4, 2, n, 32, seed=2)
    view = KVView.from_tensors(k, v, shuffle_seed=2)
    method = LoopServe(alpha=0.9, samples=40, last_rows=0, answer_rows=m, n_d=4)
    state = method.begin(Chunk.of(q[:, done - 20 : done - 9], view.upto(done - 9)))
    for at in range(done - 9, done):
        query = Query.of(q[:, at : at + 1], view.upto(at + 1))
        method.observe(query, Dense(query.shape), None, state)
    assert isinstance(state, AnsweringState)
    assert state.end == done
    torch.testing.assert_close(state.answer, q[:, done - m : done])
    plain = Chunk.of(q[:, done:], view, layers=1)
    chunk = replace(plain, states=[state], cost=Cost())
    chosen = method.select_prefill(chunk)
    chosen.check()
    assert chosen.shape == plain.shape
    rows = torch.cat([torch.arange(m), m + method.sample(plain)])
    assert chunk.cost.scored == rows.numel() * n
    longer = Shape.suffix(4, 2, m + n - done, n, q.device)
    lines = cover_rows(q[:, done - m :], view, longer, rows, 0.9, plain.scale, None, overlap="exact", rounds=False)
    for head in range(4):
        for found, expected in zip(chosen.unit_lines(head), lines[head]):
            assert found.tolist() == sorted(expected.tolist())
    # Without an answer that ends where the chunk begins nothing changes.
    without = replace(method, answer_rows=0).select_prefill(plain)
    for states in ([], [LoopServeState(q[:, :4])], [replace(state, end=done - 1)], [replace(state, answer=None)]):
        same = method.select_prefill(replace(plain, states=states))
        assert torch.equal(same.columns, without.columns)
        assert torch.equal(same.distances, without.distances)


def test_a_second_turn_looks_at_the_first_answer(llm):
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    ids = [random_ids(length, seed=length) for length in (150, 90, 126)]
    scored = []
    for policy in (ANSWERS, ANSWERS.replace("answer_rows=5", "answer_rows=0")):
        with llm.session(policy) as session:
            session.generate(ids[0], params)
            output = session.generate(ids[1], params)
            again = tokens(output)
            scored.append(output.report["prefill"]["keys_scored"])
        with llm.session(policy) as session:  # a turn that is cut off leaves no trace
            session.generate(ids[0], params)
            running = session.stream(ids[2], params)
            next(running), next(running)
            running.close()
            assert tokens(session.generate(ids[1], params)) == again
    first_chunk = 157 + llm.engine.config.chunk  # keys that its rows see: the answer's last token is its first
    assert scored[0] - scored[1] == 5 * first_chunk * LAYERS
