"""Decode rows that read everything: in the one call a step, whatever their method is, and their states are those of the
method's own hooks, row by row."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_helpers import tokens
from helpers import UNTIMED
from tiny_models import make_checkpoint, random_ids
from torch import Tensor

from saccade import LLM, SamplingParams
from saccade.engine.rows.plans import FixedPlans
from saccade.methods.cis.anchors import Anchors
from saccade.methods.history import snapshot
from saccade.methods.labels import Labels
from saccade.methods.lfps.tables import ScoreTables
from saccade.methods.rocketkv import RocketKept
from saccade.methods.state import MethodState
from saccade.ops.cpu_plans import PlannedRows

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

from short_context import Counted, every_policy

# Each reads everything at first; what it has learnt meanwhile it needs once it no longer does.
LEARNING = [
    "lfps(least=70)",
    "lfps(least=70, unit=kv_head)",
    "loopserve(budget=70, n_d=8, first=4)",
    "loopserve(budget=70, n_d=4, first=24, answer_rows=6)",
    "h2o(budget=70)",
    "h2o(budget=70, unit=q_head)",
    "h2o(budget=0.5, heavy=0.3)",
    "snapkv(capacity=100)",
    "snapkv(capacity=40, window=8)",
    "adakv(capacity=40, window=8, unit=q_head)",
    "rocketkv(keys=68, capacity=400)",
    "psa(block_size=8, microbatch=5)",
    "hshare(source=prompt, heavy=50, sinks=4, local=20)",
    "double_sparsity(source=prompt, k=24, dense_upto=72)",
    "magicpig(dense_upto=72, bits=4, tables=20, local=8)",
    "infinigen(skew=off, dense_upto=72)",
    "topp(dense_upto=72)",
    "twilight(dense_upto=72, p=0.8, base=40)",
    "vattention(sinks=32, local=40, block_size=8)",
    "random(k=72)",
    "topk(k=70)",
    "auto(least=1000)",
    "cis(k=40, sinks=4, local=28)",
    "quest(budget=72, block_size=8, dense_layers=0, current=competes)",
]
WINDOWED = ["cis(k=40, sinks=4, local=28)+psaw(local=16, block_size=1)", "psaw(local=16, block_size=1, phi=0.4)",
            "loopserve(budget=200)+psaw(local=16, block_size=16)"]  # fmt: skip
PARTS = ("directions", "has", "counts", "positions")  # of anchors, whatever room there is for keys
FEW = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return make_checkpoint(
        "llama", tmp_path_factory.mktemp("llama"), max_position_embeddings=512, head_dim=32, num_hidden_layers=4
    )


@pytest.fixture(scope="module")
def counted(folder) -> Counted:
    return Counted(lambda: LLM(folder, kv_memory="16MiB", enable_prefix_caching=False))


def make(folder: Path) -> LLM:
    return LLM(folder, kv_memory="16MiB", prefill_chunk=2048, exact=False, enable_prefix_caching=False)


@pytest.fixture(scope="module")
def shared(folder) -> LLM:
    return make(folder)


def known(value: Any) -> Iterator[Any]:
    """What a state means, part by part: tensors without room to grow, and plain values."""
    if isinstance(value, ScoreTables):
        width = int(value.row[0]) + 1 - value.first
        scale = value.scale[:, None]
        yield from (value.first, value.row, value.vertical[:, :width] * scale, value.slash[:, :width] * scale)
    elif isinstance(value, Labels):
        yield value.length
        yield from value.saved_fields().values()
    elif isinstance(value, Anchors):
        yield from (value.count, *(getattr(value, name)[: value.count] for name in PARTS)) if value.count else (None,)
    elif isinstance(value, MethodState):
        for name, part in vars(value).items():
            yield name
            yield from known(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from known(part)
    else:
        yield value


def assert_same(ours: Any, theirs: Any) -> None:
    left, right = list(known(ours)), list(known(theirs))
    assert len(left) == len(right)
    for one, other in zip(left, right):
        if isinstance(one, Tensor) and one.is_floating_point():
            torch.testing.assert_close(one, other, atol=2e-5, rtol=2e-5)
        elif isinstance(one, Tensor):
            assert torch.equal(one, other)
        else:
            assert one == other


def plain(report: dict[str, Any]) -> dict[str, Any]:
    decode = {**report["decode"], **UNTIMED}
    return {name: pytest.approx(part, abs=1e-6) if isinstance(part, float) else part for name, part in decode.items()}


def calls(counted: Counted, policy: str) -> float:
    """Python's calls of a step, the median of a few."""
    return statistics.median(step.calls for step in counted.steps([random_ids(88, seed=0)], [policy], 12))


@pytest.fixture(scope="module")
def dense_calls(counted) -> float:
    return calls(counted, "dense")


@pytest.mark.parametrize("policy", every_policy())
def test_a_short_context_costs_no_more_calls_than_dense(counted, dense_calls, policy):
    assert calls(counted, policy) <= 1.1 * dense_calls


@pytest.mark.parametrize(
    "policy", ["psa(epsilon=0.7, block_size=8)", "h2o(budget=70)", "quest(budget=64)", "cis(k=70)"]
)
def test_rows_that_choose_cost_about_as_many_calls_as_dense(counted, dense_calls, policy):
    """At 88 tokens, which are more than they read."""
    assert calls(counted, policy) <= 1.2 * dense_calls


