"""Two processes that share out the KV heads of one model answer as one process does."""

from __future__ import annotations

import gc
import os
import queue
import re
import signal
import threading
from contextlib import suppress
from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import fork_server
import pytest
import torch
from engine_helpers import EVERY, finish
from tiny_models import make_checkpoint, random_ids

from saccade import LLM, SamplingParams, ranks
from saccade.engine import rank_link
from saccade.engine.config import EngineConfig
from saccade.engine.host_pass import HostPass
from saccade.engine.observe import observing
from saccade.engine.pieces import BeginRestore, CaptureSession, CopyRows, FinishRestore, LoadRows, act
from saccade.engine.rank_limits import why_not
from saccade.engine.rank_link import RankGroup, RankLink, RanksLost, send
from saccade.engine.ranks import OtherRank
from saccade.engine.worker import Worker
from saccade.errors import ModelError, PolicyError, RequestError, SaccadeError
from saccade.kv.format import KVFormat
from saccade.methods import labels, prehoc
from saccade.methods.offline import KINDS
from saccade.methods.policy import Policy
from saccade.models.calibration import Calibrations, save_calibration
from saccade.models.loader import load_model
from saccade.models.shards import shard, shard_model
from saccade.ranks import Start, serve

LAYERS, BLOCKS = 3, 40  # of 32 tokens a layer: less than all requests below take at once
PROMPTS = [random_ids(length, seed=length) for length in (230, 150, 301, 64, 333)]
CLOSE = 1e-4  # of log-probabilities


def make(folder, ranks: int, **options) -> LLM:
    memory = LAYERS * BLOCKS * KVFormat(torch.float32, 2 // ranks, 16, 32).block_bytes  # each rank's own
    settings = {"dtype": "float32", "prefill_chunk": 64, "device": "cpu", "threads": 1, "kv_memory": memory}
    return LLM(folder, tensor_parallel_size=ranks, **{"enable_prefix_caching": False, **settings, **options})


@pytest.fixture(scope="module")
def engines(tiny_llama, quickly_started):
    """Those that ``pair`` has made: lists of an engine of one process and one of two."""
    made: list[tuple[LLM, LLM]] = []
    yield made
    for llm in (llm for both in made for llm in both):
        llm.reset_prefix_cache()
        assert llm.pool.used_blocks == 0
        link = llm.engine.link
        lost = link is not None and link.lost is not None
        llm.close()
        assert link is None or [process.poll() for process in link.processes] == [-9 if lost else 0]


@pytest.fixture
def pair(engines, tiny_llama):
    """An engine of one process and one of two; whatever they ran, no block is held in the end."""
    if not engines or engines[-1][1].engine.link.lost is not None:
        options = {"exact": False, "enable_prefix_caching": True}
        engines.append((make(tiny_llama, 1, **options), make(tiny_llama, 2, **options)))
    return engines[-1]


@pytest.fixture(scope="module")
def quickly_started():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranks, "subprocess", fork_server.SUBPROCESS)
        yield


def greedy(count: int = 8, **more) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, logprobs=2, **more)


def same(one, two) -> None:
    """Equal tokens, and log-probabilities that differ by rounding."""
    assert [output.error for output in (*one, *two)] == [None] * (len(one) + len(two))
    for own, other in zip(one, two, strict=True):
        for mine, theirs in zip(own.outputs, other.outputs, strict=True):
            assert mine.token_ids == theirs.token_ids
            assert mine.cumulative_logprob == pytest.approx(theirs.cumulative_logprob, abs=CLOSE)
            for left, right in zip(mine.logprobs or [], theirs.logprobs or [], strict=True):
                assert {token: at.logprob for token, at in left.items()} == pytest.approx(
                    {token: at.logprob for token, at in right.items()}, abs=CLOSE
                )


def test_each_rank_stores_its_own_heads(pair):
    one, two = pair
    assert two.pool.num_blocks == one.pool.num_blocks == LAYERS * BLOCKS
    assert (one.pool.format.kv_heads, two.pool.format.kv_heads) == (2, 1)
    assert 2 * two.pool.format.block_bytes == one.pool.format.block_bytes


def test_many_requests_in_chunks(pair):
    """More than the pool holds at once, so some wait, and others give their blocks up and begin again."""
    one, two = pair
    same(one.generate(PROMPTS, greedy(41)), two.generate(PROMPTS, greedy(41)))


