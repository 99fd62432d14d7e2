"""An engine in a process of its own answers as one in this process does; its death, and its parent's, are seen."""

from __future__ import annotations

import asyncio
import json
import math
import time
from dataclasses import dataclass, replace

import fork_server
import pytest
from engine_helpers import BLOCK_BYTES, make
from server_helpers import FAR, FAR_BLOCKS, GREEDY, error, parsed, serving, until
from tiny_models import random_ids

from saccade import SamplingParams
from saccade.engine.core import new_request_id
from saccade.engine.messages import AddRequest, MapOrder, RequestMetrics, RequestOutcome, StepOutput, TokenLogprob
from saccade.engine.ranks.link import RanksLost
from saccade.engine.settings.config import EngineConfig
from saccade.errors import CapacityError, EngineLost, ModelError
from saccade.methods.policy import Policy
from saccade.server import engine_launch, wire, wire_forms
from saccade.server.engine_client import EngineProcess
from saccade.server.engines import about_llm

PSA = "flexprefill+psa(epsilon=0.9)"


def config(folder, **settings) -> EngineConfig:
    settings.setdefault("enable_prefix_caching", False)  # blocks are counted
    return EngineConfig.of(
        model=folder, dtype="float32", kv_memory=FAR_BLOCKS * BLOCK_BYTES, prefill_chunk=64, max_requests=4, **settings
    )


@pytest.fixture(autouse=True, scope="module")
def _quickly_started():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_launch, "subprocess", fork_server.SUBPROCESS)
        yield


@pytest.fixture(scope="module")
def server(far_llama):
    with serving(EngineProcess(config(far_llama), "error"), max_queue=64, selection_maps=400) as running:
        yield running


def test_answers_are_those_of_an_engine_in_this_process(server, llm):
    ids = random_ids(150, 3)
    for policy in ("dense", PSA):
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=2)
        want = llm.generate([ids], params, policy=policy)[0]
        asked = {"prompt": ids, **GREEDY, "max_tokens": 12, "policy": policy, "logprobs": 2, "report": True}
        got = server.ask("/v1/completions", asked).json()["choices"][0]
        assert got["text"] == want.outputs[0].text
        assert got["logprobs"]["token_logprobs"] == [
            pytest.approx(entry[token].logprob, abs=1e-5)
            for token, entry in zip(want.outputs[0].token_ids, want.outputs[0].logprobs)
        ]
        assert got["report"]["decode"]["keys_attended"] == want.report["decode"]["keys_attended"]
        streamed = server.events("/v1/completions", asked)
        assert "".join(one["choices"][0]["text"] for one in streamed[:-1]) == want.outputs[0].text
        assert [one["choices"][0]["finish_reason"] for one in streamed[:-1]].count("length") == 1


def test_what_runs_and_selection_maps_pass_the_process_border(server, llm):
    text = "rain fell on the town, " * 7
    ids = llm.encode(text)
    params = SamplingParams(temperature=0, max_tokens=5)
    message = AddRequest(new_request_id(), ids, params, Policy.parse(PSA), map_order=MapOrder((1,), 32))
    with llm.loop.asked([message]) as (stream,):
        outcome = list(llm.loop.outputs(stream))[-1].outcome
    with server.client.stream("POST", "/v1/completions", json={"prompt": ids, **FAR, "stream": True}) as response:
        lines = response.iter_lines()
        next(lines)
        (running,) = server.client.get("/v1/requests").json()["running"]
    assert running["prefill"]["tokens"] == len(ids)
    assert [len(heads) for heads in running["prefill"]["density_per_head"]] == [4, 4, 4]
    drawn = server.ask(
        "/v1/selection_maps", {"prompt": text, "policy": PSA, "layers": [1], "pixels": 32, "max_tokens": 5}
    )
    assert {name: drawn.json()[name] for name in outcome.selection_map} == outcome.selection_map


def test_samples_sessions_and_grammars_pass_the_process_border(server):
    drawn = {"prompt": "some text", "max_tokens": 6, "seed": 3, "temperature": 2.0, "ignore_eos": True}
    both = [choice["text"] for choice in server.ask("/v1/completions", {**drawn, "n": 2}).json()["choices"]]
    assert both[0] == server.ask("/v1/completions", drawn).json()["choices"][0]["text"] != both[1]
    turns = [server.complete(random_ids(length, 1), session_id="s").json()["usage"] for length in (100, 120)]
    assert turns[1]["prompt_tokens_details"]["cached_tokens"] >= 99
    assert server.client.delete("/v1/sessions/s").status_code == 200
    asked = {"structured_outputs": {"regex": "(ab){3}c"}, "ignore_eos": False, "max_tokens": 20}
    assert server.complete("x", **asked).json()["choices"][0]["text"] == "abababc"
    assert server.complete("x", stop=["\ud800"], logit_bias={"7": 3.5}).status_code == 200


def test_the_engines_refusals_keep_their_form(server):
    assert error(server.complete("x", policy="etf(reuse=nothing)"))[::2] == (400, "policy")
    assert error(server.complete([5, 9999]))[0] == 400
    assert error(server.complete("x", logit_bias={"9999": 1}))[::2] == (400, None)
    assert server.complete("x", stop_token_ids=[2**70]).status_code == 200  # it never comes


def test_a_client_that_goes_away_ends_its_request_there(server):
    with server.client.stream("POST", "/v1/completions", json={"prompt": "x", **FAR, "stream": True}) as response:
        next(response.iter_lines())
        until(lambda: server.serving.engine.statistics().running == 1)
    server.idle(5)
    assert server.serving.engine.statistics().used_blocks == 0
    assert "num_requests_running" in server.client.get("/metrics").text


