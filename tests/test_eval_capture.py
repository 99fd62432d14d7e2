"""Watching runs: what is captured is what ran, and true attention is what transformers computes."""

from __future__ import annotations

import pytest
import torch
from engine_helpers import make
from eval_calls import make_call
from helpers import KINDS, brute_force, generator, planted_heads, random_selection
from tiny_models import make_checkpoint, one_thread, oracle, random_ids  # noqa: F401

from saccade import LLM
from saccade.engine.observing import observing
from saccade.engine.watch.truth import selected_rows, true_rows
from saccade.errors import RequestError, SaccadeError
from saccade.eval.capture import capture, watch
from saccade.selection import Blocks, Shape

FAMILIES = ("llama", "mistral", "gemma2", "gpt_oss", "granite")


def weights_of(call) -> torch.Tensor:
    """[heads, rows, n], the blocks of true_rows put together again."""
    out = torch.full((call.q.shape[0], call.q.shape[1], call.kv.length), torch.nan)
    for true in true_rows(call, entries=1000):
        out[true.heads, true.rows] = true.weights()
    return out


@torch.inference_mode()
def eager_weights(folder, ids) -> list[torch.Tensor]:
    """[layers] of [heads, n, n], as transformers' eager attention gives them."""
    found = oracle(folder)(input_ids=torch.tensor([ids]), use_cache=False, output_attentions=True).attentions
    return [layer[0] for layer in found]


