"""Short chunks of prefills that the device backend serves give what the row path gives: tokens, stored keys, reports,
and what methods learn. CPU tensors, Triton's interpreter, no graphs."""

from __future__ import annotations

import pytest
import torch
import triton_helpers  # noqa: F401  (sets the interpreter up first)
from device_helpers import Once, device_of, put_on_device
from engine_helpers import finish, start, tokens
from tiny_models import make_checkpoint, random_ids

from saccade import LLM, SamplingParams
from saccade.engine.device import attention as device_attention
from saccade.engine.device import prefill as device_prefill
from saccade.engine.device.backend import DeviceBackend
from saccade.engine.device.placed import Arranging
from saccade.engine.steps.step import ScheduledRequest
from saccade.methods.policy import Policy

FEW = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
SHARED = random_ids(32, seed=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    small = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "num_hidden_layers": 2}
    return make_checkpoint("llama", tmp_path_factory.mktemp("llama"), max_position_embeddings=2048, **small)


@pytest.fixture(scope="module")
def engines(folder):
    """Chunks of 32 rows, the first of which the host computes: what is shared ends on a border."""
    own, batched = (
        LLM(folder, kv_memory="16MiB", prefill_chunk=32, exact=False, enable_prefix_caching=True) for _ in range(2)
    )
    put_on_device(batched)
    return own, batched


@pytest.fixture
def steps(monkeypatch):
    """The rows of each recorded step that prefilled."""
    seen: list[list[int]] = []
    real = Arranging.prefill

    def noted(self, step, memories, results):
        seen.append([one.length for one in step.scheduled])
        return real(self, step, memories, results)

    monkeypatch.setattr(Arranging, "prefill", noted)
    return seen


def asked(*lengths: int) -> list[list[int]]:
    return [SHARED + random_ids(length, seed=length) for length in lengths]


def same(own, batched) -> None:
    """Tokens are the same, and all that a report counts but times and names of kernels."""
    assert batched.error is None
    assert tokens(own) == tokens(batched)
    for phase in ("prefill", "decode"):
        left, right = own.report[phase], batched.report[phase]
        for name in ("policy", "tokens", "keys_attended", "keys_causal", "density_per_head", "selections", "searches"):
            assert left[name] == right[name], (phase, name)
    assert own.report["cached_tokens"] == batched.report["cached_tokens"]
    assert sorted(own.report["notes"]) == sorted(batched.report["notes"])


def test_several_requests_in_one_step_with_a_prefix_shared_and_not(engines, steps):
    """Mixed lengths, some of whole pieces; and what they leave is what others go on from."""
    for one in engines:
        one.reset_prefix_cache()
        one.generate(SHARED, FEW)
    for lengths in ((16,), (1, 17)):
        own, batched = (one.generate(asked(*lengths), FEW) for one in engines)
        for left, right in zip(own, batched):
            same(left, right)
    assert steps == [[16], [1, 17]]
    assert device_of(engines[1]).graphs.kinds > 2


def test_stored_keys_are_those_of_the_host(engines, steps):
    stored = []
    for one in engines:
        one.reset_prefix_cache()
        with one.session() as session:
            for turn in asked(18)[0], random_ids(2, seed=3):
                session.generate(turn, FEW)
            (sequence,) = one.engine.sessions.values()
            stored.append([sequence.kv.view(layer).keys().clone() for layer in range(2)])
            stored[-1] += [sequence.kv.view(layer).values().clone() for layer in range(2)]
    assert steps == [[18], [3]]  # the turn before left its last token
    for left, right in zip(*stored):
        torch.testing.assert_close(left, right, atol=1e-5, rtol=1e-4)


LEARNING = [
    "lfps(k=30, least=1, blocks=4)",
    "h2o(budget=40)",
    "cis(k=20, sinks=3, local=6, tau=0.0, s=3)",
    "psa(epsilon=0.4, microbatch=1)",
    "snapkv(capacity=40, window=24)",
    "loopserve(alpha=1, budget=40, first=2, n_d=3)",
    "dense+etf",
]
FIRST = LEARNING[:1]


@pytest.mark.parametrize(
    "policy", [*FIRST, *(pytest.param(text, marks=pytest.mark.thorough) for text in LEARNING[len(FIRST) :])]
)
def test_methods_learn_from_rows_of_recorded_steps(engines, steps, policy):
    """The last rows of a prompt, and of the next turn; a window of 24 queries reaches into the chunk before."""
    answers = []
    for one in engines:
        one.reset_prefix_cache()
        with one.session(policy=policy) as session:
            answers.append([session.generate(turn, FEW) for turn in (asked(20)[0], random_ids(10, seed=4))])
    for left, right in zip(*answers):
        same(left, right)
    assert steps or policy == "dense+etf"


