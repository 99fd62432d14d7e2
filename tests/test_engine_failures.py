"""Cancellation, failures and interrupts take nobody else down, and give everything back."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import fork_server
import pytest
from engine_helpers import EVERY, FIVE, GREEDY, finish, interrupt, make, start, tokens

from saccade import SamplingParams
from saccade.engine.rows.backend import RowBackend
from saccade.engine.rows.layers_pass import LayersPass
from saccade.engine.worker import Worker
from saccade.methods.base import Method
from saccade.methods.policy import Policy
from saccade.selection import Dense


@pytest.mark.parametrize("steps", [0, 1, 2, 7, 9])
def test_cancelling_frees_blocks_and_leaves_others_unchanged(llm, prompts, solo, steps):
    """While queued, in the middle of a prefill of 6 chunks, and while decoding."""
    kept = [start(llm, prompts[i], policy=FIVE[i]) for i in (0, 1)]
    gone = start(llm, prompts[4], policy=FIVE[4])
    last = start(llm, prompts[2], policy=FIVE[2])
    for _ in range(steps):
        llm.engine.step()
    before = llm.engine.pool.used_blocks
    held = gone.sequence.kv.blocks
    llm.engine.cancel(gone)
    assert gone.finish_reason == "cancelled"
    assert llm.engine.pool.used_blocks == before - held
    llm.engine.cancel(gone)  # once more does nothing
    finish(llm.engine)
    assert [request.final_ids for request in (*kept, last)] == [solo[0], solo[1], solo[2]]
    assert llm.engine.pool.used_blocks == 0


def test_closing_a_stream_early_cancels(llm, prompts):
    for stop_after in (1, 8):
        stream = llm.stream(prompts[4], replace(GREEDY, max_tokens=100))  # a reader who is late gets several at once
        for _ in range(stop_after):
            next(stream)
        assert llm.engine.pool.used_blocks > 0
        stream.close()
        assert llm.engine.pool.used_blocks == 0
        assert not llm.engine.busy
    llm.stream(prompts[0], GREEDY).close()  # never started
    assert not llm.engine.busy


@dataclass(frozen=True)
class Broken(Method):
    """Fails at one layer of one phase."""

    name: ClassVar[str] = "broken"
    phases: ClassVar[tuple[str, ...]] = ("prefill", "decode")

    phase: str = "decode"
    layer: int = 1

    def _select(self, phase, chunk):
        if phase == self.phase and chunk.layer == self.layer:
            raise RuntimeError("planted failure")
        return Dense(chunk.shape)

    def select_prefill(self, chunk):
        return self._select("prefill", chunk)

    def select_decode(self, query, state):
        return self._select("decode", query)


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("layer", [0, 2])
def test_one_request_that_fails_takes_nobody_down(llm, prompts, solo, phase, layer):
    broken = Policy(Broken(phase, layer), Broken(phase, layer))
    with pytest.warns(RuntimeWarning, match="planted failure"):
        outputs = llm.generate([prompts[0], prompts[3], prompts[2]], GREEDY, policy=[FIVE[0], broken, FIVE[2]])
    assert [tokens(outputs[0]), tokens(outputs[2])] == [solo[0], solo[2]]
    assert outputs[1].outputs[0].finish_reason == "error"
    assert f"layer {layer}, {phase}: RuntimeError: planted failure" in outputs[1].error
    assert len(tokens(outputs[1])) == (0 if phase == "prefill" else 1)
    assert outputs[0].error is None
    assert llm.engine.pool.used_blocks == 0
    assert tokens(llm.generate(prompts[1], GREEDY, policy=FIVE[1])[0]) == solo[1]


def broken() -> None:
    raise SystemExit("the engine broke")


def test_an_interrupt_of_one_caller_leaves_others_intact(llm, prompts, in_the_next_pass):
    """generate() gives up, but a stream that shares its steps goes on as if nothing had happened."""
    long = SamplingParams(temperature=0, max_tokens=300, ignore_eos=True)
    alone = tokens(llm.generate(prompts[1], long, policy=FIVE[1])[0])
    stream = llm.stream(prompts[1], long, policy=FIVE[1])
    got = next(stream).new_tokens
    in_the_next_pass(interrupt, phase="prefill")
    with pytest.raises(KeyboardInterrupt):
        llm.generate(prompts[0], long)
    got += [token for output in stream for token in output.new_tokens]
    assert got == alone
    assert llm.engine.pool.used_blocks == 0


def test_an_interrupted_session_turn_is_cancelled(llm, prompts, in_the_next_pass):
    with llm.session() as session:
        first = session.generate(prompts[2], GREEDY)
        before = session.token_ids
        long = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
        in_the_next_pass(interrupt)
        with pytest.raises(KeyboardInterrupt):
            session.generate(prompts[3][:50], long)
        assert not llm.engine.busy
        assert session.token_ids == before
        again = tokens(session.generate(prompts[3][:50], GREEDY))
    fresh = llm.generate([*prompts[2], *tokens(first), *prompts[3][:50]], GREEDY)[0]
    assert again == tokens(fresh)


def test_the_loop_outlives_a_step_that_breaks(llm, prompts, solo, in_the_next_pass):
    """What no request is to blame for ends those that run, with the reason; nothing is lost, and the next one works."""
    in_the_next_pass(broken)
    with pytest.warns(RuntimeWarning, match="the engine broke"):
        outputs = llm.generate(prompts[:2], GREEDY)
    assert [output.outputs[0].finish_reason for output in outputs] == ["error", "error"]
    assert llm.engine.pool.used_blocks == 0
    assert tokens(llm.generate(prompts[0], GREEDY)[0]) == solo[0]


def test_a_step_that_never_gets_as_far_as_a_pass_ends_those_that_wait(tiny_llama, prompts, solo, monkeypatch):
    llm = make(tiny_llama)
    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.scheduler, "schedule", lambda: 1 // 0)
        with pytest.warns(RuntimeWarning, match="ZeroDivisionError"):
            outputs = llm.generate(prompts[:2], GREEDY)
    assert [output.outputs[0].finish_reason for output in outputs] == ["error", "error"]
    assert tokens(llm.generate(prompts[0], GREEDY)[0]) == solo[0]


def test_a_pass_that_breaks_is_tried_again_for_each_request_alone(tiny_llama, prompts, in_the_next_pass):
    """Packed, no request is to blame: each gets a pass of its own, and the answers are what they were."""
    packed = make(tiny_llama, exact=False)
    want = [tokens(packed.generate(ids, GREEDY, policy="topk(k=24)")[0]) for ids in prompts[:3]]

    def out_of_memory() -> None:
        raise MemoryError("too little memory for so many rows")

    in_the_next_pass(out_of_memory)
    outputs = packed.generate(prompts[:3], GREEDY, policy="topk(k=24)")
    assert [tokens(output) for output in outputs] == want
    assert packed.engine.pool.used_blocks == 0


def test_a_pass_that_cannot_be_planned_lets_go_of_what_it_held(tiny_llama, prompts, monkeypatch):
    packed = make(tiny_llama, exact=False)
    host, real, let_go = packed.engine.worker.host, RowBackend.plan, []

    def failing(self, step, *given):
        real(self, step, *given)  # which holds blocks by now
        monkeypatch.setattr(RowBackend, "plan", real)
        monkeypatch.setattr(host, "done", lambda: let_go.append(step) or RowBackend.done(host))
        raise MemoryError("no room for a plan")

    monkeypatch.setattr(RowBackend, "plan", failing)
    output = packed.generate(prompts[0], GREEDY)[0]
    assert "no room for a plan" in output.error
    assert len(let_go) == 1
    assert packed.engine.pool.used_blocks == 0


def test_passes_that_always_break_in_company_keep_no_request_from_its_end(tiny_llama, prompts, monkeypatch):
    """State that may have seen the step is made again from the first token on, in several chunks: longer than a request
    was left alone, so that it broke in company again, for ever."""
    packed = make(tiny_llama, exact=False, chunk=8)
    want = [tokens(packed.generate(ids, GREEDY, policy="h2o(budget=24)")[0]) for ids in prompts[:3]]
    real, broken = LayersPass.steps, []

    def only_alone(self):
        if len(self.step) > 1:
            broken.append(len(self.step))
            raise MemoryError("too little memory for two")
        return real(self)

    monkeypatch.setattr(LayersPass, "steps", only_alone)
    outputs = packed.generate(prompts[:3], GREEDY, policy="h2o(budget=24)")
    assert [tokens(output) for output in outputs] == want
    assert 2 <= len(broken) < 40
    monkeypatch.undo()
    packed.generate(prompts[:2], GREEDY)
    assert not packed.engine.worker._alone  # whoever has ended keeps nobody from running ahead
    assert packed.engine.pool.used_blocks == 0


def test_a_step_that_breaks_when_all_its_rows_are_done_is_taken_back_whole(llm, prompts, monkeypatch):
    """infinigen began its state anew from the last chunk alone: what it had seen of the others was gone."""
    real, steps = Worker.run, []
    few = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)

    def run(self, step):
        steps.append(real(self, step))
        if len(steps) == 2:  # the last chunk of the prompt
            raise RuntimeError("planted")
        return steps[-1]

    ids = prompts[2][:100]
    for policy in EVERY:
        (want,) = llm.generate(ids, few, policy=policy)
        one, other = start(llm, ids, few, policy), start(llm, prompts[2][:80], few)
        with monkeypatch.context() as patch:
            patch.setattr(Worker, "run", run)
            finish(llm.engine)
        assert len(steps) > 2
        steps.clear()
        assert (one.error, other.error) == (None, None)
        assert one.final_ids == tokens(want), policy.text


def test_interleaved_streams_lose_nothing(llm, prompts, solo):
    """Whoever drives a step runs everybody's rows; each reader must still see all of its own tokens and text."""
    streams = [llm.stream(ids, GREEDY, policy=policy) for ids, policy in zip(prompts[:3], FIVE)]
    got: list[list] = [[] for _ in streams]
    live = dict(enumerate(streams))
    while live:
        for i, stream in list(live.items()):
            output = next(stream, None)
            if output is None:
                del live[i]
            else:
                got[i].append(output)
    for outputs, want in zip(got, solo):
        assert [token for output in outputs for token in output.new_tokens] == want
        assert "".join(output.new_text for output in outputs) == outputs[-1].outcome.text
        assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]


