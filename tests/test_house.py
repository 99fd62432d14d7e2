"""The house: which files lie where, and what imports what. Floors are lint-imports' (pyproject.toml)."""

from __future__ import annotations

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import saccade.engine

ROOT = Path(saccade.engine.__file__).parent


def imported(path: Path) -> set[str]:
    """The modules of the engine that a file imports, for annotations too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("saccade.engine"):
            inner = ROOT.joinpath(*node.module.split(".")[2:])
            found |= {node.module} if inner.with_suffix(".py").exists() else set()
            found |= {f"{node.module}.{one.name}" for one in node.names if (inner / f"{one.name}.py").exists()}
    return found


def test_files_of_the_engine_import_each_other_in_one_direction():
    """Annotations count: a reader who follows a type comes to a file further down, and never back."""
    files = {
        path: ".".join(("saccade.engine", *path.relative_to(ROOT).with_suffix("").parts)) for path in ROOT.rglob("*.py")
    }
    graph = {name: imported(path) for path, name in files.items() if path.name != "__init__.py"}
    order = list(TopologicalSorter(graph).static_order())  # CycleError names a circle
    assert order.index("saccade.engine.steps.step") < order.index("saccade.engine.core")
    assert len(order) == len(graph) > 80


def test_the_engines_floor_can_be_looked_over():
    entries = [path for path in ROOT.iterdir() if path.name not in ("__pycache__", "__init__.py")]
    assert len(entries) <= 22
    assert all(len(list(path.glob("*.py"))) <= 19 for path in entries if path.is_dir())
