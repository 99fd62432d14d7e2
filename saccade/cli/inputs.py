"""Reading prompts and writing reports, with errors that name the file and the way out."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from saccade.errors import RequestError, shown
from saccade.files import write_text


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
    """The prompt from an argument, a file, standard input, or a document followed by an argument.

    A document's last line break is dropped, as editors add it; between a document and an argument one is put back.
    """
    document: str | None = None
    if file is not None:
        document = decode(sys.stdin.buffer.read(), "standard input") if str(file) == "-" else read_text(file)
    elif prompt is None or prompt == "-":
        if sys.stdin is None or sys.stdin.isatty():
            raise RequestError("no prompt: give it as an argument, with --prompt-file FILE, or on standard input")
        document, prompt = decode(sys.stdin.buffer.read(), "standard input"), None
    if document is None:
        text = prompt or ""
    else:
        document = document.removesuffix("\n")
        text = document if prompt is None else f"{document}\n{prompt}"
    if not text:
        raise RequestError("the prompt is empty; give some text")
    return text


def write_json(path: Path, data: Any) -> None:
    write_text(path, json.dumps(data, indent=2, ensure_ascii=False) + "\n")
