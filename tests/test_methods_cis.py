"""CIS against its definition, head by head; its invariants; state in the engine."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from covering import spread
from engine_helpers import GREEDY, LAYERS, check_cancelled_turn, make, preempted
from helpers import Planted, generator, planted_heads
from tiny_models import random_ids

from saccade import LLM, SamplingParams
from saccade.errors import PolicyError, SaccadeError
from saccade.facts import is_correct, make_facts, plant
from saccade.kv.view import KVView
from saccade.methods.base import Chunk, Query
from saccade.methods.cis import CIS
from saccade.methods.cis.anchors import Anchors
from saccade.methods.fitting import Sizes
from saccade.methods.policy import Policy
from saccade.methods.prehoc import PSAW
from saccade.methods.state import check, load, save
from saccade.ops import Call, cpu, run
from saccade.prose import generate
from saccade.selection import Dense, cut

PATTERN = Planted(sink=2.0, columns=(31, 90), slashes=(5,), blocks=(3,), strength=4.0)


def stream(n: int, prompt: int, drift: float = 0.4, heads: int = 4, kv_heads: int = 2, seed: int = 0):
    """Queries that change slowly, and at times at once: (q, k, view)."""
    q, k, v = planted_heads(heads, kv_heads, n, 32, seed, PATTERN)
    rng = generator(seed + 1)
    for position in range(prompt + 1, n):
        jumps = torch.rand(heads, 1, generator=rng) < 0.1
        noise = torch.randn(heads, 32, generator=rng) * q[:, position - 1].std()
        q[:, position] = torch.where(jumps, q[:, position], q[:, position - 1] + drift * noise)
    return q, k, KVView.from_tensors(k, v, shuffle_seed=seed)


def steps(method: CIS, q, view: KVView, prompt: int, hidden=None):
    """Yields (position, query, what was selected, what was read) step by step; ``hidden`` [positions, channels]."""
    state = method.begin(Chunk.of(q[:, :prompt], view.upto(prompt)))
    for position in range(prompt, q.shape[1]):
        taken_in = None if hidden is None else hidden[position]
        now = q[:, position : position + 1], view.upto(position + 1)
        query = Query.of(*now, step=position - prompt, taken_in=taken_in)
        selection = method.select_decode(query, state)
        selection.check()
        ran = run(Call.of(query.q, query.kv, selection, want_weights=True), "reference")
        method.observe(query, ran.used, ran.weights, state)
        yield position, query, selection, ran.used


def cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(a.double().flatten() @ b.double().flatten() / (a.double().norm() * b.double().norm()))


def expected_reads(method: CIS, q, k, prompt: int, heads: list[int], compared=None):
    """What a unit reads, and whether it retrieved, at every step (docs/algorithms.md 5.3); ``compared`` [positions,
    channels] where that is not its queries."""
    anchors: list[tuple[torch.Tensor, set[int], list[int], int]] = []
    block = None
    for position in range(prompt, q.shape[1]):
        n, kv_head = position + 1, heads[0] // (q.shape[0] // k.shape[0])
        number = (position - prompt if method.align == "step" else position) // method.s
        if number != block:
            block, anchors = number, []
        budget = method.budget(n)
        low, high = method.sinks, n - method.local
        own = q[heads, position] if compared is None else compared[position]
        alike = [a for a in anchors if cosine(own, a[0]) > method.tau]
        forced = {*range(low), *range(high, n)}
        if alike:
            _, shared, heavy, then = alike[-1]
            if method.anchors == "any":  # hands on what it has, as old as that is
                anchors.append((own, shared, heavy, then))
            gap = set(range(then + 1 - method.local, high)) if method.cover_gap else set()
            reach = () if method.follow is None else range(-method.follow, method.follow + 1)
            moved = {i + position - then + o for i in heavy for o in reach}
            yield forced | shared | gap | {i for i in moved if low <= i < high}, False
            continue
        logits = [k[kv_head, :n].double() @ q[h, position].double() / math.sqrt(q.shape[-1]) for h in heads]
        score = (logits[0] if len(heads) == 1 else sum(torch.softmax(x, 0) for x in logits)).tolist()
        best = sorted(range(low, high), key=lambda i: (-score[i], i))[:budget]
        read = [*forced, *best]
        weight = sum(torch.softmax(x[read], 0) for x in logits)  # within what was read, as the paper's A
        order = sorted(best, key=lambda i: (-float(weight[read.index(i)]), i))
        m = budget // 3 if method.m is None else method.m
        near = {i + o for i in order[:m] for o in range(-method.r, method.r + 1) if low <= i + o < high}
        anchors.append((own, {*best} | near, order[:m], position))
        yield {*read}, True


EVERY_OPTION = [
    {},
    {"s": 5, "r": 3, "m": 4},
    {"tau": 0.95, "sinks": 0, "local": 1},
    {"cover_gap": False},
    {"align": "position", "s": 6},
    {"unit": "kv_head"},
    {"k": 0.15, "m": 0},
    {"follow": 0},
    {"follow": 2, "m": 5, "cover_gap": False},
    {"follow": 1, "unit": "kv_head", "s": 30},
    {"anchors": "any"},
    {"anchors": "any", "tau": 0.95, "s": 30, "follow": None},
    {"anchors": "any", "unit": "kv_head", "s": 5, "cover_gap": False},
    {"anchors": "any", "align": "position", "s": 6, "r": 3, "m": 4, "k": 0.15},
]


@pytest.mark.parametrize(("options", "kernels"), spread(EVERY_OPTION, [True, False]), ids=str)
def test_every_step_reads_what_the_definition_says(options, kernels, monkeypatch):
    if not kernels:
        monkeypatch.setattr(cpu, "available", lambda: False)
    method = CIS(**({"k": 20, "sinks": 4, "local": 6, "s": 8} | options))
    q, k, view = stream(165, 130, seed=1)
    share = 1 if method.unit == "q_head" else 2
    expected = [list(expected_reads(method, q, k, 130, list(range(u, u + share)))) for u in range(0, 4, share)]
    shared = retrieved = 0
    for at, (_, query, _, used) in enumerate(steps(method, q, view, 130)):
        for unit, chosen in enumerate(used.lists()):
            assert set(chosen.tolist()) == expected[unit][at][0]
        searching = [unit[at][1] for unit in expected]
        assert query.cost.searches == sum(searching) * share
        assert query.cost.scored == round(query.shape.k_len * sum(searching) / len(searching))
        retrieved += sum(searching)
        shared += len(searching) - sum(searching)
    assert shared > 10
    assert retrieved > 10


@pytest.mark.parametrize("unit", ["q_head", "kv_head"])
@pytest.mark.parametrize("by", ["key", "hidden"])
@pytest.mark.parametrize("kernels", [True, False])
def test_likeness_may_be_of_keys_or_hidden_states(by, unit, kernels, monkeypatch):
    if not kernels:
        monkeypatch.setattr(cpu, "available", lambda: False)
    method = CIS(k=20, sinks=4, local=6, s=8, tau=0.7, by=by, unit=unit)
    q, k, _ = stream(165, 130, seed=2)
    slow = [stream(165, 130, drift=0.7, heads=2, seed=seed)[0][0] for seed in (3, 4)]
    k[:, 130:] = 0.02 * torch.stack(slow)[:, 130:]  # no weight so large that the others vanish
    hidden = torch.cat(slow, 1)  # [positions, 64]
    view, share = KVView.from_tensors(k, k, shuffle_seed=2), 1 if unit == "q_head" else 2
    units = [list(range(u, u + share)) for u in range(0, 4, share)]
    expected = [
        list(expected_reads(method, q, k, 130, heads, k[heads[0] // 2] if by == "key" else hidden)) for heads in units
    ]
    retrieved = []
    for at, (_, query, _, used) in enumerate(steps(method, q, view, 130, hidden)):
        assert [set(chosen.tolist()) for chosen in used.lists()] == [unit[at][0] for unit in expected]
        searching = [unit[at][1] for unit in expected]
        assert query.cost.searches == sum(searching) * share
        retrieved += searching
    assert 5 < sum(retrieved) < len(retrieved) - 5
    assert by == "key" or all(alike[1] == expected[0][at][1] for unit in expected for at, alike in enumerate(unit))


@pytest.mark.parametrize("options", [{"s": 1}, {"tau": 1.0}])
def test_without_sharing_it_is_exact_top_k_of_the_middle(options):
    q, k, view = stream(150, 130)
    for position, query, _, used in steps(CIS(k=20, sinks=4, local=6, **options), q, view, 130):
        assert query.cost.searches == 4
        for head, chosen in enumerate(used.lists()):
            logits = k[head // 2, 4 : position - 5] @ q[head, position]
            best = torch.sort(logits, descending=True, stable=True).indices[:20] + 4
            assert chosen.tolist() == sorted([*range(4), *best.tolist(), *range(position - 5, position + 1)])


@pytest.mark.parametrize("s", [3, 8, 16])
def test_each_block_retrieves_once_at_least(s):
    """rho >= 1 / s; with tau = -1 exactly once a block."""
    for tau in (-1.0, 0.8):
        q, _, view = stream(130 + 4 * s, 130, seed=3)
        searches = [
            query.cost.searches for _, query, _, _ in steps(CIS(k=20, sinks=4, local=6, s=s, tau=tau), q, view, 130)
        ]
        assert sum(searches) / (4 * len(searches)) >= 1 / s
        assert all(searches[block] == 4 for block in range(0, 4 * s, s))
        if tau < 0:
            assert sum(searches) == 4 * 4


@pytest.mark.parametrize("anchors", ["retrieved", "any"])
def test_chains_of_likeness(anchors):
    """A query turns away by small steps: each is like the one before, soon unlike who retrieved."""
    q, k, v = planted_heads(1, 1, 170, 32, 0, PATTERN)
    angle = 0.3
    for step in range(10):
        q[0, 160 + step] = 0.0
        q[0, 160 + step, 5], q[0, 160 + step, 6] = math.cos(step * angle), math.sin(step * angle)
    # arccos 0.8 = 0.64: two steps away is alike, three are not
    method = CIS(k=20, sinks=4, local=6, tau=0.8, s=9, anchors=anchors)
    searches = [query.cost.searches for _, query, _, _ in steps(method, q, KVView.from_tensors(k, v), 160)]
    assert searches == ([1, 0, 0, 1, 0, 0, 1, 0, 0, 1] if anchors == "retrieved" else [1, *[0] * 8, 1])


@pytest.mark.parametrize("anchors", ["retrieved", "any"])
@pytest.mark.parametrize("kernels", [True, False])
def test_cosines_that_tie(anchors, kernels, monkeypatch):
    """Queries along axes and halfway between four of them: cosines of 1, 0 and just tau, which is not above it. Of
    several that are alike the latest counts."""
    if not kernels:
        monkeypatch.setattr(cpu, "available", lambda: False)
    q, k, view = stream(170, 130, seed=6)
    along = torch.eye(32)
    along[8:16] = along[:4].sum(0)  # cosine 0.5 with each of the four
    along[9] = along[:8].sum(0) + 3 * along[2]  # rational, but rounded
    which = torch.randint(0, 12, (4, 40), generator=generator(7)) % torch.tensor([12, 10, 4, 1])[:, None]
    q[:, 130:] = along[which] * 4
    method = CIS(k=20, sinks=4, local=6, s=11, tau=0.5, anchors=anchors)
    expected = [list(expected_reads(method, q, k, 130, [u])) for u in range(4)]
    for at, (_, query, _, used) in enumerate(steps(method, q, view, 130)):
        assert [set(chosen.tolist()) for chosen in used.lists()] == [one[at][0] for one in expected]
        assert query.cost.searches == sum(one[at][1] for one in expected)


@pytest.mark.parametrize("turn", [4, 11])
def test_a_copy_of_the_state_goes_on_from_where_it_was(turn):
    """Chains go back and fork: a copy, saved and loaded, that is fed other queries reads what the definition says of
    those, and the original what it says of its own."""
    method = CIS(k=20, sinks=4, local=6, s=8, tau=0.7, anchors="any")
    q, k, view = stream(150, 130, seed=8)
    other = q.clone()
    other[:, 130 + turn :] = q[:, 130 + turn :].flip(0)
    kept, runs = None, {}
    for name, queries in (("own", q), ("other", other)):
        state, first = (method.begin(Chunk.of(q[:, :130], view.upto(130))), 130) if kept is None else (kept, 130 + turn)
        expected = [list(expected_reads(method, queries, k, 130, [u])) for u in range(4)]
        for position in range(first, 150):
            if kept is None and position == 130 + turn:
                fields, data = save(state)
                kept = load(fields, data)
                check(kept, Sizes(1, 4, 2, 32, position, torch.float32))
            query = Query.of(queries[:, position : position + 1], view.upto(position + 1), step=position - 130)
            ran = run(Call.of(query.q, query.kv, method.select_decode(query, state), want_weights=True), "reference")
            method.observe(query, ran.used, ran.weights, state)
            lists = [set(chosen.tolist()) for chosen in ran.used.lists()]
            assert lists == [one[position - 130][0] for one in expected]
        runs[name] = state.anchors.counts[: state.anchors.count]
    assert bool((runs["own"] < 0).any())
    assert not torch.equal(runs["own"], runs["other"])


@pytest.mark.parametrize("crafted", [5, -2, -7, -100])
def test_crafted_chains_are_refused(crafted):
    """A unit passes on what an earlier one retrieved, and nothing else."""
    anchors = Anchors.empty(2, 16, 4)
    anchors.reserve(4)
    anchors.count, anchors.has[:3] = 3, True
    anchors.counts[1] = -1
    check(anchors, Sizes(1, 2, 1, 16, 50, torch.float32))
    anchors.counts[2, 1] = crafted  # longer than its list; of one that passes on; of itself and later; of none
    with pytest.raises(SaccadeError, match="Anchors"):
        check(anchors, Sizes(1, 2, 1, 16, 50, torch.float32))


def test_what_leaves_the_window_stays_covered():
    """Every key from the anchor's window on is read while its set is shared; as printed it is not."""
    q, _, view = stream(150, 130, drift=0.0)
    q[:, 131:] = q[:, 130:131]
    for cover in (True, False):
        method = CIS(k=20, sinks=4, local=6, cover_gap=cover)
        missed = 0
        for position, _, _, used in steps(method, q, view, 130):
            anchor = 130 if position < 146 else 146
            for chosen in used.lists():
                missed += len(set(range(anchor - 5, position + 1)) - set(chosen.tolist()))
        assert (missed == 0) == cover


