"""InfiniteBench (Zhang et al. 2024, arXiv 2402.13718): the ten tasks that papers report, from the files users bring.

A file is ``{task}.jsonl`` as in the data set itself; nothing is downloaded. The layout is the published one for open
models: plain text without a chat template (an instruction, the context, the question, the cue that the answer goes on
from), prompts that are too long lose their middle, and answers have the published lengths. The wording is this
project's, unless the folder holds the benchmark's own ``prompt.py``: then its ``yarn_mistral_templates`` are read, as
text, and nothing in it is run.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from saccade.errors import RequestError
from saccade.eval.longbench import Codec, truncate_middle
from saccade.eval.samples import Sample, Turn, read_jsonl

TEMPLATES_FILE, TEMPLATES_NAME = "prompt.py", "yarn_mistral_templates"
LETTERS = "ABCD"
SLACK = 16  # tokens: a text decoded in two pieces may be encoded in a few more
_OPTIONS = "".join(f"\n{letter}. {{OPTION_{letter}}}" for letter in LETTERS)


@dataclass(frozen=True)
class Task:
    """``label``: its name in papers' tables; ``most``: tokens of an answer; ``metric``: of ``metrics.METRICS``."""

    label: str
    most: int
    metric: str
    template: str

    @property
    def chooses(self) -> bool:
        """Whether the answer is one of four options."""
        return self.metric in ("option_letter", "marked_option")


TASKS: Mapping[str, Task] = {
    "longbook_sum_eng": Task("En.Sum", 1200, "rouge_lsum", "Write a summary of this book.\n\n{context}\n\nSummary:"),
    "longbook_qa_eng": Task(
        "En.QA",
        40,
        "qa_f1_score",
        "Answer a question about this book in a few words.\n\n{context}\n\nQuestion: {question}\nAnswer:",
    ),
    "longbook_choice_eng": Task(
        "En.MC",
        40,
        "option_letter",
        f"Answer a question about this book.\n\n{{context}}\n\nQuestion: {{question}}{_OPTIONS}\n\n"
        "The letter of the right answer is",
    ),
    "longdialogue_qa_eng": Task(
        "En.Dia",
        40,
        "names_word",
        'In this dialogue a character\'s name was replaced once with "$$MASK$$".\n\n{context}\n\n'
        "The name behind $$MASK$$ is most likely",
    ),
    "longbook_qa_chn": Task(
        "Zh.QA", 40, "qa_f1_characters", "请读这本书，然后回答问题。\n\n{context}\n\n问题：{question}\n答案："
    ),
    "code_debug": Task(
        "Code.Debug",
        5,
        "marked_option",
        "One function of this Python code has an error that was put there on purpose.\n\n{context}\n\n"
        f"Options:{_OPTIONS}\n\nThe right option is:",
    ),
    "math_find": Task("Math.Find", 3, "first_number", "{prefix}\n\n{context}\n\n{input}"),
    "passkey": Task(
        "Retr.PassKey",
        6,
        "first_digits",
        "A pass key is hidden in a long text that does not matter. Remember it.\n\n{context}\n\n{input}\n\n"
        "The pass key is",
    ),
    "number_string": Task(
        "Retr.Number",
        12,
        "first_digits",
        "A sequence of digits is hidden in a long text that does not matter. Remember it.\n\n{context}\n\n{input}\n\n"
        "The sequence of digits is",
    ),
    "kv_retrieval": Task(
        "Retr.KV", 50, "holds_word", "Give the value that the JSON object has for a key.\n\n{context}\n\n{input}"
    ),
}


def task_of(path: Path) -> str:
    """The task whose file this is, by its name. Raises RequestError for a name that is none."""
    if path.suffix != ".jsonl" or path.stem not in TASKS:
        raise RequestError(f"{path.name} is not the file of an InfiniteBench task; known: {', '.join(TASKS)} (.jsonl)")
    return path.stem


def templates(folder: Path) -> dict[str, str]:
    """The prompt of each task: the benchmark's own where ``folder`` holds its ``prompt.py``, else this project's.
    Raises RequestError for a ``prompt.py`` that has no templates to read, or one without its ``{context}``."""
    own = {name: task.template for name, task in TASKS.items()}
    file = folder / TEMPLATES_FILE
    if not file.is_file():
        return own
    try:
        lines = ast.parse(file.read_text(encoding="utf-8")).body
        given = next(
            ast.literal_eval(line.value)
            for line in lines
            if isinstance(line, ast.Assign) and [ast.unparse(one) for one in line.targets] == [TEMPLATES_NAME]
        )
        found = {name: str(given[name]) for name in own}
    except (StopIteration, KeyError, TypeError, ValueError, SyntaxError, OSError) as error:
        raise RequestError(
            f"{file} has no {TEMPLATES_NAME} for all ten tasks ({type(error).__name__}); bring InfiniteBench's "
            "src/prompt.py as it is, or take it out of the folder"
        ) from None
    for name, text in found.items():
        if text.count("{context}") != 1:
            raise RequestError(f"{file}: the template of {name} must have {{context}} once")
    return found


