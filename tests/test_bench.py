"""The benchmarks measure what they say: rows with all their fields, real densities, limits from the same run."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch

from saccade.bench import baselines
from saccade.bench.inputs import make, random_blocks
from saccade.bench.ops import Settings, _limit_ms, run
from saccade.bench.timing import CLOCKS, median_ms
from saccade.cli.main import main
from saccade.ops import attend
from saccade.selection import Band, Dense, Shape, Tokens

FIELDS = [
    "op",
    "method",
    "backend",
    "dtype",
    "threads",
    "context",
    "heads",
    "kv_heads",
    "head_dim",
    "density",
    "ms",
    "selection_ms",
    "own_dense_ms",
    "best_torch_ms",
    "limit_ms",
    "torch_sdpa_ms",
    "speedup_torch_sdpa",
    "selection_percent_of_dense",
    "percent_of_gemm",
    "time_over_density",
]


def bench(*args: str) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(["bench", "ops", *args])
    assert exit_info.value.code == 0


@pytest.fixture(autouse=True)
def _small_limits(monkeypatch):
    """Limits are measured on buffers of hundreds of megabytes; a test only needs them to be measured."""
    from saccade.bench import limits

    monkeypatch.setattr(limits, "GEMM_SIZE", 64)
    monkeypatch.setattr(limits, "READ_BYTES", 1 << 20)


@pytest.mark.parametrize(
    ("suite", "methods"),
    [
        ("prefill", "streaming(window=64);flexprefill(min_budget=128)"),
        ("decode", "streaming(window=64);psa;topk(k=32)"),
    ],
)
def test_rows_carry_every_field(suite, methods, tmp_path: Path, capsys):
    out = tmp_path / "rows.json"
    args = ["--suite", suite, "--contexts", "300,512", "--heads", "4", "--kv-heads", "2", "--head-dim", "32"]
    bench(*args, "--densities", "0.5", "--methods", methods, "--repeats", "1", "--threads", "1", "--json", str(out))
    facts = json.loads(out.read_text())
    assert set(facts["limits"]) == {"gemm_gflops", "read_gbps", "gather_gbps"}
    assert all(value > 0 for value in facts["limits"].values())
    rows = facts["rows"]
    oracles = ["topk(k=0.02, unit=q_head)", "topk(k=0.02, unit=kv_head)"] if suite == "decode" else []
    names = ["dense", "random_blocks(0.5)", *oracles, *methods.split(";")]
    assert [(row["context"], row["method"]) for row in rows] == [(n, name) for n in (300, 512) for name in names]
    for row in rows:
        assert set(FIELDS) <= set(row)
        assert (row["op"], row["heads"], row["kv_heads"], row["head_dim"], row["threads"]) == (suite, 4, 2, 32, 1)
        assert 0 < row["density"] <= 1
        assert row["ms"] >= row["selection_ms"] >= 0
        assert min(row["ms"], row["own_dense_ms"], row["best_torch_ms"], row["limit_ms"]) > 0
        assert (row["torch_sdpa_ms"] > 0) == (suite == "prefill")
        assert row["selection_percent_of_dense"] == pytest.approx(100 * row["selection_ms"] / row["own_dense_ms"], 1e-3)
        assert (row["density"] == 1) == (
            row["method"] == "dense" or row["speedup_own_dense"] == 1 or row["density"] == 1
        )
    assert rows[0]["ms"] == rows[0]["own_dense_ms"]
    assert any(row["density"] < 0.5 for row in rows)
    assert "own dense" in capsys.readouterr().out


def test_decode_rows_count_what_was_scored_and_planted_candidates_stay():
    methods = ["lfps(a=0.02, epsilon=1, blocks=0, least=1, rest=none)@0.1", "cis(k=0.02)"]
    settings = Settings("decode", [3000], 4, 2, 32, torch.bfloat16, 1, [], methods, 64, 3, "auto")
    rows = {row.method: row for row in run(settings, {"gemm_gflops": 1.0, "read_gbps": 1.0, "gather_gbps": 0.5})}
    assert list(rows)[-2:] == settings.methods
    assert rows["topk(k=0.02, unit=q_head)"].keys_scored == 3000
    lfps, cis = (rows[name] for name in settings.methods)
    assert lfps.keys_scored == pytest.approx(300, rel=0.2)
    assert lfps.density == pytest.approx(0.02, rel=0.2)
    assert 3000 / 16 <= cis.keys_scored < 3000
    for row in (lfps, cis):
        assert row.speedup_topk == pytest.approx(row.topk_ms / row.ms)
        assert row.ms >= row.observe_ms > 0
    assert cis.search_ratio == pytest.approx(cis.keys_scored / 3000, rel=0.01)
    assert lfps.search_ratio is None
    read = (lfps.keys_scored + lfps.density * 3000) * 4  # keys of all heads' lists, 64 bytes each, at 0.5 GB/s
    assert lfps.gather_limit_ms == pytest.approx(read * 64 / 0.5 / 1e6, rel=0.01)


def test_a_window_leaves_fewer_keys_to_decode():
    """Of 3000 keys the last layer's window hides those between the sinks and about 30 %, on its grid of 128."""
    settings = Settings("decode", [3000], 4, 2, 32, torch.bfloat16, 1, [], ["dense+psaw", "cpe"], 64, 3, "auto")
    rows = {row.method: row for row in run(settings, {"gemm_gflops": 1.0, "read_gbps": 1.0, "gather_gbps": 0.5})}
    assert rows["dense+psaw"].density == pytest.approx(1 - (768 - 128) / 3000, abs=0.001)
    assert rows["cpe"].density < 0.3
    assert rows["cpe"].search_ratio >= 1 / 16