def test_a_failure_in_choosing_a_token_takes_nobody_down(llm, prompts, solo, monkeypatch):
    drawn = SamplingParams(temperature=1, max_tokens=10, seed=1)  # by its own sampler
    good, bad = start(llm, prompts[0]), start(llm, prompts[2], drawn)
    monkeypatch.setattr(bad.sampler, "sample", lambda *_: [][0])
    finish(llm.engine)
    assert good.final_ids == solo[0]
    assert (bad.finish_reason, bad.final_ids) == ("error", [])
    assert "IndexError" in bad.error
    assert llm.engine.pool.used_blocks == 0


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0, 1])
def test_logits_that_are_no_numbers_end_their_request_alone(llm, prompts, solo, monkeypatch, value, temperature):
    """A broken or overflowing model says so; it does not answer."""
    params = SamplingParams(temperature=temperature, max_tokens=10, ignore_eos=True, seed=1)
    broken, other = start(llm, prompts[2], params), start(llm, prompts[0])
    runner = llm.model.runner
    steps, place = runner.steps, len(prompts[2]) + 1  # of the row whose token is the third

    def poisoned(token_ids, positions, ctx, *, take, **options):
        def spoilt(logits):
            rows = (positions[options["logit_rows"]] == place).nonzero()[:, 0]
            if len(broken.output_ids) == 2:
                logits[rows, 7] = value
            take(logits)

        return steps(token_ids, positions, ctx, take=spoilt, **options)

    monkeypatch.setattr(runner, "steps", poisoned)
    finish(llm.engine)
    assert broken.finish_reason == "error"
    assert "the model's logits are not finite" in broken.error
    assert len(broken.final_ids) == 2
    assert other.final_ids == solo[0]


