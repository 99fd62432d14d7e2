"""Recorded steps of two processes, each with half of the heads, give what one process gives: CPU tensors, Triton's
interpreter, no graphs, sums over gloo."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import device_rank
import fork_server
import pytest
import torch
import triton_helpers  # noqa: F401  (sets the interpreter up first)
from engine_helpers import finish
from rank_helpers import greedy, same
from tiny_models import make_checkpoint, random_ids

from saccade import LLM, SamplingParams, ranks
from saccade.engine import worker
from saccade.engine.device import backend
from saccade.engine.ranks import meeting
from saccade.engine.ranks.leads import FirstLead
from saccade.kv.format import KVFormat
from saccade.methods.policy import Policy

PROMPTS = [random_ids(length, seed=length) for length in (30, 158, 97)]
POLICIES = ["dense", "arkvale(budget=64, unit=kv_head)", "quest(budget=64, dense_layers=1)"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    shape = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "num_hidden_layers": 2}
    return make_checkpoint("llama", tmp_path_factory.mktemp("llama"), max_position_embeddings=1024, **shape)


@pytest.fixture(autouse=True, scope="module")
def ranks_with_a_device():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranks, "subprocess", fork_server.SUBPROCESS)
        patch.setattr(ranks, "COMMAND", (str(Path(device_rank.__file__)),))
        patch.setattr(worker, "device_backend", device_rank.device_backend)
        patch.setenv("RUNS_AHEAD", "1")
        yield


def make(folder, count: int, **options) -> LLM:
    settings = {"dtype": "float32", "prefill_chunk": 256, "device": "cpu", "threads": 1, "kv_memory": "4MiB"}
    settings |= {"exact": False, "enable_prefix_caching": False, **options}
    return LLM(folder, tensor_parallel_size=count, **settings)


@pytest.fixture(scope="module")
def pair(folder):
    """An engine of one process, and one of two."""
    with make(folder, 1) as one, make(folder, 2) as two:
        assert isinstance(two.engine.worker.device.lead, FirstLead)
        yield one, two
        assert two.pool.used_blocks == 0
    assert [process.poll() for process in two.engine.link.processes] == [0]


def by_device(outputs) -> None:
    """All decode rows ran in batched steps."""
    for one in outputs:
        assert {path["path"] for path in one.report["decode"]["paths"]} == {"recorded"}


@pytest.fixture
def asked(monkeypatch):
    """How many steps were launched ahead of their turn and asked for."""
    seen: list[bool] = []
    real = backend.DeviceBackend._go_on
    monkeypatch.setattr(backend.DeviceBackend, "_go_on", lambda self, *more: seen.append(True) or real(self, *more))
    return seen


def test_rows_of_several_methods(pair, asked):
    """Counts of all heads, as one process has them; steps run ahead in both."""
    own = [llm.generate(PROMPTS, greedy(6), policy=POLICIES) for llm in pair]
    same(*own)
    by_device(own[1])
    assert len(asked) >= 8
    counts, until = pair[1].engine.link._counts._counts, time.monotonic() + 20
    while counts[0] != counts[1] and time.monotonic() < until:
        time.sleep(0.01)  # the other leaves the last sum
    assert counts[0] == counts[1] > 0  # a rank that hangs is found by these: decisions count on both
    for mine, theirs in zip(*own, strict=True):
        left, right = mine.report["decode"], theirs.report["decode"]
        for name in ("tokens", "keys_attended", "keys_causal", "density_per_head", "selections", "retrievals"):
            assert left[name] == right[name], name
        assert right["keys_estimated"] == pytest.approx(left["keys_estimated"], abs=8)


def test_tokens_that_are_drawn(pair, asked):
    """The first rank's, on both, for steps that go on with them."""
    params = [SamplingParams(max_tokens=6, seed=3, temperature=0.9, ignore_eos=True, logprobs=1), greedy(6)]
    own = [llm.generate(PROMPTS[:2], params, policy="dense") for llm in pair]
    same(*own)
    by_device(own[1])
    assert asked


def test_audits_of_recorded_steps(pair):
    """Each looks at its own heads: the same places, and what is found there, as of one process."""
    own = [llm.generate(PROMPTS[2], greedy(5, seed=7, audit=1.0, audit_steps=0.6), policy=POLICIES[1]) for llm in pair]
    by_device(own[1])
    mine, theirs = (out[0].report["audit"] for out in own)
    assert mine["places"] == theirs["places"] == mine["output_error"]["samples"] == 4 * 2 * 2
    assert theirs["left_out"] == 0
    for name in ("steps", "retained_mass", "output_error", "output_error_scaled", "agreement", "divergence"):
        assert theirs[name] == pytest.approx(mine[name], abs=2e-5), name


def test_a_request_that_joins_and_one_that_is_cancelled(pair):
    answers = []
    for llm in pair:
        engine = llm.engine
        first = engine.add(PROMPTS[1], greedy(9), Policy.parse("arkvale(budget=64, unit=kv_head)"))
        while len(first.output_ids) < 3:
            engine.step()
        second, third = (engine.add(ids, greedy(5), Policy()) for ids in (PROMPTS[0], PROMPTS[2]))
        while len(second.output_ids) < 2:
            engine.step()
        engine.cancel(third)
        finish(engine)
        answers.append([first.final_ids, second.final_ids])
    assert answers[0] == answers[1]