def load(
    path: Path, *, template: str | None = None, codec: Codec | None = None, length: int | None = None
) -> Iterator[Sample]:
    """One sample of one turn for each item of the file.

    ``codec`` and ``length`` cut prompts in their middle so that prompt and answer fit ``length`` tokens. Turn meta says
    ``chat`` (no template), ``truncated`` and ``label``. Raises RequestError for a missing file, for a line that is no
    item of the task (with its number), and for a length in which no answer has room.
    """
    name = task_of(path)
    task = TASKS[name]
    longest = None if length is None else length - task.most - SLACK
    if (codec is None) != (longest is None) or (longest is not None and longest < 2):
        raise RequestError(
            f"length={length!r} must be above {task.most + SLACK + 1} for {name}, whose answers take {task.most} "
            "tokens, and comes with a tokenizer"
        )
    if not path.is_file():
        raise RequestError(f"{path} does not exist; InfiniteBench has one file a task, such as passkey.jsonl")
    for index, item in enumerate(read_jsonl(path)):
        try:
            head, tail, answers = _filled(name, template or task.template, item)
        except _NoItem as error:
            raise RequestError(f"{path}, line {index + 1} is no item of {name}: {error}") from None
        truncated = False
        if codec is not None and longest is not None:
            head, tail, truncated = truncate_middle(head, tail, codec, longest)
        turn = _turn(task, head, tail, answers, truncated)
        yield Sample(f"infinitebench:{name}", length or 0, index, 0, (turn,), meta={"_id": item.get("id")})


def make_turn(name: str, item: dict[str, Any]) -> Turn:
    """The turn that asks one item of a task in this project's wording, nothing cut."""
    return _turn(TASKS[name], *_filled(name, TASKS[name].template, item), truncated=False)


def _turn(task: Task, head: str, tail: str, answers: tuple[str, ...], truncated: bool) -> Turn:
    meta = {"chat": False, "truncated": truncated, "label": task.label}
    return Turn((head,) if head else (), tail, answers, task.metric, task.most, meta=meta)


class _NoItem(ValueError):
    pass


def _filled(name: str, template: str, item: Any) -> tuple[str, str, tuple[str, ...]]:
    """(prompt up to the context's end, the rest, references) of one item."""
    if not isinstance(item, dict):
        raise _NoItem("it is no object")
    missing = [key for key in ("context", "input", "answer") if key not in item]
    if missing:
        raise _NoItem(f"it has no {', '.join(missing)}")
    for key in ("context", "input"):
        if not isinstance(item[key], str):
            raise _NoItem(f"{key} must be text")
    answers = _answers(item["answer"])
    fields = {"input": item["input"], "question": item["input"]}
    if name == "math_find":
        asked = re.search(r"The .+ of", item["input"])
        if asked is None:
            raise _NoItem("input must name a number, such as 'The largest number of ...'")
        fields["prefix"] = f"What is {asked.group(0)[: -len(' of')].lower()} in the following list?"
    if TASKS[name].chooses:
        options = item.get("options")
        if not isinstance(options, list) or len(options) != len(LETTERS) or not all(map(_text, options)):
            raise _NoItem("options must be a list of four texts")
        if answers[0] not in options:
            raise _NoItem(f"answer {answers[0]!r} is none of the options")
        answers = answers[0], LETTERS[options.index(answers[0])]
        fields |= {f"OPTION_{letter}": text for letter, text in zip(LETTERS, options)}
    head, tail = (_put(part, fields) for part in template.split("{context}"))
    return head + item["context"], tail, answers


def _put(text: str, fields: Mapping[str, str]) -> str:
    # Not str.format: what is put in is data and may hold braces, which must not be filled again.
    return re.sub(r"\{(\w+)\}", lambda found: fields.get(found.group(1), found.group(0)), text)


def _answers(given: Any) -> tuple[str, ...]:
    listed = given if isinstance(given, list) else [given]
    plain = [str(one) for one in listed if isinstance(one, (str, int, float)) and not isinstance(one, bool)]
    if not plain or len(plain) < len(listed):
        raise _NoItem("answer must be a text or a number, or a list of them")
    return tuple(plain)


def _text(value: Any) -> bool:
    return isinstance(value, str)
