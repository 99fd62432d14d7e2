"""The gap between tokens: how a round's seconds are shared out, by a clock that goes as rows say."""

from __future__ import annotations

import importlib
import inspect
import itertools
from dataclasses import dataclass, field

import pytest
import torch
from engine_helpers import start
from tiny_models import make_checkpoint, random_ids

from saccade import LLM, SamplingParams
from saccade.engine import core
from saccade.engine.rows import suspended
from saccade.engine.rows.attention import RowAttention
from saccade.engine.scheduling import slices, token_gap
from saccade.engine.scheduling.row_costs import RowCosts
from saccade.engine.scheduling.token_gap import SHARE, Need, shared_out
from saccade.engine.settings.config import EngineConfig
from saccade.engine.watch import report
from saccade.errors import SaccadeError
from saccade.server import TOKEN_GAP

GAP = 0.05
LAYERS = 6
SPARSE = "flexprefill(gamma=0.5, block_size=64, min_budget=0)"
BUILDS = "dense+h2o(budget=64)"  # its states see every chunk


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint(
        "llama", tmp_path_factory.mktemp("llama"), max_position_embeddings=4096, head_dim=32, num_hidden_layers=LAYERS
    )


def test_what_rows_take_is_learnt():
    costs, rng = RowCosts(), torch.Generator().manual_seed(1)
    assert costs.seconds(10, 10) is None
    for _ in range(60):
        rows, keys = (int(torch.randint(low, high, (), generator=rng)) for low, high in ((16, 512), (100, 9000)))
        noise = 1 + 0.02 * float(torch.randn((), generator=rng))
        costs.learn(rows, keys, noise * rows * (2e-4 + 3e-8 * keys))
    for rows, keys in ((64, 500.0), (500, 8000.0)):
        assert costs.seconds(rows, keys) == pytest.approx(rows * (2e-4 + 3e-8 * keys), rel=0.1)
    one = RowCosts()
    one.learn(64, 32, 0.064)
    assert one.seconds(128, 32) >= 0.12


def test_a_round_is_shared_out():
    assert shared_out([], 1.0) == {}
    assert shared_out([Need(1, 9.0, 0)], 1.0) == {1: 1.0}
    assert shared_out([Need(1, 9.0, 0), Need(2, 9.0, 0)], 1.0) == {1: SHARE, 2: 1 - SHARE}
    found = shared_out([Need(1, 9.0, 5), Need(2, 9.0, 4), Need(3, 0.1, 2), Need(4, 0.2, 3)], 1.0)
    assert found == pytest.approx({1: SHARE, 2: 1 - SHARE - 0.3, 3: 0.1, 4: 0.2})  # who is due first
    found = shared_out([Need(1, 0.1, 5), Need(2, 9.0, 1), Need(3, 9.0, 2)], 1.0)
    assert found == pytest.approx({1: 0.1, 2: 0.9, 3: 0.0})  # what the first leaves goes on
    rng = torch.Generator().manual_seed(3)
    for count in range(1, 9):
        needs = [Need(number, *(torch.rand(2, generator=rng) / 2).tolist()) for number in range(count)]
        found = shared_out(needs, 1.0)
        assert sum(found.values()) == pytest.approx(1.0)
        assert found[0] >= min(needs[0].seconds, SHARE) - 1e-9


