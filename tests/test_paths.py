"""Which path rows take through attention, as reports and ``saccade explain`` tell it."""

from __future__ import annotations

import json

import pytest
from test_cli import run
from tiny_models import make_checkpoint, random_ids

from saccade import LLM, SamplingParams
from saccade.engine.steps.paths import CHUNK, LAYER, MEANINGS, ROW, STEP
from saccade.ops import cpu

ASKED = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True)
pytestmark = pytest.mark.skipif(not cpu.available(), reason="the C++ kernels are not built")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint("llama", tmp_path_factory.mktemp("paths"), max_position_embeddings=512, head_dim=32)


@pytest.fixture(scope="module")
def llm(folder):
    return LLM(folder, kv_memory="16MiB", exact=False, dtype="float32", enable_prefix_caching=False)


def paths(llm, policies, lengths=(200,), asked=ASKED):
    outputs = llm.generate([random_ids(length, seed=1) for length in lengths], asked, policy=policies)
    return [(one.report["prefill"]["paths"], one.report["decode"]["paths"]) for one in outputs]


@pytest.mark.parametrize(
    ("policy", "path", "why"),
    [
        ("dense", STEP, None),
        ("topk(k=24)", STEP, None),
        ("lfps(k=16, sinks=2, local=8, least=24)", STEP, None),
        ("psa(epsilon=0.5, block_size=8)", STEP, None),
        ("psa(epsilon=0.5, block_size=8)+psaw(local=16)", ROW, "state"),
        ("topp(dense_upto=0, p=0.5)", ROW, "topp"),
        ("h2o(budget=40)+psaw(local=16)", ROW, "state"),
    ],
)
def test_a_row_takes_the_fastest_path_that_serves_it_and_says_why_no_other(llm, policy, path, why):
    ((prefill, decode),) = paths(llm, policy)
    assert [(one["path"], one["rows"], one["why"]) for one in prefill] == [(CHUNK, 200, None)]
    assert [(one["path"], one["rows"]) for one in decode] == [(path, 4)]
    assert (decode[0]["why"] is None) == (why is None)
    assert why is None or why in decode[0]["why"]


def test_rows_of_a_step_hold_each_other_to_calls_a_layer(llm):
    """A row whose method chooses for itself keeps others from the call for all layers, and says so."""
    (_, ours), (_, theirs) = paths(llm, ["dense", "topp(dense_upto=0, p=0.5)"], (200, 180))
    assert {one["path"] for one in ours} == {LAYER}
    assert "chosen for layer by layer" in ours[0]["why"]
    assert {one["path"] for one in theirs} == {ROW}


def test_rows_that_are_looked_at_are_chosen_for_one_by_one(folder):
    with LLM(folder, kv_memory="16MiB", exact=False, backend="reference", enable_prefix_caching=False) as plain:
        ((_, decode),) = paths(plain, "dense")
    assert [(one["path"], one["rows"]) for one in decode] == [(ROW, 4)]
    assert "no call for rows of many requests" in decode[0]["why"]


def test_explain_tells_what_a_run_reports(folder, capsys):
    options = [
        "-p",
        "topp(dense_upto=0, p=0.5)",
        "-m",
        str(folder),
        "--lengths",
        "40,90",
        "--json",
        "--kv-memory",
        "16MiB",
    ]
    code, out, err = run(capsys, "explain", *options)
    assert code == 0, err
    rows = json.loads(out)
    assert [(row["tokens"], row["phase"], row["path"]) for row in rows] == [
        (length, phase, path) for length in (40, 90) for phase, path in (("prefill", CHUNK), ("decode", ROW))
    ]
    assert all(row["path"] in MEANINGS for row in rows)
    assert "topp" in rows[1]["why"]
