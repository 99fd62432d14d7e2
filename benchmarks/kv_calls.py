"""What storing keys and values in fewer bits does to forced calls of tools: the same requests under each format, each
behind a document as long as ``--length`` says, answered along the grammar that ``saccade serve`` forces calls by. A
call is right if its function and all of its arguments are those that were asked for.

    python benchmarks/kv_calls.py --model build/real/qwen2.5-coder --count 100 --length 512

A model whose chat template knows no tools, or that has none, reads the functions in the text, with a call of each
as an example, and answers with a list of JSON.
"""

from __future__ import annotations

import argparse
import json
import random
from typing import Any, NamedTuple

from kv_tasks import config_of, give_back

from saccade import LLM, SamplingParams
from saccade.engine.core import new_request_id
from saccade.engine.messages import AddRequest
from saccade.errors import SaccadeError
from saccade.eval.setting import load
from saccade.eval.stats import paired_difference
from saccade.methods.policy import Policy
from saccade.outputs import finished
from saccade.prose import generate
from saccade.server.matchers import Compiler, Grammar
from saccade.server.tool_formats import UNKNOWN, ToolFormat, format_of
from saccade.server.tool_formats.parts import Arguments, Begun, settled
from saccade.server.tool_formats.words import Words

MOST = 96  # tokens of a call
CITIES = "Lisbon", "Nairobi", "Osaka", "Quito", "Tromso", "Vilnius", "Adelaide", "Ghent"
PEOPLE = "Ada", "Bruno", "Chiara", "Dmitri", "Emeka", "Farah", "Greta", "Hugo"
TEXT, NUMBER = {"type": "string"}, {"type": "integer"}
FUNCTIONS = {
    "get_weather": {"city": TEXT, "days": NUMBER},
    "convert_money": {"amount": NUMBER, "source": {"enum": ["EUR", "USD", "JPY"]}, "target": {"enum": ["GBP", "CHF"]}},
    "send_message": {"to": TEXT, "minutes": NUMBER},
    "book_table": {"city": TEXT, "guests": NUMBER, "outside": {"type": "boolean"}},
}
ASKED = {
    "get_weather": "What will the weather be in {city} over the next {days} days?",
    "convert_money": "How much are {amount} {source} in {target}?",
    "send_message": "Send a message to {to} in {minutes} minutes.",
    "book_table": "Book a table in {city} for {guests} guests, with outside set to {outside}.",
}
SHOWN: tuple[tuple[str, dict[str, Any]], ...] = (  # one of each: a small model calls nothing else
    ("get_weather", {"city": "Lima", "days": 3}),
    ("convert_money", {"amount": 18, "source": "USD", "target": "CHF"}),
    ("send_message", {"to": "Ines", "minutes": 25}),
    ("book_table", {"city": "Cork", "guests": 7, "outside": False}),
)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": fields,
                "required": list(fields),
                "additionalProperties": False,
            },
        },
    }
    for name, fields in FUNCTIONS.items()
]


class Wanted(NamedTuple):
    """A request: a document, the question behind it, the function that is asked for, and its arguments."""

    document: str
    question: str
    name: str
    arguments: dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--formats", default="auto,int8", help="values of kv_dtype; others are held against the first")
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--length", type=int, default=512, help="tokens of a document before the question, about")
    parser.add_argument("--policy", default="dense")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--together", type=int, default=4, help="requests that are answered at once")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--kv-memory", default="512MiB", help="of each engine; more for requests that share steps")
    asked = parser.parse_args()
    wanted = [request(number, asked.length) for number in range(asked.count)]
    first: list[bool] | None = None
    for format in asked.formats.split(","):
        found = answered(asked, wanted, format)
        give_back()
        calls = sum(one is not None for one in found)
        correct = [one == (ask.name, ask.arguments) for one, ask in zip(found, wanted)]
        first = correct if first is None else first
        gap = paired_difference([100.0 * one for one in correct], [100.0 * one for one in first])
        better, worse = (sum(sign * (a - b) > 0 for a, b in zip(correct, first)) for sign in (1, -1))
        print(
            f"| {asked.model}, {asked.dtype}, {asked.device}, {asked.length} tokens | {format} | calls "
            f"{calls} of {len(found)} | right {sum(correct)} | {gap.mean:+.2f} [{gap.low:+.2f}, {gap.high:+.2f}] | "
            f"{better}, {worse} |",
            flush=True,
        )


