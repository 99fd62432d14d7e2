"""Selection maps that a request orders, and reports of requests that run."""

from __future__ import annotations

import asyncio
import base64

import numpy as np
import pytest
from engine_helpers import make
from server_helpers import FAR, FAR_BLOCKS
from tiny_models import random_ids

from saccade import SamplingParams
from saccade.engine.core import new_request_id
from saccade.engine.messages import AddRequest, MapOrder
from saccade.engine.watch.maps import FLOOR, Maps
from saccade.errors import RequestError
from saccade.eval.capture import watch
from saccade.methods.policy import Policy

GREEDY = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
POLICY = Policy.parse("streaming(sinks=2, window=40)+topk(k=24)")


def ask(ids, order=None, policy=POLICY, params=GREEDY):
    return AddRequest(new_request_id(), ids, params, policy, map_order=order)


def outcomes(llm, messages):
    with llm.loop.asked(messages) as streams:
        return [list(llm.loop.outputs(stream))[-1].outcome for stream in streams]


def test_a_request_gets_the_map_that_an_observer_of_the_whole_engine_draws(llm):
    """Beside others, which see nothing of it: their answers and their counts stay."""
    ids, other = random_ids(300, seed=1), random_ids(280, seed=2)
    (alone,) = outcomes(llm, [ask(other)])
    mapped, beside = outcomes(llm, [ask(ids, MapOrder((0, 2), 64)), ask(other)])
    want = Maps(len(ids), 4, (0, 2), 64)
    assert watch(llm, ids, want, POLICY, max_tokens=5, ignore_eos=True).outputs[0].token_ids == mapped.token_ids
    assert mapped.selection_map == want.as_dict()
    assert beside.selection_map is None
    assert beside.token_ids == alone.token_ids
    for phase in ("prefill", "decode"):
        assert beside.report[phase]["keys_attended"] == alone.report[phase]["keys_attended"]
        assert beside.report[phase]["rows_unread"] == alone.report[phase]["rows_unread"]
    assert not llm.engine.watch.maps or llm.engine.step() == []
    assert llm.engine.watch.maps.keys() <= {mapped.request_id}


def test_the_grids_are_what_was_read(llm):
    ids = random_ids(90, seed=3)
    (got,) = outcomes(llm, [ask(ids, MapOrder((1,), 128))])
    drawn = got.selection_map
    assert (drawn["prompt_tokens"], drawn["tokens"], drawn["cell"]) == (90, 94, 1)
    by_phase = {part["phase"]: part for part in drawn["maps"]}
    shapes = {phase: (part["heads"], part["rows"], part["columns"]) for phase, part in by_phase.items()}
    assert shapes == {"prefill": (4, 90, 94), "decode": (4, 4, 94)}
    grids = {
        (phase, name): np.frombuffer(base64.b64decode(part[name]), np.uint8).reshape(shapes[phase])
        for phase, part in by_phase.items()
        for name in ("read", "unread", "share")
    }
    query, key = np.arange(90)[:, None], np.arange(94)[None, :]
    band = (query - key < 40) | (key < 2)
    causal = key <= query
    share = np.where(causal, np.where(band, 254, 0), 255)
    assert (grids["prefill", "share"] == share).all()
    assert (grids["prefill", "read"][:, ~(band & causal)] == 0).all()
    assert (grids["decode", "share"] == 254).sum(-1).tolist() == [[24] * 4] * 4
    # Weights of a row add up to 1: those read to the mass that is stated.
    weights = {
        name: np.where(grids["prefill", name] > 0, FLOOR ** (1 - grids["prefill", name] / 255.0), 0)
        for name in ("read", "unread")
    }
    assert np.allclose((weights["read"] + weights["unread"]).sum(-1), 1, atol=0.03)
    assert np.allclose(weights["read"].sum(-1).mean(-1), by_phase["prefill"]["mass"], atol=0.03)


def test_a_map_shows_the_whole_prompt_though_its_beginning_is_known(tiny_llama):
    ids = random_ids(300, seed=4)
    with make(tiny_llama, enable_prefix_caching=True) as llm:
        outcomes(llm, [ask(ids, policy=Policy.parse("dense"))])
        (again,) = outcomes(llm, [ask(ids, policy=Policy.parse("dense"))])
        assert again.report["cached_tokens"] > 0
        (mapped,) = outcomes(llm, [ask(ids, MapOrder((0,), 32), Policy.parse("dense"))])
        assert mapped.report["cached_tokens"] == 0
        assert mapped.selection_map["maps"][-1]["density"] == [1.0] * 4


@pytest.mark.parametrize(
    ("order", "params", "said"),
    [
        (MapOrder((3,)), GREEDY, "layers=\\[3\\] must be some of 0 to 2"),
        (MapOrder(()), GREEDY, "layers=\\[\\] must be"),
        (MapOrder((0,), 5000), GREEDY, "pixels=5000 must be from 16 to"),
        (MapOrder((0,)), SamplingParams(max_tokens=900), "max_tokens=900 must be from 1 to"),
    ],
)
def test_a_map_that_cannot_be_drawn_is_refused(llm, order, params, said):
    with pytest.raises(RequestError, match=said):
        llm.loop.add([ask([5, 6], order, params=params)])
    assert llm.loop.running == 0


def test_a_running_request_reports_what_it_has_done(far_llama):
    llm = make(far_llama, FAR_BLOCKS)

    async def main():
        outputs = await llm.loop.submit([ask(random_ids(200, seed=5), params=SamplingParams(**FAR))])
        made = 0
        while made < 20:
            for output in await outputs.take():
                made += len(output.new_tokens)
        reports = await asyncio.wrap_future(llm.loop.running_reports(4))
        outputs.close()
        return outputs, reports, llm.loop.running_reports(0).result()

    outputs, (report,), none = asyncio.run(main())
    llm.close()
    assert none == []
    assert report["request_id"] in [stream.request_id for stream in outputs.streams]
    assert report["output_tokens"] >= 20
    assert report["prefill"]["tokens"] == 200
    assert np.array(report["decode"]["density_per_head"]).shape == (3, 4)
    assert 0 < report["decode"]["density"] < 0.2
