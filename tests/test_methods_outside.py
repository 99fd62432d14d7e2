"""Methods from outside the package: registered, offered by an entry point, or imported from a file."""

from __future__ import annotations

import os
import pickle
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from helpers import planted_heads

import saccade
from saccade.errors import PolicyError
from saccade.kv.view import KVView
from saccade.methods import Chunk, Method, Query, ScoredBlocks
from saccade.methods.outside import in_this_process_alone
from saccade.methods.policy import Policy
from saccade.methods.registry import KNOWN, METHODS
from saccade.selection import Band, Dense, Selection

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs/adding-a-method.md").read_text(encoding="utf-8")
FILE = ROOT / "examples/my_method/my_method/__init__.py"


@pytest.fixture
def tidy():
    """What a test registers is forgotten after it."""
    before = dict(KNOWN), dict(METHODS)
    yield
    for known, old in zip((KNOWN, METHODS), before):
        for name in set(known) - set(old):
            del known[name]


def ask(method: Method, n: int, seed: int = 1) -> tuple[Query, Selection]:
    q, k, v = planted_heads(4, 2, n, seed=seed)
    query = Query.of(q[:, -1:], KVView.from_tensors(k, v, shuffle_seed=seed))
    return query, method.select_decode(query, None)


def test_the_first_lines_of_the_page_run(tidy, capsys):
    code = re.search(r"```python\n(.*?)```", PAGE, re.DOTALL).group(1)
    assert len(code.splitlines()) <= 30
    exec(compile(code, "mine.py", "exec"), {"__name__": "__main__"})
    assert 0 < float(capsys.readouterr().out) < 0.5
    assert Policy.parse("mean_key(budget=128)").decode.budget == 128
    assert in_this_process_alone("mean_key")
    assert not in_this_process_alone("quest")


@dataclass(frozen=True)
class Planted(ScoredBlocks):
    """The exact best key of each block."""

    name: ClassVar[str] = "planted"
    lists: ClassVar[int] = 2

    def score(self, query: Query, q: torch.Tensor, summary: torch.Tensor) -> torch.Tensor:
        full = len(summary) * self.block_size
        keys = query.kv.keys(0, full).float()  # [kv_heads, keys, d]
        best = torch.einsum("kgd,knd->kgn", q, keys).unflatten(2, (len(summary), -1)).amax(3)
        return {2: best.amax(1), 4: best.flatten(0, 1), 1: best.amax((0, 1))[None]}[self.lists]


