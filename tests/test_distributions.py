"""Two wheels of one tree: saccade-llm, and saccade-eval with saccade/eval, saccade/bench and saccade/eval_cli."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from saccade.cli.measuring import COMMANDS, OURS

ROOT = Path(__file__).parent.parent
CORE = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
EVAL = tomllib.loads((ROOT / "packages/eval/pyproject.toml").read_text(encoding="utf-8"))
CONTRIB = tomllib.loads((ROOT / "contrib/pyproject.toml").read_text(encoding="utf-8"))
FOLDERS = [name.replace(".", "/") for name in OURS]

ABSENT = f"""
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if any(name == one or name.startswith(one + ".") for one in {OURS!r}):
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Absent())
"""


def alone(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """``code`` in a process for which saccade-eval is not installed."""
    command = [sys.executable, "-c", ABSENT + code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return alone("from saccade.cli.main import main\nmain(sys.argv[1:])", *arguments)


def files(folder: Path) -> set[str]:
    """Those that a wheel would take, by their paths from the folder; links are followed."""
    found = set()
    for place, _, names in os.walk(folder, followlinks=True):
        if "__pycache__" not in place:
            found |= {str((Path(place) / name).relative_to(folder)) for name in names if not name.endswith(".so")}
    return found


def test_each_file_is_in_one_wheel():
    build = CORE["tool"]["scikit-build"]
    (left_out,) = [one for one in build["overrides"] if "wheel" in one and "exclude" in one["wheel"]]
    assert left_out["if"] == {"state": "wheel"}  # an editable install has all
    assert sorted(left_out["wheel"]["exclude"]) == sorted(f"{folder}/**" for folder in FOLDERS)
    assert EVAL["tool"]["scikit-build"]["wheel"]["packages"] == {folder: folder for folder in FOLDERS}
    whole = {f"saccade/{name}" for name in files(ROOT / "saccade")}
    others = {name for name in files(ROOT / "packages/eval") if name.startswith("saccade/")}
    assert others == {name for name in whole if any(name.startswith(f"{folder}/") for folder in FOLDERS)}
    assert len(others) > 100
    assert len(whole - others) > 600


def test_they_are_of_one_version():
    version = CORE["project"]["version"]
    for project in (EVAL["project"], CONTRIB["project"]):
        assert project["version"] == version
        assert project["dependencies"] == [f"saccade-llm=={version}"]
    extras = CORE["project"]["optional-dependencies"]
    assert extras["eval"][0] == f"saccade-eval=={version}"
    assert "saccade-llm[eval]" in extras["lm-eval"]


def test_every_module_of_the_core_imports_without_saccade_eval():
    """Also those that only some machines need, where they import here."""
    done = alone("""
import importlib, json, pkgutil
import saccade
from saccade.cli.measuring import OURS
whole, skipped = 0, {}
for one in pkgutil.walk_packages(saccade.__path__, "saccade.", onerror=lambda name: None):
    if one.name.endswith("__main__") or any(one.name == own or one.name.startswith(own + ".") for own in OURS):
        continue
    try:
        importlib.import_module(one.name)
        whole += 1
    except ModuleNotFoundError as error:
        skipped[one.name] = error.name
print(json.dumps([whole, skipped]))
""")
    assert done.returncode == 0, done.stderr[-2000:]
    whole, skipped = json.loads(done.stdout.splitlines()[-1])
    assert whole > 500
    assert not [name for name in skipped.values() if name.startswith("saccade")]


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("demo", []),
        ("inspect", ["-h"]),
        ("tune", ["smollm2", "--threads", "2"]),
        ("eval", ["run", "--out", "x"]),
        ("bench", ["ops", "--help"]),
    ],
)
def test_commands_of_saccade_eval_say_where_they_are(name, given):
    assert name in COMMANDS
    done = command(name, *given)
    said = f"saccade: error: 'saccade {name}' is in saccade-eval: pip install \"saccade-llm[eval]\""
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(said)
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["--help"], "Not installed: 'saccade eval' is in saccade-eval"),
        (["methods", "psa"], "epsilon"),
        (["doctor"], "recorded decode steps"),
        (["info", "retriever"], "retriever"),
        (["serve", "--help"], "Answer OpenAI's API"),
        (["chat", "--help"], "Talk in turns"),
        (["fetch", "--help"], "Download pretrained models"),
        (["sessions", "--help"], "conversations"),
        (["explain", "--policy", "psa", "--lengths", "300"], "300 tokens, prefill"),
        (
            [
                "generate",
                "The code is 4711. The code is",
                "-m",
                "retriever",
                "-p",
                "flexprefill+psa",
                "--max-tokens",
                "4",
            ],
            "",
        ),
    ],
    ids=lambda given: given[0] if isinstance(given, list) else "",
)
def test_the_other_commands_need_none_of_it(given, says):
    done = command(*given)
    assert done.returncode == 0, done.stderr
    assert says in re.sub(r"\s*[│\n]\s*", " ", done.stdout)
    assert done.stdout


def test_a_calibration_makes_its_text_without_it(tmp_path):
    """What both need lies in the core."""
    from tiny_models import make_checkpoint

    folder = make_checkpoint("llama", tmp_path)
    done = command("calibrate", "locality", "--model", str(folder), "--tokens", "200")
    assert done.returncode == 0, done.stderr
    assert (folder / "calibration/locality.safetensors").exists()


@pytest.mark.thorough
@pytest.mark.parametrize("source", ["tree", "sdist"])
def test_wheels_that_are_built_hold_what_the_configuration_says(tmp_path, source):
    """Without kernels. An sdist holds what its wheel needs."""
    build = "import sys, scikit_build_core.build as build\nprint(getattr(build, 'build_' + sys.argv[1])(sys.argv[2]))"
    environment = {**os.environ, "SACCADE_PURE": "1"}

    def built(kind: str, project: Path) -> Path:
        made = [sys.executable, "-c", build, kind, str(tmp_path)]
        done = subprocess.run(made, cwd=project, env=environment, capture_output=True, text=True, check=True)
        return tmp_path / done.stdout.splitlines()[-1]

    held = {}
    for name, project in (("llm", ROOT), ("eval", ROOT / "packages/eval"), ("contrib", ROOT / "contrib")):
        if source == "sdist":
            packed = built("sdist", project)
            subprocess.run(["tar", "xf", packed, "-C", tmp_path], check=True)
            project = tmp_path / packed.name.removesuffix(".tar.gz")
        wheel = built("wheel", project)
        assert wheel.name.endswith("py3-none-any.whl")
        names = zipfile.ZipFile(wheel).namelist()
        held[name] = {one for one in names if ".dist-info/" not in one}
        if name == "contrib":
            (offered,) = [one for one in names if one.endswith("entry_points.txt")]
            assert b"[saccade.methods]" in zipfile.ZipFile(wheel).read(offered)
    whole = {f"saccade/{name}" for name in files(ROOT / "saccade")}
    assert not held["llm"] & held["eval"]
    assert held["llm"] | held["eval"] == whole
    assert all(name.startswith(tuple(f"{folder}/" for folder in FOLDERS)) for name in held["eval"])
    assert held["contrib"] == {f"saccade_contrib/{name}" for name in files(ROOT / "contrib/saccade_contrib")}
