"""The server's log: a JSON object a line, whoever speaks."""

from __future__ import annotations

import io
import json
import logging
import sys
import warnings

import pytest
from transformers.utils import logging as theirs

from saccade.server.logs import log_to_stderr, logger


@pytest.fixture
def loggers_as_they_were():
    theirs.get_verbosity()  # sets its own handler up, once
    known = [
        logging.root,
        *(one for one in logging.root.manager.loggerDict.values() if isinstance(one, logging.Logger)),
    ]
    before = [(one, one.handlers, one.propagate, one.level) for one in known]
    for one in known:
        one.handlers = list(one.handlers)
    yield
    for one, handlers, propagate, level in before:
        one.handlers, one.propagate = handlers, propagate
        one.setLevel(level)


@pytest.mark.usefixtures("loggers_as_they_were")
def test_what_libraries_warn_of_is_json_too(monkeypatch):
    said = io.StringIO()
    monkeypatch.setattr(sys, "stderr", said)
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    log_to_stderr("info")
    shown = warnings.showwarning
    logger.info("ready")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = shown  # which a new context gives back to Python
        warnings.warn("an argument\nwill go", FutureWarning, stacklevel=1)
    logging.getLogger("asyncio").error("a task failed")
    logging.getLogger("huggingface_hub.file_download").warning("slow")
    theirs.get_logger("transformers.models.llama").warning("a config is odd")
    lines = [json.loads(line) for line in said.getvalue().splitlines()]
    assert [(line["logger"], line["message"]) for line in lines] == [
        ("saccade.server", "ready"),
        ("saccade.server", "FutureWarning: an argument\nwill go"),
        ("asyncio", "a task failed"),
        ("huggingface_hub.file_download", "slow"),
        ("transformers.models.llama", "a config is odd"),
    ]
    assert [line["level"] for line in lines] == ["info", "warning", "error", "warning", "warning"]
