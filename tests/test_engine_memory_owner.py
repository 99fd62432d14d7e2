"""The worker owns memory: of a sequence the rest of the engine knows lengths and blocks alone."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import saccade.engine
from saccade.kv.held import HeldBlocks

ROOT = Path(saccade.engine.__file__).parent
# The worker, the backends of attention with what they are made of, and the memory itself.
KEPT = ("memories", "sequence_memory", "hosted", "kept_states", "saved_memory")
OWNERS = (
    "worker.py",
    "rows/*.py",
    "device/*.py",
    "attention.py",
    "ranks/other.py",
    "ranks/worker.py",
    *(f"memory/{one}.py" for one in KEPT),
)
HELD = {name for name in vars(HeldBlocks) if not name.startswith("_")} | set(HeldBlocks.__annotations__)


def broken(source: str) -> list[str]:
    """What a file of the engine may not do, by line."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and any(name.name == "SequenceMemory" for name in node.names):
            found.append(f"{node.lineno}: imports SequenceMemory")
        elif isinstance(node, ast.Subscript) and ast.unparse(node.value).split(".")[-1] == "memories":
            found.append(f"{node.lineno}: looks into the memories")
        elif isinstance(node, ast.Attribute) and node.attr == "memory" and ast.unparse(node.value).endswith("sequence"):
            found.append(f"{node.lineno}: reads a sequence's memory")
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value).endswith(("sequence.kv", "donor.kv")):
            found += [] if node.attr in HELD else [f"{node.lineno}: reads {ast.unparse(node)}"]
    return found


def test_the_engine_reaches_no_memory_past_its_worker():
    files = [path for path in sorted(ROOT.rglob("*.py")) if not any(path.match(one) for one in OWNERS)]
    assert len(files) > 40
    assert {str(path): found for path in files if (found := broken(path.read_text()))} == {}


@pytest.mark.parametrize(
    "line",
    [
        "from saccade.engine.memory.sequence_memory import Cut, SequenceMemory",
        "self.worker.memories[one.id].drop()",
        "request.sequence.memory.kv.truncate(3)",
        "request.sequence.kv.view(0)",
        "donor.kv.free()",
    ],
)
def test_what_reaches_past_it_is_found(line):
    assert len(broken(line)) == 1


def test_what_an_engine_may_ask_is_allowed():
    assert broken("request.sequence.kv.reserve(request.sequence.kv.length + 1)\nmemories.free(sequence.id)") == []
