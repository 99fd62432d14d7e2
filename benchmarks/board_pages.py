"""The pages of boards that were run elsewhere: a drawn page, data and tables of each model and length, and of all of
them the policy that is chosen on all models but one and held on the one left out (leave_one_out.py).

    python benchmarks/board_pages.py SmolLM2=boards-s.tgz Qwen2.5-Coder=boards-q.tgz --made "One H100, 2026-11-28"

A model is NAME=PATH[,PATH...]: archives of benchmarks/gpu/boards.sh, or folders that boards were written to. Boards of
the same length and tasks make one page. Writes board-real-NAME-LENGTH.html, .json and -tables.md to `--out`, and
board-real.md, which names them all. Exits with 1 where leave_one_out.py does.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import re
import sys
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import leave_one_out

from saccade.errors import RequestError
from saccade.eval.board import kept
from saccade.eval.board.page import write_board
from saccade.eval.plots import in_k
from saccade.eval.results import read_json

MODEL = re.compile(r"(?<=-m |el )(\S*/)(?=[^\s/]+/?(?:\s|$))")  # the folders before a model's file in a command
MATCHES = {
    "keys": "a dial turned to as many keys",
    "share": "a dial turned to as large a share",
    "setting": "the same setting",
}
Group = tuple[str, int, tuple[str, ...]]  # name, length, tasks


def boards(paths: Sequence[str], space: Path) -> list[Path]:
    """The folders of boards in archives, which are unpacked to ``space``, and folders. SystemExit where there is
    none."""
    found: list[Path] = []
    for text in paths:
        path = Path(text)
        if path.is_file():
            own = space / f"{len(list(space.iterdir()))}"
            try:
                with tarfile.open(path) as archive:
                    archive.extractall(own, filter="data")
            except (tarfile.TarError, OSError) as error:
                raise SystemExit(f"{path} is no archive of boards: {error}") from None
            path = own
        inner = sorted(file.parent for file in path.rglob(kept.KEPT))
        if not inner:
            raise SystemExit(f"{text} holds no board that finished anything (no {kept.KEPT})")
        found += inner
    return found


def grouped(name: str, folders: Sequence[Path]) -> dict[Group, list[Path]]:
    """Folders by length and tasks."""
    found: dict[Group, list[Path]] = {}
    for folder in folders:
        data = read_json(folder / kept.KEPT)
        tasks = tuple(sorted(set(re.findall(r"(?:-t|--task) (\S+)", data["command"]))))
        for length in sorted({one[2] for one in data["wanted"]}):
            found.setdefault((name, length, tasks), []).append(folder)
    return found


def page_name(group: Group, all_of: Mapping[Group, Sequence[Path]]) -> tuple[str, str]:
    """What a group's files begin with, and its title; a number tells groups apart that are alike otherwise."""
    name, length, tasks = group
    title = f"{name} at {in_k(length)}"
    kinds = kinds_of(tasks)
    if kinds == {"long"}:
        title += ", long answers"
    elif not tasks and any(one[:2] == (name, length) and one[2] for one in all_of):
        title += ", drift"
    alike = [one for one in all_of if one[:2] == (name, length) and one[2] and tasks and kinds == kinds_of(one[2])]
    title += f", {1 + alike.index(group)}" if len(alike) > 1 else ""
    return "board-real-" + re.sub("[^a-z0-9]+", "-", title.replace(" at ", "-").lower()).strip("-"), title


def kinds_of(tasks: Sequence[str]) -> set[str]:
    """Where tasks come from: natural, ruler, long."""
    return {task.partition(":")[0] for task in tasks}


