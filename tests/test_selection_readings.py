"""Readings carry their behaviour: nobody asks of what kind one is, and a new kind is served where it is defined."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
import torch
import triton_helpers  # noqa: F401  (sets the interpreter up first)
from device_helpers import Sequences, reference
from engine_helpers import tokens
from tiny_models import make_checkpoint, random_ids

import saccade
from saccade import LLM, SamplingParams
from saccade.engine.device.backend import DeviceBackend
from saccade.engine.rows.plans import FixedPlans
from saccade.errors import SaccadeError
from saccade.methods.base import Method
from saccade.ops import cpu
from saccade.selection import Band, Dense
from saccade.selection.forms import Known, Rule, Summarized
from saccade.selection.plan import DevicePlan
from saccade.selection.readings import CHOICE, Choice, Ends, Everything, Reading

SOURCES = Path(saccade.__file__).parent


def kinds(texts: Iterable[str]) -> set[str]:
    """Names of Reading and of all classes over it, wherever they are."""
    classes = [found for text in texts for found in re.findall(r"^class (\w+)\(([^)]*)\)", text, re.MULTILINE)]
    bases = {name: set(re.findall(r"\w+", over)) for name, over in classes}
    found = {"Reading"}
    while more := {name for name, own in bases.items() if own & found} - found:
        found |= more
    return found


def asked(tree: ast.Module) -> list[tuple[int, set[str]]]:
    """Line and names of each question of what class something is."""
    found = []
    for node in ast.walk(tree):
        where: list[ast.AST] = []
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("isinstance", "type"):
            where = node.args[1:]
        elif isinstance(node, ast.MatchClass):
            where = [node.cls]
        elif isinstance(node, ast.Compare) and any(
            isinstance(part, ast.Call) and isinstance(part.func, ast.Name) and part.func.id == "type"
            for part in (node.left, *node.comparators)
        ):
            where = [node.left, *node.comparators]
        names = {part.id for one in where for part in ast.walk(one) if isinstance(part, ast.Name)}
        names |= {part.attr for one in where for part in ast.walk(one) if isinstance(part, ast.Attribute)}
        found.append((getattr(node, "lineno", 0), names))
    return found


def test_no_kind_of_reading_is_asked_for_outside_of_selection():
    texts = {path.relative_to(SOURCES): path.read_text() for path in SOURCES.rglob("*.py")}
    known = kinds(texts.values()) | {"Readings", "Listed", "Shared"}  # the latter: what rows on a CPU read
    assert {"Everything", "Ends", "Choice", "OwnReading", "BestKeys", "SeenKeys", "Readings"} <= known
    questions = {
        f"{path}:{line}"
        for path, text in texts.items()
        if path.parts[0] != "selection" and any(name in text for name in known)
        for line, names in asked(ast.parse(text))
        if names & known
    }
    assert questions == set()


@pytest.mark.parametrize(
    "line",
    ["isinstance(x, Ends | Choice)", "isinstance(x, (int, readings.Ends))", "type(x) is Ends", "y = type(x) == Ends"],
)
def test_questions_are_found(line):
    assert any("Ends" in names for _, names in asked(ast.parse(line)))
    assert any("Ends" in names for _, names in asked(ast.parse("match x:\n    case Ends():\n        pass")))


def test_a_choice_has_a_budget_or_a_rule():
    blocks, rule = Summarized(16, "minmax"), Rule(0.5, 1, "min", "all")
    for given in ({}, {"take": 2, "rule": rule}):
        with pytest.raises(SaccadeError, match="take or by a rule"):
            Choice(blocks, 2, 1, 1, 200, **given)


@dataclass(frozen=True)
class LastBlocks(Reading):
    """A kind of reading that nothing else knows: the last ``count`` blocks of ``size`` keys, the partial one among
    them, by the kernels that read chosen blocks."""

    kernels = CHOICE

    size: int
    count: int

    @property
    def choice(self) -> Choice:
        return Choice(Summarized(self.size, "minmax"), 1, 0, self.count, self.all_upto, take=0)

    @property
    def blocks(self) -> Summarized:
        return self.choice.source

    @property
    def all_upto(self) -> int:
        return self.count * self.size

    @property
    def numbers(self):
        return self.choice.numbers

    def cost(self, length: int, step: int = 0) -> Known:
        blocks = -(-length // self.size)
        return Known("dense", length, 0) if blocks <= self.count else Known("blocks", length - self.start(length), 0)

    def start(self, length: int) -> int:
        """The first key that a row of ``length`` keys reads."""
        return max(0, -(-length // self.size) - self.count) * self.size

    def selection(self, shape, lists):
        return self.choice.selection(shape, lists)


@dataclass(frozen=True)
class LastBlocksMethod(Method):
    """The method of that reading, as its own selection says it: a band, in all layers but the first."""

    name: ClassVar[str] = "last_blocks"
    phases: ClassVar[tuple[str, ...]] = ("decode",)

    size: int = 16
    count: int = 3

    def select_decode(self, query, state):
        shape, start = query.shape, LastBlocks(self.size, self.count).start(query.shape.k_len)
        return Band(shape, window=shape.k_len - start) if start and query.layer else Dense(shape)

    def device_plan(self, spec):
        return DevicePlan.alike(self, spec, LastBlocks(self.size, self.count), dense_layers=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint(
        "llama", tmp_path_factory.mktemp("llama"), max_position_embeddings=2048, head_dim=32, num_hidden_layers=2
    )


def test_a_new_kind_is_served_on_a_cpu(folder, monkeypatch):
    """Tokens are those of the rows' own selections by the reference, and the kernels have served every row by plan."""
    prompts = [random_ids(length, seed=length) for length in (40, 63, 130)]
    params = SamplingParams(temperature=0.0, max_tokens=12)
    given, of = [], FixedPlans.of

    def seen(self, rows):
        given.append(of(self, rows))
        return given[-1]

    monkeypatch.setattr(FixedPlans, "of", seen)
    with LLM(folder, device="cpu") as llm:
        got = [tokens(one) for one in llm.generate(prompts, params, policy=LastBlocksMethod())]
    assert given
    assert all((fixed is not None) == cpu.available() for fixed in given)
    with LLM(folder, device="cpu", backend="reference") as llm:
        assert got == [tokens(one) for one in llm.generate(prompts, params, policy=LastBlocksMethod())]
        assert got != [tokens(one) for one in llm.generate(prompts, params)]


