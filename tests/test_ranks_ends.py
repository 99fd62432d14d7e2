"""Ranks that die, hang, break or never begin: what runs ends with an error that names them."""

from __future__ import annotations

import gc
import os
import queue
import re
import signal
import threading
from contextlib import suppress
from types import SimpleNamespace

import fork_server
import pytest
import torch
from engine_helpers import finish
from rank_helpers import PROMPTS, greedy, make
from storm.ranks import Plan, storm

from saccade import ranks
from saccade.engine.ranks import link as rank_link
from saccade.engine.ranks.link import RankLink, RanksLost, send
from saccade.engine.ranks.meeting import RankGroup
from saccade.engine.ranks.other import OtherRank
from saccade.engine.ranks.worker import FirstRank, RankWorker
from saccade.engine.rows.layers_pass import LayersPass
from saccade.engine.settings.config import EngineConfig
from saccade.engine.worker import Worker
from saccade.errors import SaccadeError
from saccade.methods.policy import Policy
from saccade.ranks import Start, serve


@pytest.fixture
def two(tiny_llama, monkeypatch):
    monkeypatch.setattr(ranks, "subprocess", fork_server.SUBPROCESS)
    with make(tiny_llama, 2, exact=False) as llm:
        yield llm
        llm.reset_prefix_cache()
        assert llm.pool.used_blocks == 0
    assert [process.poll() for process in llm.engine.link.processes] == [-signal.SIGKILL]


def test_a_rank_that_dies(two):
    """What runs ends with an error that names it, so does what comes later, at once; the process lives on."""
    engine = two.engine
    first, second = (engine.add(ids, greedy(30), Policy()) for ids in PROMPTS[:2])
    while len(second.output_ids) < 3:
        engine.step()
    os.kill(engine.link.processes[0].pid, signal.SIGKILL)
    finish(engine)
    for request in (first, second):
        assert "rank 1 of 2 ended by itself, with exit code -9" in request.error
        assert request.error_type == "EngineLost"
        assert "close this engine and begin another" in request.error
    with pytest.warns(RuntimeWarning, match="rank 1 of 2 ended"):
        assert "RanksLost" in two.generate(PROMPTS[3], greedy(2))[0].error
    assert not two.loop.alive  # by which a server begins another engine


def test_a_rank_that_hangs(two):
    """It is found by the processor that it does not use while it is waited for, and named."""
    engine = two.engine
    engine.link.hangs_after(0.5)
    request = engine.add(PROMPTS[0], greedy(30), Policy())
    while len(request.output_ids) < 3:
        engine.step()
    process = engine.link.processes[0]
    os.kill(process.pid, signal.SIGSTOP)
    finish(engine)
    assert re.search(r"rank 1 of 2 hangs: it used no processor for \d s.*begin another", request.error)
    assert process.wait(10) == -signal.SIGKILL
    assert not two.loop.alive


@pytest.mark.thorough
def test_a_storm():
    """``make storm-ranks`` has thousands of requests."""
    done = storm(120, Plan(seed=2, each=40))
    assert done.wrong == []
    assert done.right > 20
    assert len(done.ends) > 1


@pytest.fixture
def on_a_thread(monkeypatch):
    """The other rank runs on a thread of this process: what breaks it can be planted."""
    monkeypatch.setattr(rank_link, "ANSWER_SECONDS", 5.0)
    messages: queue.Queue = queue.Queue()
    threads = []

    def follow(start: Start) -> None:
        with suppress(OSError):
            serve(start, iter(messages.get, None))
        gc.collect()  # closes its connections, as the end of a process does

    def started(link, config, pool, length, exact, densities) -> None:
        start = Start(config, 1, str(link.store_path), pool.num_blocks, length, exact, torch.get_num_threads())
        threads.append(threading.Thread(target=follow, args=(start,)))
        threads[-1].start()
        link.tell, link.tell_each = messages.put, lambda each: messages.put(each[0])
        link.join()

    monkeypatch.setattr("saccade.llm.start_ranks", started)
    yield
    messages.put(None)
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()


