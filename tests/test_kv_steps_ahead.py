"""Steps launched behind others that may bring blocks in by themselves, without a model: whatever becomes of the step
ahead, no key is lost, and the host's map is the device's. The kernels run under Triton's interpreter."""

from __future__ import annotations

from itertools import count
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import triton_helpers  # noqa: F401  (sets the interpreter up first)
from tier_helpers import nothing_left

from saccade.engine.device.tiers import DeviceTiers
from saccade.kv import BlockManager, KVFormat, KVStorage, SequenceKV, listed
from saccade.kv.host import HostTier
from saccade.kv.tier import TierCounts
from saccade.ops.triton import pages, residency
from saccade.ops.triton.batch import KeyLists, Pages

LAYERS, HEADS, SIZE, WIDTH, MOST = 2, 2, 16, 8, 20  # of keys a block, numbers a key, blocks a sequence


@pytest.fixture(autouse=True)
def few_programs(monkeypatch):
    """Copies are as right by two programs as by many, and the interpreter runs one after the other. Long lists let
    steps go ahead where there are few slots."""
    monkeypatch.setattr(pages, "COPIERS", 2)
    monkeypatch.setattr(listed, "SHARE", 2)


class Steps:
    """Decode steps of sequences over ``slots`` slots, as DeviceBackend runs them: a row reads some blocks, a KV head
    each its own, and stores a key. ``kept``: by sequence, what is stored, [layers, 2, heads, keys, width].

    ``ahead``: what the step launched ahead of its turn would store, by sequence; None where there is none."""

    def __init__(self, slots: int, apart: bool, seed: int = 0, replacement: str = "clock") -> None:
        storage = KVStorage(KVFormat(torch.float32, HEADS, WIDTH, SIZE), slots, "cpu", pages)
        storage.v.zero_()
        tier = HostTier(1 << 19, storage, apart)
        self.pool = BlockManager(
            storage, LAYERS, heads_apart=apart, tier=tier, debug=True, replacement=replacement, logical_blocks=120
        )
        self.pool.slots = self.pool.slots.clone()  # a device's own
        self.rng, self.device = np.random.default_rng(seed), DeviceTiers()
        self.kept: dict[SequenceKV, torch.Tensor] = {}
        self.ahead: dict[SequenceKV, torch.Tensor] | None = None
        self.wrong: list[str] = []
        self.done = dict.fromkeys(("launched ahead", "asked", "unasked", "short", "short before"), 0)
        self.counted = TierCounts()

    def begin(self, length: int) -> SequenceKV:
        """A sequence of so many keys."""
        kv = SequenceKV(self.pool)
        kv.reserve(length)
        made = self.random(length)
        for layer, (k, v) in enumerate(made):
            kv.append(layer, k, v)
        self.kept[kv] = made
        return kv

    def end(self, kv: SequenceKV) -> None:
        del self.kept[kv]
        kv.free()

    def random(self, keys: int) -> torch.Tensor:
        made = self.rng.standard_normal((LAYERS, 2, HEADS, keys, WIDTH))
        return torch.from_numpy(made).float()

    def step(self, sequences: list[SequenceKV], most: int = 3, goes_on: bool = True, then: int | None = None) -> bool:
        """A row of each, that reads ``most`` blocks, and the step behind it ``then``. Whether it was a recorded one in
        the end."""
        for kv in sequences:
            kv.reserve(kv.length + 1)
        rows = [self.row(kv) for kv in sequences]
        if self.ahead is not None and list(self.ahead) == sequences:
            self.device.asked(rows)
            stored = self.ahead
            self.done["asked"] += 1
        else:
            self.forget()
            if not self.pool.absent:
                self.host(sequences)
                return False
            self.device.prepare(self.pool, rows)
            stored = self.launch(sequences, most)
        self.ahead = None
        self.pool.catch_up()
        fits = not any(kv.missing_blocks(kv.length + 2) for kv in sequences)
        for kv in sequences:
            kv.appended(1)
        if goes_on and fits and self.device.lets_follow(rows):
            self.device.go_ahead()
            self.ahead = self.launch(sequences, most if then is None else then)
            self.done["launched ahead"] += 1
        short = self.device.settle(rows) is not None
        for row in rows:
            self.counted.add(row.result.tiers)
        if short:
            self.done["short"] += 1
            self.done["short before"] += self.ahead is not None
            for kv in sequences:
                kv.appended(-1)
            self.ahead = None
            self.device.give_up()
            self.host(sequences)
            return False
        if self.wrong:
            raise AssertionError(self.wrong)
        for kv, row in stored.items():
            self.kept[kv] = torch.cat([self.kept[kv], row], 3)
        return True

    def row(self, kv: SequenceKV) -> SimpleNamespace:
        scheduled = SimpleNamespace(start=kv.length, stop=kv.length + 1)
        result = SimpleNamespace(tiers=None, asked_bytes=0)
        return SimpleNamespace(kv=kv, scheduled=scheduled, plan=SimpleNamespace(blocks=None), result=result)

    def launch(self, sequences: list[SequenceKV], most: int) -> dict[SequenceKV, torch.Tensor]:
        """What kernels do in a step: look on no map of the host's. What they read is held against what is kept, unless
        the step has run short; rows that are not settled yet are not looked at."""
        offers, pool, storage = self.pool.tiers.offer(), self.pool, self.pool.storage
        offers.begin()
        count, units = len(sequences), pool.rows
        lengths = torch.tensor([kv.length + 1 for kv in sequences], dtype=torch.int32)
        logical = torch.zeros(count, MOST, dtype=torch.int32)
        for number, kv in enumerate(sequences):
            logical[number, : len(kv.block_table)] = kv.block_table.int()
        tables = torch.zeros(LAYERS, count, pool.rows, MOST, dtype=torch.int32)
        stored, wrong = {kv: self.random(1) for kv in sequences}, []
        for layer in range(LAYERS):
            picked = []
            for length in lengths.tolist():
                last = (length - 1) // SIZE
                for _ in range(units):
                    some = self.rng.choice(last + 1, min(last + 1, most), replace=False)
                    picked.append(np.union1d(some, [last]))
            blocks = torch.full((len(picked), most + 1), 99, dtype=torch.int32)
            for entry, own in enumerate(picked):
                blocks[entry, : len(own)] = torch.from_numpy(own)
            counts = torch.tensor([len(own) for own in picked])
            lists = KeyLists(None, counts, blocks, units, SIZE, blocks.shape[1])
            where = Pages(storage.k, storage.v, tables[layer], lengths, MOST * SIZE)
            residency.bring_in(pool, offers, layer, logical, where, lists)
            for number, kv in enumerate(sequences):
                position = int(lengths[number]) - 1
                for head in range(HEADS):
                    own = picked[number * units + (head if units > 1 else 0)]
                    table = tables[layer, number, head if units > 1 else 0]
                    for half, part in enumerate((storage.k, storage.v)):
                        part[table[position // SIZE], head, position % SIZE] = stored[kv][layer, half, head, 0]
                        want = self.kept[kv][layer, half, head]
                        for block in own.tolist():
                            rows = want[block * SIZE : (block + 1) * SIZE]
                            if not torch.equal(part[table[block], head, : len(rows)], rows):
                                wrong.append(f"layer {layer}, head {head}, block {block} of {kv.id}")
        if wrong and not offers.head[:, 1].any():
            self.wrong += wrong
        return stored

    def host(self, sequences: list[SequenceKV]) -> None:
        """The step as the row path runs it."""
        for kv in sequences:
            kv.reserve(kv.length + 1)
            made = self.random(1)
            for layer, (k, v) in enumerate(made):
                kv.append(layer, k, v)
                assert torch.equal(kv.view(layer).keys(), torch.cat([self.kept[kv][layer, 0], k], 1))
            self.kept[kv] = torch.cat([self.kept[kv], made], 3)

    def forget(self) -> None:
        """What was launched ahead is not asked for."""
        self.done["unasked"] += self.ahead is not None
        self.ahead = None
        self.device.come_back()

    def sound(self, whole: bool = False) -> None:
        """The host's map is the device's, a slot holds one part, and all that is absent lies in the tier; where
        ``whole``, every key is what was stored last."""
        pool = self.pool
        there = pool.host_slots  # which has what is on its way written down
        assert torch.equal(there, pool.slots)
        for number, tiers in enumerate(pool.tiers.each):
            places = pool.map_of(number)
            taken = places[places >= 0].tolist()
            assert (
                len(set(taken))
                == len(taken)
                == pool.storage.num_blocks - 1 - len(tiers._withheld) - pool.free_in(number)
            )
            assert not set(taken) & {tiers.guard, *pool.free_list(number).tolist()}
            assert int(pool._taken[number].sum()) == len(taken)
            for kv, kept in self.kept.items():
                full = kv.block_table[: -(-kept.shape[3] // SIZE)].numpy()
                assert ((places[:, full] >= 0) | (tiers._cell[:, full] > 0)).all()
        held = [kv.block_table for kv in self.kept]
        absent = (there[:, :, torch.cat(held)] < 0).sum() if held else 0
        assert pool.absent == absent
        for kv, kept in self.kept.items() if whole else ():
            for layer in range(LAYERS):
                assert torch.equal(kv.view(layer).keys(), kept[layer, 0])
                assert torch.equal(kv.view(layer).values(), kept[layer, 1])


@pytest.mark.parametrize("apart", [False, True])
def test_a_step_ahead_is_asked_for_or_not(apart):
    steps = Steps(33, apart)
    kv, pool = steps.begin(290), steps.pool
    for _ in range(6):
        assert steps.step([kv])
    assert steps.done["launched ahead"] >= 4
    assert steps.done["asked"] >= 3
    assert steps.ahead is not None
    before, counted = pool.tiers.counts.copy(), vars(steps.counted).copy()
    assert pool.behind is not None
    steps.sound()  # which looks into the map
    moved = pool.tiers.counts.since(before)
    assert moved.hits + moved.misses > 0  # of the step that nobody has asked for
    assert vars(steps.counted) == counted
    assert steps.step([kv])  # it is asked for now, and has long been settled
    own = {name: value - counted[name] for name, value in vars(steps.counted).items()}
    assert own["hits"] + own["misses"] == moved.hits + moved.misses
    if steps.ahead is not None:
        steps.forget()
    before, counted = pool.tiers.counts.copy(), vars(steps.counted).copy()
    steps.device.come_back()
    assert vars(steps.counted) == counted
    steps.sound(whole=True)
    steps.end(kv)
    nothing_left(pool)


@pytest.mark.parametrize("apart", [False, True])
def test_a_step_that_is_short_takes_the_one_behind_it_along(apart):
    steps = Steps(33, apart)
    kv = steps.begin(290)
    for _ in range(3):
        assert steps.step([kv])
    steps.forget()
    for row in steps.pool.tiers.offer()._rows:
        row._spent = 0  # steps took nothing of late, so that a list that is nearly used up may do for two
    assert not steps.step([kv], most=15, then=1)
    assert steps.done["short"] == steps.done["short before"] == 1
    assert steps.ahead is None
    steps.sound(whole=True)
    assert steps.step([kv])  # nothing of what ran short is left
    steps.end(kv)
    nothing_left(steps.pool)


def test_a_sequence_ends_while_a_step_ahead_moves_its_blocks():
    steps = Steps(33, True)
    first, second = steps.begin(164), steps.begin(150)
    for _ in range(12):
        steps.step([first, second])
        if steps.ahead is not None:
            break
    assert steps.ahead is not None
    steps.end(first)
    assert not steps.device._ahead[0]._flights  # it was waited for before a slot was anybody's
    steps.sound()
    third = steps.begin(130)
    steps.sound(whole=True)
    for _ in range(3):
        steps.step([second, third])
    steps.sound(whole=True)
    for kv in (second, third):
        steps.end(kv)
    steps.forget()
    nothing_left(steps.pool)


@pytest.mark.parametrize(
    ("apart", "seed", "replacement"),
    [
        pytest.param(False, 0, "clock", marks=pytest.mark.thorough),
        (True, 1, "clock"),
        pytest.param(True, 2, "lru", marks=pytest.mark.thorough),
        pytest.param(False, 3, "fifo", marks=pytest.mark.thorough),
        pytest.param(True, 4, "fifo", marks=pytest.mark.thorough),
        pytest.param(False, 5, "lru", marks=pytest.mark.thorough),
    ],
)
def test_whatever_comes_between_steps(apart, seed, replacement):
    """Sequences begin, end, grow by the host's rows, are cut back, shared and read, steps want much at once, or come
    for other rows than the one ahead: what is stored stays what it is."""
    steps, rng = Steps(81, apart, seed, replacement), np.random.default_rng(seed)
    living = [steps.begin(int(rng.integers(230, 290))) for _ in range(3)]
    chosen = living[:1]
    for turn in count():
        if turn == 50:
            break
        steps.step(chosen, most=int(rng.choice([1, 2, 18], p=[0.55, 0.4, 0.05])), goes_on=rng.random() < 0.9)
        what = rng.random()
        if what < 0.6:
            continue
        if what < 0.65:
            chosen = [kv for kv in living if rng.random() < 0.6] or living[-1:]
        elif what < 0.74 and len(living) < 5:
            living.append(steps.begin(int(rng.integers(100, 280))))
        elif what < 0.8 and len(living) > 3:
            gone = living.pop(int(rng.integers(len(living))))
            steps.end(gone)
        elif what < 0.86:
            steps.forget()  # as a pass of the host's begins
            steps.host([living[int(rng.integers(len(living)))]])
        elif what < 0.92:
            kv = living[int(rng.integers(len(living)))]
            length = max(20, kv.length - int(rng.integers(1, 20)))
            kv.truncate(length)
            steps.kept[kv] = steps.kept[kv][..., :length, :]
            if steps.ahead is not None and kv in steps.ahead:
                steps.forget()  # its next row is another one
        elif what < 0.96:
            steps.sound()
        else:
            steps.sound(whole=True)
        for kv in [kv for kv in living if kv.length > (MOST - 1) * SIZE - 2]:
            living.remove(kv)
            steps.end(kv)
        if not living:
            living.append(steps.begin(280))
        chosen = [kv for kv in chosen if kv in living] or living[:1]
    steps.sound(whole=True)
    assert min(steps.done[name] for name in ("asked", "unasked")) > 0, steps.done
    assert steps.done["launched ahead"] > 5, steps.done
    for kv in living:
        steps.end(kv)
    steps.forget()
    nothing_left(steps.pool)
