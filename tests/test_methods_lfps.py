"""LFPS against its definition: tables kept by position, entry by entry, in float64; invariants; state in the engine."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from covering import covering
from engine_helpers import GREEDY, LAYERS, check_cancelled_turn, preempted
from helpers import Planted, brute_force, generator, mass_of, planted_heads
from lfps_helpers import row_of
from tiny_models import random_ids

from saccade.errors import PolicyError
from saccade.kv.view import KVView
from saccade.methods.base import Chunk, Query
from saccade.methods.lfps import LFPS, choosing
from saccade.methods.lfps import cpu as lfps_cpu
from saccade.methods.lfps import tables as score_tables
from saccade.ops import Call, cpu, run
from saccade.selection import Candidates, Dense

PATTERN = Planted(sink=3.0, columns=(31, 90), slashes=(40,), blocks=(3,), strength=7.0)
plain = partial(LFPS, blocks=0, least=1, rest=None)  # without what joins the tables: see test_methods_lfps_blocks.py


KERNELS = ["reference", *cpu.supported_isas()]
UNITS = ["q_head", "kv_head"]


@pytest.fixture(params=KERNELS)
def kernels(request, monkeypatch):
    """Tables by torch, and by the kernels of each instruction set."""
    if request.param == "reference":
        monkeypatch.setattr(lfps_cpu, "why_not", lambda *_: "patched")
        yield "reference"
        return
    cpu.set_isa(request.param)
    yield "auto"
    cpu.set_isa(None)


@dataclass
class Stream:
    """Decode steps over growing keys: ``prompt`` rows are known to begin with."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    prompt: int

    @classmethod
    def make(cls, n: int, prompt: int, heads: int = 4, kv_heads: int = 2, seed: int = 0, **options) -> Stream:
        options.setdefault("pattern", PATTERN)
        return cls(
            *planted_heads(heads, kv_heads, n, head_dim=options.pop("head_dim", 48), seed=seed, **options), prompt
        )

    def run(self, method: LFPS, backend: str = "reference"):
        """Yields (position, what was selected, state before the step, out, what was read) step by step."""
        whole = KVView.from_tensors(self.k, self.v, shuffle_seed=1)
        tail = self.q[:, max(0, self.prompt - method.tail_rows) : self.prompt]
        state = method.begin(Chunk.of(tail, whole.upto(self.prompt)))
        for position in range(self.prompt, self.q.shape[1]):
            query = Query.of(self.q[:, position : position + 1], whole.upto(position + 1), step=position - self.prompt)
            selection = method.select_decode(query, state)
            selection.check()
            ran = run(Call.of(query.q, query.kv, selection, want_weights=True), backend)
            out = ran.out
            yield position, selection, state, out, ran.used
            method.observe(query, ran.used, ran.weights, state)


