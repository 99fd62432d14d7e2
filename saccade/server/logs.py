"""One JSON object a line. Prompts and answers are never part of it, unless a server is told so."""

from __future__ import annotations

import json
import logging
import sys
import time

logger = logging.getLogger("saccade.server")


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
    """Have this process write its logs as JSON lines."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    for name in ("saccade", "uvicorn"):
        one = logging.getLogger(name)
        one.handlers, one.propagate = [handler], False
        one.setLevel(level.upper())
    logging.getLogger("uvicorn").setLevel(max(logging.WARNING, logging.getLogger("saccade").level))
