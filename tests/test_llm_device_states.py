"""Methods that bring readings of their own, served by the device backend: what they get is what the row path gives.
CPU tensors, Triton's interpreter, no graphs."""

from __future__ import annotations

import pytest
import triton_helpers  # noqa: F401  (sets the interpreter up first)
from device_helpers import Once, device_of, put_on_device
from drafters import Seldom, drafting
from engine_helpers import tokens
from tiny_models import make_checkpoint, random_ids

from saccade import LLM, SamplingParams
from saccade.engine.attention import StepFailedError
from saccade.methods.cis import triton_one_launch
from saccade.methods.labels import recorded
from saccade.methods.lfps import triton_row_choice
from saccade.methods.policy import Policy
from saccade.methods.registry import METHODS
from saccade.ops.triton import batched_rows

FEW = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
EVICTING = [
    "snapkv(capacity=40, window=8)",
    "snapkv(capacity=40, window=8, unit=q_head)",
    "adakv(capacity=50, window=8)",
]
EVICTING += ["h2o(budget=40)", "h2o(budget=40, unit=q_head, heavy=0.8)", "h2o(budget=300)"]
ROCKET = "rocketkv(capacity=60, window=8, kernel=5"
ROCKETS = [
    f"{ROCKET}, keys=20)",
    f"{ROCKET}, keys=14, block_size=3, channels=0.25, unit=q_head)",
    "rocketkv(budget=16)",
    "rocketkv(capacity=70, window=8, kernel=5, keys=33, block_size=8)",  # reads a prompt of 30 whole at first
]
CHOOSING = ["topk(k=24)", "topk(k=0.2, sinks=3, local=5)", "topk(k=24, unit=kv_head, sinks=2, local=4)"]
CIS = "cis(k=20, sinks=3, local=6, tau=0.0"
SHARING = [
    f"{CIS})",
    f"{CIS}, s=3, m=0)",
    f"{CIS}, r=2, m=9)",
    f"{CIS}, align=position)",
]
SHARING += [
    f"{CIS}, follow=1)",
    "cis(k=0.1, sinks=3, local=6, tau=0.0, follow=2)",
    "cis(k=20, sinks=3, local=6, tau=1)",
    "cis(k=220)",
]
SHARING += [
    f"{CIS})+psaw(start_layer=1, block_size=16, local=8)",
    f"{CIS}, follow=1, s=4)+psaw(start_layer=1, block_size=1)",
]
LFPS = "lfps(k=30, least=1"
FORESEEN = [
    f"{LFPS}, blocks=4)",
    f"{LFPS}, blocks=4, epsilon=0.1)",
    f"{LFPS}, blocks=4, epsilon=0.1, unit=kv_head, rest=none)",
    f"{LFPS}, blocks=0, a=0.05, epsilon=1, rest=none)",
    f"{LFPS}, blocks=0, unit=kv_head, before=20, sinks=0, history=keep)",
    "lfps(k=0.1, least=1, blocks=3, block_size=16, epsilon=0.2)",
    "lfps",
]
LOOP = "loopserve(alpha=1, budget=40, first=2, n_d=3"
LINES = [f"{LOOP})", f"{LOOP}, observed=2)"]
SPARSE = "double_sparsity(dense_upto=0, source=prompt, dense_layers=1"
LABELLED = [
    f"{SPARSE}, k=24, channels=0.5)",
    f"{SPARSE}, k=0.2, bits=8, unit=q_head, sinks=2, local=5)",
    f"{SPARSE}, k=24, bits=16)",
    "hshare(source=prompt, heavy=20, sinks=3, local=5, every=3)",
    "hshare(source=prompt, heavy=20, sinks=3, local=5, head_share=0.5, layer_share=0.5, unit=q_head, channels=0.3)",
    f"{SPARSE.replace('dense_upto=0', 'dense_upto=113')}, k=24)",  # a prompt of 110 is read whole for some steps
]
WINDOW = "psaw(start_layer=1, block_size=1, sinks=3, local=8)"
WINDOWS = [f"dense+{WINDOW}", f"streaming(sinks=6, window=150)+{WINDOW}", f"streaming(sinks=2, window=20)+{WINDOW}"]
GUESSED = ["psa(epsilon=0.4, rank=moments, microbatch=1, block_size=16)"]
GUESSED += ["psa(epsilon=0.6, rank=moments, microbatch=2, block_size=16, rest=min, stop=mean)"]
GUESSED += ["psa(epsilon=0.6, rank=moments, microbatch=2, block_size=16, rest=estimate)"]
BY_KEYS = "psa(epsilon=0.4, rank=keys, rest=estimate, microbatch=1, block_size=16)"
GUESSED += [BY_KEYS, "psa(epsilon=0.6, rank=keys, bits=8, microbatch=2, block_size=16)"]


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    folder = make_checkpoint(
        "llama", tmp_path_factory.mktemp("llama"), max_position_embeddings=2048, head_dim=32, num_hidden_layers=2
    )
    own, batched = (
        LLM(folder, kv_memory="32MiB", prefill_chunk=256, exact=False, enable_prefix_caching=False) for _ in range(2)
    )
    put_on_device(batched)
    return own, batched