@pytest.mark.parametrize("n", [129, 160, 161, 500])
@pytest.mark.parametrize("lists", [1, 2, 4])
def test_a_score_reads_the_blocks_that_it_ranks_first(n, lists, monkeypatch):
    monkeypatch.setattr(Planted, "lists", lists)
    method = Planted(budget=128, block_size=32, sinks=1, recent=2)
    query, selection = ask(method, n)
    blocks, full = -(-n // 32), n // 32
    if blocks <= 4:
        assert isinstance(selection, Dense)
        return
    score = method.score(query, query.q[:, 0].float().unflatten(0, (2, -1)), query.kv.summary("mean", 32))
    for own, row in zip(score.tolist(), selection.indices.view(lists, -1).tolist(), strict=True):
        inner = sorted(range(1, min(full, blocks - 2)), key=lambda at: -own[at])[:1]
        assert row == sorted([0, *inner, blocks - 2, blocks - 1])
    assert query.cost.estimated == blocks - 3


def test_short_contexts_are_read_whole():
    assert isinstance(ask(Planted(budget=128), 128)[1], Dense)
    assert not isinstance(ask(Planted(budget=128), 129)[1], Dense)


@pytest.mark.parametrize(("shape", "value"), [((2, 3), 0.0), ((3, 15), 0.0), ((15,), 0.0), ((2, 15), float("nan"))])
def test_a_score_that_makes_no_sense_is_named(shape, value, monkeypatch):
    monkeypatch.setattr(Planted, "score", lambda self, query, q, summary: torch.full(shape, value))
    with pytest.raises(PolicyError, match="the score of 'planted'"):
        ask(Planted(budget=128), 490)


def make(base: type = Method, frozen: bool = True, **namespace: Any) -> type:
    made = type("Mine", (base,), {"__annotations__": {}, **namespace})
    return dataclass(frozen=frozen)(made) if frozen else made


def select(self: Method, chunk: Chunk, *_: Any) -> Selection:
    return Band(chunk.shape, window=max(1, chunk.shape.k_len // 2))


@pytest.mark.parametrize(
    ("part", "said"),
    [
        (dict, "no class over"),
        (3, "no class over"),
        (make(frozen=False, name="mine", phases=("decode",)), "no frozen dataclass"),
        (make(name="quest", phases=("decode",), select_decode=select), "taken by saccade.methods.quest"),
        (make(name="cpe", phases=("decode",), select_decode=select), "taken by the policy cis"),
        (make(name="My Method", phases=("decode",), select_decode=select), "at most 40 of a-z"),
        (make(name="", phases=("decode",), select_decode=select), "at most 40 of a-z"),
        (make(name="mine", phases=(), select_decode=select), "must be a tuple out of prefill, decode"),
        (make(name="mine", phases=("window",), select_decode=select), "must be a tuple out of prefill, decode"),
        (make(name="mine", phases=("prefill", "decode"), select_decode=select), "has no select_prefill"),
        (make(name="mine", phases=("decode",), select_decode=select, __annotations__={"k": int}), "no default"),
        (make(ScoredBlocks, name="mine"), "a ScoredBlocks without a score"),
    ],
)
def test_what_no_policy_could_be_made_of_is_refused(tidy, part, said):
    before = dict(KNOWN)
    with pytest.raises(PolicyError, match=said):
        saccade.register(part)
    assert before == KNOWN


def test_a_scored_method_is_registered_with_a_score_or_a_choice_of_its_own(tidy):
    saccade.register(make(ScoredBlocks, name="mine", score=lambda self, query, q, summary: summary.mean((1, 3)).T))
    assert Policy.parse("mine(budget=64)").decode.budget == 64
    saccade.register(make(make(ScoredBlocks, name="mine"), select_decode=select))


def test_a_class_that_is_defined_again_replaces_the_one_before(tidy):
    first, second = (make(name="mine", phases=("decode",), select_decode=select) for _ in range(2))
    assert saccade.register(first) is first
    saccade.register(second)
    assert KNOWN["mine"] is METHODS["mine"] is second
    other = make(name="mine", phases=("decode",), select_decode=select)
    other.__qualname__ = "Other"
    with pytest.raises(PolicyError, match="is taken by"):
        saccade.register(other)


def run(code: str, path: Path, **environment: str) -> str:
    """What ``code`` prints in a process of its own that finds packages in ``path``, too."""
    found = os.pathsep.join([str(path), *filter(None, [os.environ.get("PYTHONPATH")])])
    ran = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": found, **environment},
        timeout=120,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_other_processes_find_what_is_offered(tmp_path):
    """An installed package's entry points, one of which is broken, and a file."""
    (tmp_path / "mine-1.dist-info").mkdir()
    (tmp_path / "mine-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1\n")
    (tmp_path / "mine-1.dist-info" / "entry_points.txt").write_text(
        "[saccade.methods]\nmean_key = mine:MeanKey\nlost = mine:Lost\nother = mine:MeanKey\n"
    )
    (tmp_path / "mine.py").write_text(FILE.read_text(encoding="utf-8"), encoding="utf-8")
    own = FILE.read_text(encoding="utf-8").replace("MeanKey", "Second").replace('"mean_key"', '"second"')
    own = own.replace("@dataclass", "@saccade.register\n@dataclass").replace(
        "import torch\n", "import saccade, torch\n"
    )
    (tmp_path / "file.py").write_text(own, encoding="utf-8")
    code = """
from saccade import Policy
from saccade.engine.settings.rank_limits import why_not
print(Policy.parse("mean_key(budget=64)").text)
print(Policy.parse("second").text, why_not(Policy.parse("second")), why_not(Policy.parse("mean_key")))
for name in ("lost", "other", "mean_kez"):
    try:
        Policy.parse(name)
    except Exception as error:
        print(type(error).__name__, error)
"""
    out = run(code, tmp_path, SACCADE_METHODS_FROM=f"{tmp_path / 'file.py'}, nowhere").splitlines()
    assert out[0] == "mean_key(budget=64)"
    assert out[1] == "second None None"
    assert "has no attribute 'Lost'" in out[2]
    assert "calls itself 'mean_key', its entry point 'other'" in out[3]
    assert "did you mean 'mean_key'" in out[4]
    assert "No module named 'nowhere'" in out[4]


def test_ranks_do_not_take_what_other_processes_cannot_find(tidy):
    from saccade.engine.settings.rank_limits import why_not

    saccade.register(make(name="mine", phases=("decode",), select_decode=select))
    assert "registered in this process alone" in why_not(Policy.parse("mine"))


def test_the_board_has_a_row_of_it(tidy):
    from saccade.errors import RequestError
    from saccade.eval.board.grid import named
    from saccade.eval.board.pictures import look

    saccade.register(Planted)
    rows = named(["planted", "quest"])
    assert [row.name for row in rows] == ["planted", "quest"]
    copy = pickle.loads(pickle.dumps(rows[0]))  # a worker's
    values = copy.dial.values(4096)
    assert copy.policy("B", 0.1, values[0]).decode == Planted(budget=128)
    assert copy.policy("B", 0.1, values[-1]).decode.budget >= 4096
    assert look("planted") != look("quest")
    saccade.register(make(name="mine", phases=("decode",), select_decode=select))
    with pytest.raises(RequestError, match="'mine' is not on the board"):
        named(["mine"])