@pytest.mark.parametrize(("q_len", "units"), [(1, 2), (2048, 4)])
@pytest.mark.parametrize("density", [0.05, 0.1, 0.5])
def test_random_blocks_have_the_density_asked_for(q_len, units, density):
    shape = Shape.suffix(4, 2, q_len, 2048)
    blocks = random_blocks(shape, 32, density, units)
    blocks.check()
    assert blocks.units == units
    assert blocks.density() == pytest.approx(density, rel=0.2)
    assert bool(blocks.mask().any(-1).all())


def test_baselines_compute_the_same_attention():
    """A baseline that computes something else would be no baseline."""
    problem = make(4, 2, 32, 700, 700, torch.float32)
    want, _ = attend(problem.q, problem.views[0], backend="reference")
    group = problem.shape.group
    for function in (baselines._sdpa, lambda q, k, v: baselines._tiled(q, k, v, problem.scale)):
        got = function(problem.q[:group], problem.k[:1], problem.v[:1])
        torch.testing.assert_close(got.reshape(group, 700, 32), want[:group], atol=1e-5, rtol=1e-4)
    step = make(4, 2, 32, 700, 1, torch.float32)
    want, _ = attend(step.q, step.views[0], backend="reference")
    got = baselines._bmm_decode(step.q.unflatten(0, (2, 2)).squeeze(2), step.k, step.v, step.scale)
    torch.testing.assert_close(got.flatten(0, 1), want[:, 0], atol=1e-5, rtol=1e-4)


def test_long_contexts_try_the_fastest_calls_alone(monkeypatch):
    problem = make(4, 2, 32, 300, 300, torch.bfloat16)
    every = {f"{call}/{dtype}" for call in ("sdpa", "bmm") for dtype in ("bfloat16", "float32")}
    assert set(baselines.prefill_ms(problem, 1, "cpu")) == every
    monkeypatch.setattr(baselines, "ALL_UPTO", 128)
    times = baselines.prefill_ms(problem, 1, "wall")
    assert "sdpa/bfloat16" in times
    assert len(times) <= 2
    assert set(times) <= every


@pytest.mark.parametrize(("each", "calls"), [(1.0, 4), (5.0, 3), (9.0, 2), (30.0, 1)])
def test_long_calls_are_their_own_warm_up(each, calls, monkeypatch):
    """Three repeats and one before them; a call of seconds counts itself, and a minute is never spent."""
    seen, now = [], itertools.count(step=each)
    monkeypatch.setitem(CLOCKS, "cpu", lambda: next(now))
    assert median_ms([lambda: seen.append(1)], 1, "cpu") == 1000 * each
    assert len(seen) == calls


def test_decode_copies_are_equal_and_apart():
    problem = make(4, 2, 32, 256, 1, torch.bfloat16)
    assert len(problem.views) == 16
    first, last = problem.views[0], problem.views[-1]
    tables = [set(view.paged().block_table[0, :8].tolist()) for view in (first, last)]
    assert not tables[0] & tables[1]
    assert torch.equal(first.keys(), problem.k)
    assert torch.equal(last.values(), problem.v)


def test_limits_count_bytes_once_per_kv_head():
    problem = make(4, 2, 32, 100, 1, torch.bfloat16)
    settings = Settings("decode", [100], 4, 2, 32, torch.bfloat16, 1, [], [], 128, 1, "auto")
    limits = {"gemm_gflops": 1.0, "read_gbps": 1.0, "gather_gbps": 1.0}

    def bytes_of(selection) -> float:
        return _limit_ms(settings, limits, problem, selection) * 1e6

    one_key = 2 * 32 * 2  # key and value of 32 channels, two bytes each
    assert bytes_of(Dense(problem.shape)) == pytest.approx(100 * 2 * one_key)
    assert bytes_of(Band(problem.shape, window=10)) == pytest.approx(10 * 2 * one_key)
    lists = [torch.tensor(keys) for keys in ([0, 1], [1, 2], [5], [5])]
    assert bytes_of(Tokens.from_lists(problem.shape, lists)) == pytest.approx(4 * one_key)


BAD = {
    "suite": (["--suite", "both"], "both"),
    "context": (["--contexts", "4k"], "4k"),
    "density": (["--densities", "2"], "2"),
    "heads": (["--heads", "3", "--kv-heads", "2"], "kv_heads"),
    "threads": (["--threads", "0"], "threads"),
    "phase": (["--suite", "decode", "--methods", "flexprefill"], "flexprefill"),
    "method": (["--methods", "nope"], "nope"),
    "folder": (["--json", "absent/rows.json"], "absent"),
    "file": (["--json", "."], "folder"),
    "no context": (["--contexts", ","], "contexts"),
    "a digit that is none": (["--contexts", "4\u00b2"], "from 1 to 4194304"),
    "context below the rows looked at": (["--suite", "decode", "--contexts", "63"], "'63' is not a length from 64 to"),
    "too many threads": (["--threads", "1025"], "from 1 to 1024"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_options_are_one_line(case, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    args, names = BAD[case]
    with pytest.raises(SystemExit) as exit_info:
        main(["bench", "ops", *args])
    err = capsys.readouterr().err
    assert exit_info.value.code == 2
    assert err.startswith("saccade: error: ")
    assert err.count("\n") == 1
    assert names in err
