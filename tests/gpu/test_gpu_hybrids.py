"""Models with layers that keep a state give on a GPU what they give on a CPU, from recorded steps, too, whatever comes
between two of them: other rows, forks, truncations, edits, and snapshots that share a slot with what goes on."""

from __future__ import annotations

import pytest
from engine_helpers import GREEDY, tokens
from tiny_models import make_checkpoint, random_ids

from saccade import LLM, SamplingParams

FAMILIES = (
    "lfm2", "qwen3_5_text", "qwen3_next", "qwen3_5_moe_text", "olmo_hybrid", "granitemoehybrid", "falcon_h1",
    "nemotron_h", "bamba",
)  # fmt: skip

WIDE = ("lfm2", "olmo_hybrid", "granitemoehybrid", "bamba")  # whose heads are as wide as their number says


@pytest.fixture(scope="module", params=FAMILIES)
def engines(request, tmp_path_factory):
    """A CPU and a GPU engine of one checkpoint, whose heads are wide enough for the kernels."""
    sizes = {"hidden_size": 128} if request.param in WIDE else {"head_dim": 32}
    if request.param in ("granitemoehybrid", "bamba"):
        sizes["mamba_n_heads"] = 8
    folder = make_checkpoint(
        request.param, tmp_path_factory.mktemp(request.param), **sizes, max_position_embeddings=2048
    )
    options = {
        "kv_memory": "64MiB",
        "prefill_chunk": 128,
        "dtype": "float32",
        "enable_prefix_caching": True,
        "exact": False,
    }
    return [LLM(folder, device=device, **options) for device in ("cpu", "cuda")]


@pytest.mark.parametrize("policy", ["dense", "quest(budget=64, dense_layers=0)"])
def test_turns_and_edits_equal_those_of_the_cpu(engines, policy):
    first, second, other = (random_ids(length, seed=length) for length in (400, 33, 50))
    said = []
    for llm in engines:
        with llm.session(policy=policy) as session:
            answers = [session.generate(first, GREEDY), session.generate(second, GREEDY)]
            answers.append(session.complete(session.token_ids[:425] + other, GREEDY))
        answers += llm.generate([first + other, first + second], GREEDY, policy=policy)
        assert all(one.error is None for one in answers)
        said.append([tokens(one) for one in answers])
    assert said[0] == said[1]
    experts = engines[1].model.spec.family in ("qwen3_next", "qwen3_5_moe_text", "nemotron_h")  # may ask the host
    paths = {one["path"] for one in answers[0].report["decode"]["paths"]}
    assert paths <= ({"recorded", "eager"} if experts else {"recorded"})
    assert engines[1].pool.states.pinned == 0


def test_rows_that_come_and_go(engines):
    prompts = [random_ids(length, seed=length) for length in (61, 1, 24, 200, 128, 90)]
    params = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for count in (30, 3, 17, 9, 30, 12)]
    for left, right in zip(*(llm.generate(prompts, params) for llm in engines)):
        assert right.error is None
        assert tokens(left) == tokens(right)


@pytest.mark.parametrize("count", [1, 3])
def test_recorded_equals_plain_and_launched_ahead_or_not(engines, count):
    """Samples of one prompt share the state after it, and go their own ways."""
    gpu = engines[1]
    device = gpu.engine.worker.device
    prompts = [random_ids(40 + 31 * at, seed=at) for at in range(4)]
    long = SamplingParams(temperature=0.8 if count > 1 else 0, seed=5, n=count, max_tokens=40, ignore_eos=True)
    runs = []
    for records, ahead in ((True, True), (True, False), (False, False)):
        device.kinds.clear()
        device.kinds.records, device.runs_ahead = records, ahead
        runs.append([[one.token_ids for one in output.outputs] for output in gpu.generate(prompts, long)])
    device.kinds.records = device.runs_ahead = True
    assert runs[0] == runs[1] == runs[2]
    assert gpu.pool.states.pinned == 0


@pytest.mark.parametrize("draft", ["quest(budget=64, block_size=16, dense_layers=0)", "h2o(budget=64)"])
def test_drafts_leave_what_a_run_without_them_leaves(engines, draft):
    """Recorded steps draft, the host verifies and takes back what it must."""
    gpu = engines[1]
    prompts = [random_ids(length, seed=length) for length in (300, 61, 129)]
    long = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    plain = gpu.generate(prompts, long)
    drafted = gpu.generate(prompts, long, policy=f"lossless(draft={draft}, tokens=5)")
    for left, right in zip(plain, drafted):
        assert right.error is None
        assert tokens(left) == tokens(right)
        assert right.report["speculation"]["drafted"] > 0
        assert right.report["recomputed_tokens"] == 0
    assert gpu.pool.states.pinned == 0