def test_identical_queries_keep_the_anchors_mass():
    """Sharers read all that the anchor read but what left through neither set: more keys, never fewer."""
    q, _, view = stream(146, 130, drift=0.0)
    q[:, 131:] = q[:, 130:131]
    first = None
    for _, _, _, used in steps(CIS(k=20, sinks=4, local=6), q, view, 130):
        lists = [set(chosen.tolist()) for chosen in used.lists()]
        first = lists if first is None else first
        assert all(a <= b for a, b in zip(first, lists))


def test_the_default_answers_every_fact():
    """The built-in retriever copies: with the paper's sets, which stay where they are, answers break off."""
    facts = make_facts(6, 3)
    llm = LLM("retriever", dtype="float32", max_model_len=2048)
    greedy = SamplingParams(temperature=0, max_tokens=24, stop=["."])
    text, right = plant(generate(1200, 3), facts, 3), {}
    for policy in ("cis", "cpe", "cis(follow=none)"):
        with llm.session(policy) as session:
            session.generate(text, SamplingParams(temperature=0, max_tokens=1))
            answers = [session.generate(f"\n{fact.question}", greedy).outputs[0].text for fact in facts]
        right[policy] = sum(map(is_correct, answers, facts))
    assert right["cis"] == right["cpe"] == 6
    assert right["cis(follow=none)"] < 5


