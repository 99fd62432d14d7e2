"""Progress on stderr while long texts are read: a bar at a terminal, nothing elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def reading(what: str, quiet: bool = False) -> Iterator[Callable[[int, int], None]]:
    """Gives ``show(done, total)``, which draws a bar of tokens and takes it away where ``done`` reaches ``total``. A
    later, longer ``total`` begins a new one."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True, quiet=quiet or not sys.stderr.isatty())
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        bar = None

        def show(done: int, total: int) -> None:
            nonlocal bar
            if done >= total:
                if bar is not None:
                    progress.remove_task(bar)
                    bar = None
                progress.stop()
                return
            if bar is None:
                progress.start()
                bar = progress.add_task(what, total=total, completed=done)
            else:
                progress.update(bar, completed=done, total=total)

        yield show
