"""Has the C++ kernels that ``make sanitize`` built take the place of the installed ones: ``pytest -p sanitized``.

Address and undefined-behaviour sanitizers then watch every kernel that the tests run, and end the process at the first
mistake. The installed kernels' file is never loaded.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent.parent / "build" / "sanitize" / "saccade"


def load() -> None:
    """Put the module where ``from saccade import _kernels`` finds it. Nothing has imported it yet."""
    assert "saccade._kernels" not in sys.modules
    (file,) = FOLDER.glob("_kernels*.so")
    spec = importlib.util.spec_from_file_location("saccade._kernels", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["saccade._kernels"] = module
    spec.loader.exec_module(module)


MISTAKE = """
import sanitized, torch
from saccade.kv.view import KVView
from saccade.ops import attend
from saccade.selection import Dense, Shape
kv = KVView.from_tensors(torch.randn(1, 64, 16), torch.randn(1, 64, 16))
paged = kv.paged()
paged.block_table[..., -1] = paged.k.shape[0]  # one slot too far
attend(torch.randn(1, 1, 16), kv, Dense(Shape.suffix(1, 1, 1, 64)), backend="cpu", threads=1)
print("nobody noticed")
"""


def pytest_sessionstart() -> None:
    """The watch must be awake: a kernel that is sent astray has to end its process."""
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parent), "SACCADE_DEBUG": "0"}
    done = subprocess.run([sys.executable, "-c", MISTAKE], env=env, capture_output=True, text=True, check=False)
    if done.returncode == 0 or "heap-buffer-overflow" not in done.stderr:
        raise SystemExit(f"the sanitizers are not at work: {done.returncode} {done.stdout} {done.stderr[-2000:]}")


load()
