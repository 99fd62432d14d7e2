"""The container file's commands beside today's: options of ``saccade``, extras, files and paths that it names exist."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
from test_docs_commands import check

from saccade.server.gate import OPEN
from saccade.server.settings import ServerConfig

ROOT = Path(__file__).parent.parent
FILES = sorted((ROOT / "deploy").glob("*ockerfile*"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
LINES = ("ENTRYPOINT", "CMD")


def tool() -> ModuleType:
    """tools/try_container.py, which reads and runs these files."""
    spec = importlib.util.spec_from_file_location("try_container", ROOT / "tools/try_container.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["try_container"] = module  # where its data classes look for it
    spec.loader.exec_module(module)
    return module


def instructions(file: Path) -> list[tuple[str, str]]:
    return tool().instructions(file.read_text(encoding="utf-8"))


def started(steps: list[tuple[str, str]]) -> str:
    """The command line of ``saccade`` that a container runs."""
    words = [word for name, rest in steps if name in LINES for word in json.loads(rest)]
    return " ".join(words[words.index("saccade") :])


def test_there_are_files():
    assert FILES


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_what_a_container_starts_has_todays_options(file):
    line = started(instructions(file))
    assert re.match(r"saccade serve --", line)
    check(line)
    for renamed in (line.replace("--host", "--hosts"), line.replace("serve", "server")):
        with pytest.raises(AssertionError):
            check(renamed)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_build_arguments_and_extras_are_known(file):
    steps = instructions(file)
    values = dict(rest.partition("=")[::2] for name, rest in steps if name == "ARG")
    text = file.read_text(encoding="utf-8")
    for given in re.findall(r"--build-arg (\w+)=", text):
        assert given in values
    extras = {values["EXTRAS"], *re.findall(r"EXTRAS=([\w-]+)", text)}
    assert extras <= set(PROJECT["optional-dependencies"])
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert f"\nTORCH ?= {values['TORCH']}\n" in makefile
    (least,) = re.findall(r"^>=(3\.\d+)$", PROJECT["requires-python"])
    assert tuple(map(int, values["PYTHON"].split("."))) >= tuple(map(int, least.split(".")))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_all_that_the_build_reads_is_copied(file):
    """What pyproject.toml and CMakeLists.txt name: the licence and the readme, too, without which no wheel is built."""
    copied = [rest.split()[:-1] for name, rest in instructions(file) if name == "COPY" and "--from" not in rest]
    found = {one for words in copied for one in words}
    assert {
        "pyproject.toml",
        "CMakeLists.txt",
        "csrc",
        "saccade",
        PROJECT["readme"],
        *PROJECT["license-files"],
    } <= found
    assert all((ROOT / one).exists() for one in found)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_the_health_check_asks_the_server_at_a_path_that_needs_no_key(file):
    steps = dict(instructions(file))
    port, path = re.findall(r"localhost:(\d+)(/\w+)", steps["HEALTHCHECK"])[0]
    assert steps["EXPOSE"] == port == str(ServerConfig().port)
    assert path in OPEN


def test_lines_are_joined_and_comments_left_out():
    text = '# a\nARG A=1\n# b\nRUN one \\\n    && two\n\nCMD ["x"]\n'
    assert tool().instructions(text) == [("ARG", "A=1"), ("RUN", "one && two"), ("CMD", '["x"]')]
