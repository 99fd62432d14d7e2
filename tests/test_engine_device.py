"""The device backend on steps built by hand: what it gives, counts and shows, and what becomes of steps that fail. CPU
tensors, Triton's interpreter, no graphs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import triton_helpers  # noqa: F401  (sets the interpreter up first)
from device_helpers import Once, Sequences, reference
from kv_helpers import move_blocks
from tiny_models import make_checkpoint

from saccade.engine.attention import StepFailedError, Watch
from saccade.engine.device import attention as device_attention
from saccade.engine.device.backend import DeviceBackend
from saccade.engine.device.graphs import COVERED, MOST_GRAPHS, MOST_NEW, Key, StepKinds, rounded_up
from saccade.engine.sampling.choosing import choose_tokens
from saccade.engine.steps.row_sampling import RowSampling
from saccade.engine.steps.step import StepInput
from saccade.engine.watch.clock import Clock
from saccade.engine.watch.layer_stats import LayerStats
from saccade.methods.policy import Policy
from saccade.models.loader import load_model
from saccade.ops.triton import batched_reading, progressive
from saccade.ops.triton.common import kept_zeros

MIXED = [
    "dense",
    "streaming(sinks=2, window=40)",
    "streaming(sinks=0, window=60)",
    "arkvale(budget=96)",
    "arkvale(budget=70, sinks=1, window=1)",
    "quest(budget=64, dense_layers=1)",
    "quest(budget=55, dense_layers=1)",
    "psa(epsilon=0.4, microbatch=1, rank=cuboid)",
    "psa(epsilon=0.9, microbatch=1, rank=cuboid)",
    "locks(budget=64)",
]
LENGTHS = [30, 190, 70, 158, 159, 159, 160, 190, 190, 159]  # where blocks fill


@pytest.fixture(scope="module")
def runner(tmp_path_factory):
    folder = make_checkpoint(
        "llama", tmp_path_factory.mktemp("llama"), max_position_embeddings=2048, head_dim=32, num_hidden_layers=2
    )
    return load_model(folder).runner


def logits_of(results):
    return torch.cat([results[request].logits for request in sorted(results)])


def counted(result) -> dict[int, tuple[LayerStats, dict]]:
    """By layer, what a device counted, as a report adds it up; and the whole."""
    (late,) = result.late.values()
    taken = late.take()
    layers = {layer: LayerStats() for layer in taken.layers}
    for layer, one in taken.layers.items():
        layers[layer].plus(one)
    return layers, taken


def test_rows_of_all_methods_in_one_step_give_what_each_gives_alone(runner):
    """Over steps in which blocks fill, tokens, stored keys and counts are those of the methods' own choices."""
    ours, theirs = (Sequences(runner, MIXED, LENGTHS) for _ in range(2))
    device, wanted = DeviceBackend(runner), {}
    for _ in range(2):
        step = ours.step()
        assert [device.serves(step, number, ours.memories[number]) for number in range(len(step))] == [None] * len(step)
        results = device.run(step, ours.memories)
        expected, context = reference(theirs)
        torch.testing.assert_close(logits_of(results), expected, atol=2e-4, rtol=1e-4)
        for place, stats in context.stats.items():
            wanted.setdefault(place, []).append(stats)
    for number in range(len(MIXED)):
        kv, other = ours.memories[number].kv, theirs.memories[number].kv
        assert kv.length == other.length == LENGTHS[number] + 2
        for layer in range(runner.spec.layers):
            torch.testing.assert_close(kv.view(layer).keys(), other.view(layer).keys(), atol=1e-4, rtol=1e-4)
        layers, taken = counted(results[number + 100])
        assert taken.backends == {"triton": 2 * runner.spec.layers}
        for layer, stats in layers.items():
            parts = wanted[number, layer]
            assert stats.calls == 2
            assert stats.causal == sum(part.causal for part in parts)
            assert stats.pairs().tolist() == sum(part.pairs() for part in parts).tolist()
            assert stats.estimated == sum(part.estimated for part in parts)
            assert stats.retrievals == sum(part.retrievals for part in parts)
            assert stats.estimates == sum(part.estimates for part in parts)
            assert stats.covered == pytest.approx(sum(part.covered for part in parts), abs=1e-4)
            assert stats.least_covered == pytest.approx(min(part.least_covered for part in parts), abs=1e-4)
        assert results[number + 100].late  # what was taken is not counted again
        assert not counted(results[number + 100])[1].layers


