"""What a task is made of: samples of one or more turns, as the jsonl files of ``saccade eval prepare`` hold them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from saccade.errors import RequestError
from saccade.files import written_whole

POSITIONS = ("begin", "middle", "end")


@dataclass(frozen=True)
class Turn:
    """One user message and what the assistant should answer.

    ``context``: segments that are concatenated as they are (each brings its own white space); may be empty in a later
    turn. ``question`` stands before, between (after segment ``len(context) // 2``) or after them, by ``position``.
    ``prefix`` opens the assistant's message (an answer cue); ``answers`` are the references, whose meaning is
    ``metric``'s, a name in ``saccade.eval.metrics.METRICS``. ``meta``: plain data for analysis (depth, relevant turns).
    """

    context: tuple[str, ...]
    question: str
    answers: tuple[str, ...]
    metric: str
    max_new_tokens: int
    position: str = "end"
    prefix: str = ""
    meta: dict[str, Any] = field(default_factory=dict)

    def split(self) -> tuple[str, str]:
        """The user message in two parts: up to the question, and from the question on."""
        if self.position not in POSITIONS:
            raise RequestError(f"position={self.position!r} is not one of {', '.join(POSITIONS)}")
        cut = {"begin": 0, "middle": len(self.context) // 2, "end": len(self.context)}[self.position]
        return "".join(self.context[:cut]), self.question + "".join(self.context[cut:])

    def message(self) -> str:
        """The user message."""
        return "".join(self.split())


@dataclass(frozen=True)
class Sample:
    """One item of a task. ``length``: the nominal length in tokens; ``index``: its number within task and length.

    With ``shared`` every turn is asked on its own over the first turn's context (one context, several questions);
    otherwise the turns are one conversation.
    """

    task: str
    length: int
    index: int
    seed: int
    turns: tuple[Turn, ...]
    shared: bool = False
    meta: dict[str, Any] = field(default_factory=dict)

    @property
    def id(self) -> str:
        return f"{self.task}/{self.length}/{self.seed}/{self.index}"

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON, ``id`` first."""
        return {"id": self.id, **asdict(self)}

    @classmethod
    def from_dict(cls, record: dict[str, Any]) -> Sample:
        """The inverse of ``as_dict``. Raises RequestError for a record that is no sample."""
        try:
            turns = tuple(
                Turn(**{**turn, "context": tuple(turn["context"]), "answers": tuple(turn["answers"])})
                for turn in record["turns"]
            )
            return cls(**{key: value for key, value in record.items() if key not in ("id", "turns")}, turns=turns)
        except (KeyError, TypeError) as error:
            raise RequestError(f"record {record.get('id')!r} is not a sample: {error}") from None


def write_jsonl(path: Path, records: Iterable[dict[str, Any]]) -> None:
    """One record a line, whole or not at all (see files.written_whole)."""
    with written_whole(path) as aside, aside.open("w", encoding="utf-8", newline="\n") as file:
        for record in records:
            file.write(json.dumps(record, ensure_ascii=False) + "\n")


def read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """Records in order. Raises RequestError that names the line that is not JSON."""
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                try:
                    yield json.loads(line)
                except json.JSONDecodeError as error:
                    raise RequestError(f"{path}, line {number} is not JSON: {error}") from None