def test_counts_that_are_asked_for_while_requests_run(pair):
    """Each asks the other rank for what it has counted; what is asked for again is counted once."""
    said = []
    for llm in pair:
        request = llm.engine.add(PROMPTS[1], greedy(6), Policy.parse("quest(budget=64, dense_layers=1)"))
        looks = []
        while not request.finished:
            llm.engine.step()
            looks.append(request.report.as_dict()["decode"]["keys_attended"])
        assert looks[-1] == request.report.as_dict()["decode"]["keys_attended"]
        said.append(looks[-1])
    assert said[0] == said[1] > 0


def test_short_prompts_that_a_device_computes_together(pair):
    prompts = [random_ids(length, seed=length) for length in (9, 20, 33)]
    own = [llm.generate(prompts, greedy(3)) for llm in pair]
    same(*own)


def test_steps_recorded_ahead_of_requests(folder):
    """The first rank says which, one by one; answers are what they were."""
    with make(folder, 1, max_requests=4) as one, make(folder, 2, max_requests=4) as two:
        for llm in (one, two):
            device = llm.engine.worker.device
            pool, policy = llm.pool, Policy.parse("dense")
            done = llm.engine.worker.prepare(pool, policy, 4, 1024, 0.0, 1)
            assert done.recorded == 1
            assert device.graphs.kinds == 1
        same(one.generate(PROMPTS, greedy(4)), two.generate(PROMPTS, greedy(4)))


def test_tiers(folder):
    """What is not resident on some rank is attended by the host on both; the rest is not."""
    answers, paths = [], set()
    for count, slots in ((1, None), (2, 30)):
        memory = "4MiB" if slots is None else slots * KVFormat(torch.float32, 1, 32, 16).block_bytes
        options = {} if slots is None else {"kv_host": "4MiB"}
        with make(folder, count, block_size=16, kv_memory=memory, **options) as llm:
            answers.append([*llm.generate([PROMPTS[0]], greedy(4)), *llm.generate(PROMPTS, greedy(5), policy=POLICIES)])
            paths = {path["path"] for one in answers[-1] for path in one.report["decode"]["paths"]}
    same(*answers)
    assert "recorded" in paths
    assert len(paths) > 1


def test_a_rank_that_dies_within_a_step(folder):
    with make(folder, 2) as llm:
        engine = llm.engine
        request = engine.add(PROMPTS[1], greedy(30), Policy())
        while len(request.output_ids) < 3:
            engine.step()
        os.kill(engine.link.processes[0].pid, signal.SIGKILL)
        finish(engine)
        assert re.search("rank 1 of 2 ended by itself, with exit code -9; no request can go on", request.error)
        assert request.report.as_dict()["decode"]["tokens"] >= 2


@pytest.mark.thorough
def test_a_rank_stopped_in_an_exchange_that_the_first_has_left_is_found(folder, monkeypatch):
    """It has sent its part, so that the first rank goes on to a step, where devices wait for each other."""
    monkeypatch.setenv("JOINS_BESIDE_COUNTS", "1")
    monkeypatch.setattr(meeting.RankGroup, "_run", meeting.RankGroup._run)
    device_rank.join_beside_counts()
    with make(folder, 2) as llm:
        counts, process = llm.engine.link._counts._counts, llm.engine.link.processes[0]
        stopped: list[float] = []

        def stop() -> None:
            time.sleep(0.3)
            while not counts[1] % 2:
                pass
            os.kill(process.pid, signal.SIGSTOP)
            stopped.append(time.monotonic())

        thread = threading.Thread(target=stop)
        thread.start()
        (answer,) = llm.generate(PROMPTS[:1], greedy(700))
        thread.join()
        assert time.monotonic() - stopped[0] < 10
        assert "rank 1 of 2 hangs" in answer.error


@pytest.mark.thorough
def test_a_rank_that_would_go_another_way_ends_the_engine(folder, monkeypatch):
    """Rows in another order, say: sums of such would be of different rows."""
    real = FirstLead.takes_ahead
    monkeypatch.setattr(FirstLead, "takes_ahead", lambda self, own, said: real(self, own, ("other", said)))
    with make(folder, 2) as llm:
        request = llm.engine.add(PROMPTS[0], greedy(5), Policy())
        finish(llm.engine)
        assert "rank 1 of 2 ended by itself" in request.error


def test_one_rank_alone_launches_what_it_would_among_others(folder):
    """A dry run of a server's start: no other process, and no matter what it answers."""
    with ranks.alone(), make(folder, 2, layers=1) as llm:
        assert llm.engine.link.processes == []
        assert llm.engine.worker.prepare(llm.pool, Policy(), 2, 1024, 0.0, 1).recorded == 1
        (answer,) = llm.generate([PROMPTS[0]], greedy(3), policy="quest(budget=64)")
        assert len(answer.outputs[0].token_ids) == 3
        assert llm.pool.format.kv_heads == 1


def test_a_rank_ends_with_the_first_whatever_it_waits_for(tmp_path):
    """As one does that waits on its GPU."""
    script = tmp_path / "rank.py"
    script.write_text(
        "import time\nfrom saccade import ranks\nranks.END_SECONDS = 0.1\nranks._end_with_the_first()\ntime.sleep(60)\n"
    )
    process = fork_server.popen([sys.executable, str(script)], stdin=subprocess.PIPE)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.3)
    process.stdin.close()
    assert process.wait(30) == 1
