"""What tests of ``saccade eval board`` share."""

from __future__ import annotations

import pytest

from saccade.cli.main import main
from saccade.eval.metrics import METRICS


def run(*words: object) -> int:
    """The command line's exit code."""
    with pytest.raises(SystemExit) as end:
        main([str(word) for word in words])
    return int(end.value.code or 0)


@pytest.fixture
def always_right(monkeypatch):
    """Random weights answer nothing, and no board is made of that."""
    for name in METRICS:
        monkeypatch.setitem(METRICS, name, lambda prediction, references, **options: 1.0)
