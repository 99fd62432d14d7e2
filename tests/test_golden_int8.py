"""Greedy tokens of every method over keys and values of 8 bits, on the reference backend, are those that an earlier
version gave (tests/golden/record_int8.py)."""

from __future__ import annotations

import json

import pytest
from golden.record_int8 import FILE, tokens
from golden.replay import checkpoint, load
from method_matrix import MATRIX
from tiny_models import one_thread  # noqa: F401

from saccade.methods.policy import Policy

CASES = json.loads(FILE.read_text())["cases"]


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    made = load(checkpoint("llama", tmp_path_factory.mktemp("golden")), backend="reference", kv_dtype="int8")
    yield made
    made.close()


@pytest.mark.parametrize("case", CASES, ids=[case["policy"] for case in CASES])
def test_tokens_stay(llm, case):
    assert tokens(llm, case["policy"], case["seed"]).outputs[0].token_ids == case["tokens"]


def test_nearly_every_method_was_recorded():
    known = {Policy.parse(case.methods()[0]).text for case in MATRIX}
    assert {case["policy"] for case in CASES} <= known
    assert len(CASES) >= len(known) - 3
