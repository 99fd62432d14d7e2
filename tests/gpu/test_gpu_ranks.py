"""One model on two GPUs answers as on one; what joins them gives what it must; ranks that die or hang are named.

Two ranks may share one GPU where sums go over the host: those tests run on any GPU machine. What has not passed on GPUs
yet comes first: `pytest -n 4`, which begins with a case a process.
"""

from __future__ import annotations

import faulthandler
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from rank_helpers import same
from tiny_models import make_checkpoint, random_ids
from torch import Tensor

from saccade import LLM, SamplingParams
from saccade.engine.ranks import meeting
from saccade.errors import ModelError
from saccade.methods.policy import Policy
from saccade.models.baseline import RANDOM_8B, save_random_llama

two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
POLICIES = [
    "dense",
    "quest(budget=64, dense_layers=1)",
    "arkvale(budget=64, unit=kv_head)",
    "flexprefill(lines=block, min_budget=128)+lfps",
    "psa(epsilon=0.3, microbatch=1)",
    "streaming(sinks=2, window=40)",
]
CASE_SECONDS = 150.0
PROMPTS = [random_ids(length, seed=length) for length in (230, 150, 301, 64)]


def greedy(count: int, **more) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, logprobs=2, **more)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    shape = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32, "num_hidden_layers": 3}
    return make_checkpoint("llama", tmp_path_factory.mktemp("llama"), max_position_embeddings=2048, **shape)


def make(folder, ranks: int, **options) -> LLM:
    settings = {"device": "cuda", "kv_memory": "64MiB", "prefill_chunk": 128, "exact": False}
    settings |= {"enable_prefix_caching": False, **options}
    return LLM(folder, tensor_parallel_size=ranks, **settings)


def joins(llm: LLM) -> str:
    return type(llm.engine.link.group._there).__name__


@pytest.fixture(scope="module")
def one(folder):
    with make(folder, 1) as llm:
        yield llm


@pytest.fixture(scope="module")
def pair(folder, one):
    with make(folder, 2) as two:
        yield one, two
        assert two.pool.used_blocks == 0
    assert [process.poll() for process in two.engine.link.processes] == [0]


@pytest.fixture(autouse=True)
def bounded():
    """A case that hangs, in a kernel perhaps, ends its process; xdist names it, and runs the others in another one."""
    faulthandler.dump_traceback_later(CASE_SECONDS, exit=True, file=sys.__stderr__)
    yield
    faulthandler.cancel_dump_traceback_later()


@two_gpus
def test_tiers_of_each_gpu(folder, one):
    with make(folder, 2, kv_memory="160KiB", kv_host="64MiB") as two:
        for policy in POLICIES[:3]:
            same(one.generate(PROMPTS, greedy(6), policy=policy), two.generate(PROMPTS, greedy(6), policy=policy))


@two_gpus
def test_the_8b_shape_in_bfloat16(tmp_path):
    """Two layers. Each GPU rounds its part of a sum to bfloat16 before it is added, so two are no nearer to each other
    than both are to float32: over all tokens of a prompt two err as one does."""
    shape = {**RANDOM_8B, "num_hidden_layers": 2, "vocab_size": 4099}
    with torch.device("cuda"):
        path = save_random_llama(tmp_path, torch.bfloat16, **shape)
    ids = torch.randint(0, 250, (3000,), generator=torch.Generator().manual_seed(5)).tolist()
    sparse = "flexprefill(lines=block, min_budget=256, max_budget=512)+arkvale(budget=256, unit=kv_head)"
    scores: dict[str, Tensor] = {}
    for name, ranks, dtype in (("exact", 1, "float32"), ("one", 1, "bfloat16"), ("two", 2, "bfloat16")):
        with make(path, ranks, kv_memory="256MiB", prefill_chunk=1024, dtype=dtype) as llm:
            (found,) = llm.generate(ids, SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0), policy="dense")
            scores[name] = of_prompt(found, ids)
            (found,) = llm.generate(ids, greedy(12), policy=sparse)
            assert (found.error, len(found.outputs[0].token_ids)) == (None, 12)
    errors = [float((scores[name] - scores["exact"]).square().mean().sqrt()) for name in ("one", "two")]
    assert 0 < errors[1] < 1.5 * errors[0], errors


def of_prompt(output, ids) -> Tensor:
    """Log-probabilities of its prompt's tokens but the first."""
    assert output.error is None, output.error
    return torch.tensor([at[token].logprob for at, token in zip(output.prompt_logprobs[1:], ids[1:], strict=True)])


ENDED = """
    import faulthandler, json, os, signal, sys, threading, time
    faulthandler.dump_traceback_later(100, exit=True)  # what it waits for
    from saccade import LLM, SamplingParams
    from tiny_models import random_ids
    path, how = sys.argv[1:]
    options = dict(device="cuda", kv_memory="64MiB", exact=False, enable_prefix_caching=False, tensor_parallel_size=2)
    llm = LLM(path, **options)
    process = llm.engine.link.processes[0]
    params = SamplingParams(temperature=0, max_tokens=1800, ignore_eos=True)
    llm.generate(random_ids(30, seed=1), SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))  # records
    ended = []
    def end():
        time.sleep(0.4)
        os.kill(process.pid, signal.SIGKILL if how == "kill" else signal.SIGSTOP)
        ended.append(time.monotonic())
    threading.Thread(target=end).start()
    print("begun", time.monotonic(), file=sys.stderr, flush=True)
    output = llm.generate(random_ids(30, seed=1), params)[0]
    print("ended", time.monotonic(), file=sys.stderr, flush=True)
    seconds = time.monotonic() - ended[0]
    gone = process.wait(10)
    print(json.dumps({"error": output.error, "seconds": seconds, "gone": gone}), flush=True)
    llm.close()
    again = LLM(path, **options).generate(random_ids(30, seed=1), SamplingParams(temperature=0, max_tokens=5))[0]
    print(json.dumps({"again": again.error}), flush=True)
    os._exit(0)
"""