@pytest.mark.parametrize("heads_apart", [False, True])
def test_blocks_may_move_between_two_steps(runner, heads_apart):
    """A step looks its blocks up in the pool's map as it runs. Who moves them tells no sequence and no row."""
    ours, theirs = (Sequences(runner, MIXED, LENGTHS, heads_apart=heads_apart) for _ in range(2))
    device = DeviceBackend(runner)
    for _ in range(3):
        results = device.run(ours.step(), ours.memories)
        torch.testing.assert_close(logits_of(results), reference(theirs)[0], atol=2e-4, rtol=1e-4)
        for number in (1, 4, 8):
            move_blocks(ours.pool, ours.memories[number].kv)


def test_rows_whose_blocks_are_not_resident_are_not_served(runner):
    sequences = Sequences(runner, ["dense", "dense"], [70, 70])
    device, step = DeviceBackend(runner), sequences.step()
    sequences.pool.evict(1, [sequences.memories[1].kv.block_table[0].item()])
    assert [device.serves(step, number, sequences.memories[number]) for number in (0, 1)] == [
        None, "some of its KV blocks are not resident",
    ]  # fmt: skip


def test_numbers_are_no_part_of_a_kind_of_step(runner):
    """Whatever their epsilons and budgets, requests share groups, and steps one kind, which one graph would serve."""
    policies = [f"psa(epsilon={share}, microbatch=1, rank=cuboid)" for share in (0.1, 0.7)]
    policies += [f"arkvale(budget={budget})" for budget in (170, 200, 256)]
    device, lengths = DeviceBackend(runner), [190, 70, 300, 290, 50]
    sequences = Sequences(runner, policies, lengths)
    device.run(sequences.step(), sequences.memories)
    others = Sequences(runner, [p.replace("=0.1", "=0.95").replace("=200", "=180") for p in policies], lengths)
    others.pool, others.memories = sequences.pool, sequences.memories
    device.run(others.step(), others.memories)
    assert device.graphs.kinds == 1
    assert device.graphs.recorded == 0
    (kind,) = device.kinds._kinds.values()
    assert [group.rows for group in kind.groups] == [2, 4]


def test_a_larger_step_that_is_recorded_serves_a_smaller_one(runner):
    """Rows come and go. What is left out is padding; who comes often gets a recording of its own."""
    ours, theirs = (Sequences(runner, MIXED, LENGTHS) for _ in range(2))
    device = DeviceBackend(runner)
    device.run(ours.step(), ours.memories)
    (kind,) = device.kinds._kinds.values()
    kind.graph = object()  # nothing is recorded on a CPU; the step runs as if it were
    reference(theirs)
    few = [0, len(MIXED) - 1]
    for times in range(1, COVERED + 2):
        step = ours.step().part(few)
        expected = reference(theirs)[0][few]
        torch.testing.assert_close(logits_of(device.run(step, ours.memories)), expected, atol=2e-4, rtol=1e-4)
        assert len(device.kinds._kinds) == (1 if times <= COVERED else 2)
    exact = DeviceBackend(runner, covers=False)
    exact.run(ours.step(), ours.memories)
    next(iter(exact.kinds._kinds.values())).graph = object()
    exact.run(ours.step().part(few), ours.memories)
    assert len(exact.kinds._kinds) == 2


def test_kinds_that_come_and_go_push_no_recording_out():
    kinds = StepKinds(torch.device("cpu"), True)
    keys = [Key(((form, 1),), 1024) for form in range(MOST_GRAPHS + 3 * MOST_NEW)]
    for key in keys[: MOST_GRAPHS + 2]:
        kinds.of(key, ()).graph = object()  # type: ignore[assignment]
    for key in keys[MOST_GRAPHS + 2 :]:
        kinds.of(key, ())
    assert kinds.of(keys[2], ()).graph is not None
    assert kinds.stats.recorded == MOST_GRAPHS
    assert kinds.recorded == (MOST_GRAPHS, MOST_GRAPHS)
    assert kinds.stats.kinds == MOST_GRAPHS + MOST_NEW
    assert kinds.of(keys[-1], ()) is kinds.of(keys[-1], ())
    assert keys[0] not in kinds._kinds


