"""Chunks that are suspended between layers: answers do not show it, and whatever ends them leaves nothing behind."""

from __future__ import annotations

from contextlib import contextmanager, suppress

import pytest
from engine_helpers import EVERY, GREEDY, LAYERS, finish, make, start
from tiny_models import make_checkpoint, random_ids

from saccade import LLM, SamplingParams
from saccade.engine.rows.attention import RowAttention
from saccade.engine.scheduling.token_gap import TokenGap
from saccade.methods.policy import Policy

SPARSE = "flexprefill(gamma=0.5, block_size=64, min_budget=0)"
LEARNING = (  # a decode method watches the prompt, begins at its end, evicts, or rows skip layers
    "dense+h2o(budget=24)",
    "dense+snapkv(capacity=24, window=8)",
    f"{SPARSE}+psa(epsilon=0.4, block_size=16, microbatch=1)",
    "xattention+lfps(k=24, history=keep)",
    "dense+etf",
)
SCORED = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, logprobs=2)
PROMPT = random_ids(150, seed=5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint("llama", tmp_path_factory.mktemp("llama"), head_dim=32, max_position_embeddings=1024)


@pytest.fixture
def layer_by_layer(monkeypatch):
    """Every chunk is suspended after each of its layers."""
    monkeypatch.setattr(TokenGap, "round", property(lambda self: 0.0))


def suspending(folder, blocks: int = 4000, **options) -> LLM:
    return make(folder, blocks, max_token_gap=0.5, **options)


def said(request) -> tuple:
    report = request.report.as_dict()
    counts = [
        {name: value for name, value in report[phase].items() if "second" not in name and name != "backends"}
        for phase in ("prefill", "decode")
    ]
    return request.final_ids, request.logprobs, request.error, counts, report["notes"]


def serve(llm: LLM, policies: list[Policy]) -> list:
    """Answers of all policies to the same prompt, beside a stream."""
    with llm:
        stream = start(llm, random_ids(20, seed=1), SamplingParams(temperature=0, max_tokens=400, ignore_eos=True))
        llm.engine.step()
        requests = []
        for at in range(0, len(policies), 3):
            group = policies[at : at + 3]
            own = [start(llm, PROMPT, SCORED, policy) for policy in group]
            while not all(one.finished for one in own):
                llm.engine.step()
            requests += own
        llm.engine.cancel(stream)
        assert clean(llm)
    return requests


def clean(llm: LLM) -> bool:
    """Whether nothing is left of requests."""
    engine = llm.engine
    kept = engine.scheduler.suspended or engine.worker._suspended or engine.scheduler.running or engine.worker.memories
    return not kept and llm.pool.used_blocks == 0


@pytest.mark.parametrize("backend", ["reference", "auto"])
def test_answers_do_not_hang_on_suspensions(folder, layer_by_layer, backend):
    """To the last bit, with every count, for every method."""
    policies = EVERY if backend == "reference" else [*map(Policy.parse, LEARNING)]
    whole = serve(make(folder, 4000, backend=backend), policies)
    parts = serve(suspending(folder, backend=backend), policies)
    for policy, one, other in zip(policies, whole, parts):
        assert one.error is None, (policy.text, one.error)
        assert said(one) == said(other), policy.text
        assert one.report.suspensions == 0
        assert other.report.suspensions >= 2 * (LAYERS - 1), policy.text  # of three chunks


def suspended(llm: LLM, request, chunks: int = 1, layers: int = 1) -> None:
    """Step until so many layers of a later chunk of a request have run."""
    for _ in range(200):
        held = llm.engine.scheduler.suspended.get(request.id)
        if held is not None and held.rows.start >= chunks * 64 and held.layers >= layers:
            return
        llm.engine.step()
    raise AssertionError("no chunk is suspended")


def reference(folder, policy: str) -> list[int]:
    with make(folder) as llm:
        one = start(llm, PROMPT, GREEDY, policy)
        finish(llm.engine)
        return one.final_ids


@pytest.mark.parametrize("policy", ["dense", SPARSE, *LEARNING])
@pytest.mark.parametrize("chunks", [0, 2])
def test_a_cancelled_chunk_leaves_nothing(folder, layer_by_layer, policy, chunks):
    want = reference(folder, policy)
    with suspending(folder) as llm:
        gone, stays = (start(llm, PROMPT, GREEDY, policy) for _ in range(2))
        suspended(llm, gone, chunks)
        llm.engine.cancel(gone)
        assert gone.id not in llm.engine.worker._suspended
        finish(llm.engine)
        assert stays.final_ids == want
        assert clean(llm)


@pytest.mark.parametrize("policy", ["dense", SPARSE, *LEARNING])
def test_a_session_goes_back_to_where_it_stood(folder, layer_by_layer, policy):
    turns = [random_ids(90, seed=7), random_ids(140, seed=8)]

    def talk(llm: LLM, chunks: int | None = None) -> list[list[int]]:
        sequence, answers = llm.engine.sessions.require(llm.engine.sessions.open()), []
        for number, ids in enumerate(turns):
            if chunks is not None:
                broken = llm.engine.add(random_ids(250, seed=40 + number), GREEDY, Policy.parse(policy), sequence)
                for _ in range(100):
                    held = llm.engine.scheduler.suspended.get(broken.id)
                    if held is not None and held.layers and held.rows.start - held.rows.span_start >= 64 * chunks:
                        break
                    llm.engine.step()
                assert held is not None
                llm.engine.cancel(broken)
            one = llm.engine.add(ids, GREEDY, Policy.parse(policy), sequence)
            finish(llm.engine)
            assert one.error is None
            answers.append(one.final_ids)
        return answers

    with make(folder) as llm:
        want = talk(llm)
    for chunks in (0, 3):
        with suspending(folder) as llm:
            assert talk(llm, chunks) == want


@contextmanager
def failing(layer: int, request: int, error: BaseException):
    """The attention of a request's chunk fails at a layer, once, as a method or as the loop around it would."""
    run, left = RowAttention.run, [True]

    def broken(self, index, q, k, v, spec):
        if index == layer and left[0] and self.rows[0].scheduled.request_id == request:
            left[0] = False
            run(self, index, q, k, v, spec)
            raise error
        return run(self, index, q, k, v, spec)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RowAttention, "run", broken)
        yield


