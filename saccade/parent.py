"""Processes that end with the one that started them, however that one ends, be they stopped at the time."""

from __future__ import annotations

import ctypes
import os
import queue
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import cache
from typing import Any, TypeVar

T = TypeVar("T")
PR_SET_PDEATHSIG = 1


def end_with_parent(is_gone: Callable[[], bool]) -> None:
    """Have the kernel kill this process when its parent ends; end it now where the parent ``is_gone`` already. Linux
    takes the end of the thread that started it for its parent's: see :func:`on_lasting_thread`. Elsewhere nothing."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if is_gone():
        os._exit(1)


def on_lasting_thread(call: Callable[[], T]) -> T:
    """What ``call`` returns or raises, on a thread that ends with this process alone: it may start processes that end
    with this one."""
    done: Future[T] = Future()
    _asked(os.getpid()).put((call, done))
    return done.result()


@cache  # a fork has no threads but its own
def _asked(pid: int) -> queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]]:
    asked: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()

    def serve() -> None:
        while True:
            call, done = asked.get()
            try:
                done.set_result(call())
            except BaseException as error:
                done.set_exception(error)
            del call, done  # what they hold, until the next call

    threading.Thread(target=serve, name="saccade-parent", daemon=True).start()
    return asked
