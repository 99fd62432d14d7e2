"""``saccade bench``: the benchmarks' commands, and recall, which may record a model's attention as eval does."""

from __future__ import annotations

from saccade.bench.cli import app
from saccade.eval_cli.recall import recall

app.command("recall")(recall)

__all__ = ["app"]
