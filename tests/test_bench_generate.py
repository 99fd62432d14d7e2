"""``saccade bench generate`` measures what it says: rows with their parts, the same keys and the same work on both
sides, synthetic keys that are really read and that a few of which carry the weight."""

from __future__ import annotations

import json

import pytest
import torch
from gguf_files import tiny, write

from saccade import LLM, SamplingParams
from saccade.bench.generate import COLUMNS, WARM, kv_bytes
from saccade.bench.generate_kv import TAIL, plant, synthesize
from saccade.bench.ttft import TRANSFORMERS, prompt
from saccade.cli.main import main
from saccade.methods import Policy
from saccade.models.baseline import TransformersModel, save_random_llama

METHODS = ["transformers", "dense", "streaming(sinks=4, window=96)", "lfps(unit=kv_head)", "psa", "snapkv"]
LAYERS = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    small = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": LAYERS, "vocab_size": 300}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    return save_random_llama(tmp_path_factory.mktemp("small"), torch.float32, **small, **heads)


@pytest.fixture(autouse=True)
def known_bandwidth(monkeypatch):
    monkeypatch.setattr("saccade.bench.limits.measure", lambda *args: {"read_gbps": 0.5})


def bench(*args: str) -> int:
    with pytest.raises(SystemExit) as exit_info:
        main(["bench", "generate", *args])
    return exit_info.value.code


@pytest.mark.parametrize("synthetic", [True, False])
def test_rows_and_their_parts(folder, tmp_path, capsys, synthetic):
    files = ["--json", str(tmp_path / "rows.json"), "--markdown", str(tmp_path / "rows.md")]
    args = ["--model", str(folder), "--contexts", "1500,600", "--methods", ";".join(METHODS), "--dtype", "float32"]
    assert bench(*args, "--tokens", "5", *files, *(["--synthetic-kv"] if synthetic else [])) == 0
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [(row["context"], row["method"]) for row in rows] == [(n, m) for n in (600, 1500) for m in METHODS]
    weights = 4 * (LAYERS * (64 * (64 + 2 * 32 + 64) + 3 * 64 * 96) + 64 * 300)
    for row in rows:
        parts = [row[f"{part}_ms"] for part in ("attention", "selection", "linear", "rest")]
        assert min(parts) >= 0
        assert sum(parts) == pytest.approx(1000 / row["tokens_per_s"], abs=1e-3)
        assert row["linear_ms"] > 0
        assert (row["attention_ms"] > 0) == (row["method"] != TRANSFORMERS)
        same = {other["method"]: other["tokens_per_s"] for other in rows if other["context"] == row["context"]}
        assert row["x_dense"] == pytest.approx(row["tokens_per_s"] / same["dense"], rel=1e-3)
        assert row["x_transformers"] == pytest.approx(row["tokens_per_s"] / same[TRANSFORMERS], rel=1e-3)
        assert (row["tokens"], row["threads"], row["dtype"], row["synthetic"]) == (5, 1, "float32", synthetic)
        assert len(row["output"]) == 1 + WARM + 5
        read = weights + row["density"] * 4 * 2 * LAYERS * 2 * 16 * row["context"]
        assert row["floor_ms"] == pytest.approx(read / 0.5 / 1e6, rel=1e-4)
    theirs, dense, streaming, *_ = rows[len(METHODS) :]
    assert theirs["backends"] == ["sdpa"]
    assert dense["density"] == 1.0
    assert dense["output"] == theirs["output"]  # in float32 both sides compute the same
    assert streaming["density"] == pytest.approx(100 / 1504, rel=1e-2)
    text = (tmp_path / "rows.md").read_text().splitlines()
    assert text[0] == f"| {' | '.join(COLUMNS)} |"
    assert len(text) == 2 + len(rows)
    assert "streaming(sinks=4, window=96)" in capsys.readouterr().out