LEAVING = """
import sys
from saccade import LLM, SamplingParams
llm = LLM(sys.argv[1], dtype="float32", kv_memory="16MiB")
gone = LLM(sys.argv[1], dtype="float32", kv_memory="16MiB")
for one in (llm, gone):
    stream = one.stream([1, 2, 3], SamplingParams(temperature=0, max_tokens=1000, ignore_eos=True))
    next(stream)
del gone
print("left", flush=True)
"""


def test_the_interpreter_ends_while_requests_run(tiny_llama):
    """No thread of the engine's is at work when the interpreter goes: C++ would end the process with SIGABRT."""
    done = fork_server.run(["-c", LEAVING, str(tiny_llama)], timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "left\n", "")


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(max_tokens=4, prompt_logprobs=2)])
def test_a_token_that_breaks_the_model_ends_its_requests_alone(tiny_llama, prompts, solo, params):
    """NaN goes through attention as NaN; kernels once took it for an absent key, and answered."""
    llm = make(tiny_llama)
    llm.model.runner.llama.weights.embedding.weight[7] = math.nan
    fine = [token for token in prompts[0] if token != 7]
    want = tokens(make(tiny_llama).generate(fine, GREEDY)[0])
    spoilt = [*fine[:40], 7, *fine[40:]]
    with pytest.warns(RuntimeWarning, match="not finite"):
        outputs = llm.generate([fine, spoilt], [GREEDY, params])
    assert tokens(outputs[0]) == want
    assert outputs[1].outputs[0].finish_reason == "error"
    assert "the model's logits are not finite" in outputs[1].error


