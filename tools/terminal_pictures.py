"""Pictures of ``saccade chat`` and ``generate`` in a terminal, as SVG for the documentation:

    python tools/terminal_pictures.py MODEL BOOK [FOLDER]

runs the commands in a pseudo-terminal (pexpect), shows what they draw on a screen (pyte), and writes
FOLDER/terminal-*.svg (rich), docs/images by default. It prints how a bar moved and what rest it foretold, beside the
time that reading took. ``pip install pyte`` first.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pexpect
import pyte
from rich.console import Console
from rich.text import Text

COLUMNS, LINES = 100, 16
TICK = 0.2
_FONTS = re.compile(r"@font-face \{.*?\}|<!--.*?-->", re.DOTALL)  # which would be fetched
READ = re.compile(r"([\d,]+) of ([\d,]+) tokens(?: \((\d+)%)?(?:, ([\d:]+) left)?")


class Terminal:
    """A command on a screen. ``seen``: how far it was at which second, in its own words."""

    def __init__(self, *words: str) -> None:
        self.screen = pyte.Screen(COLUMNS, LINES)
        self._stream = pyte.ByteStream(self.screen)
        environment = {**os.environ, "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1", "COLUMNS": str(COLUMNS)}
        command = [str(Path(sys.executable).parent / "saccade"), *words]
        self.child = pexpect.spawn(command[0], command[1:], env=environment, dimensions=(LINES, COLUMNS), timeout=None)
        self.began = time.monotonic()
        self.seen: list[tuple[float, str]] = []

    @property
    def text(self) -> str:
        return "\n".join(line.rstrip() for line in self.screen.display).rstrip()

    def until(self, done: Callable[[str], bool], seconds: float = 300) -> None:
        """Take what is drawn until the screen is so."""
        ends = time.monotonic() + seconds
        while not done(self.text):
            if time.monotonic() > ends:
                raise SystemExit(f"nothing of the kind came:\n{self.text}")
            self.take(TICK)

    def take(self, seconds: float) -> None:
        ends = time.monotonic() + seconds
        while (left := ends - time.monotonic()) > 0:
            try:
                self._stream.feed(self.child.read_nonblocking(1 << 16, left))
            except pexpect.TIMEOUT:
                pass
            except pexpect.EOF:
                break
        found = READ.search(self.text)
        if found and (not self.seen or self.seen[-1][1] != found[0]):
            self.seen.append((time.monotonic() - self.began, found[0]))

    def type(self, words: str, each: float = 0.05) -> None:
        for letter in words:
            self.child.send(letter)
            self.take(each)

    def picture(self, path: Path, title: str) -> None:
        console = Console(record=True, width=COLUMNS, file=open(os.devnull, "w"), force_terminal=True)  # noqa: SIM115
        for number in range(len(self.text.splitlines())):
            line, row = Text(), self.screen.buffer[number]
            for column in range(COLUMNS):
                cell = row[column]
                named = {"default": "", "brown": "yellow"}.get(cell.fg, cell.fg)
                style = named if named.isalpha() or not named else f"#{named}"
                line.append(cell.data, f"{'bold ' if cell.bold else ''}{style}".strip())
            line.rstrip()
            console.print(line)
        drawn = _FONTS.sub("", console.export_svg(title=title))
        drawn = drawn.replace("<svg", f'<svg role="img" aria-label="{title}"', 1)
        path.write_text(
            "\n".join(line.rstrip() for line in drawn.splitlines() if line.strip()) + "\n", encoding="utf-8"
        )

    def foretold(self) -> None:
        """Print how reading went, and each rest beside the true one."""
        if not self.seen:
            return
        ended = self.seen[-1][0]
        for at, said in self.seen:
            print(f"  {at - self.seen[0][0]:6.1f} s: {said}; true rest {ended - at:.0f} s", flush=True)


def main(model: str, book: str, folder: Path) -> None:
    common = ("-m", model, "-f", book, "--first", "7500", "--temperature", "0")
    chat = Terminal("chat", *common, "-n", "60")
    chat.until(lambda text: "left)" in text)
    chat.type("Who tells this story, and where")
    chat.until(lambda text: re.search(r"[3-6]\d%", text) is not None)
    chat.picture(folder / "terminal-reading.svg", "saccade chat reads a book while one types")
    chat.until(lambda text: "reading" not in text)
    chat.foretold()
    chat.type(" does he go?\r")
    chat.until(lambda text: "allows more" in text)
    chat.type("/report\r")
    chat.until(lambda text: "decode:" in text)
    chat.picture(folder / "terminal-answer.svg", "An answer that was cut, and its report")
    chat.type("\x04")
    generate = Terminal("generate", *common, "-n", "30", "Who tells this story?")
    generate.until(lambda text: "loading" in text)
    print(f"  loading shown after {time.monotonic() - generate.began:.1f} s")
    generate.until(lambda text: "reading" in text)
    print(f"  bar: {generate.text.splitlines()[-1].strip()}")
    generate.until(lambda text: "tokens by" in text)
    generate.foretold()
    generate.child.expect(pexpect.EOF)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3] if len(sys.argv) > 3 else "docs/images"))