def test_a_copy_is_followed():
    """Each query looks for the key after the one before it, 60 steps on: the first one's set, moved along, has it."""
    rng, start = generator(5), 40
    steady = torch.randn(32, generator=rng)  # what all queries ask alike
    k = torch.nn.functional.normalize(torch.randn(1, 300, 32, generator=rng), dim=-1) * 8
    q = torch.zeros(1, 300, 32)
    for position in range(240, 300):
        q[0, position] = 6 * steady / steady.norm() + k[0, start + position - 240]
    view = KVView.from_tensors(k, torch.randn(1, 300, 32, generator=rng))
    found = {}
    for follow in (None, 0):
        method = CIS(tau=-1.0, s=64, k=8, m=4, r=0, sinks=2, local=4, follow=follow)
        read = [set(used.lists()[0].tolist()) for _, _, _, used in steps(method, q, view, 240)]
        found[follow] = [start + at in keys for at, keys in enumerate(read)]
    assert found[None][0]
    assert sum(found[None]) < 30
    assert all(found[0])


@pytest.mark.parametrize("options", [{"r": 10**9}, {"m": 10**9, "follow": 10**9}, {"k": 0.1, "s": 10**9, "follow": 1}])
def test_room_is_made_for_the_context_and_not_for_the_options(options, monkeypatch):
    """Lists grow within one endless block of steps; what is shared stays what the definition says."""
    monkeypatch.setattr("saccade.methods.cis.method.AHEAD", 3)
    method = CIS(**({"k": 20, "sinks": 4, "local": 6, "s": 8, "tau": 0.6} | options))
    q, k, view = stream(165, 130, seed=2)
    expected = [list(expected_reads(replace(method, **_near(options)), q, k, 130, [u])) for u in range(4)]
    for at, (_, _, _, used) in enumerate(steps(method, q, view, 130)):
        for unit, chosen in enumerate(used.lists()):
            assert set(chosen.tolist()) == expected[unit][at][0]
    state = method.begin(Chunk.of(q[:, :130], view.upto(130)))
    method.select_decode(Query.of(q[:, 130:131], view.upto(131), step=0), state)
    assert state.anchors.capacity + state.anchors.most <= 2 * 134


