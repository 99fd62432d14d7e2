"""Grammars of requests: each is compiled in a helper process before the engine sees it (grammar_check.py)."""

from __future__ import annotations

import asyncio
import json
import os
import select
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from saccade.errors import RequestError
from saccade.server.matchers import Compiler, tokens_of

SECONDS = 10.0  # of compiling one grammar, at most
START = 120.0  # of a helper's beginning: it reads a tokenizer
HELPERS = 2  # at once: a slow grammar does not hold up the next one
CHECKED = 1024  # grammars that are known to compile
PROGRAM = (sys.executable, "-m", "saccade.server.grammar_check")


class Grammars:
    """Checks grammars for one model's tokens; the arguments are those of Compiler. ``compiler``: for an engine of this
    process."""

    def __init__(self, hf: Any, vocab: int, ends: Sequence[int]) -> None:
        self.compiler = Compiler(hf, vocab, ends)
        self._threads = ThreadPoolExecutor(HELPERS, "saccade-grammars")
        self._lock = threading.Lock()
        self._free: list[Helper] = []  # helpers with nothing to do
        self._known: OrderedDict[str, str] = OrderedDict()
        self._begin: str | None = None  # what a helper is told first
        self._closed = False

    async def checked(self, source: str) -> str:
        """``source`` as llguidance writes it, without waiting where it is known. RequestError where it does not compile
        in time."""
        found = self._known.get(source)
        if found is None:
            found = await asyncio.get_running_loop().run_in_executor(self._threads, self._check, source)
        with self._lock:
            self._known[source] = found
            self._known.move_to_end(source)
            while len(self._known) > CHECKED:
                self._known.popitem(last=False)
        return found

    def close(self) -> None:
        """End the helpers."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            self._closed, helpers, self._free = True, self._free, []
        for helper in helpers:
            helper.end()

    def _check(self, source: str) -> str:
        with self._lock:
            helper = self._free.pop() if self._free else None
        helper = helper or Helper(self._first())
        try:
            answer = helper.ask(json.dumps({"source": source}), SECONDS)
        except BaseException:
            helper.end()
            raise
        with self._lock:
            if not self._closed:
                self._free.append(helper)
                helper = None
        if helper is not None:
            helper.end()
        if "error" in answer:
            raise RequestError(answer["error"])
        return answer["source"]

    def _first(self) -> str:
        if self._begin is None:
            compiler = self.compiler
            if getattr(compiler.hf, "backend_tokenizer", None) is None or not compiler.ends:
                tokens_of(compiler.hf, compiler.vocab, compiler.ends)  # says what is missing
                raise RequestError("structured outputs need a fast tokenizer with an end token")
            backend = json.loads(compiler.hf.backend_tokenizer.to_str())
            backend["truncation"] = backend["padding"] = None
            told = {"tokenizer": json.dumps(backend), "vocab": compiler.vocab, "ends": compiler.ends}
            self._begin = json.dumps(told)
        return self._begin


class Helper:
    """A process that compiles grammars, one after the other. RequestError where it cannot begin."""

    def __init__(self, first: str) -> None:
        self._process = subprocess.Popen(
            PROGRAM, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
        )
        try:
            answer = self.ask(first, START)
            if "error" in answer:
                raise RequestError(answer["error"])
        except BaseException:
            self.end()
            raise

    def ask(self, line: str, seconds: float) -> dict[str, str]:
        """Its answer to a line. RequestError where that does not come in time, or the process ends over it."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        end, got = time.monotonic() + seconds, b""
        try:
            self._process.stdin.write(line.encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            raise _too_complex("it ends the process that compiles it") from None
        while not got.endswith(b"\n"):
            left = end - time.monotonic()
            if left <= 0 or not select.select([self._process.stdout], [], [], left)[0]:
                raise _too_complex(f"it takes more than {seconds:g} s")
            more = os.read(self._process.stdout.fileno(), 1 << 16)
            if not more:
                raise _too_complex("it takes more memory or nesting than it may")
            got += more
        answer: dict[str, str] = json.loads(got)
        return answer

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(OSError):  # what was not written yet
                    pipe.close()


def _too_complex(why: str) -> RequestError:
    return RequestError(f"{why}; make it simpler: fewer alternatives, rules and repetitions")
