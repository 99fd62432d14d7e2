"""``benchmarks/compare.py`` on made-up files: rows pair by name, intervals are Student's, the exit code says it."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from pathlib import Path

import pytest

FILE = Path(__file__).parents[1] / "benchmarks" / "compare.py"
spec = importlib.util.spec_from_file_location("compare", FILE)
compare = importlib.util.module_from_spec(spec)
sys.modules["compare"] = compare  # dataclasses look their module up
spec.loader.exec_module(compare)


def pairs(factors: dict[str, list[float]]) -> list[tuple[dict[str, float], dict[str, float]]]:
    """Pairs whose new times are ``factors`` times the old ones, which drift from pair to pair."""
    count = len(next(iter(factors.values())))
    old = [dict.fromkeys(factors, 3.0 * (1 + pair)) for pair in range(count)]
    return [(times, {name: t * factors[name][pair] for name, t in times.items()}) for pair, times in enumerate(old)]


def test_equal_runs_have_ratio_one_whatever_the_drift():
    (row,) = compare.ratios(pairs({"a": [1.0] * 9}))
    assert (row.median, row.low, row.high) == pytest.approx((1, 1, 1))
    assert compare.verdict([row]) == (pytest.approx(1), [])


def test_the_interval_is_students_on_logarithms():
    factors = [0.9, 1.0, 1.1, 1.3]
    (row,) = compare.ratios(pairs({"a": factors}))
    logs = [math.log(factor) for factor in factors]
    mean = sum(logs) / 4
    reach = 3.182 * math.sqrt(sum((log - mean) ** 2 for log in logs) / 3) / 2
    assert (row.low, row.high) == pytest.approx((math.exp(mean - reach), math.exp(mean + reach)))
    assert row.median == pytest.approx(math.sqrt(1.0 * 1.1))


@pytest.mark.parametrize(
    ("factors", "mean", "slower"),
    [
        ({"a": [1.06, 1.07, 1.08], "b": [0.9, 0.9, 0.9]}, 0.981, []),  # a's interval reaches below 1.05
        ({"a": [1.07, 1.07, 1.07], "b": [0.9, 0.9, 0.9]}, 0.981, ["a"]),
        ({"a": [1.04, 1.04, 1.04], "b": [1.03, 1.03, 1.03]}, 1.035, []),
    ],
)
def test_the_verdict(factors, mean, slower):
    found, named = compare.verdict(compare.ratios(pairs(factors)))
    assert found == pytest.approx(mean, abs=1e-3)
    assert named == slower


def test_what_cannot_be_compared_is_refused():
    with pytest.raises(ValueError, match="at least 2"):
        compare.ratios(pairs({"a": [1.0]}))
    with pytest.raises(ValueError, match=r"not every run has the rows: b"):
        compare.ratios([({"a": 1.0}, {"a": 1.0}), ({"a": 1.0}, {"a": 1.0, "b": 1.0})])
    with pytest.raises(ValueError, match="no time above 0"):
        compare.row_times("ops", {"rows": [{"context": 8, "method": "dense", "ms": 0.0}]})
    with pytest.raises(ValueError, match="two rows are called 'ops 8 dense'"):
        compare.row_times("ops", {"rows": [{"context": 8, "method": "dense", "ms": 1.0}] * 2})


@pytest.mark.parametrize(("factor", "code"), [(1.0, 0), (1.03, 1)])
def test_runs_alternate_and_the_exit_code_says_it(tmp_path, monkeypatch, capsys, factor, code):
    order = []

    def fake(command, cwd, **options):
        order.append(Path(cwd).name)
        assert Path(command[0]) == Path(cwd) / ".venv/bin/python"
        ms = 5.0 * (factor if Path(cwd).name == "new" else 1.0)
        column = {"generate": "ms_per_token", "ttft": "seconds"}.get(command[4], "ms")
        rows = [{"context": 64, "method": method, column: ms} for method in ("dense", "psa")]
        Path(command[command.index("--json") + 1]).write_text(json.dumps({"rows": rows}))
        return compare.subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(compare.subprocess, "run", fake)
    arguments = [str(tmp_path / "old"), str(tmp_path / "new"), "--pairs", "3", "--folder", str(tmp_path / "runs")]
    assert compare.main(arguments) == code
    benches = len(compare.BENCHES)
    assert order == ["old", "new"] * benches + ["new", "old"] * benches + ["old", "new"] * benches
    said = capsys.readouterr().out
    assert f"geometric mean {factor:.4f}" in said
    assert said.count("dense  ") == benches
    assert len(list((tmp_path / "runs").iterdir())) == 6 * benches


def test_a_run_that_fails_says_why(tmp_path, monkeypatch):
    failed = compare.subprocess.CompletedProcess([], 2, "", "saccade: no such option\n")
    monkeypatch.setattr(compare.subprocess, "run", lambda *args, **options: failed)
    with pytest.raises(SystemExit, match="no such option"):
        compare.main([str(tmp_path), str(tmp_path), "--only", "ttft"])