@pytest.mark.parametrize(
    "prefill",
    [
        "tri_shape(sinks=8, window=16, last=15)",
        pytest.param("loopserve(alpha=0.9, min_rows=20)", marks=pytest.mark.thorough),
        pytest.param("flashprefill(alpha=0.5, last_blocks=1)", marks=pytest.mark.thorough),
        pytest.param("streaming(window=20)", marks=pytest.mark.thorough),
    ],
)
def test_a_sparse_prefill_whose_short_chunk_is_dense(engines, steps, prefill):
    own, batched = (one.generate(asked(12), FEW, policy=f"prefill={prefill}")[0] for one in engines)
    same(own, batched)
    assert steps == ([] if "streaming" in prefill else [[12]])


def test_tokens_are_drawn_in_the_step(engines, steps, monkeypatch):
    params = [
        SamplingParams(max_tokens=2, seed=3, ignore_eos=True),
        SamplingParams(max_tokens=2, temperature=0, logprobs=2, ignore_eos=True),
        SamplingParams(max_tokens=2, seed=4, top_p=0.8, repetition_penalty=1.3, ignore_eos=True),
        SamplingParams(max_tokens=2, temperature=0, prompt_logprobs=1, ignore_eos=True),  # the host's
    ]
    drawn: list[bool] = []
    real = DeviceBackend.run

    def noted(self, *given):
        results = real(self, *given)
        drawn.extend(one.tokens is not None for one in results.values())
        return results

    monkeypatch.setattr(DeviceBackend, "run", noted)
    own, batched = (one.generate(asked(4, 5, 6, 7), params) for one in engines)
    for left, right in zip(own, batched):
        same(left, right)
        scores = [[list(entries) for entries in one.outputs[0].logprobs or []] for one in (left, right)]
        assert scores[0] == scores[1]
    assert drawn == [True] * 7
    assert steps == [[4, 5, 6]]
    sampled = SamplingParams(max_tokens=2, seed=5, n=3, ignore_eos=True)  # each draws from the prompt's logits
    left, right = (one.generate(asked(9), sampled)[0] for one in engines)
    assert [one.token_ids for one in left.outputs] == [one.token_ids for one in right.outputs]
    assert len({tuple(one.token_ids) for one in right.outputs}) > 1


def test_a_step_that_fails_is_taken_back_alone(engines, steps, monkeypatch):
    """The host serves its rows, and the next one is recorded again. What a method cannot learn ends its request."""
    own, batched = engines
    expected = [own.generate(prompt, FEW)[0] for prompt in asked(10, 11)]
    before = len(steps)
    with monkeypatch.context() as patched:
        patched.setattr(device_attention, "attend_rows", Once(device_attention.attend_rows, ZeroDivisionError("no"), 2))
        outputs = [batched.generate(prompt, FEW)[0] for prompt in asked(10, 11)]
    assert len(steps) == before + 2
    assert [tokens(one) for one in outputs] == [tokens(one) for one in expected]
    assert [len([note for note in one.report["notes"] if "failed" in note]) for one in outputs] == [1, 0]
    with monkeypatch.context() as patched:
        fails = Once(device_prefill.follow_prefill, ZeroDivisionError("no"), 2)
        patched.setattr(device_prefill, "follow_prefill", fails)
        broken, whole = batched.generate(asked(13, 14), FEW, policy=[LEARNING[2], "dense"])
    assert broken.error == "layer 1, prefill: ZeroDivisionError: no"
    assert whole.error is None
    assert tokens(whole) == tokens(own.generate(asked(14), FEW)[0])


def test_a_request_cancelled_in_between(engines, steps):
    """Between two recorded chunks; the other goes on as if it had been alone."""
    engine = engines[1].engine
    free = engine.pool.free_blocks
    prompt = random_ids(90, seed=6)
    first, second = (start(engines[1], ids, FEW) for ids in (prompt, asked(8)[0]))
    while first.sequence.computed < 64:
        engine.step()
    engine.cancel(first)
    finish(engine)
    assert [8] in steps
    assert [32] in steps
    assert [26] not in steps
    assert second.output_ids == tokens(engines[0].generate(asked(8), FEW)[0])
    engines[1].reset_prefix_cache()
    assert engine.pool.free_blocks >= free


def test_exact_rows_do_not_hang_on_the_batch(folder, steps):
    made = LLM(folder, kv_memory="16MiB", prefill_chunk=32, exact=True, enable_prefix_caching=False)
    put_on_device(made)
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=1)
    together = made.generate(asked(3, 18), params)
    assert steps == [[3], [18]]
    for prompt, one in zip(asked(3, 18), together):
        alone = made.generate(prompt, params)[0]
        assert alone.outputs[0].logprobs == one.outputs[0].logprobs


def test_which_chunks_share_a_step():
    """As many pieces as keep a GPU busy; fewer where a method keeps their queries, never with the others."""

    def chunk(number, rows, policy):
        return ScheduledRequest(number, number, 64, 64 + rows, "prefill", Policy.parse(policy), 0, 64 + rows, 64 + rows)

    plain = {number: chunk(number, 32, "dense") for number in range(33)}
    learned = {number: chunk(number, 128, "dense+loopserve") for number in range(40, 45)}
    found = device_prefill.parts({**learned, **plain})
    assert found == [[*range(32)], [32], [40, 41], [42, 43], [44]]
    assert device_prefill.parts({}) == []