def test_few_lengths_occur():
    """Powers of two, and eighths of them where keys are many: never an eighth too long there."""
    lengths, found = [1, 1024, 1025, 40_000, 65_536, 65_537, 98_304, 131_072, 131_073, 250_000], []
    for length in lengths:
        found.append(rounded_up(length))
        assert found[-1] >= length
        assert rounded_up(found[-1]) == found[-1]
        assert length <= 65_536 or found[-1] <= 1.125 * length
    assert found == [1024, 1024, 2048, 65_536, 65_536, 73_728, 98_304, 131_072, 147_456, 262_144]
    keys, every = 1024, []
    while keys <= 1 << 20:
        every.append(keys)
        keys = rounded_up(keys + 1)
    assert len(every) == 7 + 4 * 8


def test_a_row_that_another_request_takes_over_keeps_what_it_has_counted(runner):
    sequences = Sequences(runner, ["psa(epsilon=0.5, microbatch=1, rank=cuboid)"] * 2, [222, 190])
    device = DeviceBackend(runner)
    both = device.run(sequences.step(), sequences.memories)
    alone = sequences.step()
    second = device.run(alone.part([1]), sequences.memories)  # in the row that was the first's
    assert second[101].late == both[101].late
    assert counted(both[100])[0][0].calls == 1
    layers, _ = counted(second[101])
    assert layers[0].calls == 2
    again = Sequences(runner, ["psa(epsilon=0.5, microbatch=1, rank=cuboid)"] * 2, [222, 190])
    steps = [reference(again)[1] for _ in range(2)]
    for layer in range(2):
        wanted = sum(context.stats[1, layer].pairs() for context in steps)
        assert layers[layer].pairs().tolist() == wanted.tolist()


def test_results_are_what_the_request_wants(runner):
    sequences = Sequences(runner, ["dense"] * 2, [40, 50])
    device = DeviceBackend(runner)
    both = device.run(sequences.step(), sequences.memories)
    likeliest = device.run(sequences.step(greedy=True), sequences.memories)
    assert both[100].logits.shape == (1, runner.spec.vocab_size)
    assert both[100].tokens is None
    assert likeliest[100].logits is None
    again = Sequences(runner, ["dense"] * 2, [40, 50])
    reference(again)
    assert [likeliest[100 + row].tokens[0] for row in range(2)] == reference(again)[0].argmax(-1).tolist()
    nothing = device.run(sequences.step(wants_logits=False), sequences.memories)
    assert nothing[100].logits is None
    assert nothing[100].tokens is None


def test_logits_that_are_not_finite_go_to_the_sampler(runner):
    sequences = Sequences(runner, ["dense"], [40])
    for layer in range(runner.spec.layers):
        view = sequences.memories[0].kv.view(layer)
        view.write(0, view.keys(), view.values() * float("nan"))
    result = DeviceBackend(runner).run(sequences.step(greedy=True), sequences.memories)[100]
    assert result.tokens is None
    assert not torch.isfinite(result.logits).any()


@pytest.mark.parametrize("asked", [RowSampling(seed=5, logprobs=2), RowSampling(0.0, repetition_penalty=1.5)])
def test_tokens_are_chosen_beside_the_logits(runner, asked):
    sequences = Sequences(runner, ["dense"] * 2, [40, 50])
    if asked.repetition_penalty != 1.0:
        asked = asked._replace(seen=torch.arange(40))
    plain = DeviceBackend(runner).run(sequences.step(), sequences.memories)
    again = Sequences(runner, ["dense"] * 2, [40, 50])
    results = DeviceBackend(runner).run(again.step(sampling=asked), again.memories)
    logits = torch.cat([plain[100 + row].logits for row in range(2)])
    tokens, logprobs = choose_tokens(logits, [asked] * 2, [41, 51])
    for row in range(2):
        assert results[100 + row].logits is None
        assert results[100 + row].tokens == [tokens[row]]
        assert results[100 + row].logprobs == (None if asked.logprobs is None else [logprobs[row]])
    again = Sequences(runner, ["dense"] * 2, [40, 50])
    for layer in range(runner.spec.layers):
        view = again.memories[0].kv.view(layer)
        view.write(0, view.keys(), view.values() * float("nan"))
    results = DeviceBackend(runner).run(again.step(sampling=asked), again.memories)
    assert results[100].tokens is None
    assert not torch.isfinite(results[100].logits).any()
    assert results[101].tokens == [tokens[1]]


