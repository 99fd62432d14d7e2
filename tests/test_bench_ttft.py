"""``saccade bench ttft`` measures what it says: rows with their parts, the same work on both sides, budgets that give
the density they are named for."""

from __future__ import annotations

import json

import pytest
import torch

from saccade import LLM
from saccade.bench import ttft
from saccade.bench.ttft import COLUMNS, FIRST, at_density, policy_at, prompt
from saccade.cli.main import main
from saccade.engine.observing import timing
from saccade.engine.watch.clock import Clock
from saccade.errors import SaccadeError
from saccade.kv.view import KVView
from saccade.methods import Policy
from saccade.methods.base import Chunk
from saccade.models.baseline import TransformersModel, save_random_llama

METHODS = ["transformers", "dense", "a_shape@0.2", "flexprefill@0.2+psaw+etf", "etf(reuse=kv)"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    small = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "vocab_size": 300}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    return save_random_llama(tmp_path_factory.mktemp("small"), torch.float32, **small, **heads)


def bench(*args: str) -> int:
    with pytest.raises(SystemExit) as exit_info:
        main(["bench", "ttft", *args])
    return exit_info.value.code


def test_rows_and_their_parts(folder, tmp_path, capsys):
    files = ["--json", str(tmp_path / "rows.json"), "--markdown", str(tmp_path / "rows.md")]
    args = ["--model", str(folder), "--contexts", "1500,600", "--methods", ";".join(METHODS), "--dtype", "float32"]
    assert bench(*args, "--repeats", "2", "--chunk", "500", *files) == 0
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [(row["context"], row["method"]) for row in rows] == [(n, m) for n in (600, 1500) for m in METHODS]
    for row in rows:
        parts = [row[f"{part}_s"] for part in ("attention", "selection", "linear", "rest")]
        assert sum(parts) == pytest.approx(row["seconds"], abs=1e-4)
        assert min(parts) >= 0
        assert row["linear_s"] > 0
        assert (row["attention_s"] > 0) == (row["method"] != "transformers")
        same = {other["method"]: other["seconds"] for other in rows if other["context"] == row["context"]}
        assert row["x_own_dense"] == pytest.approx(same["dense"] / row["seconds"], rel=1e-3)
        assert row["x_transformers"] == pytest.approx(same["transformers"] / row["seconds"], rel=1e-3)
        assert (row["repeats"], row["threads"], row["dtype"], row["model"]) == (2, 1, "float32", str(folder))
    theirs, dense, a_shape, composed, copied = rows[5:]
    assert theirs["backends"] == ["sdpa"]
    assert dense["density"] == 1.0
    assert a_shape["density"] == pytest.approx(0.2, abs=0.05)
    assert composed["policy"] == "flexprefill(gamma=0.0, min_budget=150, lines=block)+psaw+etf"
    assert composed["density"] < 0.6
    assert (
        composed["frozen"] == copied["frozen"] == pytest.approx((750 - 16) / (4 * 1500), abs=1e-6)
    )  # half of the last layer
    assert dense["frozen"] == 0
    text = (tmp_path / "rows.md").read_text().splitlines()
    assert text[0] == f"| {' | '.join(COLUMNS)} |"
    assert len(text) == 2 + len(rows)
    assert "flexprefill@0.2+psaw+etf" in capsys.readouterr().out


def test_no_measurement_begins_after_the_limit(folder, capsys):
    args = ["--model", str(folder), "--contexts", "300", "--methods", "dense;etf", "--dtype", "float32"]
    assert bench(*args, "--limit", "0", "--clock", "cpu") == 0
    assert "2 of 2 measurements did not begin" in capsys.readouterr().out


def test_random_models_take_the_longest_prompt_and_its_answer(monkeypatch, folder, capsys):
    made = []

    def made_for(*args, positions):
        made.append(positions)
        return folder

    monkeypatch.setattr("saccade.bench.cli.model_folder", made_for)
    assert bench("--contexts", "300,200", "--methods", "dense", "--dtype", "float32", "--limit", "0") == 0
    assert made == [301]


