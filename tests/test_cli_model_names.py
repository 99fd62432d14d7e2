"""A wrong model name costs no import of torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

from saccade.cli import model_names
from saccade.cli.model_names import BUILT_IN, FETCHED, check_name
from saccade.errors import ModelError
from saccade.models import catalogue, hub, reference


def test_a_wrong_name_is_refused_before_torch_is_imported():
    code = (
        "import sys\nfrom saccade.cli.main import main\n"
        "try:\n    main(['chat', '-m', 'smolm2'])\n"
        "finally:\n    print('torch' in sys.modules)\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (ran.returncode, ran.stdout) == (2, "False\n")
    assert "model 'smolm2' is no file or folder here; did you mean smollm2?" in ran.stderr


def test_names_are_those_of_the_models_there_are(tmp_path, monkeypatch):
    assert set(BUILT_IN) == set(reference.NAMES)
    assert set(FETCHED) == set(catalogue.ENTRIES)
    assert model_names._HUB.pattern == hub._NAME.pattern
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    for name in ("mine", "Qwen/Qwen3-8B", "a/b@main", *BUILT_IN, *FETCHED):
        check_name(name)
    for name in ("", "absent", "absent.gguf", "./a/b", "a/b/c"):
        assert not hub.is_name(name)
        with pytest.raises(ModelError, match=r"give a folder, a GGUF file, a hub name such as Qwen/Qwen3-8B"):
            check_name(name)