def write_page(
    group: Group, folders: Sequence[Path], named: tuple[str, str], out: Path, made: str, timed: bool = True
) -> str | None:
    """The files of one page; why there are none, else None."""
    base, title = named
    placed, grid, missing, commands = kept.joined(folders)
    with tempfile.TemporaryDirectory() as space:
        try:
            files = write_board(placed, grid, Path(space), MODEL.sub("", commands), missing, timed)
        except RequestError as error:
            return str(error)
        text = {file.suffix: file.read_text(encoding="utf-8") for file in files}
    body = text[".md"].partition("\n")[2].lstrip("\n")
    head = f"# The board of {title}\n\n{made} ([page]({base}.html), [data]({base}.json)).\n\n"
    for suffix, content in ((".html", text[".html"]), (".json", text[".json"]), ("-tables.md", head + body)):
        (out / f"{base}{suffix}").write_text(content, encoding="utf-8")
    return None


def overview(pages: Mapping[str, list[tuple[str, str]]], out: Path, made: str, words: Sequence[str]) -> bool:
    """board-real.md; whether all choices keep the bounds on the model left out."""
    lines = ["# The board of real models", "", f"{made}.", ""]
    lines += [f"* [{title}]({base}-tables.md), [drawn]({base}.html)" for own in pages.values() for base, title in own]
    holds = True
    if len(pages) > 1:
        files = [f"{name}={','.join(str(out / f'{base}.json') for base, _ in own)}" for name, own in pages.items()]
        for match, title in MATCHES.items():
            said = io.StringIO()
            with contextlib.redirect_stdout(said):
                holds &= leave_one_out.main([*files, "--match", match, *words]) == 0
            lines += ["", f"## Leave one out: {title}", "", said.getvalue().rstrip("\n")]
    (out / "board-real.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return holds


def in_navigation(pages: Sequence[tuple[str, str]], file: Path) -> None:
    """Add the pages below the last board of the site's navigation, unless they are there."""
    text = file.read_text(encoding="utf-8")
    wanted = [("board-real.md", "The board of real models")]
    wanted += [(f"{base}-tables.md", f"The board of {title}") for base, title in pages]
    new = [f'          - "{title}": results/{name}' for name, title in wanted if f"results/{name}" not in text]
    lines = text.splitlines()
    last = max((at for at, one in enumerate(lines) if "results/board-" in one), default=None)
    if new and last is not None:
        file.write_text("\n".join([*lines[: last + 1], *new, *lines[last + 1 :]]) + "\n", encoding="utf-8")


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", metavar="NAME=PATH[,PATH...]")
    parser.add_argument("--made", required=True, help="on what machine, and when; the first words of every page")
    parser.add_argument("--out", type=Path, default=Path("docs/results"))
    parser.add_argument("--navigation", type=Path, help="mkdocs.yml, to which the pages are added")
    parser.add_argument("--rounding", action="append", default=[], metavar="NAME=SHARE", help="as leave_one_out.py's")
    parser.add_argument("--more", type=int, default=2, help="as leave_one_out.py's")
    parser.add_argument("--no-times", action="store_true", help="leave times out: other processes ran beside")
    given = parser.parse_args(words)
    pages: dict[str, list[tuple[str, str]]] = {}
    given.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as space:
        groups: dict[Group, list[Path]] = {}
        for text in given.models:
            name, equal, paths = text.partition("=")
            if not equal or not paths:
                raise SystemExit(f"{text!r} must be NAME=PATH[,PATH...]")
            groups |= grouped(name, boards(paths.split(","), Path(space)))
        for group, folders in groups.items():
            named = page_name(group, groups)
            why = write_page(group, folders, named, given.out, given.made, not given.no_times)
            print(f"{named[1]}: {why or given.out / (named[0] + '-tables.md')}")
            if why is None:
                pages.setdefault(group[0], []).append(named)
    if not pages:
        raise SystemExit("no board has finished anything")
    rounding = [word for one in given.rounding for word in ("--rounding", one)]
    holds = overview(pages, given.out, given.made, [*rounding, "--more", str(given.more)])
    print(given.out / "board-real.md")
    if given.navigation:
        in_navigation([one for own in pages.values() for one in own], given.navigation)
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
