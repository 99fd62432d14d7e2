"""How far each setting of a board drifts from dense attention over forced tokens, and how many keys it reads there."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from torch import Tensor

from saccade.engine.settings.config import EngineConfig
from saccade.errors import RequestError
from saccade.eval.drift.measure import compared, run
from saccade.eval.predict import described_model
from saccade.eval.results import read_json, slug, write_json
from saccade.eval.setting import sparse_in
from saccade.llm import LLM
from saccade.methods.policy import Policy
from saccade.passage import Passage, made_passage

FOLDER = "drift"  # beside the result folders


def place_of(results: Path, length: int, tokens: int, policy: str) -> Path:
    """The file of a policy's drift: its name says which, and two policies never share one."""
    digest = hashlib.sha256(policy.encode()).hexdigest()[:12]
    return results / FOLDER / f"{length}-{tokens}" / f"{slug(policy)[:80]}-{digest}.json"


def load_drift(file: Path) -> Drift | None:
    """What lies in ``file``; None where nothing was measured yet. RequestError for what is no record."""
    return Drift(read_json(file)) if file.is_file() else None


@dataclass(frozen=True)
class Drift:
    """One policy's over one passage, as it lies in a file."""

    record: Mapping[str, Any]

    @property
    def policy(self) -> str:
        return self.record["policy"]

    @property
    def kl(self) -> list[float]:
        """To dense attention, nats a forced token."""
        return self.record["kl"]

    @property
    def mean(self) -> float:
        return sum(self.kl) / len(self.kl)

    @property
    def agree(self) -> float:
        """Share of the tokens whose likeliest one is dense attention's."""
        return sum(self.record["agree"]) / len(self.record["agree"])

    def keys(self, phase: str) -> float | None:
        """Share of the keys that dense attention reads."""
        return self.record[phase]["density"]

    def read(self, phase: str, summary: float | None) -> float | None:
        """Bytes over dense attention's, as ``Part.read`` has them; None where that is not known, which a record from
        before block summaries were counted does not say of a method that has them."""
        estimated = self.record[phase].get("estimated", None if summary else 0.0)
        return None if summary is None or estimated is None else self.record[phase]["reads"] + summary * estimated / 2

    def time(self, phase: str) -> float | None:
        """Over dense attention's, of one sequence where the drift was measured; None where that took none."""
        seconds = self.record["dense_seconds"][phase]
        return self.record[phase]["seconds"] / seconds if seconds else None


class Drifts:
    """Of one model at one length, ``tokens`` forced; a file a policy in ``results``, so that any number of processes
    and runs share them. Dense attention runs when it is first asked for."""

    def __init__(self, llm: LLM, model: EngineConfig, results: Path, length: int, tokens: int) -> None:
        self.llm, self.results, self.length, self.tokens = llm, results, length, tokens
        self._described = described_model(llm, model)

    def known(self, policy: Policy) -> Drift | None:
        """What was measured before. RequestError where that is of other weights."""
        found = load_drift(self._file(policy))
        if found is not None and found.record["weights"] != self._described["weights_sha256"]:
            raise RequestError(f"{self._file(policy)} was measured on another model; give another --out, or remove it")
        return found

    def of(self, policy: Policy) -> Drift:
        """A policy's, measured unless it was before. SaccadeError where it does not run."""
        found = self.known(policy)
        if found is not None:
            return found
        passage, dense, base = _dense(self.llm, self.length, self.tokens)
        if sparse_in("prefill", policy):
            self.llm.reset_prefix_cache()  # chunks that another decode method's run left would not be counted
        logits, ran = run(self.llm, passage, policy, weights=False)
        own = compared(logits, dense, passage)
        record = {
            "policy": policy.text,
            "length": self.length,
            "tokens": passage.steps,
            "weights": self._described["weights_sha256"],
            "dtype": self._described["dtype"],
            "device": str(self.llm.model.device),
            "kl": own["kl"],
            "agree": own["agree"],
            **{phase: ran[phase] for phase in ("prefill", "decode")},
            "dense_seconds": {phase: base[phase]["seconds"] for phase in ("prefill", "decode")},
        }
        write_json(self._file(policy), record)
        return Drift(record)

    def _file(self, policy: Policy) -> Path:
        return place_of(self.results, self.length, self.tokens, policy.text)


@lru_cache(2)
def _dense(llm: LLM, length: int, tokens: int) -> tuple[Passage, Tensor, dict[str, Any]]:
    passage = made_passage(llm.encode, length, tokens, 0)
    return (passage, *run(llm, passage, Policy(), weights=False))
