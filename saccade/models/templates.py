"""Chat templates are programs that come with a checkpoint: they run for a bounded time."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from saccade.errors import RequestError

SECONDS = 10.0  # a template of real life takes milliseconds
MOST_TEXT = 1 << 26  # letters

Trace = Callable[[FrameType, str, Any], Any]


class _TooLong(BaseException):
    """Nothing on the way takes this for its own."""


def render(run: Callable[[], str], template: object) -> str:
    """``run``'s text, which renders ``template``. RequestError where that takes longer than ``SECONDS`` or gives more
    than ``MOST_TEXT`` letters; what ``run`` raises itself goes on.

    The sandbox bounds each range() alone, so loops within loops never end. Powers, which no clock can stop, are refused
    before the template is compiled.
    """
    import jinja2

    for text in template.values() if isinstance(template, dict) else [template]:
        try:
            power = any(kind == "operator" and sign == "**" for _, kind, sign in jinja2.Environment().lex(str(text)))
        except jinja2.TemplateError:  # compiling it says so
            power = False
        if power:
            raise RequestError("the chat template computes a power (**), which may never end; give another template")
    try:
        with _deadline(time.monotonic() + SECONDS):
            text = run()
    except _TooLong:
        raise RequestError(
            f"the chat template does not come to an end within {SECONDS:g} s; it loops too long, give another template"
        ) from None
    if len(text) > MOST_TEXT:
        raise RequestError(f"the chat template makes a prompt of {len(text)} letters; at most {MOST_TEXT} are read")
    return text


@contextmanager
def _deadline(end: float) -> Iterator[None]:
    """Raises _TooLong in this thread's Jinja code once ``end`` (of the monotonic clock) has passed. The tracer of a
    debugger rests meanwhile."""

    def line(frame: FrameType, event: str, arg: Any) -> Trace:
        if time.monotonic() > end:
            raise _TooLong
        return line

    def call(frame: FrameType, event: str, arg: Any) -> Trace | None:
        line(frame, event, arg)
        return line if frame.f_code.co_filename == "<template>" else None

    before = sys.gettrace()
    sys.settrace(call)
    try:
        yield
    finally:
        sys.settrace(before)