def test_prompts_that_are_scored(pair):
    one, two = pair
    params = greedy(2, prompt_logprobs=1)
    theirs, ours = (llm.generate(PROMPTS[0], params)[0].prompt_logprobs for llm in pair)
    same(one.generate(PROMPTS[0], params), two.generate(PROMPTS[0], params))
    for left, right in zip(theirs[1:], ours[1:], strict=True):
        assert {token: at.logprob for token, at in left.items()} == pytest.approx(
            {token: at.logprob for token, at in right.items()}, abs=CLOSE
        )


def test_samples_fork(pair):
    params = SamplingParams(n=3, temperature=1.0, seed=5, max_tokens=9, ignore_eos=True)
    theirs, ours = (llm.generate(PROMPTS[1], params) for llm in pair)
    same(theirs, ours)
    assert [report["cached_tokens"] for report in ours[0].reports] == [
        report["cached_tokens"] for report in theirs[0].reports
    ]
    assert ours[0].reports[1]["prefill"]["tokens"] == 0


def test_prefixes_are_shared_and_given_up(pair):
    """Again and again, each time behind another prefix: what is kept fills the pool, and makes room."""
    one, two = pair
    for seed in range(4):
        asked = [[*random_ids(200, seed=50 + seed), *random_ids(count, seed=count)] for count in (30, 40)]
        for ids in asked:
            same(one.generate(ids, greedy(3)), two.generate(ids, greedy(3)))
    assert two.engine.prefixes.hits == one.engine.prefixes.hits > 0


def test_a_session_whose_turn_is_cancelled(pair):
    answers = []
    for llm in pair:
        engine = llm.engine
        session = engine.sessions.open()
        sequence, said = engine.sessions[session], []
        for turn, keep in ((PROMPTS[0], None), (PROMPTS[3], 100), (PROMPTS[1], None)):
            request = engine.add(turn, greedy(6), Policy(), sequence, keep)
            for _ in range(3):
                engine.step()
            engine.cancel(request)
            request = engine.add(turn, greedy(6), Policy(), sequence, keep)
            finish(engine)
            said.append(request.final_ids)
            assert sequence.kv.length == sequence.computed
        engine.sessions.forget(session)
        answers.append(said)
    assert answers[0] == answers[1]
    assert len(set(map(tuple, answers[0]))) == 3


@pytest.mark.parametrize("way", ["whole", "in segments"])
def test_a_saved_session_goes_on_with_any_number_of_ranks(pair, way):
    answers, saved = [], []
    for llm in pair:
        llm.engine.prefixes.clear()  # what is brought back takes nobody's room
        sessions = llm.engine.sessions
        number = sessions.open()
        llm.engine.add(PROMPTS[0], greedy(4), Policy(), sessions[number])
        finish(llm.engine)
        saved.append(kept(llm, number, way))
        sessions.forget(number)
    for llm, (whole, rows) in product(pair, saved):
        assert whole.data["kv"]["kv_heads"] == 2
        number, note = brought_back(llm, whole, rows, way)
        assert note is None
        request = llm.engine.add(PROMPTS[3], greedy(4), Policy(), llm.engine.sessions[number])
        finish(llm.engine)
        assert request.report.cached_tokens == 233
        answers.append(request.final_ids)
        llm.engine.sessions.forget(number)
        llm.engine.prefixes.clear()
    assert answers == answers[:1] * 4


def kept(llm, session: int, way: str):
    """A session as it is saved whole, or in segments of 64 tokens with the rows of those."""
    sessions = llm.engine.sessions
    if way == "whole":
        return sessions.save(session), []
    captured = act(sessions, CaptureSession(session, 64))
    rows = [act(sessions, CopyRows(session, captured.mark, start, start + 64)) for start in range(0, 192, 64)]
    return replace(captured.saved, data={**captured.saved.data, "model": sessions.identity.data}), rows


def brought_back(llm, saved, rows, way: str):
    if way == "whole":
        return llm.engine.sessions.restore(saved, [], False)
    session = act(llm.engine.sessions, BeginRestore(saved))
    for number, tensors in enumerate(rows):
        assert act(llm.engine.sessions, LoadRows(session, 64 * number, tensors)) is None
    return session, act(llm.engine.sessions, FinishRestore(session, saved))[1]


