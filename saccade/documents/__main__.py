"""Reads one document in a process of its own: ``python -m saccade.documents NAME < FILE``.

A file may be made so that reading it takes hours or all memory, which nothing can end in a thread. What comes out is
JSON: ``{"text": ...}``, or ``{"error": ...}`` with one line and exit code 2.
"""

from __future__ import annotations

import json
import resource
import sys

from saccade.documents.kinds import text_of
from saccade.errors import SaccadeError, brief

MEMORY = 4 << 30  # bytes of addresses
SECONDS = 30  # of processor time


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    name = sys.argv[1] if len(sys.argv) > 1 else "the document"
    try:
        text = text_of(sys.stdin.buffer.read(), name)
        answer = {"text": text} if text.strip() else {"error": f"{name} is empty; give a document with some text"}
    except SaccadeError as error:
        answer = {"error": str(error)}
    except (MemoryError, RecursionError) as error:
        answer = {"error": brief(f"{name} takes more memory than a document may ({type(error).__name__})")}
    print(json.dumps(answer))
    sys.exit("error" in answer and 2)


if __name__ == "__main__":
    main()