def test_who_is_not_served_is_told_why(runner):
    device = DeviceBackend(runner)

    def reason(policy: str, **changes) -> str | None:
        sequences = Sequences(runner, [policy], [40])
        step = sequences.step()
        step = replace(step, scheduled=(step.scheduled[0]._replace(**changes),))
        return device.serves(step, 0, sequences.memories[0])

    assert reason("dense") is None
    assert reason("dense", stop=43) == "only single decode rows are batched"
    assert reason("dense", phase="prefill") is None
    assert "follow others" in reason("dense", phase="prefill", start=0)
    assert "at most 128 rows" in reason("dense", phase="prefill", start=1, stop=130)
    assert "log-probabilities" in reason("dense", phase="prefill", scored=((40, 5),))
    for policy in ("streaming(sinks=1, window=4)", "dense+psaw(start_layer=1)", "dense+etf"):
        assert "read everything" in reason(policy, phase="prefill")
    assert "log-probabilities" in reason("dense", scored=((40, 5),))
    device.watch.logits = lambda request, position, row: None
    assert reason("dense") is None
    own, device.lead = device.lead, object()  # that of several ranks
    assert reason("dense") == "an observer looks at the logits of decode rows, of which the other ranks know nothing"
    device.lead = own
    device.watch.logits = None
    assert "window" in reason("arkvale+psaw(start_layer=1)")
    assert "share of the weight" in reason("topp")
    assert "no device plan" in reason("quest(current=competes)")
    assert "not of 8" in reason("arkvale(block_size=8)")
    assert "units" in reason("quest(unit=q_head, dense_layers=0)")
    assert reason("psa(rank=moments, rest=estimate)") is None
    assert reason("psa(rank=keys, rest=estimate)") is None
    assert "not of 8" in reason("psa(rank=keys, rest=estimate, block_size=8)")
    assert "each KV head" in reason("psa(rank=keys, rest=estimate, unit=layer)")
    assert "each KV head" in reason("psa(unit=layer, rank=cuboid)")
    assert "microbatch" in reason("psa(microbatch=17, rank=cuboid)")
    sequences = Sequences(runner, ["dense"], [40])
    sequences.memories[0].states[1] = object()
    assert "state" in device.serves(sequences.step(), 0, sequences.memories[0])


def test_more_requests_than_a_step_holds_take_several(runner):
    sequences = Sequences(runner, ["dense"], [40])
    step = sequences.step()
    step = StepInput(step.scheduled * 140, step.input_ids, step.positions, tuple(range(141)))
    parts = DeviceBackend(runner).parts(step, [3, *range(10, 140)], sequences.memories)
    assert [len(part) for part in parts] == [64, 64, 3]
    assert [number for part in parts for number in part] == [3, *range(10, 140)]


@pytest.mark.parametrize("error", [ZeroDivisionError("it broke"), torch.cuda.OutOfMemoryError("no memory")])
def test_a_step_that_fails_is_taken_back_alone(runner, monkeypatch, error):
    """In the middle of a layer, after kernels have left words for those that did not run: the step then gives, tried
    again, what it gives in one go."""
    policies, lengths = (
        ["psa(epsilon=0.4, microbatch=1, rank=cuboid)", "psa(epsilon=0.8, microbatch=1, rank=cuboid)"],
        [190, 222],
    )
    ours, theirs = (Sequences(runner, policies, lengths) for _ in range(2))
    device, step = DeviceBackend(runner), ours.step()
    monkeypatch.setattr(progressive, "merge", Once(progressive.merge, error, at=2))
    with pytest.raises(StepFailedError, match=str(error)):
        device.run(step, ours.memories)
    assert [memory.kv.length for memory in ours.memories.values()] == lengths
    assert not kept_zeros(torch.device("cpu"), 1).any()
    results = device.run(step, ours.memories)
    expected, context = reference(theirs)
    torch.testing.assert_close(logits_of(results), expected, atol=2e-4, rtol=1e-4)
    for row in range(2):
        layers, _ = counted(results[100 + row])
        for layer, stats in layers.items():
            assert stats.pairs().tolist() == context.stats[row, layer].pairs().tolist()
            assert stats.covered == pytest.approx(context.stats[row, layer].covered, abs=1e-4)


