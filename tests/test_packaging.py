"""What the package says of itself: one version everywhere, one name for the index, hints that work."""

from __future__ import annotations

import ast
import re
import sys
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
    newest = re.search(r"^## (?!Unreleased$)(\S+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
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


# What our code asks of a distribution that had it not from the beginning: the first version with it, and where we ask.
# `make lowest` installs the lowest versions that pyproject.toml allows and runs what touches them.
FIRST = {
    "llguidance": ("1.7.0", "server/grammar_check.py", r'eos_token=told\["ends"\]'),  # a list of them
    "starlette": ("1.7.0", "server/responses_socket.py", r"\bWebSocketDisconnected\b"),
    "fastapi": ("0.133.0", "server/responses_socket.py", r"\bWebSocketDisconnected\b"),  # the first beside starlette 1
}
# Distributions whose modules have other names, and modules that a distribution we ask for brings along.
MODULES = {"huggingface_hub": "huggingface-hub", "yaml": "pyyaml", "zmq": "pyzmq", "lm_eval": "lm-eval"}
MODULES |= {"opentelemetry": "opentelemetry-api", "prometheus_client": "prometheus-client"}
MODULES |= {"flash_attn": "flash-attn-4", "cutlass": "nvidia-cutlass-dsl", "tokenizers": "transformers"}


def requirements() -> list[Requirement]:
    """All of pyproject.toml's."""
    return [
        Requirement(one)
        for part in (PROJECT["dependencies"], *PROJECT["optional-dependencies"].values())
        for one in part
    ]


def lowest(name: str) -> Version:
    """The lowest version of a distribution that is allowed."""
    bounds = next(one.specifier for one in requirements() if canonicalize_name(one.name) == name)
    return min(Version(bound.version) for bound in bounds if bound.operator in (">=", "=="))


def test_lower_bounds_are_where_begins_what_we_use():
    for name, (first, file, used) in FIRST.items():
        assert re.search(used, (ROOT / "saccade" / file).read_text(encoding="utf-8")), f"{name}: the table is stale"
        assert lowest(name) >= Version(first), f"{name}>={lowest(name)} of pyproject.toml is below {first} ({used})"


def test_a_distribution_has_one_bound_wherever_it_is_asked_for():
    found: dict[str, set[str]] = {}
    for one in requirements():
        found.setdefault(canonicalize_name(one.name), set()).add(str(one.specifier))
    found["saccade-llm"] = {""}  # extras of our own
    assert {name: bounds for name, bounds in found.items() if len(bounds) > 1} == {}
    builders = re.search(r"^BUILDERS := (.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert builders is not None
    for text in re.findall(r"'([^']+)'", builders[1]):
        assert found[Requirement(text).name] == {str(Requirement(text).specifier)}, text
    build = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["build-system"]["requires"]
    for text in build:
        assert found[Requirement(text).name] == {str(Requirement(text).specifier)}, text


def test_what_is_imported_is_asked_for():
    """Not only what another distribution may bring along, in a version that it chooses."""
    asked = {canonicalize_name(one.name) for one in requirements()}
    imported: set[str] = set()
    for file in (*(ROOT / "saccade").rglob("*.py"), *(ROOT / "contrib").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                imported |= {one.name.split(".")[0] for one in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module is not None and not node.level:
                imported.add(node.module.split(".")[0])
    others = imported - sys.stdlib_module_names - {"saccade", "saccade_contrib"}
    assert {"torch", "starlette", "zmq"} <= others
    assert {name for name in others if MODULES.get(name, canonicalize_name(name)) not in asked} == set()
