"""The server's log: a JSON object a line, whoever speaks."""

from __future__ import annotations

import json
import subprocess
import sys

SPEAKERS = """
import logging, warnings
from saccade.server.logs import log_to_stderr, logger
log_to_stderr("info")
logger.info("ready")
warnings.warn("an argument\\nwill go", FutureWarning)
logging.getLogger("asyncio").error("a task failed")
logging.getLogger("huggingface_hub.file_download").warning("slow")
from transformers.utils import logging as theirs
theirs.get_logger("transformers.models.llama").warning("a config is odd")
"""


def test_what_libraries_warn_of_is_json_too():
    ran = subprocess.run([sys.executable, "-c", SPEAKERS], capture_output=True, text=True, check=True, timeout=120)
    lines = [json.loads(line) for line in ran.stderr.splitlines()]
    assert [(line["logger"], line["message"]) for line in lines] == [
        ("saccade.server", "ready"),
        ("saccade.server", "FutureWarning: an argument\nwill go"),
        ("asyncio", "a task failed"),
        ("huggingface_hub.file_download", "slow"),
        ("transformers.models.llama", "a config is odd"),
    ]
    assert [line["level"] for line in lines] == ["info", "warning", "error", "warning", "warning"]
