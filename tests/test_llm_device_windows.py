"""Sparse methods on models with sliding windows, in recorded steps: layers whose window hides keys from a row read it,
all others read as the method says, and what requests get is what the row path gives. CPU tensors, Triton's interpreter,
no graphs."""

from __future__ import annotations

import pytest
import triton_helpers  # noqa: F401  (sets the interpreter up first)
from device_helpers import choose_one_by_one, device_of, put_on_device
from engine_helpers import tokens
from tiny_models import make_checkpoint, random_ids

from saccade import LLM, SamplingParams
from saccade.engine.device.ahead import Ahead
from saccade.engine.device.backend import DeviceBackend
from saccade.engine.watch.phase_stats import SLIDES
from saccade.methods.registry import METHODS
from saccade.models import llama_weights, probe
from saccade.models.interface import ModelSpec

WINDOW = 72  # tokens
FEW = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
LENGTHS = 69, 100  # of prompts: one outgrows the window on the way, one has
METHOD = {
    "streaming": "streaming(sinks=2, window=40)",
    "quest": "quest(budget=48, dense_layers=1)",
    "arkvale": "arkvale(budget=48)",
    "locks": "locks(budget=48)",
    "psa": "psa(epsilon=0.4, microbatch=1, block_size=16)",
    "topk": "topk(k=24)",
    "cis": "cis(k=20, sinks=3, local=6, tau=0.0, r=2, m=9)",
    "lfps": "lfps(k=30, least=1, blocks=4)",
    "loopserve": "loopserve(alpha=1, budget=40, first=2, n_d=3)",
    "snapkv": "snapkv(capacity=40, window=8)",
    "adakv": "adakv(capacity=50, window=8)",
    "rocketkv": "rocketkv(capacity=60, window=8, kernel=5, keys=20)",
    "h2o": "h2o(budget=40)",
    "double_sparsity": "double_sparsity(dense_upto=0, source=prompt, dense_layers=1, k=24, channels=0.5)",
    "hshare": "hshare(source=prompt, heavy=20, sinks=3, local=5, every=3, layer_share=0.5)",
}
BY_KEYS = "psa(epsilon=0.4, rank=keys, rest=estimate, microbatch=1, block_size=16)"
QUICK = "quest", "lfps", "h2o"


def thorough(*values):
    return pytest.param(*values, marks=pytest.mark.thorough)


def engine(folder, batched: bool, **options) -> LLM:
    settings = {"kv_memory": "16MiB", "prefill_chunk": 256, "enable_prefix_caching": False}
    made = LLM(folder, exact=False, **{**settings, **options})
    (put_on_device if batched else choose_one_by_one)(made)
    return made


def checkpoint(family: str, folder, **options):
    small = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "sliding_window": WINDOW}
    return make_checkpoint(family, folder, max_position_embeddings=1024, **{**small, **options})


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    """By family: the row path's, and one whose steps are recorded."""
    made = {}

    def of(family: str) -> tuple[LLM, LLM]:
        if family not in made:
            folder = checkpoint(family, tmp_path_factory.mktemp(family))
            made[family] = engine(folder, False), engine(folder, True)
        return made[family]

    return of


def same(own, batched) -> None:
    """Tokens and what was read are the same, and recorded steps did it."""
    assert own.error is batched.error is None
    assert tokens(own) == tokens(batched)
    left, right = own.report["decode"], batched.report["decode"]
    assert set(right["backends"]) == {"triton"}
    # Rounded step by step on the host, where heads that rest have candidates too.
    assert left["keys_scored"] == pytest.approx(right["keys_scored"], abs=2 * len(tokens(own)), rel=0.12)
    for name in ("keys_attended", "keys_causal", "density_per_head", "searches", "searchable", "selections"):
        assert left[name] == right[name], name
    assert own.report["notes"] == batched.report["notes"]


def logits(answer) -> list[float]:
    """Of each chosen token, its log-probability."""
    return [entry[token].logprob for entry, token in zip(answer.outputs[0].logprobs, answer.outputs[0].token_ids)]


def test_every_method_with_a_plan_is_tried():
    spec = ModelSpec("gemma2", 3, 2, 1, 32, 288, 1024, None, (WINDOW, None, WINDOW))
    planned = {name for name, method in METHODS.items() if "decode" in method.phases and method().device_plan(spec)}
    assert planned - {"dense", "lossless"} == set(METHOD)


@pytest.mark.parametrize("name", [name if name in QUICK else thorough(name) for name in METHOD])
def test_rows_that_outgrow_a_window(engines, name):
    prompts = [random_ids(length, seed=length) for length in LENGTHS]
    own, batched = (one.generate(prompts, FEW, policy=METHOD[name]) for one in engines("gemma3_text"))
    for left, right in zip(own, batched):
        same(left, right)
        assert "band" in right.report["decode"]["selections"]
        assert SLIDES in right.report["notes"]


@pytest.mark.parametrize(
    ("family", "policy"),
    [
        ("gemma2", METHOD["lfps"]),  # logits are capped
        thorough("gemma2", BY_KEYS),
        thorough("gemma2", METHOD["rocketkv"]),
        ("gpt_oss", METHOD["topk"]),  # logits without values
        thorough("gpt_oss", METHOD["psa"]),
        ("mistral", METHOD["snapkv"]),  # all layers slide
        thorough("mistral", METHOD["lfps"]),
        thorough("gemma3_text", BY_KEYS),
        thorough("cohere2", METHOD["cis"]),
    ],
)
def test_families(engines, family, policy):
    prompts = [random_ids(length, seed=length) for length in LENGTHS]
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=1)
    own, batched = (one.generate(prompts, params, policy=policy) for one in engines(family))
    for left, right in zip(own, batched):
        same(left, right)
        assert logits(left) == pytest.approx(logits(right), abs=1e-4)


SIZES = None, 72, 102


@pytest.mark.parametrize("policy", ["lfps(k=30, least=1)", thorough(METHOD["quest"]), thorough(METHOD["h2o"])])
def test_windows_of_two_sizes(tmp_path, monkeypatch, policy):
    monkeypatch.setattr(llama_weights, "_window", lambda attention, config: SIZES[attention.layer_idx])
    monkeypatch.setattr(probe, "configured_windows", lambda family, config: SIZES)
    folder = checkpoint("llama", tmp_path / "llama", num_hidden_layers=3)
    prompts = [random_ids(length, seed=length) for length in (69, 99)]
    own, batched = (engine(folder, chosen) for chosen in (False, True))
    assert own.model.runner.spec.windows == SIZES
    for left, right in zip(*(one.generate(prompts, FEW, policy=policy) for one in (own, batched))):
        same(left, right)