def test_a_session_whose_method_knows_something_stays_with_one_process(pair):
    one, two = pair
    session = one.session("arkvale")
    session.generate("abc", greedy(2))
    saved = one.engine.sessions.save(session.id)
    session.close()
    with pytest.raises(PolicyError, match="tensor_parallel_size=1"):
        two.engine.sessions.restore(saved, [], False)
    session = two.session("lfps")
    session.generate(PROMPTS[0], greedy(2))
    with pytest.raises(PolicyError, match="keeps a state cannot be saved with tensor_parallel_size=2; use"):
        two.engine.sessions.save(session.id)
    session.close()


APART = [policy for policy in EVERY if why_not(policy) is None]


def test_few_methods_join_heads():
    joined = {part.name for policy in EVERY if why_not(policy) for part in (policy.prefill, policy.decode)} - {"dense"}
    assert joined == {"infllm", "arkvale", "adakv", "hshare", "random", "magicpig", "vattention", "infinigen"}


def test_auto_is_dense_unless_it_is_told_more(pair):
    prompt = PROMPTS[0]
    own = [llm.generate(prompt, greedy(16), policy="auto(least=1, method=lfps)")[0] for llm in pair]
    assert [one.report["policy"] for one in own] == ["lfps", "lfps"]
    assert own[0].outputs[0].token_ids == own[1].outputs[0].token_ids
    offer = pair[1].engine.automatic.offer()
    assert (offer.prefill_from, offer.decode_from) == (None, None)
    assert "tensor_parallel_size=2" in offer.said


@pytest.mark.parametrize("policy", APART, ids=lambda policy: policy.text)
def test_every_method_that_chooses_by_head(pair, policy):
    """Tokens, and reports of all heads, as of one process: prompts in chunks, batches, a second turn."""
    for llm in pair:
        llm.reset_prefix_cache()
    own = [llm.generate(PROMPTS[:2], greedy(12), policy=policy) for llm in pair]
    same(*own)
    for mine, theirs in zip(*own, strict=True):
        alike(mine.reports[0], theirs.reports[0])
    turns = []
    for llm in pair:
        session = llm.session(policy)
        turns.append([session.generate(ids, greedy(5)) for ids in PROMPTS[2:4]])
        session.close()
    for mine, theirs in zip(*turns, strict=True):
        same([mine], [theirs])
        alike(mine.reports[0], theirs.reports[0])


def alike(mine, theirs) -> None:
    """Two reports of the same work; counts that are means over heads may differ by their rounding."""
    for phase in ("prefill", "decode"):
        own, other = mine[phase], theirs[phase]
        for name in ("keys_attended", "keys_causal", "tokens", "searches", "coverage", "kinds"):
            assert own.get(name) == other.get(name), name
        for name in ("keys_scored", "keys_estimated"):
            assert own[name] == pytest.approx(other[name], abs=8 + own[name] / 500), name


@pytest.mark.parametrize(
    "policy", ["quest(budget=64)+psaw", "flexprefill(min_budget=0)+lfps+etf", "arkvale(unit=kv_head)"]
)
def test_windows_freezes_and_units(pair, policy):
    same(*(llm.generate(PROMPTS[:2], greedy(), policy=policy) for llm in pair))


@pytest.mark.parametrize("policy", ["lfps", "cis(k=30)", "h2o(budget=60)", "psa(epsilon=0.5, microbatch=1)"])
def test_sparse_turns_that_are_cancelled(pair, policy):
    answers = []
    for llm in pair:
        engine, chosen = llm.engine, Policy.parse(policy)
        session = engine.sessions.open()
        sequence, said = engine.sessions[session], []
        for turn, keep in ((PROMPTS[0], None), (PROMPTS[3], 100), (PROMPTS[1], None)):
            request = engine.add(turn, greedy(6), chosen, sequence, keep)
            for _ in range(6):
                engine.step()
            engine.cancel(request)
            request = engine.add(turn, greedy(6), chosen, sequence, keep)
            finish(engine)
            said.append(request.final_ids)
        engine.sessions.forget(session)
        answers.append(said)
    assert answers[0] == answers[1]