def test_a_new_kind_is_served_on_a_device(folder):
    """Beside rows of others in one step, counted as its cost says and its own selection reads."""
    with LLM(folder, device="cpu") as llm:
        runner = llm.model.runner
        policies = [LastBlocksMethod(), "streaming(sinks=1, window=20)", LastBlocksMethod(size=32, count=1)]
        ours, theirs = (Sequences(runner, policies, [200, 70, 64]) for _ in range(2))
        device, step = DeviceBackend(runner), ours.step()
        assert [device.serves(step, number, ours.memories[number]) for number in range(3)] == [None] * 3
        results = device.run(step, ours.memories)
        expected, context = reference(theirs)
        for row in range(3):
            torch.testing.assert_close(results[row + 100].logits[0], expected[row], atol=2e-4, rtol=1e-4)
            (late,) = results[row + 100].late.values()
            for layer, one in late.take().layers.items():
                assert one.pairs().tolist() == context.stats[row, layer].pairs().tolist()


def test_everything_and_ends_are_kinds_like_others():
    assert Everything().ends == (0, None)
    assert Ends(3, 9).ends == (3, 9)
    plan = DevicePlan("x", "x", (Everything(), LastBlocks(16, 3)))
    assert (plan.listed, plan.keeps, plan.ruled) == (True, False, False)
    assert plan.summarized == Summarized(16, "minmax")
