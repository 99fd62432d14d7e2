"""Triton's interpreter for tests on a CPU: import this before any kernel."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")
if torch.cuda.is_available():
    pytest.skip("the kernels run on the GPU here: see tests/gpu", allow_module_level=True)

import triton
import triton.runtime.interpreter as interpreter

_patch_tensor = interpreter._patch_lang_tensor


def _patch_for_numpy(tensor, scope) -> None:
    """numpy 2.4 refuses ``int`` of an array of one element, which Triton's interpreter before 3.9 asks of scalars."""
    _patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


if hasattr(interpreter, "_LangPatchScope"):
    interpreter._patch_lang_tensor = _patch_for_numpy
if triton.__version__.startswith("3.9."):
    import quick_interpreter  # noqa: F401  (the same results in a sixth of the time)
