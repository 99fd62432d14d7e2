"""Two agents that work through the Messages API: what they send is written here, what the model says is forced by a
grammar, so that any model plays its part. They grow to a number of tokens as agents do: one reads much at first and
then takes small steps, the other begins with a handbook and grows evenly.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

JSON = dict[str, Any]
MARK = {"cache_control": {"type": "ephemeral"}}
_WORDS = [
    "the",
    "field",
    "of",
    "a",
    "table",
    "is",
    "read",
    "by",
    "each",
    "test",
    "that",
    "opens",
    "what",
    "it",
    "found",
]


def prose(rng: random.Random, letters: int) -> str:
    """So many letters of words."""
    words: list[str] = []
    while sum(map(len, words)) + len(words) < letters:
        words.append(f"{rng.choice(_WORDS)}{rng.randrange(100) if rng.random() < 0.2 else ''}")
    return " ".join(words)[:letters]


def _tool(name: str, what: str, *fields: str) -> JSON:
    schema = {"type": "object", "properties": {one: {"type": "string"} for one in fields}, "required": list(fields)}
    return {"name": name, "description": what, "input_schema": schema}


@dataclass
class Agent:
    """``head``: the first block of its system prompt, with the call's number in it; ``start``: the share of all letters
    that its first request has; ``early``: the share that results of the first quarter of its turns have of the rest."""

    name: str
    head: str
    task: str
    tools: list[JSON]
    start: float
    early: float
    thinks: bool = False
    seed: int = 0
    rng: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)

    def results(self, turns: int, letters: int) -> Iterator[int]:
        """How many letters each turn's results have."""
        rest, first = letters * (1 - self.start), max(1, turns // 4)
        for number in range(turns):
            yield int(rest * self.early / first if number < first else rest * (1 - self.early) / (turns - first))

    def say(self, number: int) -> tuple[str, int]:
        """What the model is made to write in a turn, and how many calls that has."""
        calls, rng = 2 if number % 3 == 1 else 1, self.rng
        written = []
        for _ in range(calls):
            tool = rng.choice(self.tools)
            given = {name: f"{prose(rng, 12)}" for name in tool["input_schema"]["required"]}
            written.append(f"<tool_call>\n{json.dumps({'name': tool['name'], 'arguments': given})}\n</tool_call>")
        thoughts = f"<think>{prose(rng, 30)}</think>" if self.thinks else ""
        return f"{thoughts}Step {number}: {prose(rng, 20)}.\n" + "\n".join(written), calls


def agents() -> list[Agent]:
    coder = [_tool("read_file", "the lines of a file", "path"), _tool("run_tests", "what a test run prints", "name")]
    coder.append(_tool("edit_file", "put one text in another's place", "path", "old", "new"))
    reader = [_tool("search", "sections of the handbook about a question", "question")]
    reader.append(_tool("note", "keep a finding", "text"))
    return [
        Agent("coder", "x-anthropic-billing-header: cc_version=2.1; cch={:05x};", "mend the parser", coder, 0.15, 0.85),
        Agent("reader", "It is now minute {} of the shift.", "find who signs", reader, 0.55, 0.25, True, 1),
    ]


@dataclass
class Played:
    """Of each turn the prompt's tokens, how many were read from the cache, and how many an earlier request had."""

    prompts: list[int] = field(default_factory=list)
    read: list[int] = field(default_factory=list)

    @property
    def share(self) -> float:
        """Tokens that were read from the cache, of all prompt tokens."""
        return sum(self.read) / sum(self.prompts)

    @property
    def best(self) -> float:
        """What the share would be if nothing that an earlier prompt had was computed again."""
        return sum(self.prompts[:-1]) / sum(self.prompts)


def play(agent: Agent, ask: Callable[[JSON], JSON], turns: int, letters: int) -> Played:
    """Have an agent take its turns. ``ask`` sends a request's fields and gives the message as JSON."""
    played, rng = Played(), agent.rng
    rules = {"type": "text", "text": prose(rng, int(letters * agent.start)), **MARK}
    messages: list[JSON] = [{"role": "user", "content": [{"type": "text", "text": agent.task}]}]
    for number, size in enumerate(agent.results(turns, letters)):
        written, calls = agent.say(number)
        messages[-1]["content"][-1] |= MARK  # as clients do: the last block, in each request another one
        message = ask({
            "system": [{"type": "text", "text": agent.head.format(number)}, rules],
            "messages": messages,
            "tools": agent.tools,
            "max_tokens": 2000,
            "structured_outputs": {"choice": [written]},
        })  # fmt: skip
        del messages[-1]["content"][-1]["cache_control"]
        used = [block for block in message["content"] if block["type"] == "tool_use"]
        assert message["stop_reason"] == "tool_use"
        assert len(used) == calls
        usage = message["usage"]
        read = usage["cache_read_input_tokens"]
        played.read.append(read)
        played.prompts.append(read + usage["cache_creation_input_tokens"] + usage["input_tokens"])
        results = [
            {"type": "tool_result", "tool_use_id": block["id"], "content": prose(rng, size // calls)} for block in used
        ]
        messages += [{"role": "assistant", "content": message["content"]}, {"role": "user", "content": results}]
    return played
