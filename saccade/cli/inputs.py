"""Reading prompts and writing reports, with errors that name the file and the way out."""

from __future__ import annotations

import json
import os
import select
import stat
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from saccade.documents import text_of
from saccade.errors import RequestError, shown
from saccade.files import write_text
from saccade.machine import show_bytes

if TYPE_CHECKING:
    from saccade.llm import LLM

SAMPLE = 20_000  # characters whose tokens stand for all of a long text's
WAIT = 2.0  # seconds before a silent standard input is mentioned


def read_text(path: Path) -> str:
    """A document's text (see saccade.documents). RequestError for what has none."""
    try:
        if not path.exists():
            raise RequestError(f"prompt file {path} does not exist")
        if path.is_dir():
            raise RequestError(f"prompt file {path} is a folder; give one of its files")
        return text_of(path.read_bytes(), str(path))
    except OSError as error:
        raise RequestError(f"prompt file {shown(str(path))} cannot be read: {error.strerror}") from error


@dataclass(frozen=True)
class Part:
    """The ``first`` or ``last`` tokens of a document, or both ends; all of it where neither is given."""

    first: int | None = None
    last: int | None = None

    def __post_init__(self) -> None:
        for name in ("first", "last"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise RequestError(f"--{name} {value} must be a number of tokens, at least 1")

    def of(self, text: str, tokenizer: Any) -> str:
        """That part of ``text``."""
        if self.first is None and self.last is None:
            return text
        ids = tokenizer.encode(text, add_special_tokens=False)
        if len(ids) <= (self.first or 0) + (self.last or 0):
            return text
        ends = [ids[: self.first] if self.first else [], ids[-self.last :] if self.last else []]
        return "\n\n[...]\n\n".join(tokenizer.decode(one).strip("\ufffd") for one in ends if one)


WHOLE = Part()


def room_of(llm: LLM) -> int:
    """Tokens of a context."""
    return llm.engine.checks.limits.room


def has_room(llm: LLM) -> str:
    """How much room there is, and how to have more."""
    room, most = room_of(llm), llm.model.spec.max_position
    if room < llm.max_model_len:
        more = "--kv-memory gives more, and --kv-disk FOLDER:SIZE puts keys on a disk"
    else:
        more = "the model reads no more" if room == most else f"--max-model-len gives up to {most:,}"
    return f"the context has room for {room:,} ({more})"


def refuse_too_long(text: str, name: str, llm: LLM) -> None:
    """RequestError, by an estimate, for a text that is much too long: to count its tokens takes time."""
    room, about = room_of(llm), tokens_about(text, llm.tokenizer)
    if about > 1.2 * room:
        raise RequestError(
            f"{name} has about {about:,} tokens ({show_bytes(len(text.encode()))}), and {has_room(llm)}; "
            f"--last {room // 2} or --first {room // 2} takes a part of it"
        )


def tokens_about(text: str, tokenizer: Any) -> int:
    """How many tokens a text has, by a part of its middle where it is long."""
    if len(text) <= 2 * SAMPLE:
        return len(tokenizer.encode(text, add_special_tokens=False))
    at = (len(text) - SAMPLE) // 2
    return len(tokenizer.encode(text[at : at + SAMPLE], add_special_tokens=False)) * len(text) // SAMPLE


def gather_prompt(prompt: str | None, file: Path | None) -> str:
    """The prompt from an argument, a document (a file, or what is piped in), or a document followed by an argument,
    with a line break in between."""
    return "\n".join(part for part in gather(prompt, file) if part is not None)


def gather(prompt: str | None, file: Path | None) -> tuple[str | None, str | None]:
    """A document, and what follows it; one of them may be None. A document's last line break is dropped, as editors add
    it. RequestError for an empty document: a document that is given is meant to be read."""
    name, document = "", None
    if file is not None and str(file) != "-":
        name, document = f"prompt file {file}", read_text(file)
    elif file is not None or prompt is None or prompt == "-" or piped():
        if file is None and (sys.stdin is None or sys.stdin.isatty()):
            raise RequestError("no prompt: give it as an argument, with --prompt-file FILE, or on standard input")
        name, document = "standard input", _standard_input()
        prompt = None if prompt == "-" and file is None else prompt
    if document is not None and not document.strip():
        away = "</dev/null where none is meant" if name == "standard input" else "leave it away"
        raise RequestError(f"{name} is empty; give a document with some text, or {away}")
    if document is None and not prompt:
        raise RequestError("the prompt is empty; give some text")
    return None if document is None else document.removesuffix("\n"), prompt


def piped() -> bool:
    """Whether standard input is a pipe or a file, put there to be read."""
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (AttributeError, OSError, ValueError):  # no standard input, a closed one, or none of the system's
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode) or stat.S_ISSOCK(mode)


def _standard_input() -> str:
    """All of standard input; says so where nothing comes, as a pipe that is never closed would wait for ever."""
    if piped() and not select.select([sys.stdin], [], [], WAIT)[0]:
        print("saccade: note: reading standard input, where nothing came yet; </dev/null stops that", file=sys.stderr)
    return text_of(sys.stdin.buffer.read(), "standard input")


def write_json(path: Path, data: Any) -> None:
    write_text(path, json.dumps(data, indent=2, ensure_ascii=False) + "\n")