def same(own, batched) -> None:
    """Tokens and what was read are the same, and recorded steps did it."""
    assert batched.error is None
    assert tokens(own) == tokens(batched)
    left, right = own.report["decode"], batched.report["decode"]
    assert set(right["backends"]) == {"triton"}
    # Rounded step by step on the host, where heads that rest have candidates too.
    assert left["keys_scored"] == pytest.approx(right["keys_scored"], abs=2 * len(tokens(own)), rel=0.12)
    for name in ("keys_attended", "keys_causal", "density_per_head", "searches", "searchable", "selections"):
        assert left[name] == right[name], name
    assert sorted(own.report["notes"]) == sorted(batched.report["notes"])


EVERY = [*EVICTING, *ROCKETS, *CHOOSING, *SHARING, *FORESEEN, *LINES, *LABELLED, *WINDOWS, *GUESSED]
QUICK = {
    EVICTING[1],
    ROCKETS[1],
    CHOOSING[2],
    SHARING[2],
    FORESEEN[1],
    LINES[1],
    LABELLED[3],
    LABELLED[5],
    WINDOWS[1],
    BY_KEYS,
}


def first_of(policies: list[str], count: int = 1) -> list:
    """``policies``, of which all but the first ``count`` wait for ``make test-all``."""
    return [*policies[:count], *(pytest.param(text, marks=pytest.mark.thorough) for text in policies[count:])]


@pytest.mark.parametrize("policy", first_of(sorted(EVERY, key=lambda text: text not in QUICK), len(QUICK)))
def test_tokens_and_reports(engines, policy):
    prompts = [random_ids(length, seed=length) for length in ((110,) if policy in QUICK else (30, 150))]
    own, batched = (one.generate(prompts, FEW, policy=policy) for one in engines)
    for left, right in zip(own, batched):
        same(left, right)


ALONE = {
    f"{CIS}, unit=kv_head, r=2)": "unit=kv_head",
    f"{CIS[:-1]}3, anchors=any)": "anchors=any",
    f"{CIS}, cover_gap=false)": "cover_gap=false",
    f"{LOOP}, unit=q_head, force=true)": "force=true, unit=q_head",
    f"{LOOP}, slashes=false, at_start=true)": "at_start=true, slashes=false",
}


@pytest.mark.parametrize("policy", ALONE)
def test_the_papers_other_values_are_the_references(engines, policy):
    """Rows beside recorded ones; why they are none is said by name."""
    (reading, _) = Policy.parse(policy).decode.device_plan(engines[1].model.runner.spec).layers
    assert ALONE[policy] in reading.why_not(engines[1].model.runner.spec)
    prompts, policies = [random_ids(110, seed=1), random_ids(90, seed=2)], [policy, "topk(k=24)"]
    own, batched = (one.generate(prompts, FEW, policy=policies) for one in engines)
    assert [tokens(one) for one in own] == [tokens(one) for one in batched]
    assert "triton" not in batched[0].report["decode"]["backends"]
    same(own[1], batched[1])


@pytest.mark.parametrize(
    "policy",
    first_of(
        ["h2o(budget=40)", ROCKETS[0], f"{CIS}, s=3)", f"{LFPS}, blocks=4, history=keep)", f"{LOOP})", BY_KEYS], 2
    ),
)
def test_a_second_turn_goes_on_with_what_the_first_learnt(engines, policy):
    answers = []
    for one in engines:
        with one.session(policy=policy) as session:
            answers.append([session.generate(random_ids(length, seed=length), FEW) for length in (90, 15)])
    for left, right in zip(*answers):
        same(left, right)


LEARNING = ["h2o(budget=40)", ROCKETS[0], f"{CIS}, follow=1)", f"{LFPS}, blocks=4)", f"{LOOP})"]


