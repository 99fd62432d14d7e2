"""A wrong model name costs no import of torch."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from saccade.cli import model_names
from saccade.cli.model_names import BUILT_IN, check_name
from saccade.errors import ModelError
from saccade.models import hub, reference


def test_a_wrong_name_is_refused_before_torch_is_imported():
    code = (
        "import sys\nfrom saccade.cli.main import main\n"
        "try:\n    main(['chat', '-m', 'smolm2'])\n"
        "finally:\n    print('torch' in sys.modules)\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (ran.returncode, ran.stdout) == (2, "False\n")
    assert "model 'smolm2' is no file or folder here; did you mean smollm2?" in ran.stderr


def test_a_model_that_was_not_fetched_is_named_before_torch_is_imported(tmp_path):
    code = (
        "import sys\nfrom saccade.cli.main import main\n"
        "try:\n    main(['chat', '-m', 'smollm2'])\n"
        "finally:\n    print('torch' in sys.modules)\n"
    )
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "TMPDIR": str(tmp_path)}
    ran = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert (ran.returncode, ran.stdout) == (2, "False\n")
    assert "is not on this machine yet; run: saccade fetch smollm2 (98 MB to download" in ran.stderr


def test_names_are_those_of_the_models_there_are(tmp_path, monkeypatch):
    assert set(BUILT_IN) == set(reference.NAMES)
    assert model_names._HUB.pattern == hub._NAME.pattern
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    for name in ("mine", "Qwen/Qwen3-8B", "a/b@main", *BUILT_IN):
        check_name(name)
    for name in ("", "absent", "absent.gguf", "./a/b", "a/b/c"):
        assert not hub.is_name(name)
        with pytest.raises(ModelError, match=r"give a folder, a GGUF file, a hub name such as Qwen/Qwen3-8B"):
            check_name(name)
