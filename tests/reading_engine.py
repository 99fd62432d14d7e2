"""An engine's process, as tests/test_server_first_grammar.py starts it: notes in the file READING_ENGINE whenever it
reads a tokenizer for grammars, and whether its parent has begun to read its own by then."""

import os
import sys
import time
from pathlib import Path

from saccade.server import engine_process, matchers

NOTES = Path(os.environ["READING_ENGINE"])
PARENT = NOTES.with_suffix(".parent")
read = matchers.read_tokenizer


def noted(told):
    """Gives the parent time to begin: it has to be told before this process is ready."""
    ends = time.monotonic() + 30
    while not PARENT.exists() and time.monotonic() < ends:
        time.sleep(0.01)
    with NOTES.open("a") as file:
        file.write("beside\n" if PARENT.exists() else "alone\n")
    return read(told)


matchers.read_tokenizer = noted
engine_process.main(int(sys.argv[1]))
