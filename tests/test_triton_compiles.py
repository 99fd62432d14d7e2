"""Kernels that the interpreter runs are compiled as well, for a GPU that need not be there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed")


@pytest.mark.thorough
@pytest.mark.parametrize("script", ["compiled_kernels.py", "compiled_launches.py"])
def test_kernels_compile_for_hopper(script):
    """In a process of its own: here they may be interpreted."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    program = Path(__file__).with_name(script)
    done = subprocess.run([sys.executable, program], env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "_lines" in done.stdout
