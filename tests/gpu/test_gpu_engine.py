"""The engine on a GPU gives what it gives on a CPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
from engine_helpers import EVERY, GREEDY, tokens
from tiny_models import make_checkpoint, random_ids

from saccade import LLM, SamplingParams
from saccade.methods import Policy

ON_A_GPU = {"flexprefill": {"lines": "block"}, "loopserve": {"lines": "block"}}  # what "auto" means there alone


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A random float32 Llama whose heads are wide enough for the kernels."""
    return make_checkpoint("llama", tmp_path_factory.mktemp("llama"), max_position_embeddings=2048, head_dim=32)


@pytest.fixture(scope="module")
def engines(folder):
    """A CPU and a GPU engine of it."""
    return [
        LLM(folder, kv_memory="64MiB", prefill_chunk=256, device=device, enable_prefix_caching=False)
        for device in ("cpu", "cuda")
    ]


def settled(policy: Policy) -> Policy:
    """``policy`` with what a device would decide by itself."""
    return replace(policy, prefill=replace(policy.prefill, **ON_A_GPU.get(policy.prefill.name, {})))


@pytest.mark.parametrize("policy", map(settled, EVERY), ids=lambda policy: policy.text)
def test_tokens_equal_those_of_the_cpu(engines, policy):
    prompt = random_ids(400, seed=5)
    on_cpu, on_gpu = (engine.generate(prompt, GREEDY, policy=policy)[0] for engine in engines)
    assert on_gpu.error is None, on_gpu.error
    assert tokens(on_gpu) == tokens(on_cpu)
    backends = on_gpu.report["prefill"]["backends"] | on_gpu.report["decode"]["backends"]
    assert not any(name.startswith("cpu") for name in backends)


def test_dense_attention_runs_on_the_kernels(engines):
    report = engines[1].generate(random_ids(400, seed=6), GREEDY, policy="dense")[0].report
    assert set(report["prefill"]["backends"]) == set(report["decode"]["backends"]) == {"triton"}


def test_a_batch_of_policies_and_the_pool_given_back(engines):
    gpu = engines[1]
    prompts = [random_ids(length, seed=length) for length in (300, 513, 129)]
    results = gpu.generate(prompts, GREEDY, policy=EVERY[:3])
    assert all(result.error is None for result in results)
    assert gpu.engine.pool.used_blocks == 0


@pytest.mark.parametrize("count", [2, 6, 15])
def test_recorded_verifications_give_dense_tokens(engines, folder, count):
    """Rounds of three requests of unlike lengths, recorded after their first ones."""
    gpu = LLM(folder, kv_memory="64MiB", prefill_chunk=256, device="cuda", exact=False, enable_prefix_caching=False)
    prompts = [random_ids(length, seed=length) for length in (300, 513, 129)]
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    want = engines[1].generate(prompts, params)
    policy = f"lossless(draft=quest(budget=64, dense_layers=0), tokens={count}, lookup=2)"
    got = gpu.generate(prompts, params, policy=policy)
    assert list(map(tokens, got)) == list(map(tokens, want))
    for output in got:
        assert output.error is None
        assert set(output.report["decode"]["backends"]) == {"triton"}
        assert output.report["speculation"]["verifications"] > 2
    assert gpu.engine.pool.used_blocks == 0
    gpu.close()


def recorded_prefills(llm: LLM) -> int:
    return sum(key.prefill and kind.graph is not None for key, kind in llm.engine.worker.device.kinds._kinds.items())


@pytest.mark.parametrize("policy", ["dense", "lfps", "cis", "psa(epsilon=0.9)", "h2o(budget=64)", "prefill=tri_shape"])
def test_recorded_questions_after_a_shared_prefix(engines, folder, policy):
    """Questions of unlike lengths, one by one and several at once; from the third of a kind on they are replayed."""
    gpu = LLM(folder, kv_memory="64MiB", prefill_chunk=256, device="cuda", exact=False, enable_prefix_caching=True)
    document = random_ids(512, seed=1)
    asked = [document + random_ids(length, seed=length) for length in (20, 31, 25, 18, 60, 50, 64, 7, 1, 100, 120, 90)]
    want = engines[0].generate(asked, GREEDY, policy=policy)
    got = [gpu.generate(ids, GREEDY, policy=policy)[0] for ids in asked]
    for _ in range(3):
        got += gpu.generate(asked, GREEDY, policy=policy)
    for number, output in enumerate(got):
        assert output.error is None, output.error
        assert tokens(output) == tokens(want[number % len(want)])
        assert "failed" not in str(output.report["notes"])
    assert recorded_prefills(gpu) > 1
    assert gpu.engine.worker.device.graphs.recorded <= gpu.engine.worker.device.graphs.most
    gpu.close()


def test_tokens_of_a_recorded_question_are_drawn_on_the_device(engines, folder):
    gpu = LLM(folder, kv_memory="64MiB", prefill_chunk=256, device="cuda", exact=False, enable_prefix_caching=False)
    params = SamplingParams(temperature=0.8, top_p=0.9, seed=5, max_tokens=6, logprobs=2, ignore_eos=True)
    prompts = [random_ids(256 + length, seed=length) for length in (12, 40, 17, 33)]
    want = engines[0].generate(prompts, params)
    for _ in range(4):
        assert list(map(tokens, gpu.generate(prompts, params))) == list(map(tokens, want))
    assert recorded_prefills(gpu) > 0
    gpu.close()


