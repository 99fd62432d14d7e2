"""RocketKV's kernels against its row path: what rows read, step after step, under Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import triton_helpers  # noqa: F401  (sets the interpreter up first)
from test_triton_batched import DIM, HEADS, KV_HEADS, Rows, Spec

from saccade.methods.base import Chunk, Query
from saccade.methods.device_state import REALS, WORDS, Opening
from saccade.methods.rocketkv import RocketKV
from saccade.methods.rocketkv.recorded import LARGEST, RING, RecordedBlocks
from saccade.methods.state import fork
from saccade.ops.triton.batch import Pages
from saccade.ops.triton.batched_decode import append_rows
from saccade.ops.triton.batched_reading import why_not
from saccade.ops.triton.batched_rows import LayerRows
from saccade.selection import Dense
from saccade.selection.readings import Ends

LENGTHS = [41, 0, 97, 200, 333]
METHODS = [
    RocketKV(capacity=30, window=8, kernel=3, keys=20, block_size=4, channels=0.25),
    RocketKV(capacity=64, window=16, kernel=5, keys=17, block_size=1),
    RocketKV(capacity=64, window=16, kernel=5, keys=17, block_size=1, channels=0.5),
    RocketKV(capacity=150, window=8, kernel=9, keys=28, block_size=5, channels=0.5),
    RocketKV(capacity=100, window=8, kernel=1, keys=21, block_size=7, channels=0.03125),
]  # of one form, a row each


class Steps:
    """Rows that decode under ``METHODS``, each with a device state and a copy of the row path's. ``shaped`` makes other
    keys, values and queries of what is drawn; ``gone`` [kv_heads, m] are keys that an earlier turn evicted."""

    def __init__(self, unit="kv_head", dtype=torch.float32, seed=3, shaped=lambda name, part: part, gone=None, **of):
        self.rows = rows = Rows(LENGTHS, dtype=dtype, seed=seed, **of)
        self.shaped, self.rng = shaped, torch.Generator().manual_seed(seed + 1)
        self.methods = [replace(one, unit=unit) for one in METHODS]
        self.units = HEADS if unit == "q_head" else KV_HEADS
        (self.form,) = {one.device_plan(Spec).layers[0].form for one in self.methods}
        self.states, self.own = [], []
        for method, length, kv in zip(self.methods, LENGTHS, rows.kvs):
            if not length:
                self.states.append(None)
                self.own.append(None)
                continue
            kv.truncate(0)
            kv.reserve(length + 8)
            keys = torch.randn(2, KV_HEADS, length - 1, DIM, generator=self.rng).to(dtype)
            kv.append(0, shaped("k", keys[0]), keys[1])
            tail = torch.randn(HEADS, min(method.window, length - 1), DIM, generator=self.rng).to(dtype)
            evicted = None if gone is None else gone[:, : length - 1]
            state = method.begin(Chunk.of(tail, kv.view(0), gone=evicted))
            self.states.append(fork(state))
            self.own.append(RecordedBlocks(Opening([state], kv, Spec, length - 1, length)))
        self.pages = rows.pages
        for row, kv in enumerate(rows.kvs):
            if LENGTHS[row]:
                self.pages.tables[row, :, : kv.blocks] = kv.tables[0, :, : kv.blocks]
        self.lengths = list(LENGTHS)

    def draw(self) -> None:
        """What the rows of the next step bring."""
        for name, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            part = torch.randn(heads, len(LENGTHS), DIM, generator=self.rng).to(self.rows.q.dtype)
            setattr(self.rows, name, self.shaped(name, part).transpose(0, 1))

    def read(self, softcap=None):
        """What kernels read of the rows as they stand, whose new keys they store: (LayerRead, lists of each row)."""
        lengths = torch.tensor(self.lengths, dtype=torch.int32)
        pages = Pages(self.pages.k, self.pages.v, self.pages.tables, lengths, 512)
        append_rows(self.rows.k, self.rows.v, pages)
        words = torch.zeros(len(LENGTHS), WORDS, dtype=torch.int64)
        for row, state in enumerate(self.own):
            if state is not None:
                if self.lengths[row] > state.room:
                    state.grow(self.lengths[row])
                own = state.words(0)
                words[row, : len(own)] = torch.tensor(own)
        none = torch.zeros(len(LENGTHS), dtype=torch.int32)
        reals, cones = torch.zeros(len(LENGTHS), REALS), torch.zeros(len(LENGTHS), 4, dtype=torch.float64)
        layer = LayerRows(0, self.rows.q, pages, words, reals, cones, none, none.clone(), 0.3, softcap)
        read = self.form.read(layer)
        assert torch.isfinite(read.out).all()
        found = []
        for row in range(len(LENGTHS)):
            entries = range(row * self.units, (row + 1) * self.units)
            found.append([read.lists.indices[at, : int(read.lists.counts[at])].tolist() for at in entries])
        return read, found

    def go_on(self) -> None:
        """The step counts: the next one is of the next position."""
        for row, kv in enumerate(self.rows.kvs):
            if self.lengths[row]:
                kv.appended(1)
                self.own[row].length = self.lengths[row]
                self.lengths[row] += 1

    def wanted(self, softcap=None):
        """What the row path reads of each row whose key is stored, and how many blocks it looked at."""
        for row, kv in enumerate(self.rows.kvs):
            if not self.lengths[row]:
                continue
            view = kv.view(0)
            query = Query.of(self.rows.q[row][:, None], view, scale=0.3, softcap=softcap)
            selection = self.methods[row].select_decode(query, self.states[row])
            everything = [list(range(view.length))] * self.units
            lists = everything if isinstance(selection, Dense) else [one.tolist() for one in selection.lists()]
            yield row, lists, query.cost.estimated, isinstance(selection, Dense)


def check(steps: Steps, count: int, softcap=None) -> None:
    for _ in range(count):
        steps.draw()
        read, found = steps.read(softcap)
        assert read.lists.counts.view(len(LENGTHS), -1)[1].tolist() == [0] * steps.units  # padding
        steps.go_on()
        seen = 0
        for row, lists, estimated, dense in steps.wanted(softcap):
            assert found[row] == lists, (row, steps.lengths[row])
            assert float(read.estimated[row]) == estimated
            assert steps.own[row].reads_all(steps.lengths[row] - 1) == dense
            method, length = steps.methods[row], steps.lengths[row] - 1
            known = method.device_plan(Spec).layers[0].cost(length, length - LENGTHS[row])
            assert known.chooses == (estimated > 0)
            seen += 1
        assert seen == len(LENGTHS) - 1


@pytest.mark.parametrize("unit", ["kv_head", "q_head"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_rows_read_what_the_row_path_reads_step_after_step(unit, dtype):
    check(Steps(unit, dtype), 9)


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_soft_caps_and_heads_apart(softcap):
    check(Steps(heads_apart=True, seed=8), 3, softcap)


SHAPES = {
    "small whole numbers: ties everywhere": lambda name, part: part.round().clamp(-1, 1),
    "all alike": lambda name, part: torch.ones_like(part),
    "queries of nothing": lambda name, part: torch.zeros_like(part) if name == "q" else part,
    "queries of one channel": lambda name, part: part * (torch.arange(DIM) == 5) if name == "q" else part,
    "weights that one block has alone": lambda name, part: part * 30,
    "keys of one sign": lambda name, part: -part.abs() if name == "k" else part,
}


@pytest.mark.parametrize("shape", SHAPES)
def test_adversarial_numbers(shape):
    check(Steps(seed=11, shaped=SHAPES[shape]), 4)


def test_channels_that_do_not_count_may_hold_anything():
    """Infinite extremes there reach no estimate: 0 times infinity would be no number."""
    steps = Steps(seed=5)
    steps.draw()
    steps.rows.q[..., 0] = 1e-3  # the least of all, in rows that look at a share of the channels
    with torch.inference_mode():
        for own, method in zip(steps.own, steps.methods):
            if own is not None and method.channels < 1:
                own._extremes[0][:, :, :, 0] = torch.inf
    _, found = steps.read()
    steps.go_on()
    assert all(found[row] == lists for row, lists, _, _ in steps.wanted())


def test_units_that_an_earlier_turn_left_unlike_numbers_of_keys():
    gone = torch.zeros(KV_HEADS, 400, dtype=torch.bool)
    gone[0, 3:40] = gone[1, 7:30] = True
    steps = Steps(seed=4, gone=gone)
    assert len({len(one) for one in steps.states[0].positions}) == 2
    for _ in range(3):
        steps.draw()
        read, found = steps.read()
        steps.go_on()
        for row, lists, estimated, _ in steps.wanted():
            assert found[row] == lists
            assert float(read.estimated[row]) == estimated


def test_a_step_that_runs_again_finds_what_it_would_have_found():
    """Other keys came in between, and those of the step launched behind it: neither is known afterwards."""
    steps, straight = Steps(seed=9), Steps(seed=9)
    for turn in range(8):
        straight.draw()
        _, wanted = straight.read()
        straight.go_on()
        steps.draw()
        q, k, v = steps.rows.q, steps.rows.k, steps.rows.v
        steps.rows.k = k + 50.0
        steps.read()
        for row, length in enumerate(steps.lengths):
            steps.lengths[row] += length > 0
        steps.read()  # the one behind it
        for row, length in enumerate(steps.lengths):
            steps.lengths[row] -= length > 0
        steps.rows.q, steps.rows.k, steps.rows.v = q, k, v
        _, found = steps.read()
        steps.go_on()
        assert found == wanted, turn
    assert RING > 2


def test_states_go_back_to_the_row_path_and_rows_may_be_cut_off():
    steps = Steps(seed=6)
    for _ in range(6):
        steps.draw()
        steps.read()
        steps.go_on()
        list(steps.wanted())
    for row, own in enumerate(steps.own):
        if own is None:
            continue
        for length in (own.length, own.length - 3):
            (state,), other = own.settle(length), fork(steps.states[row])
            other.truncate(length)
            assert (state.length, state.size, state.keys, state.channels) == (
                other.length, other.size, other.keys, other.channels,
            )  # fmt: skip
            for mine, theirs in ((state.low, other.low), (state.high, other.high), (state.positions, other.positions)):
                assert all(torch.equal(*pair) for pair in zip(mine, theirs, strict=True))
                assert all(one.is_contiguous() for one in mine)


def test_room_grows_with_a_sequence():
    steps = Steps(seed=2)
    for own in steps.own:
        if own is not None:
            own.grow(own.room + 7)  # addresses change
    check(steps, 2)


def test_a_list_has_room_for_what_any_budget_comes_to():
    for budget in (2, 64, 512, 5000):
        method = RocketKV(budget=budget)
        room = method.device_plan(Spec).layers[0].room
        for context in (2, 33, 100, 5000, 131072, 10_000_000, 2**31 - 1):
            sized, _ = method.sized(context, 128)
            assert -(-sized.keys // sized.block_size) * sized.block_size <= room
            assert sized.block_size <= LARGEST


def test_what_no_kernel_does_stays_on_the_host():
    reading = RocketKV().device_plan(Spec).layers[0]
    sizes = {"layers": 1, "head_dim": DIM, "heads": 4, "kv_heads": 2, "windows": (None,)}
    assert why_not(reading, SimpleNamespace(value_dim=None, **sizes)) is None
    assert "not latents" in why_not(reading, SimpleNamespace(value_dim=16, **sizes))
    assert RocketKV().device_plan(SimpleNamespace(**{**sizes, "windows": (64,)})).layers == (Ends(0, 64),)