class Definition:
    """Algorithm 1 for one table pair, by position, in float64 (docs/algorithms.md 1.3, 1.4); ``heads`` share it."""

    def __init__(self, method: LFPS, stream: Stream, heads: list[int]) -> None:
        self.m, self.stream, self.heads = method, stream, heads
        first, end = method.sinks, stream.prompt
        rows = min(method.s, end)
        c = 1 / (2 * rows * (1 - method.r))
        self.ver, self.sla = torch.zeros(end - first).double(), torch.zeros(end - first).double()
        for j in range(1, rows + 1):
            w = sum(self.softmax(h, end - j) for h in heads) / len(heads)  # over keys first .. end - j
            self.ver[: w.numel()] += c * w
            self.sla[j - 1 :] += c * w  # moved to where the last row has this distance

    def softmax(self, head: int, position: int) -> torch.Tensor:
        keys = self.stream.k[head // (self.stream.q.shape[0] // self.stream.k.shape[0]), self.m.sinks : position + 1]
        return torch.softmax(keys.double() @ self.stream.q[head, position].double() / math.sqrt(keys.shape[1]), 0)

    def candidates(self, position: int) -> set[int]:
        """C1, as positions, the forced local keys left out."""
        first, m = self.m.sinks, self.m
        n = position + 1 - first
        ver = torch.cat([self.ver, torch.zeros(n - self.ver.numel())])
        # By position as the row before left it: for this row everything moves one further.
        moved = torch.cat([torch.zeros(1), self.sla, torch.zeros(n)])[:n] if m.slash_shift_on_read else None
        sla = moved if moved is not None else torch.cat([self.sla, torch.zeros(n - self.sla.numel())])
        c0, high = set(), set()
        for x in (ver, sla):
            centred = x - x.mean()
            kappa = centred.pow(4).sum() / centred.pow(2).sum() ** 2
            assert 1 / n - 1e-9 <= kappa <= 1 + 1e-9
            tau = -math.inf if m.a is None else float(m.a * x.mean() / kappa)
            if m.a is not None:
                assert m.a * float(x.mean()) - 1e-9 <= tau <= m.a * float(x.sum()) + 1e-9
            c0 |= set((x > tau).nonzero()[:, 0].tolist())
            high |= set((x > x.mean()).nonzero()[:, 0].tolist())
        near = {i + o for i in c0 for o in range(-m.before, m.after + 1) if 0 <= i + o < n}
        c1 = near if m.gate == "off" else near & high
        if m.gate == "off_for_c0":
            c1 |= c0
        local = m.local if m.read_local else 1
        return {i + first for i in c1 if i < n - local}

    def learn(self, position: int, read: list[int]) -> None:
        first, n = self.m.sinks, position + 1 - self.m.sinks
        c2 = [i for i in read if i >= first and (self.m.read_local or i < position)]
        gain = torch.zeros(n).double()
        for head in self.heads:
            w = self.softmax(head, position)[torch.tensor(c2) - first]
            gain[torch.tensor(c2) - first] += w / w.sum() / len(self.heads)
        gain[torch.tensor(c2) - first] -= 1 / (2 * len(c2))
        self.ver = self.m.r * torch.cat([self.ver, torch.zeros(n - self.ver.numel())]) + gain
        self.sla = self.m.r * torch.cat([torch.zeros(1), self.sla, torch.zeros(n)])[:n] + gain

    def rest(self) -> None:
        """A bypassed step: nothing is learnt or decays; in the paper the slash table does not shift either."""
        none = torch.zeros(1)
        self.sla = torch.cat([none, self.sla] if self.m.bypass_shift else [self.sla, none])
        self.ver = torch.cat([self.ver, none])


OPTIONS = [
    {},
    {"a": 0.9, "before": 0, "after": 3},
    {"sinks": 0, "r": 0.5, "a": 0.4},
    {"r": 0.0, "s": 7, "sinks": 9},
    {"k": 70, "s": 300},
]
COMPARED = [
    {"a": 0.6, "gate": "off_for_c0"},
    {"a": 0.9, "gate": "off", "before": 0, "after": 3},
    {"a": None, "before": 0, "after": 0},
    {"slash_shift_on_read": False, "a": 0.4},
    {"read_local": False, "sinks": 0, "r": 0.5},
    {"read_local": False, "k": 150, "gate": "off", "a": 0.05},
]


@pytest.mark.parametrize(("kernels", "options", "unit"), covering([KERNELS, OPTIONS, UNITS]), indirect=["kernels"])
def test_candidates_and_tables_are_those_of_the_definition(kernels, options, unit):
    follows_the_definition(options, unit)


@pytest.mark.parametrize("unit", ["q_head", "kv_head"])
@pytest.mark.parametrize("options", COMPARED, ids=str)
def test_so_are_those_of_options_for_comparisons(options, unit):
    assert LFPS(**options).reference_alone is not None
    follows_the_definition(options, unit)


def follows_the_definition(options, unit):
    method = plain(**({"k": 20, "epsilon": 1.0, "unit": unit} | options))
    stream = Stream.make(218, 200, seed=2)
    share = 1 if unit == "q_head" else 2
    units = [Definition(method, stream, list(range(u * share, (u + 1) * share))) for u in range(4 // share)]
    sizes = []
    for position, selection, state, _, used in stream.run(method):  # noqa: B007
        assert isinstance(selection, Candidates)
        for unit_id, definition in enumerate(units):
            expected = definition.candidates(position)
            got = set(selection.listed(unit_id).tolist())
            assert len(got ^ expected) <= 1  # a value may lie within rounding of its threshold
            sizes.append(len(expected))
            read = used.lists()[unit_id].tolist()
            assert {i for i in read if method.sinks <= i} <= got | set(
                range(position + 1 - selection.local, position + 1)
            )
            definition.learn(position, read)
    assert max(sizes) > 0
    for unit_id, definition in enumerate(units):
        n = definition.ver.numel()
        true = [
            table[unit_id].double() * state.tables.scale[unit_id]
            for table in (state.tables.vertical, state.tables.slash)
        ]
        torch.testing.assert_close(true[0][:n], definition.ver, atol=1e-5, rtol=1e-4)
        by_position = true[1][:n].flip(0)  # stored by distance
        torch.testing.assert_close(by_position, definition.sla, atol=1e-5, rtol=1e-4)


def test_table_sums_stay(kernels):
    """Each table sums to 0.5 / (1 - r) after the prefill and after every step; bounds bound, power sums are right."""
    for unit, r in (("q_head", 0.95), ("kv_head", 0.5)):
        stream = Stream.make(190, 150, seed=3)
        for _, _, state, _, _ in stream.run(plain(k=30, r=r, epsilon=1.0, unit=unit)):
            tables = state.tables
            true = torch.stack([tables.vertical, tables.slash]).double() * tables.scale[:, None]
            torch.testing.assert_close(
                true.sum(-1), torch.full(true.shape[:2], 0.5 / (1 - r)).double(), atol=2e-3, rtol=1e-4
            )
            for table, bound in ((tables.vertical, tables.vertical_max), (tables.slash, tables.slash_max)):
                assert (table.unflatten(1, (-1, score_tables.BLOCK)).amax(2) <= bound + 1e-7).all()
            powers = [[x.double().pow(p).sum(-1) for p in (1, 2, 3, 4)] for x in (tables.vertical, tables.slash)]
            expected = torch.stack([torch.stack(one, -1) for one in powers], 1)
            torch.testing.assert_close(tables.sums, expected, rtol=1e-5, atol=1e-5)


def test_stored_values_are_scaled_back_before_they_overflow(kernels):
    """With r = 0.1 the scale passes 1e-8 every ninth step."""
    stream = Stream.make(260, 200, seed=4)
    for _, _, state, _, _ in stream.run(plain(k=20, r=0.1, epsilon=1.0)):
        tables = state.tables
        assert torch.isfinite(tables.vertical).all()
        true = torch.stack([tables.vertical, tables.slash]).double() * tables.scale[:, None]
        torch.testing.assert_close(true.sum(-1), torch.full((2, 4), 0.5 / 0.9).double(), atol=1e-3, rtol=1e-3)
    assert (tables.scale > 1e-9).all()


@pytest.mark.parametrize("distance", [40, 300])
def test_a_planted_diagonal_is_found_every_time(distance):
    """The true key of a pure slash head: always read with the shift on read, never under the printed equation (P1)."""
    only = Planted(sink=0.0, columns=(), slashes=(distance,), blocks=(), strength=12.0)
    stream = Stream.make(585, 560, heads=2, kv_heads=1, seed=5, pattern=only, head_dim=64)
    rates = []
    for shift in (True, False):
        method = plain(k=12, epsilon=1.0, slash_shift_on_read=shift, read_local=True)
        found = [
            [position - distance in chosen.tolist() for chosen in used.lists()]
            for position, _, _, _, used in stream.run(method)
        ]
        rates.append(sum(map(sum, found)) / (2 * len(found)))
    assert rates[0] == 1.0
    assert rates[1] < 0.1


@pytest.mark.parametrize("unit", ["q_head", "kv_head"])
def test_without_threshold_and_gate_it_is_exact_top_k(unit):
    stream = Stream.make(230, 200, seed=6)
    method = plain(k=25, a=None, gate="off", epsilon=1.0, sinks=4, local=1, unit=unit)
    for position, _, _, _, used in stream.run(method):
        for u, chosen in enumerate(used.lists()):
            heads = [u] if unit == "q_head" else [2 * u, 2 * u + 1]
            logits = [(stream.k[h // 2, : position + 1] @ stream.q[h, position]) / math.sqrt(48) for h in heads]
            score = logits[0] if unit == "q_head" else sum(torch.softmax(x, 0) for x in logits)
            middle = score[4:position]
            best = (torch.sort(middle, descending=True, stable=True).indices[:24] + 4).tolist()
            assert chosen.tolist() == sorted([*range(4), *best, position])


def test_a_budget_of_all_keys_is_dense_and_still_learns(kernels):
    stream = Stream.make(110, 90, seed=7)
    for steps, (_, selection, state, _, _) in enumerate(stream.run(plain(k=1000, epsilon=1.0))):
        assert isinstance(selection, Dense)
        assert state.tables.steps == steps
    true = torch.stack([state.tables.vertical, state.tables.slash]).double() * state.tables.scale[:, None]
    torch.testing.assert_close(true.sum(-1), torch.full((2, 4), 10.0).double(), atol=1e-3, rtol=1e-3)


# --- bypass


SINKY = Planted(sink=14.0, columns=(31,), slashes=(40,), blocks=(), strength=4.0)


def estimates(stream: Stream, head: int, position: int, sinks: int = 4, local: int = 6) -> tuple[float, float, float]:
    """(Ls, Lg, Ll) by eq. 5: sinks, a Gaussian of all other prompt keys, the last keys."""
    k, q = stream.k[head // 2].double(), stream.q[head].double()
    prompt, scale = k[sinks : stream.prompt], 1 / math.sqrt(k.shape[1])
    last = q[stream.prompt - 1]
    variance = (prompt @ last * scale).var(correction=0) / last.square().sum()
    row = q[position]
    logits = k[: position + 1] @ row * scale
    middle = row @ prompt.mean(0) * scale + 0.5 * row.square().sum() * variance + math.log(position + 1 - sinks)
    return tuple(
        float(x) for x in (logits[:sinks].logsumexp(0), middle, logits[max(sinks, position + 1 - local) :].logsumexp(0))
    )


@pytest.mark.parametrize(
    ("kernels", "mode", "unit"), covering([KERNELS, ["sink_mean", "sink", "mean"], UNITS]), indirect=["kernels"]
)
def test_a_head_on_its_sinks_is_bypassed(kernels, mode, unit):
    stream = Stream.make(225, 210, seed=8, pattern=SINKY)
    stream.q[1] *= 0.2  # three of four heads rest on the sink
    method = plain(k=20, bypass=mode, unit=unit)
    seen = set()
    for position, selection, _, out, used in stream.run(method, kernels):
        for head in range(4):
            ls, lg, ll = estimates(stream, head, position)
            share = math.exp(ls - torch.tensor([ls, lg, ll]).double().logsumexp(0))
            idle = share > method.epsilon
            assert bool(selection.idle[head]) == idle
            seen.add(idle)
            if not idle:
                continue
            read = used.mask()[head, 0].nonzero()[:, 0].tolist()
            mean = stream.v[head // 2, 4 : stream.prompt].double().mean(0)
            mask = torch.zeros(4, 1, position + 1, dtype=torch.bool)
            mask[..., :4] = True
            sink = brute_force(
                stream.q[:, position : position + 1], stream.k[:, : position + 1], stream.v[:, : position + 1], mask
            )[0][head, 0]
            if mode == "mean":
                assert read == []
                expected = mean
            else:
                assert read == [0, 1, 2, 3]
                weight = 1 / (1 + math.exp(lg - ls)) if mode == "sink_mean" else 1.0
                expected = weight * sink + (1 - weight) * mean
            torch.testing.assert_close(out[head, 0].double(), expected, atol=1e-4, rtol=1e-4)
    assert seen == {True, False}


@pytest.mark.parametrize("unit", ["q_head", "kv_head"])
def test_a_bypass_neither_decays_nor_teaches_but_keeps_the_line(kernels, unit):
    """Only heads that attended change their tables; the slash table is read at the right distance after bypasses."""
    stream = Stream.make(240, 210, seed=8, pattern=SINKY)
    stream.q[1] *= 0.2
    before = last = None
    for position, selection, state, _, _ in stream.run(plain(k=20, unit=unit), kernels):
        if last is not None:
            idle = last.idle.view(state.tables.units, -1).all(1)
            for u in range(state.tables.units):
                same = torch.equal(state.tables.vertical[u], before[0][u]) and state.tables.scale[u] == before[1][u]
                assert same == bool(idle[u])
        assert (state.tables.row == position).all()
        before, last = (state.tables.vertical.clone(), state.tables.scale.clone()), selection


def test_a_diagonal_survives_bypasses():
    """A head alternates between sink and slash; literally frozen tables (P4) fall behind, shifted ones do not."""
    only = Planted(sink=0.0, columns=(), slashes=(60,), blocks=(), strength=12.0)
    stream = Stream.make(540, 500, heads=2, kv_heads=1, seed=9, pattern=only, head_dim=64)
    sink = 14 * math.sqrt(math.sqrt(64))
    stream.k[:, 0, 0] += sink
    stream.q[..., 0] = 0.0
    for position in range(503, 540, 3):
        stream.q[:, position, 3:] = 0.0  # nothing but the sink
        stream.q[:, position, 0] = sink
    on_line = [p for p in range(500, 540) if p < 503 or p % 3 != 503 % 3]
    rates = {}
    for shift in (True, False):
        hits, bypassed = 0, 0
        for position, selection, _, _, used in stream.run(plain(k=12, bypass_shift=shift)):
            bypassed += 0 if selection.idle is None else int(selection.idle.sum())
            hits += position in on_line and all(position - 60 in chosen.tolist() for chosen in used.lists())
        assert bypassed == 2 * (40 - len(on_line))
        rates[shift] = hits / len(on_line)
    assert rates[True] == 1.0
    assert rates[False] < 0.8


@pytest.mark.parametrize("unit", ["q_head", "kv_head"])
@pytest.mark.parametrize("shift", [{"slash_shift_on_read": False}, {}, {"bypass_shift": True}], ids=str)
def test_tables_after_bypasses_are_those_kept_by_position(unit, shift):
    """The paper's form: a bypassed step leaves both tables where they are, and newer keys go on gaining."""
    stream = Stream.make(260, 210, seed=8, pattern=SINKY)
    stream.q[1] *= 0.2
    for head in (0, 2, 3):
        stream.q[head, 210 + 3 * head :: 3] *= 0.2  # heads rest at some steps and not at others
    form = {"bypass": "mean", "bypass_shift": False, "read_local": False, "unit": unit, "a": 0.05} | shift
    method, share = plain(k=20, **form), 1 if unit == "q_head" else 2
    units = [Definition(method, stream, list(range(u * share, (u + 1) * share))) for u in range(4 // share)]
    rested = learnt = 0
    for position, selection, state, _, used in stream.run(method):  # noqa: B007
        for unit_id, definition in enumerate(units):
            mine = range(unit_id * share, (unit_id + 1) * share)
            definition.heads = [head for head in mine if selection.idle is None or not selection.idle[head]]
            if definition.heads:
                expected = definition.candidates(position)
                assert len(set(selection.listed(unit_id).tolist()) ^ expected) <= 1
                lists = used.lists()
                read = lists[definition.heads[0] if len(lists) == 4 else unit_id].tolist()
                definition.learn(position, read)
                learnt += 1
            else:
                definition.rest()
                rested += 1
    assert min(rested, learnt) > 20
    for unit_id, definition in enumerate(units):
        for table, expected in ((state.tables.vertical, definition.ver), (state.tables.slash, definition.sla.flip(0))):
            true = table[unit_id, : expected.numel()].double() * state.tables.scale[unit_id]
            torch.testing.assert_close(true, expected, atol=1e-5, rtol=1e-4)


def test_the_papers_rows_own_key_is_beside_k_and_teaches_nothing():
    stream = Stream.make(240, 200, seed=2)
    for position, selection, _, _, used in stream.run(plain(k=20, epsilon=1.0, read_local=False, a=None, gate="off")):
        assert selection.k.tolist() == [20] * 4
        assert all(len(chosen) == 4 + 20 + 1 and chosen[-1] == position for chosen in used.lists())
    for steps, (_, selection, _, _, _) in enumerate(stream.run(plain(k=200, epsilon=1.0, read_local=False))):
        assert isinstance(selection, Dense) == (196 + steps <= 200)


def test_epsilon_1_never_bypasses():
    stream = Stream.make(240, 230, seed=8, pattern=SINKY)
    for _, selection, _, _, _ in stream.run(plain(k=20, epsilon=1.0)):
        assert selection.idle is None
        assert selection.rest is None


def test_running_means_take_in_what_is_decoded():
    stream = Stream.make(240, 210, seed=8)
    for running in (False, True):
        for position, _, state, _, _ in stream.run(plain(k=20, running_means=running)):
            end = position + 1 if running else stream.prompt
            for mean, part in ((state.mean_key, stream.k), (state.mean_value, stream.v)):
                torch.testing.assert_close(mean, part[:, 4:end].mean(1), atol=1e-5, rtol=1e-4)


# --- costs, limits, errors


def test_costs_say_how_many_keys_were_scored():
    stream = Stream.make(260, 255, seed=2)
    whole = KVView.from_tensors(stream.k, stream.v)
    method = plain(k=20, epsilon=1.0)
    state = method.begin(Chunk.of(stream.q[:, 223:255], whole.upto(255)))
    query = Query.of(stream.q[:, 255:256], whole.upto(256))
    selection = method.select_decode(query, state)
    listed = sum(selection.listed(unit).numel() for unit in range(4)) / 4
    assert query.cost.scored == round(listed) + 6 + 4
    assert query.cost.estimated == 0
    assert query.cost.scored < 200


def test_it_keeps_more_than_recency_does():
    """On planted lines and blocks, with as many keys, retained mass beats sinks and a window by far."""
    stream = Stream.make(500, 440, seed=12)
    lfps, recent = [], []
    for position, _, _, _, used in stream.run(plain(k=40, epsilon=1.0)):
        q, k = stream.q[:, position : position + 1], stream.k[:, : position + 1]
        window = torch.zeros(4, 1, position + 1, dtype=torch.bool)
        window[..., :4] = window[..., -40:] = True
        lfps.append(mass_of(q, k, used.mask()))
        recent.append(mass_of(q, k, window))
    assert torch.cat(lfps).mean() > torch.cat(recent).mean() + 0.3


@pytest.mark.parametrize("isa", cpu.supported_isas())
def test_the_kernels_choose_what_the_reference_chooses(isa):
    """Tables of every shape and alignment, with one thread and two: the same lists, the same heads bypassed, and the
    same for the rest."""
    cpu.set_isa(isa)
    threads, rested, blocked = torch.get_num_threads(), 0, 0
    try:
        for case in range(36):
            method = LFPS(
                k=1 + case % 3,
                a=(0.05, 0.3, 2.0)[case % 3],
                sinks=case % 5,
                local=1 + case % 7,
                before=(0, 1, 2, 63)[case % 4],
                after=(3, 0, 40)[case % 3],
                unit=("q_head", "kv_head")[case % 2],
                blocks=(0, 2, 500)[case % 3],
                block_size=(4, 16)[case % 2],
                rest=("sample", None)[case // 2 % 2],
                probes=(64, 5)[case // 4 % 2],
                epsilon=(0.05, 1.0, 0.6)[case // 3 % 3],
            )
            length = 10 + int(torch.randint(0, 700, (), generator=generator(case)))
            dtype, softcap = (torch.float32, torch.bfloat16)[case // 8 % 2], (None, 4.0)[case // 5 % 2]
            query, state = row_of(method, length, seed=case, dtype=dtype, softcap=softcap)
            torch.set_num_threads(1 + case % 2)
            keys = length - method.sinks
            got, want = (by.choose(method, query, state, keys, min(method.local, keys)) for by in (lfps_cpu, choosing))
            assert torch.equal(got.offsets, want.offsets)
            if dtype == torch.float32 or not 0 < method.blocks < 500:  # rounded means may rank otherwise
                assert torch.equal(got.indices, want.indices)
            assert (got.idle is None) == (want.idle is None)
            assert got.idle is None or torch.equal(got.idle, want.idle)
            assert (got.rest is None) == (want.rest is None)
            if got.rest is not None:
                torch.testing.assert_close(got.rest, want.rest, atol=1e-4, rtol=1e-4)
            rested, blocked = rested + (got.idle is not None), blocked + (method.blocks > 0)
    finally:
        torch.set_num_threads(threads)
        cpu.set_isa(None)
    assert min(rested, blocked) > 5


@pytest.mark.parametrize("length", [5, 6, 9, 10])
def test_a_row_of_forced_keys_alone(length):
    """As few keys as are forced, and more than k: there is nothing to choose from, and all is read."""
    method = LFPS(k=1, local=6, sinks=4, epsilon=1.0)
    query, state = row_of(method, length)
    for by in (lfps_cpu, choosing):
        found = by.choose(method, query, state, length - 4, min(6, length - 4))
        assert found.offsets.tolist() == [0] * 5
        assert found.rest.tolist() == [-math.inf] * 4


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"gate": "off", "a": None}, "gate=off, a=none is for comparisons"),
        ({"bypass": "sink"}, "bypass=sink is"),
        ({"read_local": False, "bypass_shift": False}, "bypass_shift=false, read_local=false is"),
        ({"running_means": True}, "running_means=true is"),
        ({"slash_shift_on_read": False}, "slash_shift_on_read=false is"),
    ],
    ids=str,
)
def test_options_for_comparisons_are_refused_by_kernels(options, said):
    method = LFPS(**options)
    query, state = row_of(method, 60)
    assert said in lfps_cpu.why_not(method, query.q, query.kv, state.tables)
    spec = SimpleNamespace(layers=2, heads=4, kv_heads=2, head_dim=32, windows=(None, None))
    assert said in method.device_plan(spec).layers[0].why_not(spec)
    usual = LFPS(unit="kv_head", epsilon=1.0, rest=None, history="keep", blocks=0)
    assert lfps_cpu.why_not(usual, query.q, query.kv, state.tables) is None
    assert usual.device_plan(spec).layers[0].why_not(spec) is None


@pytest.mark.parametrize(
    "options",
    [
        {"k": 0}, {"k": 1.5}, {"s": 0}, {"r": 1.0}, {"a": -1}, {"epsilon": 2}, {"sinks": -1}, {"before": 64},
        {"local": 0}, {"unit": "layer"}, {"gate": "on"}, {"bypass": "none"}, {"bypass_shift": 1},
    ],
)  # fmt: skip
def test_bad_options(options):
    with pytest.raises(PolicyError, match=next(iter(options))):
        plain(**options)


# --- in the engine


@pytest.mark.parametrize(
    "policy", ["lfps(k=24,blocks=2)", "lfps(k=24,unit=kv_head,epsilon=0.3)", "lfps(k=24,blocks=2,history=keep)"]
)
def test_state_follows_preemption_turns_and_cancellation(tiny_llama, llm, policy):
    preempted(tiny_llama, llm, policy)
    check_cancelled_turn(llm, policy)


def test_the_report_counts_what_was_scored(llm):
    policy = "lfps(k=24,epsilon=1.0,blocks=0,rest=none)"
    report = llm.generate(random_ids(300, seed=1), GREEDY, policy=policy)[0].report["decode"]
    causal = sum(range(301, 310)) * LAYERS
    assert report["keys_causal"] == causal
    assert 0 < report["keys_scored"] < causal
    assert report["keys_attended"] <= 9 * LAYERS * (24 + 4)
    assert report["selections"] == {"tokens": 9 * LAYERS}
