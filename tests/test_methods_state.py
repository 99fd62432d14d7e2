"""Every decode method's state is forked, taken back, moved, saved and loaded without a trace: what follows equals a run
in which it never happened, bit for bit. The methods are those of the registry, by the matrix in helpers.py."""

from __future__ import annotations

import json
from typing import Any

import pytest
import safetensors.torch
import torch
from covering import spread
from method_matrix import MATRIX, MethodCase
from streams import LAYERS, PROMPT, Stream, same

from saccade.methods.base import Method
from saccade.methods.history import StateHistory
from saccade.methods.policy import parse_method
from saccade.methods.registry import METHODS
from saccade.methods.state import fork, load, save, snapshot, to

# What the matrix leaves out of a method's state.
MORE = (
    "lfps(k=40, running_means=true)",
    "lfps(k=40, history=keep, slash_shift_on_read=false, bypass_shift=false, epsilon=0.02, sinks=2)",
    "lfps(k=40, unit=kv_head, bypass_shift=false, epsilon=0.01)",
    "cis(k=30, sinks=4, local=8, tau=0.3, follow=2)",
    "cis(k=0.1, sinks=4, local=8, tau=0.0, s=5, align=position)",
    "hshare(heavy=30, sinks=4, local=8, source=prompt, rows=8, layer_share=0.5, every=3)",
    "double_sparsity(dense_upto=0, k=48, source=prompt, dense_layers=1)",
    "loopserve(budget=40, first=2, n_d=3, observed=2)",
)


def of_case(case: MethodCase) -> list[Method]:
    """The settings that decode; of a method that keeps no state the first one."""
    methods = [method for method in case.methods() if "decode" in method.phases]
    return methods if case.type.begin is not Method.begin else methods[:1]


METHODS_HERE = [*(method for case in MATRIX for method in of_case(case)), *map(parse_method, MORE)]
EVERY = pytest.mark.parametrize("method", METHODS_HERE, ids=lambda method: method.text)


def each_with(name: str, settings: list[Any]) -> pytest.MarkDecorator:
    """Every method, with one of the settings in turn; with the others in ``make test-all``."""
    return pytest.mark.parametrize(
        ("method", name), spread(METHODS_HERE, settings), ids=lambda one: getattr(one, "text", None)
    )


GOOD, BAD, OTHER = 0, 1, 2  # texts: the sequence's own, what is rejected, and another way to go on


def test_every_decode_method_is_here():
    assert {method.name for method in METHODS_HERE} == {
        name for name, kind in METHODS.items() if "decode" in kind.phases
    }


@each_with("rows", ["one by one", "layer by layer"])
def test_after_a_rejection_a_stream_equals_one_that_never_saw_it(method, rows):
    """Twice: drafts whose first rows are good and then bad are cut off where they went wrong."""
    plain, drafted, history = Stream(method), Stream(method), StateHistory()
    expected = [plain.step(GOOD) for _ in range(3)]
    got = [drafted.step(GOOD) for _ in range(3)]
    for good, bad in ((2, 3), (0, 4)):
        start = drafted.length
        history.mark(start, drafted.states)
        for source, count in ((GOOD, good), (BAD, bad)):
            if rows == "one by one":
                for _ in range(count):
                    step = drafted.step(source)
                    history.mark(drafted.length, drafted.states)
                    got += [step] if source == GOOD else []
            else:
                steps = drafted.draft(source, count, history)
                got += steps if source == GOOD else []
        drafted.rollback(start + good, history)
        expected += [plain.step(GOOD) for _ in range(good)]
        assert same(drafted.states, plain.states)
        expected += [plain.step(GOOD) for _ in range(2)]
        got += [drafted.step(GOOD) for _ in range(2)]
    assert drafted.length == plain.length == PROMPT + 9
    assert got == expected
    assert same(drafted.states, plain.states)


@each_with("after", [0, 4])
def test_a_fork_and_its_original_go_their_own_ways(method, after):
    original = Stream(method)
    for _ in range(after):
        original.step(GOOD)
    ways = {GOOD: original, OTHER: original.copied(fork)}
    assert same(ways[OTHER].states, original.states)
    steps: dict[int, list[Any]] = {GOOD: [], OTHER: []}
    for _ in range(4):
        for source, stream in ways.items():
            steps[source].append(stream.step(source))
    for source, stream in ways.items():
        alone = Stream(method)
        for _ in range(after):
            alone.step(GOOD)
        assert [alone.step(source) for _ in range(4)] == steps[source]
        assert same(alone.states, stream.states)


def written_and_read(value: Any) -> Any:
    """Through the bytes of a safetensors file and of JSON."""
    tensors, data = save(value)
    return load(safetensors.torch.load(safetensors.torch.save(tensors)), json.loads(json.dumps(data)))


def moved(value: Any) -> Any:
    return to(value, "cpu")


@each_with("way", [(written_and_read, 0), (written_and_read, 4), (moved, 4)])
def test_a_state_goes_on_as_if_it_had_never_left(method, way):
    how, after = way
    plain, stream = Stream(method), Stream(method)
    for _ in range(after):
        assert plain.step(GOOD) == stream.step(GOOD)
    back = stream.copied(how)
    assert same(back.states, plain.states)
    assert [back.step(GOOD) for _ in range(4)] == [plain.step(GOOD) for _ in range(4)]
    assert same(back.states, plain.states)


@EVERY
def test_a_state_that_holds_a_length_goes_back_to_it_by_itself(method):
    stream = Stream(method)
    before = {PROMPT: fork(stream.states)}
    for _ in range(20):  # past the next tile of labels
        stream.step(GOOD)
        before[stream.length] = fork(stream.states)
    for length, states in before.items():
        for layer, state in enumerate(fork(stream.states)):
            if state is None or not state.holds(length):
                continue
            state.truncate(length)
            assert same(state, states[layer])
    for state in stream.states:
        assert state is None or not state.holds(PROMPT - 1)


@EVERY
def test_what_a_prefill_noted_is_copied_and_saved(method):
    stream = Stream(method)
    for watched in stream.watched:
        for copy in (fork(watched), snapshot(watched), to(watched, "cpu"), written_and_read(watched)):
            assert same(copy, watched)
    if method.watches:
        assert len(stream.watched) == LAYERS
        assert None not in stream.watched


@EVERY
def test_a_fork_shares_nothing_that_is_written_to(method):
    """Steps of the original leave a fork's tensors as they were: those that both share among them."""
    stream = Stream(method)
    stream.step(GOOD)
    copies = [fork(stream.states), snapshot(stream.states)]
    before = [save(copy) for copy in copies]
    for _ in range(4):
        stream.step(BAD)
    for copy, (tensors, data) in zip(copies, before):
        now, same_data = save(copy)
        assert same_data == data
        assert all(torch.equal(now[name], tensor) for name, tensor in tensors.items())
