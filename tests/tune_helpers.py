"""What the tests of saccade tune share: fixtures of its cache and its clock, and policies that are near and far."""

from __future__ import annotations

import pytest
from drift_texts import passage
from engine_helpers import BLOCK_BYTES

from saccade.engine.settings.config import EngineConfig
from saccade.eval.tune import study
from saccade.eval.tune.ladders import Ladder
from saccade.eval.tune.study import tune
from saccade.models.tuned import Times

NEAR, FAR = "topk(k=190)", "topk(k=2)"  # of 200 tokens
TRIED = (Ladder("decode", (NEAR, FAR, "topk(k=1)")), Ladder("decode", ("streaming(sinks=1, window=2)", NEAR)))


@pytest.fixture(autouse=True, name="cache")
def own_cache(tmp_path, monkeypatch):
    tmp_path.chmod(0o700)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "saccade" / "tuned"


@pytest.fixture(autouse=True, name="timed")
def quick_times(monkeypatch):
    """Sparse takes half of dense's time from 100 tokens on."""
    asked = []

    def time(engine, policy, seconds, always):
        assert always  # whoever tunes has the time
        asked.append(policy.text)
        return Times(policy.text, (100, 200), (1.0, 2.0), (0.5, 1.0), (1.0, 2.0), (0.5, 1.0))

    monkeypatch.setattr(study, "timed", time)
    return asked


def config(folder):
    return EngineConfig.of(model=folder, dtype="float32", kv_memory=400 * BLOCK_BYTES, prefill_chunk=64)


def found_of(folder, **options):
    options = {"ladders": TRIED, "bound": 0.05, "rounding": False} | options
    return tune(config(folder), lambda llm: ("a text", passage(llm)), **options)
