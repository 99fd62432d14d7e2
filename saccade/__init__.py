"""Saccade: long-context LLM inference that looks only where it must.

>>> from saccade import LLM, SamplingParams
>>> llm = LLM("retriever", policy="flexprefill+psa")  # doctest: +SKIP
>>> llm.generate("...", SamplingParams(temperature=0))[0].outputs[0].text  # doctest: +SKIP
"""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from saccade.engine.sampling.params import SamplingParams
    from saccade.errors import SaccadeError
    from saccade.llm import LLM
    from saccade.methods.outside import register
    from saccade.methods.policy import Policy
    from saccade.outputs import CompletionOutput, RequestOutput
    from saccade.session import Session

__all__ = [
    "LLM",
    "CompletionOutput",
    "Policy",
    "RequestOutput",
    "SaccadeError",
    "SamplingParams",
    "Session",
    "__version__",
    "register",
]

# Threads of torch's OpenMP that spin while they wait take the core that another process, or a kernel thread of ours,
# could use: with one busy neighbour on two cores prefill ran three times slower. Only an unset policy is changed, and
# only if torch has not been imported yet.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

try:
    __version__ = version("saccade-llm")
except PackageNotFoundError:  # run from a source tree that is not installed
    __version__ = "0+source"

_HOME = {
    "LLM": "llm",
    "Session": "session",
    "RequestOutput": "outputs",
    "CompletionOutput": "outputs",
    "SamplingParams": "engine.sampling.params",
    "Policy": "methods.policy",
    "register": "methods.outside",
    "SaccadeError": "errors",
}


def __getattr__(name: str) -> Any:
    """Import on first use: torch and transformers take seconds, and ``saccade --help`` should not."""
    if name not in _HOME:
        raise AttributeError(f"module 'saccade' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"saccade.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