def test_calibrations_are_shared_out(tmp_path):
    folder = make_checkpoint("llama", tmp_path, num_key_value_heads=2)
    spec = load_model(folder).spec
    rng = torch.Generator().manual_seed(3)
    for kind in (labels.CALIBRATION, prehoc.LOCALITY):
        shapes = KINDS[kind].shapes(spec.heads, spec.kv_heads, spec.head_dim)
        layers = [
            {name: torch.rand(shape, generator=rng) for name, shape in shapes.items()} for _ in range(spec.layers)
        ]
        save_calibration(folder, kind, layers)
        parts = [Calibrations(shard(spec, 2), folder, rank, 2).layer([kind], 1) for rank in (0, 1)]
        for name, whole in layers[1].items():
            if kind == prehoc.LOCALITY:
                assert all(torch.equal(part[name], whole) for part in parts)
            else:
                assert torch.equal(torch.cat([part[name] for part in parts]), whole)


def test_a_stream_that_is_left(pair):
    for llm in pair:
        for _ in llm.stream(PROMPTS[2], greedy(40)):
            break
    one, two = pair
    same(one.generate(PROMPTS[2], greedy()), two.generate(PROMPTS[2], greedy()))


def test_what_several_ranks_do_not_serve_is_refused(pair):
    _, two = pair
    with pytest.raises(PolicyError, match=r"adakv.*tensor_parallel_size=2: of adakv, its heads share one budget"):
        two.generate(PROMPTS[0], greedy(), policy="adakv")
    with pytest.raises(PolicyError, match="unit='kv_head' lets each KV head choose"):
        two.session("flexprefill+arkvale")
    with pytest.raises(PolicyError, match="drafts are chosen and checked in one process"):
        two.session("lossless")
    for name, value in (("audit", 0.5), ("audit_steps", 1.0), ("bounds", 0.1)):
        with pytest.raises(RequestError, match=f"{name} looks at all heads.*tensor_parallel_size=1"):
            two.engine.add(PROMPTS[0], replace(greedy(), **{name: value}), Policy())
    with pytest.raises(RequestError, match="observe with tensor_parallel_size=1"), observing(two.engine, print):
        pass


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"policy": "hshare"}, PolicyError, "of hshare, heads take the sets of others that are like them"),
        ({"device": "cuda"}, SaccadeError, "device='cpu'"),
        ({"quantize": "fp8_reference"}, SaccadeError, "leave quantize out, or give tensor_parallel_size=1"),
        ({"max_token_gap": 0.1}, SaccadeError, "leave max_token_gap out"),
        ({"kv_memory": "profile"}, SaccadeError, "kv_memory='profile' does not go with"),
        ({"kv_disk": "tier:1GiB"}, SaccadeError, "leave kv_disk out"),
        ({"tensor_parallel_size": 0}, SaccadeError, "tensor_parallel_size=0 must be an integer >= 1"),
        ({"tensor_parallel_size": True}, SaccadeError, "must be an integer >= 1"),
    ],
)
def test_settings_that_do_not_go_together(options, error, said):
    with pytest.raises(error, match=said):
        EngineConfig(**{"model": "retriever", "device": "cpu", "tensor_parallel_size": 2, **options})


def test_heads_that_cannot_be_shared_out(tiny_llama, tmp_path):
    spec = load_model(tiny_llama).spec
    assert (shard(spec, 2).heads, shard(spec, 2).kv_heads) == (2, 1)
    with pytest.raises(ModelError, match="the model's 2 KV heads evenly; use 1 or 2"):
        LLM(tiny_llama, tensor_parallel_size=3, device="cpu", enable_prefix_caching=False)
    with pytest.raises(ModelError, match="use 1 or 2 or 3 or 6"):
        shard(replace(spec, heads=12, kv_heads=6), 4)
    other = make_checkpoint("gemma3_text", tmp_path / "gemma")
    with pytest.raises(ModelError, match=r"layers are Llama's.*use tensor_parallel_size=1"):
        shard_model(load_model(other), 0, 1, torch.Tensor.clone)


