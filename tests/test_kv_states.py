"""Slots of states: what is in one is what the sequence that goes on from it has seen, whoever took whose."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch

from saccade.errors import CapacityError, SaccadeError
from saccade.kv.sequence_states import EVERY, SequenceStates
from saccade.kv.states import StateFormat, StatePart, StatePool

FORMAT = StateFormat(2, (StatePart("conv0", (3,), torch.float32),))


def test_the_least_useful_snapshot_goes_first():
    pool = StatePool(FORMAT, 3)
    one, other = SequenceStates(pool), SequenceStates(pool)

    def run(states: SequenceStates, start: int, stop: int, keep: bool = True) -> None:
        states.pin(start)
        states.begin(start)
        pool.tensors["conv0"][:, states.slot] += stop - start
        states.end(stop, stop - start, keep)

    run(one, 0, 100)
    run(one, 100, 110)
    one.rest()
    assert one.snapshots == (100, 110)
    run(other, 0, 50)  # the third slot
    run(other, 50, 60)  # takes that after 110 tokens: 10 would be computed again, of the others 100 and 50
    assert (one.snapshots, pool.given_up) == ((100,), 1)
    assert pool.tensors["conv0"][0, other.slot].tolist() == [60.0] * 3
    assert 110 not in one
    assert 100 in one
    assert one.save(100)["conv0"].tolist() == [[100.0] * 3] * 2
    one.truncate(99)
    other.truncate(0)
    assert pool.used == 0


def test_all_states_in_use_is_an_error():
    pool = StatePool(FORMAT, 1)
    one, other = SequenceStates(pool), SequenceStates(pool)
    one.pin(0)
    one.begin(0)
    with pytest.raises(CapacityError, match="all 1 states are in use"):
        other.begin(0)


class Talk:
    """A sequence whose state is a hash of its tokens, as one that steps change in place."""

    def __init__(self, pool: StatePool, states: SequenceStates | None = None, tokens: list[int] | None = None) -> None:
        self.pool, self.tokens = pool, [] if tokens is None else tokens
        self.states = SequenceStates(pool) if states is None else states

    @staticmethod
    def after(tokens: list[int]) -> float:
        held = 0.0
        for token in tokens:
            held = (held * 31 + token) % 8191
        return held

    def change(self, slot: int, tokens: list[int]) -> None:
        part = self.pool.tensors["conv0"]
        for token in tokens:
            part[:, slot] = (part[:, slot] * 31 + token) % 8191

    def step(self, more: list[int], breaks: bool, keep: bool, inner: int) -> None:
        start = self.states.before(len(self.tokens))
        del self.tokens[start:]
        self.states.truncate(start)
        self.states.pin(start)
        self.states.begin(start, keep)
        slot = self.states.slot
        assert slot is not None
        assert self.pool.tensors["conv0"][0, slot, 0] == self.after(self.tokens)
        if inner:
            self.states.leave(start + inner)
        if breaks:
            self.change(slot, more[:1])
            self.states.truncate(start)
            return
        self.change(slot, more[:inner])
        if self.states.inner is not None:
            self.pool.copy(slot, self.states.inner[1])
        self.change(slot, more[inner:])
        self.tokens += more
        self.states.end(len(self.tokens), len(more), keep)

    def move(self, token: int, times: int, fails: bool, ahead: bool) -> None:
        """A step of a device, which leaves the state as it was until it holds; ``ahead``: the next one was launched."""
        start = self.states.before(len(self.tokens))
        del self.tokens[start:]
        self.states.truncate(start)
        self.states.pin(start)
        self.states.begin(start)
        self.states.double()
        slot, spare = self.states.slot, self.states.spare
        if spare is None:
            assert self.pool.pinned == self.pool.slots
            self.states.truncate(start)
            return
        assert slot is not None
        assert not self.pool.is_shared(spare)
        self.pool.copy(slot, spare)
        self.change(spare, [token] * times)
        if fails:
            assert self.pool.tensors["conv0"][0, slot, 0] == self.after(self.tokens)
            self.states.truncate(start)
            return
        if ahead:
            self.change(slot, [1])  # what the step after this one writes, which nobody asks for
        self.states.moved(times)
        self.tokens += [token] * times
        self.states.end(start + 1, 1, keep=False)
        assert len(self.tokens) in self.states

    def check(self) -> None:
        for length in self.states.snapshots:
            held = self.states.save(length)
            assert held is not None
            assert held["conv0"][0, 0] == self.after(self.tokens[:length])


@pytest.mark.parametrize("slots", [4, 7, 12])
def test_states_are_of_the_tokens_that_they_stand_after(slots):
    rng, pool = random.Random(slots), StatePool(FORMAT, slots)
    talks = [Talk(pool) for _ in range(3)]
    for _ in range(600):
        talk = rng.choice(talks)
        done = rng.random()
        if done < 0.3:
            talk.move(rng.randrange(100), rng.randrange(1, 4), rng.random() < 0.2, rng.random() < 0.5)
        elif done < 0.6:
            more = [rng.randrange(100) for _ in range(rng.randrange(1, 9))]
            inner = rng.randrange(1, len(more)) if len(more) > 1 and rng.random() < 0.3 else 0
            talk.step(more, rng.random() < 0.1, rng.random() < 0.4, inner)
        elif done < 0.75:
            length = rng.randrange(len(talk.tokens) + 1)
            talk.states.truncate(length)
            del talk.tokens[length:]
        elif done < 0.9:
            talk.states.rest()
        else:
            at = rng.choice(talks)
            length = None if rng.random() < 0.5 else rng.randrange(len(talk.tokens) + 1)
            made = Talk(pool, talk.states.fork(length), talk.tokens[:length])
            if at is not talk:
                at.states.truncate(0)
                talks[talks.index(at)] = made
            else:
                made.states.truncate(0)
        for one in talks:
            one.check()
        assert pool.used <= slots
    assert pool.given_up > 0
    for one in talks:
        one.states.truncate(0)
    assert (pool.used, pool.pinned) == (0, 0)


def test_what_can_be_spared_goes_where_others_need_it():
    pool = StatePool(FORMAT, 3)
    one, other, third = (SequenceStates(pool) for _ in range(3))
    for states in (one, other):
        states.pin(0)
        states.begin(0)
    one.double()
    other.double()
    assert one.spare is not None
    assert other.spare is None
    third.pin(0)
    third.begin(0)
    assert one.spare is None
    one.double()
    assert one.spare is None
    for states in (one, other, third):
        states.truncate(0)
    assert (pool.used, pool.pinned) == (0, 0)


def test_snapshots_lie_no_further_apart_than_said():
    pool = StatePool(FORMAT, 40)
    states, at, rng = SequenceStates(pool), 0, random.Random(0)
    while at < 6 * EVERY:
        rows = rng.choice((1, 64, 512, 1000, 4096))
        states.pin(at)
        states.begin(at)
        at += rows
        states.end(at, rows, keep=False)
    there = (0, *states.snapshots)
    # Steps of unlike lengths: one more than the next could be foreseen to take.
    assert max(after - before for before, after in pairwise(there)) <= 2 * EVERY
    states.truncate(0)
    for chunk in (64, 1000, 4096):
        at = 0
        while at < 5 * EVERY:
            states.pin(at)
            states.begin(at)
            at += chunk
            states.end(at, chunk, keep=False)
        there = (0, *states.snapshots)
        assert max(after - before for before, after in pairwise(there)) <= EVERY
        states.truncate(0)
    with pytest.raises(SaccadeError, match="no state of its layers stands after 7 tokens"):
        states.pin(7)


def test_what_is_loaded_has_to_be_of_the_format():
    pool = StatePool(FORMAT, 2)
    states = SequenceStates(pool)
    states.load(5, {"conv0": torch.full((2, 3), 4.0)})
    assert states.before(9) == 5
    assert states.save(5)["conv0"].unique().tolist() == [4.0]
    for wrong in ({}, {"conv0": torch.zeros(2, 4)}, {"conv0": torch.zeros(2, 3, dtype=torch.float64)}):
        with pytest.raises(SaccadeError, match="a state"):
            states.load(6, wrong)
