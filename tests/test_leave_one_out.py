"""``benchmarks/leave_one_out.py``: a policy is chosen on all models but one, and held on the one left out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def held(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import leave_one_out

    return leave_one_out


@pytest.fixture
def settings(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import board_settings

    return board_settings


def row(method, policy, budget, kl, keys, *, length=4096, agree=0.98, lost=None, long=None, kind="method", **more):
    def interval(ends):
        mean, low, high = ends
        return {"difference": -mean, "difference_low": -high, "difference_high": -low, "n": 50}

    cell = {"policy": policy, "kl": kl, "agree": agree, "keys": keys, "bytes": None}
    cell |= {} if lost is None else interval(lost)
    families = {} if long is None else {"long": interval(long)}
    said = {"method": method, "kind": kind, "phase": "decode", "protocol": "B", "budget": budget, "time": 1.0}
    return said | {"families": families, "lengths": {str(length): cell}} | more


def board(folder, name, rows, weights=None):
    about = {"tasks": [], "dtype": "float32", "weights": weights or name * 64}
    (folder / name).mkdir()
    (folder / name / "board.json").write_text(json.dumps({"about": about, "grid": {"lengths": [4096]}, "rows": rows}))
    return f"{name}={folder / name}"


def quest(kl, **more):
    return row("quest", "quest(budget=128, dense_layers=0)", 128 / 4096, kl, 0.03, **more)


def psa(epsilon, kl, keys, budget=0.125, **more):
    return row("psa", f"psa(epsilon={epsilon})", budget, kl, keys, **more)


def table(text):
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in text.splitlines() if line[:1] == "|"][
        2:
    ]


def test_the_one_that_reads_fewest_keys_is_chosen_on_two_and_breaks_on_the_third(tmp_path, held, capsys):
    oracle = row("topk", "topk(k=0.01)", 0.01, 0.0, 0.01, kind="oracle")
    models = [
        board(tmp_path, "a", [quest(0.01), psa(0.5, 0.005, 0.12), oracle]),
        board(tmp_path, "b", [quest(0.015), psa(0.6, 0.002, 0.13), oracle]),
        board(tmp_path, "c", [quest(0.5, agree=0.6), psa(0.7, 0.001, 0.125), oracle]),
    ]
    assert held.main(models) == 1
    rows = table(capsys.readouterr().out)
    assert [one[0] for one in rows] == ["a", "b", "c"]
    assert [one[1].split("`")[1] for one in rows] == ["psa", "psa", "quest"]
    assert [one[-1] for one in rows] == ["yes, by drift alone", "yes, by drift alone", "no: KL, agreement"]
    assert rows[2][2:7] == ["0.015", "3.0 %", "0.5", "60.0 %", "3.0 %"]
    assert "at 512 keys (`psa(epsilon=0.6)`, `psa(epsilon=0.7)`)" in rows[0][1]


def test_where_all_hold_it_ends_well_and_next_choices_decide_nothing(tmp_path, held, capsys):
    models = [board(tmp_path, name, [quest(0.01), psa(0.5, 0.019, 0.12)]) for name in "abc"]
    models[2] = board(tmp_path, "d", [quest(0.01), psa(0.5, 0.5, 0.12)])
    assert held.main([*models, "--more", "1"]) == 0
    out = capsys.readouterr().out
    assert [one[-1] for one in table(out)][-2:] == ["yes, by drift alone", "no: KL"]
    assert "3 of 3 first choices" in out
    assert held.main([*models, "--rounding", "d=1.0"]) == 0  # 97 % have to agree there
    assert held.main([board(tmp_path, "e", [quest(0.03)]), board(tmp_path, "f", [quest(0.03)])]) == 1  # none is chosen
    assert "none keeps the bounds: `dense`" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("third", "verdict"),
    [
        ({"lost": (0.0, -0.01, 0.01)}, "yes"),
        ({"lost": (0.03, -0.01, 0.07)}, "yes, though more than 2 points lost are not ruled out"),
        ({"lost": (0.08, 0.03, 0.12)}, "no: answers"),
        ({"lost": (0.0, 0.0, 0.0), "long": (0.5, 0.4, 0.6)}, "no: long answers"),
        ({"agree": 0.94}, "no: agreement"),
        ({"kl": 0.021}, "no: KL"),
        ({"kl": None}, "not measured"),
    ],
)
def test_what_breaks_a_bound(tmp_path, held, capsys, third, verdict):
    models = [board(tmp_path, name, [quest(0.01)]) for name in "ab"]
    models.append(board(tmp_path, "c", [quest(**({"kl": 0.01} | third))]))
    assert held.main(models) == (0 if verdict.startswith("yes") else 1)
    rows = table(capsys.readouterr().out)
    assert rows[-1][-1] == verdict
    if verdict != "not measured" and not verdict.startswith("yes"):
        assert rows[0][1] == "none keeps the bounds: `dense`"  # the same setting is not chosen with c's rows


def test_the_same_text_is_bounded_by_a_sparser_setting(tmp_path, held, capsys):
    models = [
        board(tmp_path, "a", [psa(0.5, 0.01, 0.1)]),
        board(tmp_path, "b", [psa(0.4, 0.015, 0.1), psa(0.6, 0.001, 0.2, 0.25)]),
        board(tmp_path, "c", [psa(0.45, 0.012, 0.1), psa(0.48, 0.011, 0.2, 0.25)]),
    ]
    assert held.main([*models, "--match", "setting"]) == 1
    rows = table(capsys.readouterr().out)
    # a has one setting alone, which says nothing of others; below 0.5 b has one, c two
    assert rows[0][1] == "`psa(epsilon=0.45)`"
    assert rows[0][-1] == "not measured"
    assert rows[1][1] == rows[2][1] == "`psa(epsilon=0.5)`"
    assert rows[1][2] == "0.011"  # c at 0.48
    assert rows[1][4] == "0.015, as `psa(epsilon=0.4)`"
    assert rows[2][2] == "0.015"  # b at 0.4
    assert rows[2][4] == "0.011, as `psa(epsilon=0.48)`"


def test_a_dial_whose_keys_neither_rise_nor_fall_bounds_nothing(settings):
    rows = [psa(0.2, 0.1, 0.1), psa(0.4, 0.1, 0.3), psa(0.6, 0.1, 0.2)]
    key = ("psa", "B", "psa(epsilon=0.5)")
    assert settings.nearest_below(key, settings.cells_of({"rows": rows})) is None
    falling = [psa(0.2, 0.1, 0.3), psa(0.4, 0.1, 0.2), psa(0.6, 0.2, 0.1)]
    assert settings.nearest_below(key, settings.cells_of({"rows": falling})).policy == "psa(epsilon=0.6)"


def test_what_cannot_be_held_is_said(tmp_path, held):
    one = board(tmp_path, "a", [quest(0.01)])
    for words, why in (
        ([one], "two models or more"),
        ([one, board(tmp_path, "b", [quest(0.01)], "a" * 64)], "the same weights"),
        ([one, f"c={tmp_path / 'none.json'}"], "is not the board.json"),
        ([one, "c"], "must be NAME=FILE"),
        ([one, board(tmp_path, "d", [quest(0.01)]), "--rounding", "x=0.9"], "--rounding names x; the models are a, d"),
        ([one, one.replace("a=", "b="), "--rounding", "a=90"], "'a=90': SHARE must be above 0 and at most 1"),
        ([one, one.replace("a=", "b="), "--rounding", "a"], "--rounding 'a' must be NAME=SHARE, as in S=0.969"),
    ):
        with pytest.raises(SystemExit, match=why):
            held.main(words)


def test_boards_that_lie_in_the_docs_are_read(held, settings, capsys):
    """No policy of theirs is within the bounds on both: lfps, chosen on one, drifts too far on the other."""
    results = ROOT / "docs" / "results"
    small = f"SmolLM2={results / 'board-drift.json'},{results / 'board-drift-128.json'}"
    coder = f"Qwen2.5-Coder={results / 'board-drift-qwen.json'},{results / 'board-drift-qwen-128.json'}"
    assert held.main([small, coder]) == 1
    rows = table(capsys.readouterr().out)
    assert rows[0][1] == "none keeps the bounds: `dense`"
    assert rows[1][1].startswith("`lfps` at 128 keys")
    assert rows[1][-1] == "no: KL, agreement"
    older = settings.cells_of(json.loads((results / "board-answers.json").read_text()))
    assert all(cell.kl is not None and cell.answers is not None for cell in older)


def test_what_was_not_measured_on_the_model_left_out_does_not_decide(tmp_path, held, capsys):
    whole = row("flashprefill", "flashprefill(alpha=1)", 0.002, 0.0, 1.0)  # reads as dense attention does
    models = [
        board(tmp_path, "a", [quest(0.01), psa(0.5, 0.005, 0.12), whole]),
        board(tmp_path, "b", [quest(0.01), psa(0.6, 0.002, 0.13), whole]),
        board(tmp_path, "c", [psa(0.7, 0.001, 0.125), whole]),
    ]
    assert held.main(models) == 0
    rows = table(capsys.readouterr().out)
    assert [(one[0], one[1].split("`")[1], one[-1]) for one in rows] == [
        ("a", "psa", "yes, by drift alone"),
        ("b", "psa", "yes, by drift alone"),
        ("c", "quest", "not measured"),
        ("", "psa", "yes, by drift alone"),
    ]