EVICTING = ("h2o(budget=40)", "adakv(capacity=40,window=8)", "hshare(heavy=24,sinks=2,local=8,rows=8,source=prompt)")


@pytest.mark.parametrize("policy", [*EVICTING, "loopserve(alpha=0.5,budget=40,n_d=4,first=0)"])
def test_attention_that_is_no_number_ends_its_request_with_an_error_that_says_so(tiny_llama, prompts, policy):
    """These methods choose by softmax weights: torch's own errors about shapes came back, or an answer by chance."""
    llm = make(tiny_llama)
    llm.model.runner.llama.weights.embedding.weight[7] = math.nan
    fine = [token for token in (prompts[0] * 2)[:120] if token != 7]
    want = tokens(make(tiny_llama).generate(fine, GREEDY, policy=policy)[0])
    with pytest.warns(RuntimeWarning, match="not finite"):
        outputs = llm.generate([fine, [*fine[:60], 7, *fine[60:]]], GREEDY, policy=policy)
    assert tokens(outputs[0]) == want
    assert outputs[1].outputs[0].finish_reason == "error"
    assert "ModelError: attention weights are not finite" in outputs[1].error


@pytest.mark.parametrize("temperature", [0, 1])
def test_parameters_that_drive_logits_to_infinity_end_their_request_alone(llm, prompts, solo, temperature):
    """It answered with the last token of the vocabulary."""
    params = SamplingParams(temperature=temperature, repetition_penalty=1e-39, max_tokens=4)
    with pytest.warns(RuntimeWarning, match="repetition_penalty=1e-39"):
        outputs = llm.generate([prompts[0], prompts[1]], [GREEDY, params])
    assert tokens(outputs[0]) == tokens(llm.generate(prompts[0], GREEDY)[0])
    assert outputs[1].outputs[0].finish_reason == "error"
    assert "choose values nearer to 1" in outputs[1].error