@pytest.mark.parametrize(
    "policy", ["dense", "quest(budget=32, block_size=16, dense_layers=0)", "adakv(capacity=16, window=4)"]
)
@pytest.mark.parametrize("fails", [OtherRank, FirstRank])
def test_what_fails_in_one_rank_alone(fails, policy, tiny_llama, on_a_thread, monkeypatch):
    """A request that one rank fails has an error, and a report of the steps before; others go on."""

    def failing(self, step, *more):
        result = Worker.run(self, step, *more)
        for one in step.scheduled:
            if type(self) is fails and one.start == len(PROMPTS[3]) + 2:
                result.requests[one.request_id].error = "planted"
        return result

    monkeypatch.setattr(RankWorker, "run", failing, raising=False)
    with make(tiny_llama, 2) as llm:
        first, second = (llm.engine.add(ids, greedy(6), Policy.parse(policy)) for ids in (PROMPTS[3], PROMPTS[1]))
        finish(llm.engine)
        assert first.error == ("decode: it failed in another rank" if fails is OtherRank else "planted")
        counted = [one.report.decode.layers[0].attended for one in (first, second)]
        assert any(one is None for one in counted) or len(counted[0]) == len(counted[1])
        assert second.error is None
        assert llm.pool.used_blocks == 0
        (output,) = llm.generate(PROMPTS[1], greedy(6), policy=policy)
        assert output.outputs[0].token_ids == second.final_ids


def test_a_rank_whose_pass_breaks(tiny_llama, on_a_thread, monkeypatch):
    """It ends, since it is in another layer than the first; that one's engine lives on without it."""

    def breaking(self):
        if self.runner in others and self.step.scheduled[0].phase == "decode":
            raise OSError("planted")
        return real(self)

    def beginning(self, group, pool, runner, *given):
        others.append(runner)
        begin(self, group, pool, runner, *given)

    monkeypatch.setattr(rank_link, "ANSWER_SECONDS", 2.0)  # which it waits for in vain
    real, begin, others = LayersPass.steps, OtherRank.__init__, []
    monkeypatch.setattr(LayersPass, "steps", breaking)
    monkeypatch.setattr(OtherRank, "__init__", beginning)
    with make(tiny_llama, 2) as llm:
        request = llm.engine.add(PROMPTS[3], greedy(6), Policy())
        finish(llm.engine)
        assert "the 2 ranks are out of step: RuntimeError" in request.error
        assert "close this engine and begin another" in request.error
        assert llm.pool.used_blocks == 0


def test_a_rank_that_cannot_load_its_model_says_why(tmp_path):
    link = RankLink(2)
    link.processes.append(SimpleNamespace(poll=lambda: None, stdin=None, wait=lambda seconds: 0, kill=lambda: None))
    config = EngineConfig(model=tmp_path, device="cpu", tensor_parallel_size=2)
    with pytest.raises(SaccadeError):
        serve(Start(config, 1, str(link.store_path), 3, 64, True, torch.get_num_threads()), iter(()))
    with pytest.raises(RanksLost, match=r"rank 1 of 2: ModelError: .*config.json.*close this engine"):
        link.join()
    with pytest.raises(RanksLost, match=r"config\.json"):
        link.tell("anything")
    assert not link.store_path.parent.exists()


def test_a_rank_that_does_not_come_is_waited_for_no_longer(monkeypatch):
    """Neither for a sum nor to read a message."""
    monkeypatch.setattr(rank_link, "ANSWER_SECONDS", 0.3)
    link, groups = RankLink(2), {}

    def join(rank: int) -> None:
        groups[rank] = RankGroup(link._store if rank == 0 else store, rank, 2, rank_link.ANSWER_SECONDS, link._counts)

    store = torch.distributed.FileStore(str(link.store_path), 2)
    threads = [threading.Thread(target=join, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    both: dict[int, torch.Tensor] = {}
    other = threading.Thread(target=lambda: both.update({1: groups[1].sum(torch.tensor([1.5, 2.0]))}))
    other.start()
    both[0] = groups[0].sum(torch.tensor([0.5, -2.0]))
    other.join()
    assert both[0].tolist() == both[1].tolist() == [2.0, 0.0]
    with pytest.raises(RuntimeError):
        groups[0].sum(torch.ones(2))  # rank 1 does not call it
    reading, writing = os.pipe()
    process = SimpleNamespace(stdin=os.fdopen(writing, "wb", buffering=0))
    with pytest.raises(TimeoutError, match=r"read nothing for 0\.3 seconds"):
        send(process, b"x" * (1 << 22))
    os.close(reading)
    process.stdin.close()
    link.close()