@two_gpus
@pytest.mark.parametrize("how", ["stop", "kill"])
def test_a_rank_that_ends_within_recorded_steps_ends_the_engine(folder, how):
    """Within 10 seconds, with its name; the process lives on, and may begin another engine."""
    found = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(ENDED), str(folder), how],
        capture_output=True, text=True, timeout=120,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])},
    )  # fmt: skip
    lines = [json.loads(line) for line in found.stdout.splitlines() if line.startswith("{")]
    assert lines, found.stderr[-4000:]
    assert "rank 1 of 2" in lines[0]["error"], lines
    assert lines[0]["seconds"] < 10
    assert lines[0]["gone"] == -9
    assert lines[1:] == [{"again": None}], found.stderr[-2000:]


@two_gpus
@pytest.mark.parametrize("policy", POLICIES)
def test_tokens_of_one_gpu(pair, policy):
    own = [llm.generate(PROMPTS, greedy(12), policy=policy) for llm in pair]
    same(*own)
    for mine, theirs in zip(*own, strict=True):
        for name in ("tokens", "keys_attended", "keys_causal", "selections"):
            assert mine.report["decode"][name] == theirs.report["decode"][name], name


@two_gpus
def test_steps_are_recorded_with_their_sums(pair):
    _, two = pair
    assert joins(two) == "OneShotReduce"
    before = two.engine.worker.device.graphs.recorded
    for _ in range(3):
        two.generate(PROMPTS[:3], greedy(8))
    assert two.engine.worker.device.graphs.recorded >= max(1, before)
    assert two.engine.worker.device.kinds.note is None


@two_gpus
def test_draws_and_streams(pair):
    params = [SamplingParams(max_tokens=12, seed=seed, temperature=0.8, ignore_eos=True) for seed in range(4)]
    same(*(llm.generate(PROMPTS, params, policy="dense") for llm in pair))
    for llm in pair:
        for _ in llm.stream(PROMPTS[2], greedy(40)):
            break
    same(*(llm.generate(PROMPTS[2], greedy(8)) for llm in pair))


@two_gpus
@pytest.mark.parametrize("chosen", meeting.CHOICES)
def test_whatever_joins_them(folder, pair, monkeypatch, chosen):
    monkeypatch.setenv(meeting.VARIABLE, chosen)
    with make(folder, 2) as two:
        kinds = {"one_shot": "OneShotReduce", "nccl": "NcclReduce", "gloo": "GlooReduce"}
        assert joins(two) == kinds[chosen.partition(",")[0]]
        same(pair[0].generate(PROMPTS, greedy(9)), two.generate(PROMPTS, greedy(9)))


@two_gpus
def test_the_reference_model():
    prompt = "The key of Alpha is 4711. The key of Beta is 815. What is the key of Alpha?"
    try:
        two = LLM("reference", device="cuda", dtype="float32", tensor_parallel_size=2, kv_memory="256MiB")
    except ModelError as error:
        pytest.skip(str(error))
    with two, LLM("reference", device="cuda", dtype="float32", kv_memory="256MiB") as one:
        same(one.generate([prompt], greedy(12)), two.generate([prompt], greedy(12)))


@two_gpus
def test_steps_recorded_ahead_of_requests(folder, pair):
    with make(folder, 2, max_requests=4) as two:
        done = two.engine.prepare(Policy(), 5.0)
        assert done.recorded >= 1
        assert two.engine.worker.device.graphs.recorded >= done.recorded
        same(pair[0].generate(PROMPTS, greedy(6)), two.generate(PROMPTS, greedy(6)))


@two_gpus
def test_sessions_go_on(pair):
    for policy in POLICIES[:2]:
        answers = []
        for llm in pair:
            session = llm.session(policy)
            answers.append([session.generate(ids, greedy(5)) for ids in PROMPTS[:3]])
            session.close()
        same(*answers)


@two_gpus
def test_too_few_gpus_are_one_line(folder):
    count = torch.cuda.device_count()
    with pytest.raises(Exception, match=rf"takes the GPUs {count - 1} to {count}; torch sees {count} of them"):
        make(folder, 2, device=f"cuda:{count - 1}")


@pytest.mark.parametrize("chosen", ["gloo", "one_shot,gloo"])
def test_two_ranks_on_one_gpu(folder, monkeypatch, chosen):
    """NCCL refuses that; sums over the host, and over symmetric memory of one GPU, do not."""
    monkeypatch.setenv(meeting.VARIABLE, chosen)
    monkeypatch.setenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0])
    answers = []
    for ranks in (1, 2):
        with make(folder, ranks, device="cuda:0") as llm:
            if ranks == 2 and joins(llm) != ("GlooReduce" if chosen == "gloo" else "OneShotReduce"):
                pytest.skip("this GPU has no symmetric memory")
            answers.append(llm.generate(PROMPTS[:3], greedy(6), policy=POLICIES[:3]))
    same(*answers)


def test_tiers_of_two_ranks_on_one_gpu(folder, one, monkeypatch):
    monkeypatch.setenv(meeting.VARIABLE, "gloo")
    with make(folder, 2, device="cuda:0", kv_memory="160KiB", kv_host="64MiB") as two:
        for policy in POLICIES[:3]:
            same(one.generate(PROMPTS, greedy(6), policy=policy), two.generate(PROMPTS, greedy(6), policy=policy))
