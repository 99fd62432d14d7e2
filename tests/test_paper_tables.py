"""The frames of benchmarks/paper_tables.py, the page of their rows, and what latencies are taken of."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from saccade.eval.sources import Given, find_tasks
from saccade.kv.view import KVView
from saccade.methods import Chunk
from saccade.methods.flexprefill import FlexPrefill
from saccade.methods.policy import Policy

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import paper_tables
import prefill_latencies
import tables_page

ROOT = Path(__file__).parents[1]


def test_every_frame_asks_tasks_that_exist_under_policies_that_exist():
    given = Given(len, None)
    for name, frame in paper_tables.FRAMES.items():
        assert next(iter(frame.policies.items())) == ("dense", "dense")
        texts = {Policy.parse(paper_tables.filled(one, 256, 4096)).text for one in frame.policies.values()}
        assert len(texts) == len(frame.policies), name
        assert find_tasks(frame.tasks, given)
        assert name in tables_page.SECTIONS


@pytest.mark.parametrize(
    ("policy", "filled"),
    [
        ("snapkv(capacity={B})", "snapkv(capacity=256)"),
        ("a_shape(sinks={B/8}, window={31B/8})", "a_shape(sinks=32, window=992)"),
        ("minference(vertical={1000}, slash={6096})", "minference(vertical=125, slash=762)"),
        ("streaming(sinks={1})+dense", "streaming(sinks=1)+dense"),
    ],
)
def test_options_are_scaled_to_the_budget_and_to_32k(policy, filled):
    assert paper_tables.filled(policy, 256, 4096) == filled


def row(task: str, method: str, pairs: str, read: int = 5) -> dict[str, str]:
    same = {
        "frame": "loopserve-table4",
        "model": "smollm2",
        "length": "2048",
        "text": "novel",
        "policy": method.lower(),
    }
    counts = {"prefill_read": str(read), "prefill_seen": "10", "decode_read": "1", "decode_seen": "4"}
    return same | {"task": f"mtlb:a:{task}", "method": method, "n": "2", "pairs": pairs} | counts


def test_the_page_pools_samples_by_position_and_subtracts_denses(tmp_path):
    rows = [
        row("begin", "dense", "1:1;0.5:0.5"),
        row("end", "dense", "0:0;1:1"),
        row("begin", "Two", "0.5:1;0.5:0.5", read=2),
        row("end", "Two", "0:0;0.9:1", read=2),
    ]
    path = tmp_path / "rows.csv"
    paper_tables.join(path, rows[2:])
    paper_tables.join(path, [*rows, rows[0] | {"n": "2"}])
    kept = {(one["task"], one["method"]): one for one in tables_page.read_rows(path)}
    assert kept == {(one["task"], one["method"]): one for one in rows}
    page = tables_page.page(tables_page.read_rows(path))
    lines = [line.split("|") for line in page.splitlines() if line.startswith("|")]
    cells = {line[1].strip(): [one.strip() for one in line[2:-1]] for line in lines}
    assert cells["a:begin"] == ["2", "75.0", "50.0"]
    assert cells["a:end"] == ["2", "50.0", "45.0"]
    assert cells["**minus dense, begin**"][:2] == ["2", "75.0"]
    assert cells["**minus dense, begin**"][2].startswith("-25.0 [")
    assert cells["**minus dense, all**"][2].startswith("-15.0 [")
    assert cells["prefill, keys read"][1:] == ["50 %", "20 %"]
    assert cells["decode, keys read"][1:] == ["25 %", "25 %"]


def test_published_rows_are_those_of_the_frames_and_the_page_shows_them():
    rows = tables_page.read_rows(ROOT / "docs" / "results" / "paper-tables.csv")
    assert rows
    assert (ROOT / "docs" / "results" / "paper-tables.md").read_text(encoding="utf-8") == tables_page.page(rows)
    for one in rows:
        assert one["method"] in paper_tables.FRAMES[one["frame"]].policies
        assert len(tables_page.pairs_of([one])) == int(one["n"])
        assert Policy.parse(one["policy"]).text == one["policy"]


def test_the_parts_of_a_prefill_are_the_methods_own():
    """What is timed as four parts gives what the method chooses, where no head is query-aware."""
    generator = torch.Generator().manual_seed(3)
    q, k = (torch.randn(heads, 512, 16, generator=generator) for heads in (4, 2))
    chunk, method = Chunk.of(q, KVView.from_tensors(k, k)), FlexPrefill(tau=0.0, min_budget=64, block_size=64)
    took, lines = prefill_latencies.parts(chunk, method, 1)
    assert len(took) == len(prefill_latencies.PARTS)
    assert torch.equal(lines.mask(), method.select_prefill(chunk).mask())
