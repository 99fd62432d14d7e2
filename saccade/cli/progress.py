"""What shows itself on stderr at a terminal while one waits: a model that is loaded, a prompt that is read. Elsewhere
nothing does."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from saccade.cli.rest import SPARSE, Read, RestTime, square_per_row

if TYPE_CHECKING:
    from saccade.llm import LLM

DELAY = 0.4  # seconds before a bar shows itself: what takes less needs none
FEW = 256  # tokens that need no bar either
TICK = 0.25  # seconds between two looks at how far a prompt is


class Gauge:
    """How far the prompt is that ``llm`` reads now, for one who uses it alone. Any thread may look."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self._at: tuple[int, int, int] | None = None  # the request, its tokens, and the beats when they were there
        self._rest: tuple[int, RestTime] | None = None

    def read(self) -> Read | None:
        """None where no prompt is being read."""
        engine = self.llm.engine
        for request in list(engine.scheduler.running):
            tokens, total = request.sequence.computed, request.output_start
            if tokens >= total or request.output_ids:
                continue
            beats = engine.watch.pulse.beats
            if self._at is None or self._at[:2] != (request.id, tokens):
                self._at = request.id, tokens, beats
            chunk = engine.config.chunk if request.policy.selects_by_chunk else engine.config.dense_chunk
            share = min(1.0, (beats - self._at[2]) / engine.layers)
            if self._rest is None or self._rest[0] != request.id:
                spec = self.llm.model.spec
                square = square_per_row(self.llm.model.config, spec.heads, spec.head_dim, spec.kv_heads, spec.layers)
                guess = 1.0 if request.policy.prefill.is_dense else SPARSE
                self._rest = request.id, RestTime(square, guess)
            return Read(tokens, min(chunk, total - tokens), share, total)
        return None

    def look(self) -> tuple[Read, float, float | None] | None:
        """How far it is, the share of its work that is done, and the seconds that are left, where they are known."""
        read, now = self.read(), time.monotonic()
        if read is None or self._rest is None:
            return None
        rest = self._rest[1]
        rest.see(read, now)
        return read, rest.share(read), rest.left(read, now)


def clock(seconds: float) -> str:
    """``75`` -> ``1:15``."""
    minutes, left = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{left:02d}" if hours else f"{minutes}:{left:02d}"


@contextmanager
def reading(llm: LLM, what: str = "reading", quiet: bool = False) -> Iterator[Callable[[], None]]:
    """Shows a bar while ``llm`` reads a prompt, moving each second, with the time that is left. Gives a function that
    ends it; it ends by itself with the block."""
    if quiet or not sys.stderr.isatty():
        yield lambda: None
        return
    over = threading.Event()
    thread = threading.Thread(target=_draw, args=(Gauge(llm), what, over), name="saccade-bar", daemon=True)

    def end() -> None:
        over.set()
        if thread.ident is not None:
            thread.join()

    thread.start()
    try:
        yield end
    finally:
        end()


def _draw(gauge: Gauge, what: str, over: threading.Event) -> None:
    if over.wait(DELAY):
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[said]}")
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        bar = None
        while not over.is_set():
            seen = gauge.look()
            if seen is not None:
                read, share, left = seen
                said = f"{read.about:,} of {read.total:,} tokens" + ("" if left is None else f", {clock(left)} left")
                if bar is None and read.total - read.tokens < FEW:
                    over.wait(TICK)
                    continue
                if bar is None:
                    bar = progress.add_task(what, total=1.0, said=said)
                progress.update(bar, completed=share, said=said)
            elif bar is not None:
                progress.remove_task(bar)
                bar = None
            over.wait(TICK)


@contextmanager
def waiting(what: str, quiet: bool = False) -> Iterator[None]:
    """Shows ``what`` one waits for, and for how long, until the block ends. Nothing else may be printed meanwhile."""
    if quiet or not sys.stderr.isatty():
        yield
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True, redirect_stderr=False) as progress:
        progress.add_task(what, total=None)
        yield