def _near(options):
    """The same within 165 keys, in numbers that a range can have."""
    return {name: 165 for name in ("r", "m", "follow") if options.get(name, 0) > 165}


def test_no_dilation_shares_the_set_itself():
    q, _, view = stream(140, 130, drift=0.0)
    q[:, 131:] = q[:, 130:131]
    for options in ({"r": 0}, {"m": 0}):
        runs = list(steps(CIS(k=20, sinks=4, local=6, follow=None, **options), q, view, 130))
        middles = [[set(c.tolist()) & set(range(4, 125)) for c in used.lists()] for _, _, _, used in runs]
        assert all(middle == middles[0] for middle in middles)


@pytest.mark.parametrize(("n", "dense"), [(29, True), (30, True), (31, False)])
def test_short_contexts_are_dense(n, dense):
    q, k, v = planted_heads(4, 2, n, 32)
    method, view = CIS(k=20, sinks=4, local=6), KVView.from_tensors(k, v)
    query = Query.of(q[:, -1:], view)
    selection = method.select_decode(query, method.begin(Chunk.of(q, view)))
    assert isinstance(selection, Dense) == dense
    assert (query.cost.scored == 0) == dense


def test_cpe_is_cis_with_both_modifiers():
    policy = Policy.parse("cpe")
    assert policy == Policy.parse("cis + psaw + etf")
    assert policy.decode == CIS()
    assert policy.window is not None
    assert policy.freeze is not None
    assert Policy.parse(policy.text) == policy