AHEAD = ["dense", "streaming(sinks=4, window=64)", "arkvale(budget=128)", "quest(budget=96)"]
AHEAD += ["psa(epsilon=0.3, microbatch=1)", "lfps(k=24, least=1)", "h2o(budget=96)"]
AHEAD += ["rocketkv(capacity=100, window=16, kernel=9, keys=40)"]


@pytest.mark.parametrize("policy", AHEAD)
def test_steps_launched_before_they_are_asked_for(folder, policy):
    """Tokens and counts of requests that come, go and fill blocks are those of steps that wait for each other; half of
    them draw."""
    gpu = LLM(folder, kv_memory="64MiB", prefill_chunk=256, device="cuda", exact=False, enable_prefix_caching=False)
    prompts = [random_ids(length, seed=length) for length in (300, 130, 200, 31)]
    params = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for count in (120, 40, 90, 64)]
    for number in (1, 2):
        params[number] = replace(params[number], temperature=0.8, top_p=0.9, seed=number)
    device, found = gpu.engine.worker.device, []
    assert device.runs_ahead
    for ahead in (False, True, False, True):
        device.runs_ahead = ahead
        found.append(gpu.generate(prompts, params, policy=policy))
        found[-1] += [gpu.generate(prompts[0], params[0], policy=policy)[0]]
    for other in found[1:]:
        for left, right in zip(found[0], other):
            assert right.error is None
            assert tokens(left) == tokens(right)
            for name in ("keys_attended", "keys_estimated", "tokens", "selections"):
                assert left.report["decode"][name] == right.report["decode"][name]
    assert gpu.engine.pool.used_blocks == 0
    gpu.close()


@pytest.mark.parametrize("policy", ["dense", "quest(budget=128)", "psa", "lfps", "sampled_rows"])
def test_steps_recorded_before_requests_serve_them(engines, folder, policy):
    """None is recorded afterwards, and tokens, counts and stored keys are those of an engine that recorded as it went.
    Blocks fill on the way, in several rows at once."""
    prompts = [random_ids(length, seed=length) for length in (96, 96, 95, 200)]
    params = SamplingParams(temperature=0, max_tokens=70, ignore_eos=True)
    options = {"kv_memory": "64MiB", "prefill_chunk": 256, "device": "cuda", "exact": False, "max_requests": 4}
    plain, gpu = (LLM(folder, policy=policy, **{"enable_prefix_caching": False, **options}) for _ in range(2))
    done = gpu.engine.prepare(gpu.policy, 60.0)
    assert done.recorded == done.wanted > 2
    recorded = gpu.engine.worker.device.kinds.recorded[0]
    assert recorded == done.recorded
    for one, other in zip(plain.generate(prompts, params), gpu.generate(prompts, params)):
        assert one.error is None
        assert other.error is None
        assert tokens(one) == tokens(other)
        for name in ("keys_attended", "keys_causal", "backends"):
            assert one.report["decode"][name] == other.report["decode"][name]
    assert gpu.engine.worker.device.kinds.recorded[0] == recorded
    assert gpu.engine.pool.used_blocks == 0


@pytest.mark.parametrize(
    "policy", ["quest(budget=96)", "psa(epsilon=0.3, microbatch=1)", "streaming(sinks=4, window=64)"]
)
def test_audits_and_replays_beside_recorded_steps(folder, policy):
    """They change no token and find what a CPU does, compiled, recorded and launched ahead."""
    cpu, gpu = (
        LLM(folder, kv_memory="64MiB", prefill_chunk=1024, device=device, exact=False, enable_prefix_caching=False)
        for device in ("cpu", "cuda")
    )
    prompts = [random_ids(length, seed=length) for length in (300, 230, 310)]
    shared = {"temperature": 0, "max_tokens": 24, "ignore_eos": True}
    params = [
        SamplingParams(**shared, audit=0.3, audit_steps=0.5, seed=1),
        SamplingParams(**shared, audit_steps=1.0, seed=2),
        SamplingParams(**shared),
    ]
    want = cpu.generate(prompts, params, policy=policy)
    for _ in range(4):
        found = gpu.generate(prompts, params, policy=policy)
        for left, right in zip(want, found):
            assert right.error is None
            assert tokens(left) == tokens(right)
        for left, right in zip(want[:2], found):
            host, there = (one.report["audit"] for one in (left, right))
            assert host["agreement"] == there["agreement"]
            for name in ("divergence", "retained_mass", "output_error", "output_error_scaled"):
                assert (host[name] or {}).get("samples") == (there[name] or {}).get("samples"), name
                if host[name]:
                    assert there[name]["mean"] == pytest.approx(host[name]["mean"], abs=1e-3), name
    assert found[1].report["audit"]["agreement"]["samples"] == 23
    assert gpu.engine.worker.device.kinds.recorded[0] >= 2
    assert gpu.engine.pool.used_blocks == 0
    cpu.close()
    gpu.close()