def test_both_sides_compute_the_same_token(folder):
    ids = prompt(700, 300)
    theirs = TransformersModel(folder, torch.float32)
    ours = LLM(folder, dtype="float32", kv_memory="16MiB").generate(ids, FIRST)[0].outputs[0].token_ids
    assert ours == [theirs.first_token(ids)]
    assert theirs.attention == "sdpa"


@pytest.mark.parametrize("name", ["a_shape", "tri_shape", "flexprefill", "xattention", "minference"])
@pytest.mark.parametrize("density", [0.1, 0.3])
def test_budgets_for_a_density(name, density):
    """On flat attention, as a random model has it, over a prompt far longer than the blocks."""
    n = 6144
    rng = torch.Generator().manual_seed(0)
    q, k, v = (0.05 * torch.randn(heads, n, 16, generator=rng) for heads in (2, 1, 1))
    method = Policy.parse(at_density(name, density, n)).prefill
    selection = method.select_prefill(Chunk.of(q, KVView.from_tensors(k, v)))
    slack = 0.09 if name == "tri_shape" else 0.05  # its dense last rows come on top
    assert selection.density() == pytest.approx(density, abs=slack)


def test_density_names_spell_out():
    assert policy_at("flexprefill@0.1+psa+psaw", 16384) == Policy.parse(
        "flexprefill(gamma=0, min_budget=819, lines=block)+psa+psaw"
    )
    assert policy_at("prefill=a_shape@.5, window=psaw", 1000).prefill.window == 186
    assert policy_at("etf", 100) == Policy.parse("etf")
    for text, says in (("psa@0.1", "have budgets for a density"), ("flexprefill@1.5", "between 0 and 1")):
        with pytest.raises(SaccadeError, match=says):
            policy_at(text, 1000)


def test_prompts_repeat_themselves():
    ids = prompt(6400, 32000)
    assert len(ids) == 6400
    phrases = {tuple(ids[at : at + 64]) for at in range(0, 6400, 64)}
    assert 30 < len(phrases) < 70
    assert prompt(6400, 32000) == ids
    assert max(prompt(640, 100)) < 100


def test_a_clock_counts_inner_stretches_once():
    now = iter([0.0, 1.0, 3.0, 7.0, 20.0, 21.0])
    clock = Clock(lambda: next(now))
    with clock("outer"), clock("inner"):
        pass
    with clock("outer"):
        pass
    assert clock.seconds == {"outer": 1.0 + 4.0 + 1.0, "inner": 2.0}


def test_timing_ends_with_its_block(folder):
    llm = LLM(folder, dtype="float32", kv_memory="16MiB")
    clock = Clock()
    with timing(llm.engine, clock):
        llm.generate(prompt(64, 300), FIRST)
    assert {"attention", "selection"} <= clock.seconds.keys()
    before = dict(clock.seconds)
    llm.generate(prompt(64, 300), FIRST)
    assert clock.seconds == before
    assert llm.engine.watch.clock is None


BAD = {
    "contexts": (["--contexts", "8k"], "8k"),
    "dtype": (["--dtype", "int8"], "int8"),
    "threads": (["--threads", "0"], "threads"),
    "clock": (["--clock", "sand"], "sand"),
    "method": (["--methods", "dense;nope"], "nope"),
    "density": (["--methods", "psa@0.1"], "psa@0.1"),
    "folder": (["--json", "absent/rows.json"], "absent"),
    "model": (["--model", "absent", "--contexts", "64"], "absent"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_options_are_one_line(case, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    args, names = BAD[case]
    assert bench(*args) == 2
    err = capsys.readouterr().err
    assert err.startswith("saccade: error: ")
    assert err.count("\n") == 1
    assert names in err


def test_the_defaults_are_policies():
    from saccade.bench.cli import TTFT_METHODS

    assert {ttft.TRANSFORMERS, "dense"} < set(TTFT_METHODS)
    for text in TTFT_METHODS:
        if text != ttft.TRANSFORMERS:
            assert policy_at(text, 8192).text