def test_within_a_window_it_retrieves_what_is_visible(tiny_llama):
    """CIS below PSAW: no key hidden from a layer is read there."""
    from saccade.engine.observing import observing

    llm = make(tiny_llama)
    policy = Policy.parse("cis(k=30, sinks=4, local=8) + psaw(start_layer=1, sinks=4, local=8, phi=0.5, block_size=16)")
    seen = []

    def observer(call):
        if call.phase == "decode":
            cone = policy.window.at(call.layer, LAYERS)
            hidden = torch.zeros(1) if cone is None else ~cone.row_mask(call.selection.shape, 0, 1)
            seen.append((int(hidden.sum()), bool((call.selection.mask()[:, 0] & (hidden > 0)).any())))

    with observing(llm.engine, observer):
        llm.generate(random_ids(300, seed=1), GREEDY, policy=policy)
    assert max(count for count, _ in seen) > 50
    assert not any(read for _, read in seen)


@pytest.mark.parametrize(
    "options",
    [
        {"tau": 1.5}, {"s": 0}, {"k": 0}, {"k": 2.5}, {"sinks": -1}, {"local": 0},
        {"r": -1}, {"m": -1}, {"unit": "layer"}, {"align": "x"}, {"follow": -1}, {"anchors": "all"},
    ],
)  # fmt: skip
def test_bad_options(options):
    with pytest.raises(PolicyError, match=next(iter(options))):
        CIS(**options)


