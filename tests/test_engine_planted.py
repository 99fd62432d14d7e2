"""Exceptions planted wherever a step may break: who is not to blame gets the answer it gets alone, and all blocks come
back.

``once``: the place fails one time, and nobody is lost. Else it fails whenever one request's rows are there, and only
that request ends, with the reason.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from engine_helpers import GREEDY, make, tokens
from tiny_models import make_checkpoint, random_ids

from saccade import LLM
from saccade.engine import core
from saccade.engine.memory.sequence import Sequence
from saccade.engine.rows import decode_rows as host_rows
from saccade.engine.watch.report import Report
from saccade.engine.worker import Worker
from saccade.kv.sequence import SequenceKV

PROMPTS = [random_ids(length, seed=length) for length in (90, 140, 70)]
POLICIES = ["topk(k=24)", "dense", "streaming(sinks=2, window=40)"]
BLAMED = 1  # the longest: nobody else has rows at its last positions
LAST = len(PROMPTS[BLAMED]) - 1


class Planted(Exception):
    pass


class Plant:
    """Decides when a place fails: the first time it is asked in the phase, or whenever the blamed request is there."""

    def __init__(self, once: bool, after: int) -> None:
        self.once, self.after, self.asked, self.done = once, after, 0, 0

    def __call__(self, blamed: bool) -> None:
        self.asked += self.once or blamed
        if self.asked > self.after and (blamed or self.once) and not (self.once and self.done):
            self.done += 1
            raise Planted("planted failure")


def in_runner(patch, llm: LLM, plant: Plant) -> None:
    real = llm.model.runner.steps

    def steps(input_ids, positions, *rest, take, **options):
        def planted(logits):
            plant(int(positions.max()) >= LAST)
            take(logits)

        return real(input_ids, positions, *rest, take=planted, **options)

    patch.setattr(llm.model.runner, "steps", steps)


def in_joined_rows(patch, llm: LLM, plant: Plant) -> None:
    layer_by_layer, in_one_call = host_rows.JoinedRows.run, host_rows.JoinedRows.run_layers

    def blamed(self):
        return any(one.scheduled.start >= LAST for one in [*(one.rows for _, one in self.fixed), *self.chosen])

    def run(self, layer, *rest):
        if layer == 1:
            plant(blamed(self))
        return layer_by_layer(self, layer, *rest)

    def run_layers(self, *rest):
        plant(blamed(self))
        return in_one_call(self, *rest)

    patch.setattr(host_rows.JoinedRows, "run", run)
    patch.setattr(host_rows.JoinedRows, "run_layers", run_layers)


def in_joined_attention(patch, llm: LLM, plant: Plant) -> None:
    for name in ("run", "run_layers"):
        real = getattr(host_rows.PlannedRows, name)

        def run(self, *rest, real=real, **options):
            plant(any(row.position >= LAST for row in self._rows))
            return real(self, *rest, **options)

        patch.setattr(host_rows.PlannedRows, name, run)


def in_allocation(patch, llm: LLM, plant: Plant) -> None:
    real = SequenceKV.reserve

    def reserve(self, count):
        plant(count > LAST)
        return real(self, count)

    patch.setattr(SequenceKV, "reserve", reserve)


def in_building_the_step(patch, llm: LLM, plant: Plant) -> None:
    real = core.step_input

    def step_input(batch):
        plant(any(len(request.sequence.tokens) > LAST for request, _ in batch))
        return real(batch)

    patch.setattr(core, "step_input", step_input)


def in_the_worker(patch, llm: LLM, plant: Plant) -> None:
    real = Worker.run

    def run(self, step):
        out = real(self, step)
        plant(any(one.span_length > LAST for one in step.scheduled))
        return out

    patch.setattr(Worker, "run", run)


def in_settling(patch, llm: LLM, plant: Plant) -> None:
    real = Report.take

    def take(self, *rest):
        plant(self.prompt_tokens > LAST)
        return real(self, *rest)

    patch.setattr(Report, "take", take)


PLACES = {
    "layer loop": in_runner,
    "joined rows": in_joined_rows,
    "joined attention": in_joined_attention,
    "allocation": in_allocation,
    "building the step": in_building_the_step,
    "the worker": in_the_worker,
    "settling": in_settling,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Heads of 16 channels, which the C++ kernels join rows of."""
    return make_checkpoint("llama", tmp_path_factory.mktemp("llama"), head_dim=16, max_position_embeddings=2048)


@pytest.fixture(scope="module", params=[True, False], ids=["exact", "packed"])
def engine(request, folder):
    llm = make(folder, exact=request.param)
    alone = [tokens(llm.generate(ids, GREEDY, policy=policy)[0]) for ids, policy in zip(PROMPTS, POLICIES)]
    yield llm, alone
    llm.close()


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("after", [0, 4])
def test_only_the_request_to_blame_is_lost(engine, monkeypatch, place, after):
    llm, alone = engine
    plant = Plant(once=False, after=after)
    with monkeypatch.context() as patch:
        PLACES[place](patch, llm, plant)
        with pytest.warns(RuntimeWarning, match="planted failure"):
            outputs = llm.generate(PROMPTS, GREEDY, policy=POLICIES)
    assert plant.done
    for number, output in enumerate(outputs):
        assert output.outputs[0].finish_reason == ("error" if number == BLAMED else "length"), output.error
        if number != BLAMED:
            assert tokens(output) == alone[number]
    assert "Planted: planted failure" in outputs[BLAMED].error
    assert llm.pool.used_blocks == 0
    assert not llm.engine.worker.memories
    assert tokens(llm.generate(PROMPTS[BLAMED], GREEDY, policy=POLICIES[BLAMED])[0]) == alone[BLAMED]


@pytest.mark.parametrize("place", ["layer loop", "joined rows", "joined attention", "building the step", "the worker"])
@pytest.mark.parametrize("after", [0, 4])
def test_what_breaks_once_for_several_takes_nobody_down(folder, monkeypatch, place, after):
    llm = make(folder, exact=False)
    alone = [tokens(llm.generate(ids, GREEDY, policy=policy)[0]) for ids, policy in zip(PROMPTS, POLICIES)]
    plant = Plant(once=True, after=after)
    with monkeypatch.context() as patch:
        PLACES[place](patch, llm, plant)
        outputs = llm.generate(PROMPTS, GREEDY, policy=POLICIES)
    assert plant.done == 1
    assert [tokens(output) for output in outputs] == alone
    assert llm.pool.used_blocks == 0


def test_samples_whose_blocks_cannot_be_shared_compute_them(folder, monkeypatch):
    llm = make(folder)
    params = GREEDY.for_sample(0)
    want = tokens(llm.generate(PROMPTS[0], params)[0])
    real, planted = Sequence.take_over, []

    def take_over(self, other):
        planted.append(self)
        if len(planted) == 1:
            raise Planted("planted failure")
        real(self, other)

    monkeypatch.setattr(Sequence, "take_over", take_over)
    outputs = llm.generate(PROMPTS[0], replace(params, n=3))[0].outputs
    assert [one.token_ids for one in outputs] == [want] * 3
    assert len(planted) == 2
    assert llm.pool.used_blocks == 0
