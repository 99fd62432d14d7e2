"""Reading prompts and writing reports, with errors that name the file and the way out."""

from __future__ import annotations

import json
import os
import select
import stat
import sys
from pathlib import Path
from typing import Any

from saccade.errors import RequestError, shown
from saccade.files import write_text

WAIT = 2.0  # seconds before a silent standard input is mentioned


def read_text(path: Path) -> str:
    """A UTF-8 file's text (a byte-order mark is dropped). RequestError for anything that is not one."""
    try:
        if not path.exists():
            raise RequestError(f"prompt file {path} does not exist")
        if path.is_dir():
            raise RequestError(f"prompt file {path} is a folder; give a text file")
        return decode(path.read_bytes(), str(path))
    except OSError as error:
        raise RequestError(f"prompt file {shown(str(path))} cannot be read: {error.strerror}") from error


def decode(data: bytes, name: str) -> str:
    try:
        return data.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise RequestError(
            f"{name} is not UTF-8 text: byte 0x{data[error.start]:02x} at offset {error.start}; "
            f"convert it first, for example with iconv -f latin1 -t utf-8"
        ) from error


def gather_prompt(prompt: str | None, file: Path | None) -> str:
    """The prompt from an argument, a document (a file, or what is piped in), or a document followed by an argument.

    A document's last line break is dropped, as editors add it; between a document and an argument one is put back.
    RequestError for an empty document: whoever gave one meant it to be read.
    """
    name, document = "", None
    if file is not None and str(file) != "-":
        name, document = f"prompt file {file}", read_text(file)
    elif file is not None or prompt is None or prompt == "-" or piped():
        if file is None and (sys.stdin is None or sys.stdin.isatty()):
            raise RequestError("no prompt: give it as an argument, with --prompt-file FILE, or on standard input")
        name, document = "standard input", _standard_input()
        prompt = None if prompt == "-" and file is None else prompt
    if document is None:
        text = prompt or ""
    elif not document.strip():
        raise RequestError(f"{name} is empty; give a document with some text, or leave it away")
    else:
        document = document.removesuffix("\n")
        text = document if prompt is None else f"{document}\n{prompt}"
    if not text:
        raise RequestError("the prompt is empty; give some text")
    return text


def piped() -> bool:
    """Whether standard input is a pipe or a file, which somebody put there to be read."""
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (AttributeError, OSError, ValueError):  # no standard input, a closed one, or none of the system's
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode) or stat.S_ISSOCK(mode)


def _standard_input() -> str:
    """All of standard input; says so where nothing comes, as a pipe that nobody closes would wait for ever."""
    if piped() and not select.select([sys.stdin], [], [], WAIT)[0]:
        print("saccade: note: reading standard input, where nothing came yet; </dev/null stops that", file=sys.stderr)
    return decode(sys.stdin.buffer.read(), "standard input")


def write_json(path: Path, data: Any) -> None:
    write_text(path, json.dumps(data, indent=2, ensure_ascii=False) + "\n")