# --- in the engine


@pytest.mark.parametrize(
    "policy",
    [
        "cis(k=20,sinks=4,local=8,s=4)",
        "cis(k=20,sinks=4,local=8,unit=kv_head,tau=0.5)",
        "cis(k=20,sinks=4,local=8,tau=0.3,by=hidden)",
    ],
)
def test_state_follows_preemption_turns_and_cancellation(tiny_llama, llm, policy):
    preempted(tiny_llama, llm, policy)
    check_cancelled_turn(llm, policy)


def test_the_report_says_how_often_it_retrieved(llm):
    params = SamplingParams(temperature=0, max_tokens=17, ignore_eos=True)
    ids = random_ids(300, seed=1)
    often = llm.generate(ids, params, policy="cis(k=20,sinks=4,local=8,tau=1.0)")[0].report["decode"]
    assert often["search_ratio"] == 1.0
    assert often["keys_scored"] == often["keys_causal"]
    for by in ("query", "key", "hidden"):
        policy = f"cis(k=20,sinks=4,local=8,tau=-1.0,by={by})"
        seldom = llm.generate(ids, params, policy=policy)[0].report["decode"]
        assert seldom["search_ratio"] == 1 / 16
        assert seldom["keys_scored"] == 301 * LAYERS
    assert llm.generate(ids, params, policy="topk(k=20)")[0].report["decode"]["search_ratio"] is None


@pytest.mark.skipif(not cpu.available(), reason=cpu.why_unavailable() or "-")
@pytest.mark.parametrize("follow", [None, 2])
def test_cpe_decodes_on_the_kernels(follow):
    """Searching and sharing steps alike, below a window of whole pages: four layers with heads of 32."""
    method, cone = CIS(k=20, sinks=4, local=6, follow=follow), PSAW(phi=0.5, start_layer=1, block_size=16).at(3, 4)
    q, _, view = stream(330, 300)
    state = method.begin(Chunk.of(q[:, :300], view.upto(300)))
    backends, searched = set(), set()
    for position in range(300, 330):
        query = Query.of(q[:, position : position + 1], view.upto(position + 1), step=position - 300, window=cone)
        chosen = method.select_decode(query, state)
        # What is shared lies within the window already; what moves may come from its sinks, and is cut.
        if follow is None and cone.start(position) == cone.start(position - 16):
            hidden = torch.arange(cone.sink_keys, cone.start(position))
            assert not bool(torch.isin(chosen.indices, hidden).any())
        selection = cut(chosen, cone)
        ran = run(Call.of(query.q, query.kv, selection, want_weights=True))
        method.observe(query, ran.used, ran.weights, state)
        backends.add(ran.backend)
        searched.add(bool(query.cost.searches))
        assert not bool((ran.used.row_mask(0, 0, 1) & ~cone.row_mask(ran.used.shape, 0, 1)).any())
    assert searched == {True, False}
    assert backends == {f"cpu/{cpu.isa()}"}
