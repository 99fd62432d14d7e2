"""The house: which files lie where, and what imports what. Floors are lint-imports' (pyproject.toml)."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import saccade.engine

ROOT = Path(saccade.engine.__file__).parent
TREE = ROOT.parents[1]


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


PERSONS = re.compile(r"\b(whoever|somebody|nobody|anybody)\b", re.IGNORECASE)
MADE_UP = ("saccade/prose.py", "saccade/eval/multiturn/synthetic.py")  # made-up people say these words


def test_machinery_is_no_person():
    """Comments and docstrings name the thing: a caller, a backend, a request."""
    found = [
        f"{path.relative_to(TREE)}:{number}"
        for path in texts()
        if str(path.relative_to(TREE)) not in MADE_UP
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if PERSONS.search(line)
    ]
    assert found == []


ROOMS = "bench|cli|engine|eval|kv|methods|models|ops|selection|server|sessions"
NAMED = re.compile(rf"(?:saccade/)?((?:{ROOMS})/[\w/]+\.py)\b|(csrc/\w+\.(?:h|cpp))")


def texts() -> list[Path]:
    """The files of the package's code."""
    found = [path for folder in ("saccade", "contrib", "csrc") for path in sorted((TREE / folder).rglob("*"))]
    return [path for path in found if path.suffix in (".py", ".h", ".cpp")]


def test_files_that_texts_name_exist():
    """A comment or a page that names a file of the tree names one that is there."""
    pages = [TREE / "README.md", TREE / "CONTRIBUTING.md", *sorted((TREE / "docs").glob("*.md"))]
    missing = []
    for path in [*pages, *texts()]:
        for match in NAMED.finditer(path.read_text(encoding="utf-8")):
            named = TREE / "saccade" / match[1] if match[1] else TREE / match[2]
            if not named.exists() and not (path.parent / match[0]).exists():
                missing.append(f"{path.relative_to(TREE)}: {match[0]}")
    assert not missing, "\n".join(missing)


def test_the_house_in_numbers(tmp_path):
    """``tools/house.py`` finds circles, annotations' among them, and prints this tree's."""
    package = tmp_path / "saccade"
    (package / "engine").mkdir(parents=True)
    (tmp_path / "csrc").mkdir()
    (package / "__init__.py").write_text("")
    (package / "engine" / "__init__.py").write_text("")
    (package / "engine" / "one.py").write_text("from saccade.engine.two import Two\n")
    two = (
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from saccade.engine.one import One\n\n\ndef late():\n"
    )
    (package / "engine" / "two.py").write_text(two + "    import saccade.engine.three\n")
    (package / "engine" / "three.py").write_text("import saccade.engine.one\n")
    found = [numbers(root) for root in (tmp_path, TREE)]
    assert "circles of imports in engine/      1 of [2] files" in found[0]
    assert "entries of engine/                 3" in found[0]
    assert "circles of imports in engine/      0 of [] files" in found[1]


def numbers(root: Path) -> str:
    tool = [sys.executable, str(TREE / "tools/house.py"), str(root)]
    return subprocess.run(tool, capture_output=True, text=True, check=True, timeout=120).stdout