@pytest.mark.parametrize("policy", [SPARSE, LEARNING[0]])
@pytest.mark.parametrize("layer", [1, LAYERS - 1])
def test_a_layer_that_fails_after_a_stop_ends_its_request_alone(folder, layer_by_layer, policy, layer):
    want = reference(folder, policy)
    with suspending(folder) as llm:
        one, other = (start(llm, PROMPT, GREEDY, policy) for _ in range(2))
        suspended(llm, one, 1)
        with failing(layer, one.id, RuntimeError("planted")):
            finish(llm.engine)
        assert "planted" in one.error
        assert other.final_ids == want
        assert clean(llm)


def test_a_row_that_fails_ends_its_pass_at_once(folder, layer_by_layer, monkeypatch):
    method = type(Policy.parse(SPARSE).prefill)
    seen, select = [], method.select_prefill

    def broken(self, chunk):
        seen.append(chunk.layer)
        if chunk.layer == 1:
            raise ValueError("planted")
        return select(self, chunk)

    monkeypatch.setattr(method, "select_prefill", broken)
    with suspending(folder) as llm:
        one = start(llm, PROMPT, GREEDY, SPARSE)
        finish(llm.engine)
        assert "layer 1, prefill: ValueError: planted" in one.error
        assert seen == [0, 1]
        assert clean(llm)


@pytest.mark.parametrize("policy", [SPARSE, LEARNING[0]])
def test_an_interrupt_in_a_slice_takes_the_chunk_back(folder, layer_by_layer, policy):
    want = reference(folder, policy)
    with suspending(folder) as llm:
        one, other = (start(llm, PROMPT, GREEDY, policy) for _ in range(2))
        suspended(llm, one, 1)
        with failing(1, one.id, KeyboardInterrupt()), pytest.raises(KeyboardInterrupt):
            finish(llm.engine)
        finish(llm.engine)  # nothing was lost: it goes on
        assert [one.final_ids, other.final_ids] == [want, want]
        assert clean(llm)


@pytest.mark.parametrize("policy", [SPARSE, LEARNING[0]])
def test_others_that_need_the_blocks_take_them_from_a_suspended_chunk(folder, layer_by_layer, policy):
    want = reference(folder, policy)
    long = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    with make(folder) as llm:
        first = start(llm, random_ids(55, seed=1), long)
        finish(llm.engine)
    with suspending(folder, LAYERS * 7 * 32 // 16 + 1) as llm:  # seven blocks of 32 tokens a layer
        stream = start(llm, random_ids(55, seed=1), long)
        while len(stream.output_ids) < 6:
            llm.engine.step()
        one = start(llm, PROMPT, GREEDY, policy)
        held = None
        while not one.report.preemptions:  # for the stream's next block
            held = llm.engine.scheduler.suspended.get(one.id)
            llm.engine.step()
        assert held is not None
        assert held.layers
        assert not llm.engine.scheduler.suspended
        assert not llm.engine.worker._suspended
        finish(llm.engine)
        assert stream.final_ids == first.final_ids
        assert one.final_ids == want
        assert clean(llm)


def test_an_engine_that_gives_up_or_closes_leaves_nothing(folder, layer_by_layer):
    with suspending(folder) as llm:
        one = start(llm, PROMPT, GREEDY, SPARSE)
        suspended(llm, one, 1)
        llm.engine.abandon("planted")
        assert one.error == "planted"
        assert clean(llm)
    llm = suspending(folder)
    with suppress(StopIteration):
        stream = llm.stream(PROMPT, GREEDY, policy=SPARSE) if hasattr(llm, "stream") else iter(())
        next(iter(stream))
    llm.close()
    assert not llm.engine.worker._suspended


def test_samples_share_a_prompt_that_was_suspended(folder, layer_by_layer):
    params = SamplingParams(temperature=1, seed=3, n=3, max_tokens=5, ignore_eos=True)
    with make(folder) as llm:
        want = [one.token_ids for one in llm.generate(PROMPT, params, policy=SPARSE)[0].outputs]
    with suspending(folder) as llm:
        (output,) = llm.generate(PROMPT, params, policy=SPARSE)
        assert [one.token_ids for one in output.outputs] == want
        assert output.report["suspensions"] > 0
        assert clean(llm)


def test_only_so_many_rows_are_suspended_at_a_time(folder, layer_by_layer):
    with suspending(folder, 8 * LAYERS * 12) as llm:
        many = [start(llm, random_ids(150, seed=at), GREEDY, SPARSE) for at in range(8)]
        most = 0
        while llm.engine.busy:
            llm.engine.step()
            most = max(most, sum(one.rows.length for one in llm.engine.scheduler.suspended.values()))
        assert 64 < most <= 64 + 32 + 64
        assert all(one.error is None for one in many)
        assert clean(llm)