@pytest.mark.parametrize("width", [48, 51])
def test_parts_add_up_to_the_whole(tmp_path, width):
    """Each rank's part of a layer with biases, added up, is the layer; an MLP of odd width stays whole."""
    folder = make_checkpoint("qwen2", tmp_path, intermediate_size=width)
    model = load_model(folder, "float32")
    noted: list[torch.Tensor] = []
    parts = [shard_model(model, rank, 2, lambda part: noted.append(part) or part) for rank in (0, 1)]
    whole = model.runner.llama.kernels(1000).layers[1]
    rng = torch.Generator().manual_seed(0)
    hidden = torch.randn(5, model.config.hidden_size, generator=rng)
    cos, sin = torch.ones(5, model.spec.head_dim), torch.zeros(5, model.spec.head_dim)
    want = whole.project(hidden.clone(), cos, sin)
    got = [part.runner.llama.kernels(5).layers[1].project(hidden.clone(), cos, sin) for part in parts]
    for number in range(3):
        torch.testing.assert_close(torch.cat([one[number] for one in got]), want[number])
    attended = torch.randn(model.spec.heads, 5, model.spec.head_dim, generator=rng)
    for part, own in zip(parts, attended.chunk(2)):
        part.runner.llama.kernels(5).layers[1].finish(hidden.clone(), own)
    assert len(noted) == (4 if width == 48 else 2)
    output = model.runner.llama.weights.layers[1].output
    rows = attended.transpose(0, 1).reshape(5, -1)
    torch.testing.assert_close(noted[0] + noted[len(noted) // 2], rows @ output.weight.T)


def test_a_rank_that_dies(pair):
    """What runs ends with an error that names it, so does what comes later, at once; the process lives on."""
    one, two = pair
    engine = two.engine
    first, second = (engine.add(ids, greedy(30), Policy()) for ids in PROMPTS[:2])
    while len(second.output_ids) < 3:
        engine.step()
    os.kill(engine.link.processes[0].pid, signal.SIGKILL)
    finish(engine)
    for request in (first, second):
        assert "rank 1 of 2 ended by itself, with exit code -9" in request.error
        assert "close this engine and begin another" in request.error
    with pytest.warns(RuntimeWarning, match="rank 1 of 2 ended"):
        assert "RanksLost" in two.generate(PROMPTS[3], greedy(2))[0].error
    assert (one.loop.alive, two.loop.alive) == (True, False)  # by which a server begins another engine
    assert one.generate(PROMPTS[3], greedy(2))[0].error is None


def test_a_rank_that_hangs(pair, monkeypatch):
    """It is found by the processor that it does not use while it is waited for, and named."""
    _, two = pair
    engine = two.engine
    engine.link._watch._seconds = 0.5
    request = engine.add(PROMPTS[0], greedy(30), Policy())
    while len(request.output_ids) < 3:
        engine.step()
    process = engine.link.processes[0]
    os.kill(process.pid, signal.SIGSTOP)
    finish(engine)
    assert re.search(r"rank 1 of 2 hangs: it used no processor for \d s.*begin another", request.error)
    assert process.poll() == -signal.SIGKILL
    assert not two.loop.alive


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

    def started(link, config, pool, exact) -> None:
        start = Start(config, 1, str(link.store_path), pool.num_blocks, exact, torch.get_num_threads())
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


def test_what_fails_in_another_rank_alone(tiny_llama, on_a_thread, monkeypatch):
    """A request that one rank fails has an error; others go on."""

    def failing(self, step, *more):
        result = Worker.run(self, step, *more)
        for one in step.scheduled:
            if one.start == len(PROMPTS[3]) + 2:
                result.requests[one.request_id].error = "planted"
        return result

    monkeypatch.setattr(OtherRank, "run", failing)
    with make(tiny_llama, 2) as llm:
        first, second = (llm.engine.add(ids, greedy(6), Policy()) for ids in (PROMPTS[3], PROMPTS[1]))
        finish(llm.engine)
        assert first.error == "decode: it failed in another rank"
        assert second.error is None
        assert llm.pool.used_blocks == 0
        assert llm.generate(PROMPTS[1], greedy(6))[0].outputs[0].token_ids == second.final_ids


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
    real, begin, others = HostPass.steps, OtherRank.__init__, []
    monkeypatch.setattr(HostPass, "steps", breaking)
    monkeypatch.setattr(OtherRank, "__init__", beginning)
    with make(tiny_llama, 2) as llm:
        request = llm.engine.add(PROMPTS[3], greedy(6), Policy())
        finish(llm.engine)
        assert "the 2 ranks are out of step: RuntimeError" in request.error
        assert "close this engine and begin another" in request.error
        assert llm.pool.used_blocks == 0


def test_a_rank_that_cannot_load_its_model_says_why(tmp_path):
    link = RankLink(2)
    link.processes.append(SimpleNamespace(poll=lambda: None, stdin=None, wait=lambda seconds: 0))
    config = EngineConfig(model=tmp_path, device="cpu", tensor_parallel_size=2)
    with pytest.raises(SaccadeError):
        serve(Start(config, 1, str(link.store_path), 3, True, torch.get_num_threads()), iter(()))
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
