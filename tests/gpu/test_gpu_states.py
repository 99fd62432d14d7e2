"""Methods whose recorded steps keep a state on the GPU: tokens are those of the CPU's row path, from graphs too, alone
and side by side with rows that come and go."""

from __future__ import annotations

import os

import pytest
from engine_helpers import tokens
from tiny_models import make_checkpoint, random_ids

from saccade import LLM, SamplingParams
from saccade.methods.cis import triton_one_launch

LONG = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
CIS, LFPS, LOOP = (
    "cis(k=30, sinks=3, local=8, tau=0.0",
    "lfps(k=40, least=1",
    "loopserve(alpha=1, budget=60, first=2, n_d=4",
)
POLICIES = [
    "snapkv(capacity=60, window=8)",
    "adakv(capacity=60, window=8, unit=q_head)",
    "rocketkv(capacity=120, window=8, kernel=9, keys=40)",
    "rocketkv(capacity=90, window=16, keys=30, block_size=3, channels=0.25, unit=q_head)",
    "rocketkv(budget=48)",
    "h2o(budget=60)",
    "h2o(budget=60, unit=q_head)",
    "topk(k=40)",
    "topk(k=0.1, sinks=3, local=9, unit=kv_head)",
    f"{CIS})",
    f"{CIS}, follow=none, s=5)",
    f"{CIS}, align=position, r=3)",
    f"{CIS})+psaw(start_layer=1, block_size=1, sinks=3, local=8)",
    f"{LFPS}, blocks=4)",
    f"{LFPS}, blocks=4, epsilon=0.1, unit=kv_head)",
    f"{LFPS}, blocks=0, rest=none, before=20, sinks=0)",
    "lfps(k=0.1, least=1)",
    f"{LOOP})",
    f"{LOOP}, observed=2)",
    "double_sparsity(dense_upto=0, k=50, source=prompt, dense_layers=1)",
    "hshare(source=prompt, heavy=30, sinks=3, local=8, every=3)",
    "dense+psaw(start_layer=1, block_size=1, sinks=3, local=8)",
    "psa(epsilon=0.6, block_size=16, microbatch=1, rank=keys, rest=estimate)",
]


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    folder = make_checkpoint(
        "llama", tmp_path_factory.mktemp("llama"), max_position_embeddings=2048, head_dim=32, num_hidden_layers=2
    )
    return [
        LLM(folder, kv_memory="128MiB", prefill_chunk=512, exact=False, device=device, enable_prefix_caching=False)
        for device in ("cpu", "cuda")
    ]


def same(left, right) -> None:
    assert right.error is None, right.error
    assert tokens(left) == tokens(right)
    assert set(right.report["decode"]["backends"]) == {"triton"}
    wanted, got = left.report["decode"], right.report["decode"]
    for name in ("keys_attended", "keys_causal", "searches"):
        assert wanted[name] == got[name], name
    # Under a window a device names what a short row reads by its length alone: a band of all keys may be dense.
    assert [kinds(report["selections"]) for report in (wanted, got)] == [kinds(wanted["selections"])] * 2


def kinds(selections: dict[str, int]) -> dict[str, int]:
    others = {kind: count for kind, count in selections.items() if kind not in ("dense", "band")}
    return others | {"ends or all": selections.get("dense", 0) + selections.get("band", 0)}


@pytest.mark.parametrize("policy", POLICIES)
def test_tokens_and_what_was_read_equal_those_of_the_cpu(engines, policy):
    prompts = [random_ids(length, seed=length) for length in (40, 300, 431)]
    for left, right in zip(*(engine.generate(prompts, LONG, policy=policy) for engine in engines)):
        same(left, right)


def test_sharing_where_no_program_holds_a_list(engines, monkeypatch):
    """What longer contexts take: the choice and the anchors by launches of their own."""
    monkeypatch.setattr(triton_one_launch, "HELD", 1)
    kinds_of = engines[1].engine.worker.device.kinds
    kinds_of.clear()
    try:
        for policy in (f"{CIS})", f"{CIS}, follow=none, r=2)+psaw(start_layer=1, block_size=1, sinks=3, local=8)"):
            prompts = [random_ids(length, seed=length) for length in (40, 300, 431)]
            for left, right in zip(*(engine.generate(prompts, LONG, policy=policy) for engine in engines)):
                same(left, right)
    finally:
        kinds_of.clear()


def test_all_side_by_side_with_rows_that_come_and_go(engines):
    prompts = [random_ids(100 + 17 * at, seed=at) for at in range(len(POLICIES))]
    params = [
        SamplingParams(temperature=0, max_tokens=4 + 3 * (at % 6), ignore_eos=True) for at in range(len(POLICIES))
    ]
    for left, right in zip(*(engine.generate(prompts, params, policy=POLICIES) for engine in engines)):
        same(left, right)


def test_one_graph_serves_all_numbers(engines):
    """Prompts and numbers drawn anew at each run. Rows come and go, so there are steps of several sizes: each is one
    group, all of one form."""
    gpu, seed = engines[1], int.from_bytes(os.urandom(3), "big")
    device = gpu.engine.worker.device
    device.kinds.clear()
    taus = [f"cis(k={34 + at % 9}, sinks={at % 4}, local={6 + at % 3}, tau={at / 64 - 0.5})" for at in range(64)]
    results = gpu.generate([random_ids(300, seed=seed + at) for at in range(64)], LONG, policy=taus)
    assert all(result.error is None for result in results), seed
    made = list(device.kinds._kinds.values())
    assert {len(kind.groups) for kind in made} == {1}
    assert len({kind.groups[0].form for kind in made}) == 1
    assert max(kind.groups[0].rows for kind in made) >= 16


@pytest.mark.parametrize("policy", [POLICIES[2], POLICIES[5], POLICIES[9], POLICIES[13], POLICIES[17]])
def test_answers_do_not_change_from_run_to_run(engines, policy):
    """Races would show: the same batch, many times."""
    prompts = [random_ids(300 + at, seed=at) for at in range(16)]
    first = [tokens(one) for one in engines[1].generate(prompts, LONG, policy=policy)]
    for _ in range(5):
        assert [tokens(one) for one in engines[1].generate(prompts, LONG, policy=policy)] == first
