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
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from saccade.errors import RequestError
from saccade.server.grammar_check import OFF
from saccade.server.matchers import Compiler

SECONDS = 10.0  # of compiling one grammar, at most
START = 120.0  # of a helper's beginning: it reads a tokenizer
AGAIN = 60.0  # and until a tokenizer is tried again whose helper died or was late: other processes may be to blame
HELPERS = 2  # at once: a slow grammar does not hold up the next one
CHECKED = 1024  # grammars that are known to compile
PROGRAM = (sys.executable, "-m", "saccade.server.grammar_check")


class Unread(RequestError):
    """No grammar can be checked: no helper can read the tokenizer."""


class Grammars:
    """Checks grammars for one model's tokens, those of ``compiler``, which an engine of this process goes by too. A
    tokenizer that no helper can read is tried once, whatever the number of requests."""

    def __init__(self, compiler: Compiler) -> None:
        self.compiler = compiler
        self._threads = ThreadPoolExecutor(HELPERS, "saccade-grammars")
        self._lock = threading.Lock()
        self._helpers: set[Helper] = set()
        self._free: list[Helper] = []  # those with nothing to do
        self._known: OrderedDict[str, str] = OrderedDict()
        self._beginning = threading.Lock()  # one helper at a time finds out whether helpers can begin
        self._begin: str | None = None  # what a helper is told first, megabytes
        self._lost = (0.0, "")  # until when no helper is begun, and why
        self._closed = False

    def prepare(self) -> None:
        """Have ready what a helper is told first: the tokenizer as text, which holds Python's lock for a while."""
        with suppress(ValueError):  # each request that needs a grammar is told
            if self.compiler.unfit is None:
                self._begin = json.dumps(self.compiler.told())

    async def checked(self, source: str) -> str:
        """``source`` as llguidance writes it, without waiting where it is known. RequestError where it does not compile
        in time, and Unread, at once from the second time on, where no grammar does."""
        self._check_tokenizer()
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
        """End the helpers, those at work too: nothing waits for them."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            self._closed, helpers, self._free = True, list(self._helpers), []
        for helper in helpers:
            self._end(helper)

    def _check(self, source: str) -> str:
        with self._lock:
            helper = self._free.pop() if self._free else None
        helper = helper or self._helper()
        try:
            answer = helper.ask(json.dumps({"source": source}), SECONDS)
        except BaseException as error:
            self._end(helper)
            if isinstance(error, Lost):
                raise RequestError(f"{error}; make it simpler: fewer alternatives, rules and repetitions") from None
            raise
        with self._lock:
            if not self._closed:
                self._free.append(helper)
        if "error" in answer:
            raise RequestError(answer["error"])
        return answer["source"]

    def _end(self, helper: Helper) -> None:
        with self._lock:
            self._helpers.discard(helper)
        helper.end()

    def _check_tokenizer(self) -> None:
        if self.compiler.unfit is not None:
            raise Unread(self.compiler.unfit)
        until, why = self._lost
        if time.monotonic() < until:
            raise Unread(why)

    def _helper(self) -> Helper:
        """A helper that has read the tokenizer."""
        with self._beginning:
            self._check_tokenizer()
            helper: Helper | None = None
            try:
                if self._begin is None:
                    self._begin = json.dumps(self.compiler.told())
                helper = Helper()
                with self._lock:
                    if self._closed:
                        raise Lost("the server ends")
                    self._helpers.add(helper)
                helper.begin(self._begin)
                return helper
            except BaseException as error:
                if helper is not None:
                    self._end(helper)
                if isinstance(error, (Lost, OSError)):
                    why = f"the process that reads this model's tokenizer is lost: {error}"
                    self._lost = time.monotonic() + AGAIN, f"{OFF} for {AGAIN:g} s: {why}; ask again then"
                elif isinstance(error, ValueError):
                    self.compiler.unfit = str(error)
                self._check_tokenizer()
                raise


class Lost(Exception):
    """A helper that gives no answer."""


class Helper:
    """A process that compiles grammars, one after the other, once it has read a tokenizer. ``begin`` and ``ask`` raise
    Lost where it ends or takes too long."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            PROGRAM, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
        )

    def begin(self, first: str) -> None:
        """Have it read a tokenizer. ValueError where llguidance cannot."""
        answer = self.ask(first, START)
        if "error" in answer:
            raise ValueError(answer["error"])

    def ask(self, line: str, seconds: float) -> dict[str, str]:
        """Its answer to a line."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        end, got = time.monotonic() + seconds, b""
        try:
            self._process.stdin.write(line.encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            raise Lost("it ends the process that compiles it") from None
        while not got.endswith(b"\n"):
            left = end - time.monotonic()
            if left <= 0 or not select.select([self._process.stdout], [], [], left)[0]:
                raise Lost(f"it takes more than {seconds:g} s")
            more = os.read(self._process.stdout.fileno(), 1 << 16)
            if not more:
                raise Lost("it takes more memory or nesting than it may")
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
