"""Keeping transformers' own words from the terminal, and the collector from its objects."""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from transformers.utils import logging as hf_logging

_lock = threading.Lock()
_inside = 0  # threads, and nested uses
_before = (logging.WARNING, True)  # the level, and whether there were bars, when the first came


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """No progress bars or load tables: what matters in them is raised as an error or kept as a note. transformers'
    level is the process's: with several threads inside, the last to leave gives it back."""
    global _inside, _before
    with _lock:
        if _inside == 0:
            _before = hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()
            hf_logging.set_verbosity(hf_logging.CRITICAL)
            hf_logging.disable_progress_bar()
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if _inside == 0:
                level, bars = _before
                hf_logging.set_verbosity(level)
                if bars:
                    hf_logging.enable_progress_bar()


def speak_through(handler: logging.Handler) -> None:
    """Have transformers, and the library that it loads files with, log through ``handler`` alone."""
    hf_logging.get_verbosity()  # which sets up the handler that it would add with its first message
    for name in ("transformers", "huggingface_hub"):
        one = logging.getLogger(name)
        one.handlers, one.propagate = [handler], False


@contextmanager
def no_collection() -> Iterator[None]:
    """Python's cyclic garbage collector rests inside, where much is made and little let go. It is the process's: with
    several threads inside, the first to leave wakes it."""
    works = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if works:
            gc.enable()
