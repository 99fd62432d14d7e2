"""One JSON object a line. Prompts and answers are never part of it, unless a server is told so."""

from __future__ import annotations

import json
import logging
import sys
import time
import warnings
from typing import Any

from saccade.engine.messages import RequestOutcome
from saccade.models.quiet import speak_through

logger = logging.getLogger("saccade.server")


def add_costs(costs: dict[str, Any], outcome: RequestOutcome) -> None:
    """Add what a sample cost to the log's fields of its request: tokens in all, densities of the last sample."""
    report = outcome.report
    costs["policy"] = report["policy"]
    costs["samples"] = costs.get("samples", 0) + 1
    for name in ("prompt_tokens", "cached_tokens", "output_tokens", "preemptions"):
        costs[name] = costs.get(name, 0) + report[name]
    for name in ("queue_seconds", "first_token_seconds"):
        costs[name] = report[name]
    costs["density"] = {phase: report[phase]["density"] for phase in ("prefill", "decode")}
    costs["finish_reason"] = outcome.finish_reason


class JsonLines(logging.Formatter):
    """``time`` (UTC), ``level``, ``logger``, ``message``, and whatever ``extra={"fields": {...}}`` adds."""

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {
            "time": f"{stamp}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def log_to_stderr(level: str) -> None:
    """Have this process write its logs as JSON lines, and what other libraries log or warn of."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    root = logging.getLogger()
    for other in [other for other in root.handlers if type(other) is logging.StreamHandler]:
        root.removeHandler(other)
    root.addHandler(handler)
    speak_through(handler)
    warnings.showwarning = _log_warning
    for name in ("saccade", "uvicorn"):
        one = logging.getLogger(name)
        one.handlers, one.propagate = [handler], False
        one.setLevel(level.upper())
    logging.getLogger("uvicorn").setLevel(max(logging.WARNING, logging.getLogger("saccade").level))


def _log_warning(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
    """In place of ``warnings.showwarning``, which writes lines that are no JSON."""
    logger.warning("%s: %s", category.__name__, message)