def answered(asked: argparse.Namespace, wanted: list[Wanted], format: str) -> list[tuple[str, Any] | None]:
    """The calls under ``format``. Its engine goes as this returns: the next one's keys take its room."""
    with load(config_of(asked, format), asked.together) as llm:
        return answers(llm, wanted, Policy.parse(asked.policy))


def request(number: int, length: int) -> Wanted:
    """A function of its arguments alone."""
    rng = random.Random(number)
    name = rng.choice(sorted(FUNCTIONS))
    chosen: dict[str, Any] = {}
    for field, schema in FUNCTIONS[name].items():
        if "enum" in schema:
            chosen[field] = rng.choice(schema["enum"])
        elif schema == NUMBER:
            chosen[field] = rng.randint(2, 90)
        elif schema == TEXT:
            chosen[field] = rng.choice(PEOPLE if field == "to" else CITIES)
        else:
            chosen[field] = rng.random() < 0.5
    return Wanted(generate(5 * length, seed=number), question(name, chosen), name, chosen)


def question(name: str, arguments: dict[str, Any]) -> str:
    told = {key: str(value).lower() if isinstance(value, bool) else value for key, value in arguments.items()}
    return ASKED[name].format(**told)


def answers(llm: LLM, wanted: list[Wanted], policy: Policy) -> list[tuple[str, Any] | None]:
    """The function and arguments of each call; None for an answer that is no call, one that was cut short say."""
    hf = llm.get_tokenizer()
    format = format_of(str(getattr(hf, "chat_template", None) or "")) or UNKNOWN
    words = Words(hf)
    source = format.grammar([tool["function"] for tool in TOOLS], 1, words)
    grammar = Grammar(source, "the tools", Compiler(hf, llm.model.spec.vocab_size, llm.model.eos_token_ids))
    params = SamplingParams(temperature=0, max_tokens=MOST, skip_special_tokens=not words.hidden(format.marks))
    messages = [
        AddRequest(new_request_id(), prompt(llm, one, format), params, policy, constraint=grammar) for one in wanted
    ]
    with llm.loop.asked(messages) as streams:
        outcomes = finished(streams)
    failed = next((one.error for one in outcomes if one.error is not None), None)
    if failed is not None:
        raise SaccadeError(f"a request failed: {failed}")
    return [call(format, one.text) for one in outcomes]


def prompt(llm: LLM, wanted: Wanted, format: ToolFormat) -> list[int]:
    """Token ids. Where the chat template knows no tools none is used: small models do better behind "Call:"."""
    if format is not UNKNOWN:
        said = f"{wanted.document}\n\n{wanted.question}"
        return llm.tokenizer.apply_chat_template([{"role": "user", "content": said}], True, {"tools": TOOLS})
    functions = "\n".join(json.dumps(tool["function"]) for tool in TOOLS)
    examples = "\n\n".join(
        f"Request: {question(name, arguments)}\nCall: {json.dumps([{'name': name, 'arguments': arguments}])}"
        for name, arguments in SHOWN
    )
    said = f"{wanted.document}\n\nFunctions:\n{functions}\n\n{examples}\n\nRequest: {wanted.question}\nCall:"
    return llm.encode(said)


def call(format: ToolFormat, text: str) -> tuple[str, Any] | None:
    parts = list(settled(format.reader(TOOLS).feed(text, final=True)))
    names = [part.name for part in parts if isinstance(part, Begun)]
    arguments = [part.text for part in parts if isinstance(part, Arguments)]
    if len(names) != 1 or len(arguments) != 1:
        return None
    return names[0], json.loads(arguments[0])


if __name__ == "__main__":
    main()