@pytest.mark.parametrize("half", [0, 1])
def test_rows_of_many_policies_are_one_call_a_step(shared, monkeypatch, half):
    policies = every_policy()[half::2]
    rows, real = [], PlannedRows.run_layers
    monkeypatch.setattr(
        PlannedRows, "run_layers", lambda self, *rest, **more: rows.append(len(self._rows)) or real(self, *rest, **more)
    )
    outputs = shared.generate([random_ids(60 + i, seed=i) for i in range(len(policies))], FEW, policy=policies)
    assert [output.error for output in outputs] == [None] * len(policies)
    assert rows.count(len(policies)) >= FEW.max_tokens - 2, rows


@pytest.mark.parametrize("policy", LEARNING + WINDOWED)
def test_states_and_answers_are_those_of_the_hooks(shared, monkeypatch, policy):
    """A prompt of 60 tokens: at about 70 some is left out, and by then a method knows what it had learnt."""

    def answers() -> list[Any]:
        made = []
        with shared.session(policy) as session:
            for count, length in ((6, 60), (24, 3)):  # of the second turn the whole way from all to a part
                params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
                made.append(session.generate(random_ids(length, seed=3), params))
                (sequence,) = shared.engine.scheduler.idle.values()
                memory = sequence.memories[sequence.id]
                made.append([snapshot(state) for state in memory.states])
                for layer, state in enumerate(made[-1]):  # what hangs on the keys alone is made when it is needed
                    view = memory.kv.view(layer)
                    if isinstance(state, Labels):
                        state.extend(view)
                    elif isinstance(state, RocketKept):
                        state.extend(view, view.length)
        return made

    served = []
    real = FixedPlans.count
    monkeypatch.setattr(FixedPlans, "count", lambda self, row, *rest: served.append(row) or real(self, row, *rest))
    ours = answers()
    assert len(served) >= 5
    monkeypatch.setattr(FixedPlans, "of", lambda self, rows: None)
    theirs = answers()
    for left, right in zip(ours[::2], theirs[::2]):
        assert tokens(left) == tokens(right)
        assert plain(left.report) == plain(right.report)
        assert left.report["notes"] == right.report["notes"]
    for left, right in zip(ours[1::2], theirs[1::2]):
        assert_same(left, right)


@pytest.mark.parametrize(
    ("policy", "dtype"),
    [
        ("lfps(least=75, history=keep)", "float32"),
        ("loopserve(budget=75, n_d=6, first=4, answer_rows=4)", "bfloat16"),
        ("h2o(budget=75)", "bfloat16"),
        ("snapkv(capacity=50, window=8)", "bfloat16"),
    ],
)
def test_turns_that_are_cut_and_sessions_that_are_saved_go_on_as_by_the_hooks(
    folder, monkeypatch, tmp_path, policy, dtype
):
    def answers() -> list[list[int]]:
        llm = LLM(folder, kv_memory="16MiB", exact=False, dtype=dtype, enable_prefix_caching=False)
        with llm.session(policy) as session:
            made = [tokens(session.generate(random_ids(60, seed=5), FEW))[:8]]
            for number, _ in enumerate(session.stream(random_ids(4, seed=6), FEW)):
                if number == 3:
                    break  # which cancels the turn
            session.save(tmp_path / "saved")
        with llm.restore(tmp_path / "saved") as session:
            made.append(tokens(session.generate(random_ids(3, seed=7), FEW)))
        assert llm.engine.pool.used_blocks == 0
        return made

    ours = answers()
    monkeypatch.setattr(FixedPlans, "of", lambda self, rows: None)
    assert answers() == ours


@pytest.mark.parametrize(
    "policy", ["dense", "lfps(least=64)", "loopserve(budget=90, n_d=6, first=4)", "quest(budget=64)"]
)
def test_layers_with_windows_of_their_own_rule_once_rows_outgrow_them(tmp_path, monkeypatch, policy):
    """Layers 0 and 2 of 3 show 70 keys; rows of 60 to 90 see more from the middle on."""
    folder = make_checkpoint(
        "ministral",
        tmp_path / "model",
        head_dim=32,
        num_hidden_layers=3,
        sliding_window=70,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        max_position_embeddings=512,
    )

    def answers() -> tuple[list[Any], set[int]]:
        llm, made, served = make(folder), [], set()
        real = FixedPlans.of

        def of(self, rows):
            fixed = real(self, rows)
            if fixed is not None:
                served.add(rows.scheduled.stop)
            return fixed

        with monkeypatch.context() as patch, llm.session(policy) as session:
            patch.setattr(FixedPlans, "of", of)
            for length in (58, 3):
                made.append(session.generate(random_ids(length, seed=3), FEW))
        return made, served

    ours, served = answers()
    assert {60, 65, 70} <= served
    monkeypatch.setattr(FixedPlans, "of", lambda self, rows: None)
    theirs, _ = answers()
    for left, right in zip(ours, theirs):
        assert left.error is None
        assert tokens(left) == tokens(right)
        assert plain(left.report) == plain(right.report)
        assert left.report["notes"] == right.report["notes"]