def test_synthetic_keys_are_what_is_read(folder):
    """The engine's answer changes with them, and is that of transformers over the very same keys and values."""
    llm, ids = LLM(folder, dtype="float32", kv_memory="32MiB"), prompt(700, 300)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    plain = llm.generate(ids, params)[0].outputs[0].token_ids
    made = synthesize(llm, ids)
    assert [k.shape for k, _ in made.layers] == [(2, 700 - TAIL, 16)] * LAYERS
    request = llm.engine.add(ids, params, Policy())
    made.fill(request.sequence)
    while not request.finished:
        llm.engine.step()
    assert request.report.cached_tokens == 0
    assert request.report.prefill.tokens == TAIL
    theirs = TransformersModel(folder, torch.float32)
    assert request.final_ids == theirs.generate(ids, 12, past=made.layers) != plain
    assert theirs.generate(ids, 12) == plain
    again = synthesize(llm, ids)
    assert all(torch.equal(a, b) for one, two in zip(made.layers, again.layers) for a, b in zip(one, two))


def test_a_few_planted_keys_carry_the_weight():
    """Under the queries they were made for, and under others of the same kind."""
    rng = torch.Generator().manual_seed(3)
    common = 2 * torch.randn(4, 1, 32, generator=rng)
    q = common + 0.5 * torch.randn(4, TAIL, 32, generator=rng)
    past, scale = 20_000, 32**-0.5
    k, _ = plant(q, past, 2, scale, torch.Generator().manual_seed(0))
    other = common + 0.5 * torch.randn(4, 8, 32, generator=rng)
    logits = torch.einsum("hrd,hnd->hrn", other, k.repeat_interleave(2, 0)) * scale
    weights = torch.softmax(logits, -1)
    best = weights.sort(-1, descending=True)
    assert float(best.values[..., :20].sum(-1).min()) > 0.9
    assert float(weights[..., :4].sum(-1).max()) < 0.9  # not the sinks alone
    assert len(set(best.indices[0, 0, :4].tolist()) & set(best.indices[1, 0, :4].tolist()) - set(range(4))) < 3


def test_floors_count_bytes_once(folder):
    llm = LLM(folder, dtype="float32", kv_memory="16MiB")
    assert kv_bytes(llm, 100) == 100 * LAYERS * 2 * 2 * 16 * 4
    tied = sum(part.numel() for name, part in llm.model.runner.model.named_parameters() if "norm" not in name)
    assert llm.model.matrix_bytes == 4 * tied


def test_no_measurement_begins_after_the_limit(folder, capsys):
    args = ["--model", str(folder), "--contexts", "300", "--methods", "dense;psa", "--dtype", "float32"]
    assert bench(*args, "--limit", "0", "--clock", "cpu") == 0
    assert "2 of 2 measurements did not begin" in capsys.readouterr().out


BAD = {
    "tokens": (["--tokens", "0"], "tokens"),
    "method": (["--methods", "dense;nope"], "nope"),
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


def test_short_synthetic_contexts_are_refused(folder, capsys):
    assert bench("--model", str(folder), "--contexts", str(TAIL), "--synthetic-kv", "--dtype", "float32") == 2
    assert f"contexts above {TAIL}" in capsys.readouterr().err


def test_the_defaults_are_policies():
    from saccade.bench.cli import GENERATE_METHODS

    assert {TRANSFORMERS, "dense"} < set(GENERATE_METHODS)
    for text in GENERATE_METHODS:
        if text != TRANSFORMERS:
            assert Policy.parse(text).decode.name in text


@pytest.mark.parametrize("command", ["generate", "ttft"])
def test_a_gguf_file_has_no_row_of_transformers_unless_it_is_asked_for(command, tmp_path, capsys):
    file = write(tiny("llama", tmp_path / "tiny"), tmp_path / "tiny.gguf")
    asked = ["bench", command, "--model", str(file), "--contexts", "128", "--limit", "1e-9"]  # no row is begun
    with pytest.raises(SystemExit) as ended:
        main(asked)
    assert ended.value.code == 0
    assert "without the row of transformers: transformers does not run the blocks" in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        main([*asked[:-2], "--methods", "transformers;dense"])
    assert ended.value.code == 2
    assert "give a folder of safetensors to compare" in capsys.readouterr().err