def test_a_step_whose_end_fails_is_taken_back(runner, monkeypatch):
    """Rows are counted while the device works; where waiting for it fails, they are not counted, nor is a block that
    this step filled."""
    policies, lengths = ["quest(budget=64, dense_layers=1)", "streaming(sinks=2, window=40)"], [191, 70]
    ours, theirs = (Sequences(runner, policies, lengths) for _ in range(2))
    device, step = DeviceBackend(runner), ours.step()
    with monkeypatch.context() as patched:
        patched.setattr("saccade.engine.device.backend.fetch_tokens", Once(None, ZeroDivisionError("lost"), at=1))
        with pytest.raises(StepFailedError, match="lost"):
            device.run(step, ours.memories)
    assert [memory.kv.length for memory in ours.memories.values()] == lengths
    for taken in (device.run(step, ours.memories), device.run(ours.step(), ours.memories)):
        torch.testing.assert_close(logits_of(taken), reference(theirs)[0], atol=2e-4, rtol=1e-4)
    for row in range(2):
        layers, late = counted(taken[100 + row])
        assert late.backends == {"triton": 2 * runner.spec.layers}
        assert {stats.calls for stats in layers.values()} == {2}
        assert {stats.causal for stats in layers.values()} == {2 * lengths[row] + 3}


def test_a_kind_of_step_that_fails_three_times_is_not_tried_again(runner, monkeypatch):
    sequences = Sequences(runner, ["dense", "streaming(sinks=2, window=30)"], [40, 50])
    device, step, calls = DeviceBackend(runner), sequences.step(), []
    monkeypatch.setattr(batched_reading, "band_lists", lambda *_: calls.append(1) or 1 / 0)
    for _ in range(5):
        with pytest.raises(StepFailedError, match="ZeroDivisionError"):
            device.run(step, sequences.memories)
    assert len(calls) == 3
    with pytest.raises(StepFailedError, match=r"failed 3 times .* not tried again"):
        device.run(step, sequences.memories)
    assert device.run(step.part([0]), sequences.memories)[100].logits is not None  # another kind


def test_running_out_of_memory_gives_no_kind_of_step_up(runner, monkeypatch):
    sequences = Sequences(runner, ["dense"], [40])
    device, step = DeviceBackend(runner), sequences.step()
    with monkeypatch.context() as patched:
        patched.setattr(device_attention, "append_rows", Once(None, torch.cuda.OutOfMemoryError("no memory"), at=1))
        for _ in range(5):
            device_attention.append_rows.left = 1
            with pytest.raises(StepFailedError, match="no memory"):
                device.run(step, sequences.memories)
    assert device.run(step, sequences.memories)[100].logits is not None


def test_an_observer_sees_what_every_row_reads(runner):
    ours, theirs = (Sequences(runner, MIXED, LENGTHS) for _ in range(2))
    calls = {}

    def look(call):
        calls[call.request - 100, call.layer] = call

    device = DeviceBackend(runner, watch=Watch(observer=look))
    results = device.run(ours.step(), ours.memories)
    expected, context = reference(theirs)
    torch.testing.assert_close(logits_of(results), expected, atol=2e-4, rtol=1e-4)
    assert calls.keys() == context.read.keys()
    for place, read in context.read.items():
        call = calls[place]
        assert type(call.selection) is type(read)
        assert call.selection.shape == read.shape
        assert torch.equal(call.selection.mask(), read.mask())
        call.selection.check()
        assert call.kv.length == read.shape.k_len
        assert torch.isfinite(call.out).all()
    assert counted(results[103])[1].backends == {"triton (eager)": runner.spec.layers}


def test_an_observer_that_fails_fails_its_request_alone(runner):
    sequences = Sequences(runner, ["dense"] * 2, [40, 50])

    def look(call):
        if call.request == 101:
            raise ValueError("I will not look")

    device = DeviceBackend(runner, watch=Watch(observer=look))
    results = device.run(sequences.step(), sequences.memories)
    assert results[100].error is None
    assert results[100].logits is not None
    assert results[101].error == "layer 0, decode: ValueError: I will not look"
    assert results[101].logits is None


def test_a_clock_times_the_same_kernels(runner):
    clock = Clock()
    sequences = Sequences(runner, ["arkvale(budget=96)"], [150])
    DeviceBackend(runner, watch=Watch(clock=clock)).run(sequences.step(), sequences.memories)
    assert clock.seconds.keys() == {"selection", "attention"}
    assert min(clock.seconds.values()) > 0


def test_methods_and_their_policies_are_known_once(runner):
    """A plan is made once for equal methods, so that rows know it again."""
    plans = DeviceBackend(runner)._plans
    one, same, other = map(Policy.parse, ("arkvale(budget=64)", "arkvale(budget=64)", "arkvale"))
    assert one.decode is not same.decode
    assert plans.of(one, 100) is plans.of(same, 200) is plans.of(one, 100)
    assert plans.of(one, 100) is not plans.of(other, 100)
