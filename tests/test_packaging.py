"""What the package says of itself: one version everywhere, one name for the index, hints that work."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import requires, version
from pathlib import Path

import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import saccade

ROOT = Path(saccade.__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
TEXTS = [
    *ROOT.glob("*.md"),
    *(file for folder in ("docs", "saccade", "tests", "benchmarks", "train") for file in (ROOT / folder).rglob("*.md")),
    *(file for folder in ("saccade", "tests", "benchmarks", "train") for file in (ROOT / folder).rglob("*.py")),
]


def test_the_distribution_has_a_name_of_its_own():
    assert PROJECT["name"] == "saccade-llm"
    assert PROJECT["scripts"] == {"saccade": "saccade.cli.main:main"}
    assert saccade.__version__ == version("saccade-llm") == PROJECT["version"]


def test_installation_hints_name_extras_of_the_distribution():
    wrong = re.compile(r"pip install [^`\n]*\bsaccade(?!-(?:llm|contrib|eval)\b)\b")
    named = re.compile(r"saccade-llm\[([\w-]+)\]")
    seen = set()
    for file in TEXTS:
        text = file.read_text(encoding="utf-8")
        if file.name != Path(__file__).name:
            assert not wrong.search(text), f"{file}: {wrong.search(text)}"
            seen |= set(named.findall(text))
    assert {"eval", "figures", "ruler"} <= seen <= set(PROJECT["optional-dependencies"])


def test_serving_needs_no_plotting_library():
    assert not any(need.startswith("matplotlib") for need in PROJECT["dependencies"])
    assert any(need.startswith("matplotlib") and "extra" in need for need in requires("saccade-llm") or ())


def test_changelog_and_citation_are_of_this_version():
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert newest is not None
    assert newest[1] == str(cited["version"]) == PROJECT["version"]
    assert cited["license"] == PROJECT["license"]
    assert (ROOT / "SECURITY.md").is_file()


def test_the_public_face_is_typed_and_can_be_listed():
    assert (Path(saccade.__file__).parent / "py.typed").is_file()
    assert set(saccade.__all__) <= set(dir(saccade))
    assert all(getattr(saccade, name) is not None for name in saccade.__all__)


def test_the_lock_has_every_requirement_with_a_hash():
    """`make lock` writes it anew."""
    wanted = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["dev"]]
    locked: dict[str, list[Version]] = {}
    for block in re.split(r"\n(?=\S)", (ROOT / "requirements/dev.lock").read_text()):
        if not block.startswith("#"):
            assert "--hash=sha256:" in block
            name, version = block.split(" ")[0].split("==")
            locked.setdefault(name, []).append(Version(version))
    for text in wanted:
        requirement = Requirement(text)
        if requirement.name != "torch":  # the Makefile names its version
            found = locked.get(canonicalize_name(requirement.name), [])
            assert any(version in requirement.specifier for version in found), text
