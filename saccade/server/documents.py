"""``POST /v1/documents``: the text of a file, as the command line reads it, made in a process of its own."""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

from saccade.errors import shown
from saccade.server.errors import ApiError, bad_request
from saccade.server.protocol import DocumentRequest

PROGRAM = (sys.executable, "-m", "saccade.documents")
SECONDS = 40.0  # of one document: its process may compute for 30
AT_ONCE = 2  # documents that are read
MOST_WAITING = 16  # documents that are held
NAME = 200  # letters of a file's name


class Documents:
    """Reads documents for clients, a few at once."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(AT_ONCE, "saccade-documents")
        self._held = 0

    async def text(self, body: DocumentRequest) -> bytes:
        """JSON with the document's ``text``. ApiError where it cannot be read, in the words of the command line."""
        name = shown(" ".join(body.name.split())[:NAME] or "document")[1:-1]
        if self._held >= MOST_WAITING:
            said = f"{self._held} documents are being read already; try again"
            raise ApiError(503, said, "overloaded", headers={"retry-after": "2"})
        self._held += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, _read, name, body.data)
        finally:
            self._held -= 1

    def close(self) -> None:
        """Read no more."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def _read(name: str, data: str) -> bytes:
    try:
        content = base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError):
        raise bad_request("data must be the file's bytes in base64", "data") from None
    try:
        done = subprocess.run([*PROGRAM, name], input=content, stdout=subprocess.PIPE, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise bad_request(f"{name} takes more than {SECONDS:g} s to read; give its text", "data") from None
    if done.returncode == 0:
        return done.stdout
    if done.returncode == 2 and done.stdout:
        raise bad_request(json.loads(done.stdout)["error"], "data")
    raise bad_request(f"{name} takes more time or memory to read than it may; give its text", "data")