@pytest.mark.parametrize("policy", first_of(LEARNING, 2))
@pytest.mark.parametrize("host", [False, True], ids=["tried again", "served by the host"])
def test_a_step_that_breaks_off_in_a_layer_learns_once(engines, monkeypatch, policy, host):
    """The second layer of the third step fails: what its first layer has written is written again."""
    prompt, device = random_ids(130, seed=4), device_of(engines[1])
    (expected,) = engines[0].generate(prompt, FEW, policy=policy)
    with monkeypatch.context() as patched:
        own = {
            "lfps": (triton_row_choice, "read_values"),
            "cis": (triton_one_launch, "choose"),
        }  # it may attend
        module, name = next((own[one] for one in own if policy.startswith(one)), (batched_rows, "attend_decode"))
        fails = Once(getattr(module, name), ZeroDivisionError("it broke"), at=6 if "loop" not in policy else 12)
        patched.setattr(module, name, fails)
        if not host:
            run = device.run

            def twice(step, memories, *times):
                try:
                    return run(step, memories, *times)
                except StepFailedError:
                    return run(step, memories, *times)

            patched.setattr(device, "run", twice)
        (got,) = engines[1].generate(prompt, FEW, policy=policy)
    assert fails.left <= 0
    assert tokens(got) == tokens(expected)
    assert got.report["decode"]["keys_attended"] == expected.report["decode"]["keys_attended"]
    assert any("failed" in note for note in got.report["notes"]) == host


def test_rows_of_all_methods_join_and_leave_one_step(engines):
    """One batch of every kind, of unequal prompts and answers, beside stateless ones."""
    policies = [
        EVICTING[2],
        EVICTING[3],
        ROCKETS[2],
        SHARING[4],
        SHARING[8],
        FORESEEN[1],
        LINES[0],
        "arkvale(budget=64)",
    ]
    prompts = [random_ids(60 + 11 * at, seed=at) for at in range(len(policies))]
    params = [SamplingParams(temperature=0, max_tokens=2 + at % 3, ignore_eos=True) for at in range(len(policies))]
    own, batched = (one.generate(prompts, params, policy=policies) for one in engines)
    for left, right in zip(own, batched):
        same(left, right)


@pytest.mark.thorough
def test_labels_outgrow_their_room(engines, monkeypatch):
    """A prompt too short for a frame, rows that read everything at first, and room for three keys at a time."""
    monkeypatch.setattr(recorded, "AHEAD", 3)
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    (own,), (batched,) = (one.generate(random_ids(60, seed=9), params, policy=BY_KEYS) for one in engines)
    same(own, batched)
    assert own.report["decode"]["selections"].get("blocks", 0) > 0


@pytest.mark.parametrize("policy", first_of([*LEARNING[1:4], BY_KEYS]))
def test_samples_of_one_prompt_go_their_own_ways(engines, policy):
    params = SamplingParams(temperature=1.5, max_tokens=5, ignore_eos=True, n=3, seed=7)
    (own,), (batched,) = (one.generate(random_ids(150, seed=2), params, policy=policy) for one in engines)
    assert [one.token_ids for one in own.outputs] == [one.token_ids for one in batched.outputs]
    assert len({tuple(one.token_ids) for one in own.outputs}) > 1


@pytest.mark.parametrize("policy", first_of([*LEARNING, BY_KEYS], 2))
def test_drafts_take_turns_with_recorded_steps(engines, policy):
    """Steps with drafts are the row path's: states go there and come back."""
    prompt = random_ids(120, seed=6)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    (own,) = engines[0].generate(prompt, params, policy=policy)
    with drafting(engines[1], Seldom([[*prompt, *tokens(own)]])):
        (drafted,) = engines[1].generate(prompt, params, policy=policy)
    assert tokens(drafted) == tokens(own)
    assert drafted.report["drafted_tokens"] > 0
    assert len(drafted.report["decode"]["backends"]) >= 2


def test_numbers_are_no_part_of_a_kind_of_step(engines):
    """Requests that differ in numbers alone are one group of one step, which one graph would serve."""
    device, params = device_of(engines[1]), SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    for form in ("cis(tau={0}, k=2{1}, s={2}, m={2}, sinks={1})", "lfps(r={0}, a={0}, k=3{1}, local={2}, before={1})"):
        device.kinds.clear()
        policies = [form.format(*numbers) for numbers in ((0.1, 1, 3), (0.5, 2, 4), (0.9, 3, 9))]
        results = engines[1].generate([random_ids(90, seed=4)] * 3, params, policy=policies)
        assert all(result.error is None for result in results)
        (kind,) = device.kinds._kinds.values()
        assert [group.rows for group in kind.groups] == [4]


def test_every_decode_method_has_a_device_plan_or_says_why_not(engines):
    spec = engines[1].model.runner.spec
    for method in METHODS.values():
        if "decode" in method.phases:
            assert (method().device_plan(spec) is None) == (method.rows_only is not None), method.name