@dataclass
class Clock:
    """Steps and slices take as long as the rows of their layers say; ``tokens``: when each came, by request."""

    now: float = 0.0
    tokens: dict[int, list[float]] = field(default_factory=dict)

    def perf_counter(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now

    def attend(self, context: RowAttention) -> None:
        """A layer of a pass."""
        seconds = 0.0
        for rows in context.rows:
            one = rows.scheduled
            seconds += 5e-4 if one.phase == "decode" else one.length * (1e-4 + 2e-7 * one.start)
        self.now += seconds / LAYERS


@pytest.fixture
def clock(monkeypatch):
    made, run = Clock(), RowAttention.run
    for module in (core, report, slices, suspended, token_gap):
        monkeypatch.setattr(module, "time", made)

    def timed(self, layer, q, k, v, spec):
        made.attend(self)
        return run(self, layer, q, k, v, spec)

    monkeypatch.setattr(RowAttention, "run", timed)
    monkeypatch.setattr(RowAttention, "whole", lambda self: None)  # all layers in one call take no time here
    return made


def step(llm: LLM, clock: Clock) -> None:
    for output in llm.engine.step():
        clock.tokens.setdefault(output.request_id, []).extend([clock.now] * len(output.new_tokens))


def longest(times: list[float]) -> float:
    return max(after - before for before, after in itertools.pairwise(times))


def params(count: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)


def serve(folder, clock, policy: str, shorts: int = 6, **options):
    """A stream, a long prompt and short ones: their requests, and how long the long prompt took."""
    with LLM(
        folder, dtype="float32", prefill_chunk=512, kv_memory="64MiB", **{"enable_prefix_caching": False, **options}
    ) as llm:
        stream = start(llm, random_ids(40, seed=1), params(400))
        for _ in range(3):
            step(llm, clock)
        began = clock.now
        long = start(llm, random_ids(1500, seed=2), params(4), policy)
        asked: list = []
        while not long.output_ids and not long.finished:
            if len(asked) < shorts and clock.now > began + 0.05 * (len(asked) + 1):
                asked.append((start(llm, random_ids(20, seed=50 + len(asked)), params(3), policy), clock.now))
            step(llm, clock)
        took = clock.now - began
        llm.engine.cancel(stream)
        while llm.engine.busy:
            step(llm, clock)
        assert not llm.engine.scheduler.suspended
        assert not llm.engine.worker._suspended
        assert llm.pool.used_blocks == 0
    return stream, long, asked, took


@pytest.mark.parametrize("policy", ["dense", SPARSE, BUILDS])
@pytest.mark.parametrize("exact", [True, False])
def test_streams_and_short_requests_go_on_beside_a_long_prefill(folder, clock, policy, exact):
    free, longs, _, alone = serve(folder, clock, policy, shorts=0, exact=exact)
    assert longest(clock.tokens[free.id]) > 2 * GAP  # the fault that the gap mends
    stream, long, asked, took = serve(folder, clock, policy, exact=exact, max_token_gap=GAP)
    assert long.final_ids == longs.final_ids
    assert longest(clock.tokens[stream.id]) <= 1.25 * GAP
    assert len(asked) >= 3
    for request, arrived in asked:
        assert clock.tokens[request.id][0] - arrived <= 2 * GAP
    assert took <= 1.3 * alone
    apart = exact or policy != "dense"
    assert (long.report.suspensions > 0) == apart
    assert stream.report.suspensions == 0
    rounds = took / (0.8 * GAP)
    assert long.report.suspensions <= 2 * rounds  # no more stops than are needed


def test_without_a_stream_short_requests_are_as_soon(folder, clock):
    for policy in ("dense", SPARSE):
        with LLM(
            folder,
            dtype="float32",
            exact=False,
            prefill_chunk=512,
            kv_memory="64MiB",
            max_token_gap=GAP,
            enable_prefix_caching=False,
        ) as llm:
            long = start(llm, random_ids(1500, seed=2), params(4), policy)
            for _ in range(2):
                step(llm, clock)
            short, arrived = start(llm, random_ids(20, seed=3), params(1), policy), clock.now
            while llm.engine.busy:
                step(llm, clock)
            assert clock.tokens[short.id][0] - arrived <= 2 * GAP
            assert clock.tokens[long.id][0] > clock.tokens[short.id][0]
            assert long.report.suspensions > 2  # a whole chunk, in parts: its borders are as alone


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("policy", ["dense", SPARSE])
def test_nobody_starves(folder, clock, policy, exact):
    """Two long prompts, and short ones that never end: each goes on at the share that is its own."""
    with LLM(
        folder,
        dtype="float32",
        exact=exact,
        prefill_chunk=512,
        kv_memory="64MiB",
        max_token_gap=GAP,
        enable_prefix_caching=False,
    ) as llm:
        start(llm, random_ids(60, seed=9), params(1), policy)
        while llm.engine.busy:  # what rows take is known
            step(llm, clock)
        began = clock.now
        longs = [start(llm, random_ids(1000, seed=2), params(1), policy) for _ in range(2)]
        longs[1].sequence.tokens[0] += 1
        shorts: list = []
        while not all(one.finished for one in longs):
            live = [one for one, _ in shorts if not one.finished]
            for _ in range(4 - len(live)):
                shorts.append((start(llm, random_ids(60, seed=100 + len(shorts)), params(1), policy), clock.now))
            step(llm, clock)
            assert clock.now < began + 3
        alone = sum(rows * (1e-4 + 2e-7 * at) for at, rows in ((0, 512), (512, 488)))
        assert clock.tokens[longs[0].id][0] - began <= 1.3 * alone / SHARE
        assert clock.tokens[longs[1].id][0] - began <= 1.3 * 2 * alone / SHARE
        waits = [clock.tokens[one.id][0] - arrived for one, arrived in shorts if one.finished]
        assert len(waits) > 10
        assert max(waits) <= 4 * GAP  # four of them come at once, and half a round is theirs
        for one, _ in shorts:
            llm.engine.cancel(one)
        assert llm.pool.used_blocks == 0


def test_who_has_waited_gives_way_to_nobody_who_comes_later(folder, clock, monkeypatch):
    """A prompt of middle length beside a long one, and more short ones than there is time for."""
    monkeypatch.setattr(token_gap, "UNKNOWN_ROW", 1e-4)
    with LLM(
        folder, dtype="float32", prefill_chunk=512, kv_memory="64MiB", max_token_gap=GAP, enable_prefix_caching=False
    ) as llm:
        start(llm, random_ids(2500, seed=2), params(1), SPARSE)
        middle, arrived, count = start(llm, random_ids(200, seed=3), params(1), SPARSE), clock.now, 0
        while not middle.finished:
            while len(llm.engine.scheduler.running) + len(llm.engine.scheduler.waiting) < 8:
                count += 1
                start(llm, random_ids(60, seed=100 + count), params(1), SPARSE)
            step(llm, clock)
        alone = 200 * 1e-4
        assert clock.tokens[middle.id][0] - arrived <= 2 * token_gap.STRETCH * alone + 4 * GAP
        assert count > 8
        llm.engine.abandon("the end")


@pytest.mark.parametrize("policy", ["dense", SPARSE])
@pytest.mark.parametrize("same", [True, False])
def test_what_another_cannot_use_is_not_lost(folder, clock, policy, same):
    """Beside a long prompt that has no room yet, or waits for the blocks of the first, the first takes no longer."""
    options = {"dtype": "float32", "exact": False, "prefill_chunk": 512, "kv_memory": "64MiB", "max_token_gap": GAP}
    took = []
    for count in (1, 2):
        with LLM(folder, enable_prefix_caching=True, **options) as llm:
            stream = start(llm, random_ids(20, seed=1), params(400))
            for _ in range(2):
                step(llm, clock)
            start(llm, random_ids(512, seed=9), params(1), policy)
            for _ in range(9):  # what rows take is known
                step(llm, clock)
            document, began = random_ids(1500, seed=2), clock.now
            ids = [document, document[:1400] + random_ids(90, seed=3) if same else random_ids(1500, seed=4)]
            longs = [start(llm, one, params(1), policy) for one in ids[:count]]
            while not longs[0].finished:
                step(llm, clock)
            took.append(clock.tokens[longs[0].id][0] - began)
            for one in (stream, *longs):
                llm.engine.cancel(one)
    plain_cut = policy == "dense" and not same
    assert took[1] <= (1.2 if not plain_cut else 1.1 / SHARE) * took[0]  # two that are cut take turns


def test_a_short_request_does_not_wait_behind_a_prefix_that_others_compute(folder, clock):
    with LLM(
        folder,
        dtype="float32",
        prefill_chunk=512,
        kv_memory="64MiB",
        max_token_gap=GAP,
        enable_prefix_caching=True,
    ) as llm:
        document = random_ids(1500, seed=2)
        first = start(llm, document + random_ids(9, seed=3), params(1))
        step(llm, clock)
        second = start(llm, document + random_ids(9, seed=4), params(1))  # it waits for the first one's blocks
        short, arrived = start(llm, random_ids(20, seed=5), params(1)), clock.now
        while llm.engine.busy:
            step(llm, clock)
        assert clock.tokens[short.id][0] - arrived <= 2 * GAP
        assert second.report.cached_tokens > 1400
        assert clock.tokens[second.id][0] - clock.tokens[first.id][0] <= 2 * GAP


def test_a_layer_that_takes_longer_than_the_gap_is_told(folder, clock):
    _, long, _, _ = serve(folder, clock, SPARSE, max_token_gap=0.008)
    assert any("max_token_gap=0.008: a layer takes longer for the 512 rows" in note for note in long.report.notes)
    _, long, _, _ = serve(folder, clock, SPARSE, max_token_gap=GAP)
    assert not any("max_token_gap" in note for note in long.report.notes)


@pytest.mark.parametrize("gap", [-1, "x", float("nan"), True, 1e9, "0.0001", []])
def test_gaps_that_mean_nothing_are_refused(gap):
    with pytest.raises(SaccadeError, match=r"max_token_gap=.* from 0\.001 to 3600, or 0 or 'none'"):
        LLM("retriever", max_token_gap=gap, enable_prefix_caching=False)


@pytest.mark.parametrize(
    ("given", "read"), [(None, None), (0, None), ("0", None), ("none", None), ("0.5", 0.5), (2, 2.0)]
)
def test_gaps_as_they_may_be_written(given, read):
    assert EngineConfig.of(max_token_gap=given).token_gap == read


def test_a_server_has_a_gap_and_an_engine_of_ones_own_has_none():
    assert EngineConfig().token_gap is None
    for name, default in (("serve", str(TOKEN_GAP)), ("generate", None)):
        module = importlib.import_module(f"saccade.cli.{name}")
        found = inspect.signature(getattr(module, name)).parameters["max_token_gap"].default
        assert found == default
    assert EngineConfig.of(max_token_gap=str(TOKEN_GAP)).token_gap == TOKEN_GAP
