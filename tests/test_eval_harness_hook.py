"""The start-up hook that tells lm-eval of this model, against a stand-in for lm-eval, which need not be installed."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

PLUGIN = Path(__file__).resolve().parent.parent / "plugins" / "lm_eval"
REGISTRY = """
class Registry(dict):
    def register(self, name, target):
        {body}
model_registry = Registry(dummy="lm_eval.models.dummy:Dummy")
"""


def run(folder: Path, body: str, code: str) -> subprocess.CompletedProcess[str]:
    for name, text in (("api/registry", REGISTRY.format(body=body)), ("models/__init__", "LOADED = True\n")):
        file = folder / "lm_eval" / f"{name}.py"
        file.parent.mkdir(parents=True)
        file.write_text(text)
    for package in ("lm_eval", "lm_eval/api"):
        (folder / package / "__init__.py").touch()
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(PLUGIN), str(folder)])}
    return subprocess.run([sys.executable, "-S", "-c", code], env=env, capture_output=True, text=True, check=False)


def test_the_table_gains_one_line_when_the_models_are_loaded(tmp_path):
    code = (
        "import sys; before = set(sys.modules)\n"
        "import saccade_lm_eval\n"
        "assert set(sys.modules) - before == {'saccade_lm_eval'}, set(sys.modules) - before\n"
        "from lm_eval.api.registry import model_registry as table\n"
        "assert 'saccade' not in table\n"
        "import lm_eval.models\n"
        "assert lm_eval.models.LOADED\n"
        "assert table['saccade'] == 'saccade.eval.harness:SaccadeLM' and len(table) == 2\n"
        "assert not any(getattr(one, '__module__', '') == 'saccade_lm_eval' for one in sys.meta_path)\n"
        "assert 'saccade' not in sys.modules and 'torch' not in sys.modules\n"
    )
    done = run(tmp_path, "self[name] = target", code)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    "wrap",
    [
        "sys.meta_path[:] = [Wrapped(one) for one in sys.meta_path]",
        "sys.meta_path = Guarded(sys.meta_path)",
    ],
    ids=["each finder", "the list"],
)
def test_tools_that_wrap_the_finders_change_nothing(tmp_path, wrap):
    """It could not step aside there, and lm-eval could not be imported."""
    code = (
        "import sys, saccade_lm_eval\n"
        "class Wrapped:\n"
        "    def __init__(self, real): self.real = real\n"
        "    def find_spec(self, *rest): return self.real.find_spec(*rest)\n"
        "class Guarded(list):\n"
        "    def remove(self, one): raise ValueError('nothing may go')\n"
        "    def __contains__(self, one): return False\n"
        f"{wrap}\n"
        "import lm_eval.models\n"
        "from lm_eval.api.registry import model_registry as table\n"
        "assert lm_eval.models.LOADED and len(table) == 2, table\n"
    )
    done = run(tmp_path, "self[name] = target", code)
    assert (done.returncode, done.stderr) == (0, "")


def test_an_lm_eval_with_another_table_goes_on_working(tmp_path):
    code = "import saccade_lm_eval, lm_eval.models; print(lm_eval.models.LOADED)"
    done = run(tmp_path, "raise AttributeError('no such thing')", code)
    assert (done.returncode, done.stdout) == (0, "True\n")
    assert "does not take the model 'saccade': no such thing" in done.stderr


def test_the_hook_is_for_those_who_ask_for_it():
    """Nobody else's interpreter starts with it."""
    root = PLUGIN.parent.parent
    assert "lm_eval" not in (root / "CMakeLists.txt").read_text()
    own = tomllib.loads((PLUGIN / "pyproject.toml").read_text())
    shipped = own["tool"]["hatch"]["build"]["targets"]["wheel"]["only-include"]
    assert sorted(shipped) == sorted(one.name for one in PLUGIN.glob("saccade_lm_eval.p*"))
    assert own["project"]["version"] == tomllib.loads((root / "pyproject.toml").read_text())["project"]["version"]


def test_the_start_up_line_names_the_hook():
    assert (PLUGIN / "saccade_lm_eval.pth").read_text() == "import saccade_lm_eval\n"