@dataclass(frozen=True)
class Written:
    """A constraint that is its text."""

    source: str
    name: str = "a grammar"

    def begin(self):
        raise AssertionError("no engine takes it")


def test_messages_come_back_as_they_were(tiny_llama):
    params = SamplingParams(
        max_tokens=5, stop=["\ud800a", "b"], bad_words=["c"], stop_token_ids=[2**80, 7], logit_bias={"3": 1.5}, seed=9
    )
    message = AddRequest(
        7, [1, 2, 3], params, Policy.parse(PSA), 4, 2, True, 1, 6, Written("grammar"), cache_salt="key\0\udfff"
    )
    frames = wire.Frames()
    sent = wire.framed(wire.Add(3, [wire_forms.request(message)])) + wire.framed(wire.Cancel(0, [1, 2]))
    got = [wire.to_engine(content) for byte in sent for content in frames.feed(bytes([byte]))]
    assert isinstance(got[0], wire.Add)
    assert got[0].call == 3
    back = wire_forms.add_request(got[0].requests[0], Written)
    assert back == replace(message, params=replace(params, stop_token_ids=(7,)))
    assert got[1] == wire.Cancel(0, [1, 2])

    entries = [{5: TokenLogprob(-0.5, 1, "x"), 6: TokenLogprob(-math.inf, 2, "y")}]
    report = {"notes": ["n"], "decode": {"density": 0.5}}
    times = RequestMetrics(1.0, first_token_time=2.0)
    outcome = RequestOutcome([2, 3], "text", [5], "stop", report, None, -0.5, entries, [None, *entries], 7, "b", times)
    outcome.error_type = "EngineLost"
    output = StepOutput(7, "text", [5], 3, 3, outcome, entries)
    (content,) = wire.Frames().feed(wire.framed(wire.Outputs(0, [wire_forms.output(output)])))
    read = wire.from_engine(content)
    assert isinstance(read, wire.Outputs)
    assert wire_forms.step_output(read.outputs[0], [1, 2, 3]) == output
    assert outcome.prompt == [2, 3]

    for error_ in (CapacityError("full"), EngineLost("gone")):
        assert repr(wire_forms.raised(wire_forms.told(error_))) == repr(error_)
    lost = wire_forms.raised(wire_forms.told(RanksLost("rank 1")))  # a class that the server need not know
    assert repr(lost) == repr(EngineLost("rank 1"))
    assert str(wire_forms.raised(wire_forms.told(KeyError("x")))) == "KeyError: 'x'"
    assert repr(wire_forms.raised(("is_of", "x"))) == repr(RuntimeError("x"))
    with make(tiny_llama) as llm:
        about = about_llm(llm)
    assert wire_forms.about_of(json.loads(json.dumps(wire_forms.about_dict(about), default=vars))) == about


def test_an_engine_is_asked_without_a_server(tiny_llama):
    """The contract: prefixes, refusals before a start, withdrawal. The engine ends with its parent: the kernel closes
    what a killed process held, and nobody else holds this end of the socket."""
    engine = EngineProcess(config(tiny_llama, enable_prefix_caching=True), "error")
    ids, params = random_ids(100, 1), SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)

    async def ask() -> None:
        with pytest.raises(EngineLost, match="not been started"):
            await engine.open_session("s", "")
        await engine.start()
        message = AddRequest(1, ids, replace(params, max_tokens=1), Policy())
        outputs = await engine.submit([message])
        while not outputs.finished:
            await outputs.take()
        assert engine.statistics().used_blocks > 0  # what others may go on from
        await engine.clear_prefixes()
        task = asyncio.ensure_future(engine.submit([replace(message, request_id=2, params=params)]))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await engine.check_policy(Policy.parse(PSA))
        ends = time.monotonic() + 60
        while engine.statistics().used_blocks or engine.statistics().running:
            assert time.monotonic() < ends
            await asyncio.sleep(0.01)
            await engine.clear_prefixes()
        assert not engine._calls.requests

    try:
        asyncio.run(ask())
    finally:
        engine._socket.close()
    assert engine.process.wait(60) == 1
    assert not engine.alive
    engine.close()


def test_a_model_that_cannot_be_loaded_is_refused_in_one_line():
    with pytest.raises(ModelError, match="model-that-is-none"):
        EngineProcess(config("model-that-is-none"), "error")


def test_the_death_of_the_engine_is_told_to_everybody(server):
    """The last one here: it kills what the others share."""
    engine = server.serving.engine
    asked = {"prompt": "x", **FAR, "stream": True, "n": 2}
    with server.client.stream("POST", "/v1/completions", json=asked) as response:
        lines = response.iter_lines()
        first = next(lines)
        engine.process.kill()
        events = parsed(iter([first, *lines]))
    assert events[-1] == "[DONE]"
    assert events[-2]["error"]["code"] == "engine_lost"
    assert "signal 9" in events[-2]["error"]["message"]
    assert not any(choice["finish_reason"] for one in events[:-2] for choice in one["choices"])
    assert server.client.get("/health").status_code == server.client.get("/ready").status_code == 503
    assert error(server.complete("x"))[:2] == (503, "engine_lost")
    assert error(server.complete("x", policy="quest"))[:2] == (503, "engine_lost")
    assert error(server.complete("x", session_id="s"))[:2] == (503, "engine_lost")
    assert server.serving.admission.samples == 0
