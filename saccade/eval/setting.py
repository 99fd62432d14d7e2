"""What is asked of a model: how it is run, its policy and the protocol.

Protocols (what was sparse when the answer began):

* A: everything is prefilled densely, the answer is decoded sparsely.
* B: the context is prefilled densely, the question and the answer run through the sparse decode path.
* C: sparse prefill, dense decode. D: sparse prefill and decode.

C and D follow from the policy; between A and B the caller chooses. A turn whose context goes on after its question is
prefilled whole under B too, and its row says A.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from saccade.engine.settings.config import EngineConfig
from saccade.errors import RequestError
from saccade.llm import LLM
from saccade.methods.dense import DenseMethod
from saccade.methods.policy import Policy

PROTOCOLS = ("A", "B")
HISTORIES = ("self", "gold")


def load(config: EngineConfig, together: int = 1) -> LLM:
    """The model of ``config``, whose ``threads`` are torch's too from now on, with room for ``together`` samples that
    are answered at once. Raises ModelError and its kin for a model that is missing or cannot run."""
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    return LLM(config=replace(config, max_requests=max(2, together)))


def computed(config: EngineConfig) -> EngineConfig:
    """``config`` for measurements of what each sample takes: none goes on from what another one left."""
    return replace(config, enable_prefix_caching=False)


def sparse_in(phase: str, policy: Policy) -> bool:
    """Whether a method of the policy, or a window or freeze on it, leaves keys out in ``prefill`` or ``decode``."""
    modified = policy.window is not None or (phase == "prefill" and policy.freeze is not None)
    return modified or not isinstance(getattr(policy, phase), DenseMethod)


@dataclass(frozen=True)
class Setting:
    """What is asked of the samples. ``protocol``: A or B; ``history``: whose answers later turns see, the model's own
    (``self``) or the reference's (``gold``)."""

    policy: Policy
    protocol: str = "A"
    history: str = "self"

    def __post_init__(self) -> None:
        for name, known in (("protocol", PROTOCOLS), ("history", HISTORIES)):
            if getattr(self, name) not in known:
                raise RequestError(f"{name}={getattr(self, name)!r} is unknown; known: {', '.join(known)}")
        if self.protocol == "B" and sparse_in("prefill", self.policy):
            raise RequestError(
                f"protocol B prefills the context densely, but '{self.policy.text}' is sparse in prefill; leave the "
                "protocol out (C or D follows from the policy) or give a decode method alone"
            )

    @property
    def letter(self) -> str:
        """A to D; dense runs as the baseline of A or B."""
        if not sparse_in("prefill", self.policy):
            return self.protocol
        return "D" if sparse_in("decode", self.policy) else "C"
