"""States in general, by a made-up one: what copies share, what is written, and what is refused."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from saccade.errors import SaccadeError
from saccade.methods.history import StateHistory
from saccade.methods.state import MethodState, fork, load, save, snapshot, to


@dataclass
class Inner(MethodState):
    counts: Tensor
    name: str = "x"


@dataclass
class Everything(MethodState):
    """``sums`` is written to, ``sets`` replaced, ``log`` grows; the rest is what else a state may hold."""

    version: ClassVar[int] = 3
    replaced: ClassVar[frozenset[str]] = frozenset({"sets"})
    grown: ClassVar[frozenset[str]] = frozenset({"log"})

    sums: Tensor
    sets: list[Tensor]
    log: Tensor
    inner: Inner
    pair: tuple[int, Tensor | None] = (1, None)
    by_name: dict[str, float] = field(default_factory=dict)
    flag: bool = False
    missing: None = None


def made() -> Everything:
    inner = Inner(torch.tensor([1, 2], dtype=torch.int16))
    sets = [torch.tensor([1.5]), torch.tensor([[True, False]])]
    log = torch.zeros(4, 2).T  # not contiguous
    pair, numbers = (7, torch.tensor(2.0, dtype=torch.bfloat16)), {"a": 0.1, "b": -1e300}
    return Everything(torch.ones(3), sets, log, inner, pair, numbers, True)


def test_copies_share_what_is_never_written_to_and_nothing_else():
    state = made()
    for copied, shares_log in ((fork, False), (snapshot, True), (MethodState.fork, False)):
        other = copied(state)
        assert type(other) is Everything
        assert other.sets is not state.sets
        assert other.inner is not state.inner
        assert other.sets[0] is state.sets[0]
        assert (other.log is state.log) == shares_log
        state.sums[0], state.inner.counts[0] = 5.0, 9
        state.sets[1] = torch.tensor([3])
        assert other.sums[0] == 1.0
        assert other.inner.counts[0] == 1
        assert other.sets[1].dtype == torch.bool
        state = made()


def test_a_state_is_written_as_tensors_and_json():
    state = made()
    tensors, data = save([None, state, torch.arange(2)])
    assert set(tensors) == {"1.sums", "1.sets.0", "1.sets.1", "1.log", "1.inner.counts", "1.pair.1", "2"}
    assert all(tensor.is_contiguous() for tensor in tensors.values())
    state.sums += 1  # what was saved stays
    nothing, again, numbers = load(tensors, json.loads(json.dumps(data)))
    assert nothing is None
    assert numbers.tolist() == [0, 1]
    assert again.sums.tolist() == [1.0, 1.0, 1.0]
    assert again.pair[0] == 7
    assert again.pair[1].dtype == torch.bfloat16
    assert again.inner.counts.tolist() == [1, 2]
    assert (again.by_name, again.flag, again.missing, again.inner.name) == ({"a": 0.1, "b": -1e300}, True, None, "x")
    assert [part.tolist() for part in again.sets] == [[1.5], [[True, False]]]


def test_plain_values_alone_are_saved_too():
    for value in (None, 3, "text", [1, (2.5, None)], {"a": [True]}):
        assert load(*save(value)) == value


def test_what_this_build_does_not_know_is_refused():
    tensors, data = save(made())
    with pytest.raises(SaccadeError, match="saved as Everything version 2; this build knows version 3"):
        load(tensors, data | {"version": 2})
    with pytest.raises(SaccadeError, match=r"saved as Nobody version 3; this build knows no such state, only .*Inner"):
        load(tensors, data | {"state": "Nobody"})
    with pytest.raises(SaccadeError, match=r"the tensor 'sums' is missing"):
        load({}, data)
    fewer = {name: part for name, part in data["fields"].items() if name != "flag"}
    with pytest.raises(SaccadeError, match="a saved Everything has the fields"):
        load(tensors, data | {"fields": fewer})
    for damaged in ({"what": 1}, [1, 2], {"list": [{"odd": 2}]}):
        with pytest.raises(SaccadeError, match="is not what a state is saved as"):
            load({}, damaged)


def test_what_a_state_cannot_hold_is_refused():
    state = Inner(torch.ones(1), name=object())  # type: ignore[arg-type]
    for act in (fork, save, snapshot, lambda one: to(one, "cpu")):
        with pytest.raises(TypeError, match="a method state cannot hold a object"):
            act(state)


def test_two_states_cannot_share_a_name():
    with pytest.raises(TypeError, match="a method state named Inner already"):
        type("Inner", (MethodState,), {})


def test_a_state_that_cannot_go_back_says_so():
    with pytest.raises(SaccadeError, match="a Inner cannot go back to 5 tokens by itself"):
        Inner(torch.ones(1)).truncate(5)


def test_states_move_to_a_device():
    moved = to(made(), "meta")
    assert moved.sums.device.type == moved.inner.counts.device.type == moved.pair[1].device.type == "meta"
    assert to([None, torch.ones(1)], "meta")[1].device.type == "meta"


def test_a_history_gives_back_what_was_marked():
    history, states = StateHistory(), [made(), None]
    for length in (10, 11, 12):
        history.mark(length, states)
        states[0].sums += 1
    assert history.lengths == [10, 11, 12]
    assert history.at(11, 2)[0].sums.tolist() == [2.0] * 3
    assert history.at(13, 2) == [None, None]
    back = history.rollback(11, 2)
    assert back[0].sums.tolist() == [2.0] * 3
    assert back[1] is None
    assert history.lengths == [10]
    back[0].sums += 100  # goes on
    assert history.rollback(10, 2)[0].sums.tolist() == [1.0] * 3
    assert history.lengths == []


def test_a_history_knows_only_what_was_marked():
    history = StateHistory()
    history.mark_layer(10, 0, None)
    for length, missing in ((10, r"\[1\]"), (9, r"\[0, 1\]")):
        with pytest.raises(SaccadeError, match=rf"no mark of layers {missing} at {length} tokens.*lengths: \[10\]"):
            history.rollback(length, 2)
    history.clear()
    assert history.lengths == []
