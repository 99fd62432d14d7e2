"""Greedy tokens and counts of every method are those that an earlier version gave (tests/golden/record.py): alone,
over turns, in mixed batches, and on the reference backend."""

from __future__ import annotations

import json
from itertools import product
from typing import Any

import pytest
from covering import quick, spread
from golden.replay import FILE, MODELS, RUN, answer, checkpoint, load, mixed
from tiny_models import one_thread  # noqa: F401

CASES: list[dict[str, Any]] = json.loads(FILE.read_text())["cases"]
KEYS = sorted({(case["model"], case["policy"]) for case in CASES}, key=lambda key: (list(MODELS).index(key[0]), key[1]))
OTHERS = list(MODELS)[1:]  # which have windows, caps and sinks of their own
# Every policy on the first model and, in turn, on one of the others; their batches hold all policies.
SPREAD = [
    *(key for key in KEYS if key[0] not in OTHERS),
    *(
        pytest.param(model, policy, marks=row.marks)
        for row in spread(sorted({policy for model, policy in KEYS if model in OTHERS}), OTHERS)
        for policy, model in [row.values]
        if (model, policy) in KEYS
    ),
]
ALONE = {model: [case for case in CASES if case["model"] == model and case["kind"] == "alone"] for model in MODELS}


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    """A function of a model and options that gives an LLM, made once; in the end nothing of it is in use."""
    folders, made = {}, {}

    def get(model: str, **options: Any):
        key = (model, *options.items())
        if model not in folders:
            folders[model] = checkpoint(model, tmp_path_factory.mktemp(model))
        if key not in made:
            made[key] = load(folders[model], **options)
        return made[key]

    yield get
    assert all(llm.engine.pool.used_blocks == 0 for llm in made.values())


def replay(llm, case: dict[str, Any]) -> None:
    for turn, (output, want) in enumerate(zip(RUN[case["kind"]](llm, case), case["answers"], strict=True)):
        got = answer(output)
        where = f"{case['kind']}, prompts {case['prompts']}, turn {turn}"
        assert got["tokens"] == want["tokens"], where
        assert got == want, where


@pytest.mark.parametrize(("model", "policy"), SPREAD)
def test_alone_and_over_turns(engines, model, policy):
    for case in CASES:
        if (case["model"], case["policy"]) == (model, policy):
            replay(engines(model), case)


def check_batch(llm, cases: list[dict[str, Any]]) -> None:
    wrong = [case["policy"] for case, output in zip(cases, mixed(llm, cases)) if answer(output) != case["answers"][0]]
    assert wrong == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "exact", "once"),
    quick(
        [("llama", False, True), ("llama", True, False), *((model, False, False) for model in MODELS)],
        lambda model, exact, once: once or (not exact and model == list(MODELS)[-1]),
    ),
    ids=["llama-once", "llama-exact", *MODELS],
)
def test_a_batch_of_all_methods(engines, model, exact, once):
    """``once``: one prompt a policy, the short one or, for the next policy, the long one."""
    policies = [policy for name, policy in KEYS if name == model]
    of_policies = [[case for case in ALONE[model] if case["policy"] == policy] for policy in policies]
    cases = [some[number % len(some)] for number, some in enumerate(of_policies)] if once else ALONE[model]
    check_batch(engines(model, exact=exact), cases)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "half"),
    quick(product(MODELS, (0, 1)), lambda model, half: (model, half) in (("llama", 0), (list(MODELS)[-1], 1))),
)
def test_the_reference_backend(engines, model, half):
    longest = max(case["prompts"][0][0] for case in ALONE[model])
    cases = [case for case in ALONE[model] if case["prompts"][0][0] == longest]
    check_batch(engines(model, backend="reference"), cases[half::2])


def test_what_decodes_sparsely_was_recorded_sparse():
    """Else the file would prove nothing of it: in some recorded run a method reads fewer keys than dense."""
    reads: dict[str, float] = {}
    for case in (one for one in CASES if one["model"] == "llama"):  # the others have windows of their own
        for one in case["answers"]:
            for phase in ("prefill", "decode"):
                share = one[phase]["keys_attended"] / one[phase]["keys_causal"]
                reads[case["policy"]] = min(share, reads.get(case["policy"], 1.0))
    assert [policy for policy, share in reads.items() if share == 1.0] == ["dense"]