@pytest.mark.parametrize("family", FAMILIES)
def test_true_attention_is_transformers_own(family, tmp_path):
    """Chunked prefill and decode steps, GQA, windows, soft-capping and sinks."""
    folder = make_checkpoint(family, tmp_path)
    ids = random_ids(61, seed=5)
    captured = capture(make(folder, chunk=23), ids, "dense", max_tokens=6, ignore_eos=True)
    everything = ids + captured.output.outputs[0].token_ids[:-1]
    expected = eager_weights(folder, everything)
    assert len(captured.calls) == len(expected) * (3 + 5)
    for call in captured.calls:
        shape = call.selection.shape
        rows = slice(shape.q_start, shape.q_start + shape.q_len)
        torch.testing.assert_close(weights_of(call), expected[call.layer][:, rows, : shape.k_len], atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("policy", ["streaming(sinks=2, window=9)", "topk(k=7, prefill=true)"])
def test_a_sparse_run_has_the_same_truth_in_its_first_layer(policy, tiny_llama):
    """What the first layer is given does not depend on what anybody selects."""
    ids = random_ids(50, seed=6)
    captured = capture(make(tiny_llama), ids, policy, layers=[0])
    (call,) = captured.calls
    assert call.selection.density() < 0.7
    torch.testing.assert_close(weights_of(call), eager_weights(tiny_llama, ids)[0], atol=2e-5, rtol=1e-4)


def test_what_is_captured_is_what_ran(tiny_llama):
    """Outputs follow from the captured queries, keys and selection; counts agree with the report."""
    policy = "flexprefill(gamma=0.5, block_size=64, min_budget=0)+psa(epsilon=0.3, block_size=16, microbatch=1)"
    captured = capture(make(tiny_llama, chunk=200), random_ids(300, seed=7), policy, max_tokens=5, ignore_eos=True)
    report = captured.output.report
    for phase, count in (("prefill", 2), ("decode", 4)):
        for layer in range(3):
            calls = captured.of(layer, phase)
            assert [call.kv.length for call in calls] == ([200, 300] if phase == "prefill" else [301, 302, 303, 304])
            pairs = sum(call.selection.mask().sum((1, 2)) for call in calls)
            causal = sum(call.selection.shape.causal_pairs for call in calls)
            torch.testing.assert_close(
                (pairs / causal).tolist(), report[phase]["density_per_head"][layer], atol=1e-6, rtol=0
            )
            for call in calls:
                keys, values = call.kv.keys(), call.kv.values()
                out, _ = brute_force(call.q, keys, values, call.selection.mask(), call.spec.scale)
                torch.testing.assert_close(call.out.double(), out, atol=1e-5, rtol=1e-4)
        assert len(captured.of(phase=phase)) == 3 * count
    assert all(isinstance(call.selection, Blocks) for call in captured.of(phase="decode"))
    assert report["decode"]["density"] < 1 > report["prefill"]["density"]


def test_captured_keys_outlive_the_run(tiny_llama):
    llm = make(tiny_llama, blocks=60)
    first = capture(llm, random_ids(150, seed=1), "dense")
    before = [call.kv.keys().clone() for call in first.calls]
    capture(llm, random_ids(150, seed=2), "dense")  # takes the same blocks of the pool
    assert all(torch.equal(call.kv.keys(), keys) for call, keys in zip(first.calls, before))
    assert llm.engine.pool.used_blocks == 0


@pytest.mark.parametrize("kind", KINDS)
def test_selected_rows_are_rows_of_the_mask(kind):
    for units in (1, 2, 4):
        shape = Shape.suffix(4, 2, 1 if kind == "ranking" else 40, 100)
        selection = random_selection(kind, shape, units, generator(units))
        mask = selection.mask()
        rows = torch.tensor([0] if kind == "ranking" else [0, 1, 2, 17, 30, 31, 39])
        for heads in (slice(0, 2), slice(2, 4)):
            assert torch.equal(selected_rows(selection, heads, rows), mask[heads][:, rows])


def test_blocks_of_rows_do_not_change_the_weights():
    q, k, v = planted_heads(4, 2, 90, seed=3)
    call = make_call(q[:, -50:], k, v)
    chosen = torch.tensor([0, 3, 4, 21, 49])
    whole = torch.cat([true.weights() for true in true_rows(call, chosen)])
    parts = list(true_rows(call, chosen, entries=1))
    assert len(parts) == 2 * 5
    halves = [torch.cat([part.weights() for part in parts[first : first + 5]], 1) for first in (0, 5)]
    torch.testing.assert_close(torch.cat(halves), whole, atol=1e-6, rtol=1e-4)
    dense, keys = call.selection.mask(), k.double().repeat_interleave(2, 0)
    for at, row in enumerate(chosen.tolist()):
        scores = 0.25 * torch.einsum("hd,hnd->hn", q[:, 40 + row].double(), keys)
        expected = torch.softmax(scores.masked_fill(~dense[:, row], -torch.inf), -1)
        torch.testing.assert_close(whole[:, at].double(), expected, atol=1e-6, rtol=1e-4)


def test_a_row_that_may_read_nothing_has_no_weights():
    q, k, v = planted_heads(2, 1, 30, seed=4)
    (true,) = true_rows(make_call(q, k, v))
    weights = true.weights(torch.zeros(2, 30, 30, dtype=torch.bool))
    assert torch.equal(weights, torch.zeros(2, 30, 30))


def test_observers_nest_and_leave_nothing_behind(tiny_llama):
    llm, seen = make(tiny_llama), []
    assert llm.engine.watch.observer is None
    with observing(llm.engine, lambda call: seen.append(("outer", call.layer))):
        watch(llm, random_ids(5, seed=0), lambda call: seen.append(("inner", call.layer)))
        llm.generate([random_ids(5, seed=0)])
    assert llm.engine.watch.observer is None
    assert seen[:3] == [("inner", 0), ("inner", 1), ("inner", 2)]
    assert all(name == "outer" for name, _ in seen[3:])
    assert len(seen) > 3


def test_an_observer_that_raises_fails_the_run(tiny_llama):
    def broken(call):
        raise KeyError("no such head")

    with pytest.warns(RuntimeWarning, match="no such head"), pytest.raises(RequestError, match="no such head"):
        watch(make(tiny_llama), random_ids(5, seed=0), broken)


def test_bad_input(tiny_llama):
    llm: LLM = make(tiny_llama)
    with pytest.raises(SaccadeError, match="layers 0 to 2"):
        capture(llm, [1, 2, 3], layers=[0, 3])
    with pytest.raises(SaccadeError, match="no layer"):
        capture(llm, [1, 2, 3], layers=[])
    with pytest.raises(RequestError, match="max_tokens"):
        capture(llm, [1, 2, 3], max_tokens=0)
    with pytest.raises(RequestError, match="empty"):
        capture(llm, "")


@pytest.mark.parametrize(
    "policy", ["etf(psi=0.3, start_layer=1)+streaming(window=40)", "psaw(start_layer=1)+topk(k=30)"]
)
def test_windows_and_frozen_rows_are_captured_whole(policy, tiny_llama):
    """Rows that skip a layer have no call there, but the keys they leave are in everybody's view."""
    ids = random_ids(200, seed=11)
    captured = capture(make(tiny_llama, chunk=70), ids, policy, max_tokens=4, ignore_eos=True)
    for call in captured.calls:
        keys, values = call.kv.keys(), call.kv.values()
        assert torch.isfinite(keys).all()
        out, _ = brute_force(call.q, keys, values, call.selection.mask(), call.spec.scale)
        torch.testing.assert_close(call.out.double(), out, atol=1e-5, rtol=1e-4)
    rows = [sum(call.q.shape[1] for call in captured.of(layer)) for layer in range(3)]
    assert rows[0] == 203
    assert (min(rows) < 203) == policy.startswith("etf")


def test_a_watched_run_tells_how_far_it_is(tiny_llama):
    seen = []
    output = watch(
        make(tiny_llama), random_ids(200, seed=3), lambda call: None, max_tokens=4, progress=lambda *at: seen.append(at)
    )
    assert len(output.outputs[0].token_ids) == 4
    assert seen[-1] == (204, 204)
    assert seen == sorted(seen)
    assert all(done < 204 for done, _ in seen[:-1])
