"""``benchmarks/ablations.py``: what papers turn; and what ``benchmarks/recorded_windows.py`` asks of attention."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import pytest
import torch

from saccade.engine.watch.observe import AttentionCall
from saccade.eval.sources import find_tasks
from saccade.kv.view import KVView
from saccade.methods.policy import Policy
from saccade.models.interface import LayerAttention
from saccade.selection import Dense, Shape

ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    yield
    for name in ("sweeps", "ablations", "recorded_windows", "recorded_attention"):
        sys.modules.pop(name, None)


def test_every_sweep_turns_options_that_exist_over_tasks_that_exist():
    from ablations import SWEEPS

    for name, sweep in SWEEPS.items():
        texts = [Policy.parse(text).text for text in sweep.policies]
        assert len(set(texts)) == len(texts), name
        assert [task.name for task in find_tasks(sweep.tasks)] == list(sweep.tasks)


def test_published_rows_are_those_of_the_sweeps_and_the_page_shows_them_all():
    """Rows of FlexPrefill are of Alg. 4 as printed, an option that is gone; sweeps take the same ones without it."""
    from ablations import RETIRED, SWEEPS

    with (ROOT / "docs/results/sweeps.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    page = (ROOT / "docs/results/ablations.md").read_text(encoding="utf-8")
    for name in {row["sweep"] for row in rows}:
        published = {row["policy"] for row in rows if row["sweep"] == name}
        section = page.split(f"## `{name}`", 1)[1].split("\n## ", 1)[0]
        assert all(f"| `{text}` |" in section for text in published - {"dense"})
        assert (name in SWEEPS) != (name in RETIRED)
        if name in SWEEPS:
            wanted = {Policy.parse(text).text for text in ("dense", *SWEEPS[name].policies)}
            assert {text.replace(", mode=paper", "") for text in published} == wanted


def test_lines_and_shares_by_hand():
    from recorded_windows import lines_of, shared

    assert shared(torch.tensor([5.0, 1, 4, 0]), torch.tensor([0.0, 3, 2, 9]), 2).tolist() == [0.0]
    assert shared(torch.tensor([5.0, 1, 4, 0]), torch.tensor([0.0, 3, 7, 9]), 2).tolist() == [0.5]
    torch.manual_seed(0)
    q, k = torch.randn(4, 6, 8), torch.randn(2, 9, 8)
    shape, spec = Shape.suffix(4, 2, 6, 9, q.device), LayerAttention(scale=0.5)
    call = AttentionCall(0, 0, "prefill", q, KVView.from_tensors(k, k), Dense(shape), spec, q)
    rows = torch.tensor([1, 4])
    lines = lines_of(call, rows)
    for head in range(4):
        columns, distances = torch.zeros(9), torch.zeros(9)
        for row in rows.tolist():
            place = 3 + row
            weights = torch.softmax(0.5 * k[head // 2, : place + 1] @ q[head, row], 0)
            for key, weight in enumerate(weights.tolist()):
                columns[key] += weight
                distances[place - key] += weight
        torch.testing.assert_close(lines[head], torch.stack([columns, distances]))
