"""What storing keys and values in fewer bits does to forced calls of tools: the same requests to ``saccade serve``
under each format, behind a document as long as ``--length`` says. A call is right if its function and all of its
arguments are those that were asked for.

    python benchmarks/kv_calls.py --model build/real/qwen2.5-coder --count 100 --length 512
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
from serve_peers import HOST, free_port, running

from saccade.eval.stats import paired_difference
from saccade.prose import generate

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--formats", default="auto,int8", help="values of kv_dtype; others are held against the first")
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--length", type=int, default=512, help="tokens of a document before the question, about")
    parser.add_argument("--together", type=int, default=4)
    parser.add_argument("--threads", type=int, default=1)
    asked = parser.parse_args()
    wanted = [request(number, asked.length) for number in range(asked.count)]
    found = {}
    for format in asked.formats.split(","):
        port = free_port()
        command = [
            *(sys.executable, "-m", "saccade.cli.main", "serve", "--model", asked.model, "--policy", "dense"),
            *("--kv-dtype", format, "--kv-memory", "512MiB", "--threads", str(asked.threads), "--device", "cpu"),
            *("--host", HOST, "--port", str(port)),
        ]
        with (
            tempfile.TemporaryDirectory() as folder,
            running(command, port, Path(folder) / "log"),
            httpx.Client(base_url=f"http://{HOST}:{port}", timeout=600) as client,
            ThreadPoolExecutor(asked.together) as pool,
        ):
            name = client.get("/v1/models").json()["data"][0]["id"]
            found[format] = list(pool.map(partial(right, client, name), wanted))
        first = next(iter(found.values()))
        valid, correct = (sum(one[at] for one in found[format]) for at in (0, 1))
        gap = paired_difference([100 * one[1] for one in found[format]], [100 * one[1] for one in first])
        print(
            f"{asked.model}, {format}: {valid} of {asked.count} are calls, {correct} right; "
            f"{gap.mean:+.1f} [{gap.low:+.1f}, {gap.high:+.1f}] points",
            flush=True,
        )


def request(number: int, length: int) -> tuple[str, str, dict[str, Any]]:
    """What is said, the function that is asked for, and its arguments."""
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
    told = {key: str(value).lower() if isinstance(value, bool) else value for key, value in chosen.items()}
    prose = generate(5 * length, seed=number)
    return f"{prose}\n\n{ASKED[name].format(**told)}", name, chosen


def right(client: httpx.Client, model: str, wanted: tuple[str, str, dict[str, Any]]) -> tuple[bool, bool]:
    """Whether the answer is a call, and whether it is the one that was asked for."""
    said, name, arguments = wanted
    tools = [
        {
            "type": "function",
            "function": {
                "name": one,
                "parameters": {
                    "type": "object",
                    "properties": fields,
                    "required": list(fields),
                    "additionalProperties": False,
                },
            },
        }
        for one, fields in FUNCTIONS.items()
    ]
    body = {
        "model": model,
        "messages": [{"role": "user", "content": said}],
        "tools": tools,
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "temperature": 0,
        "max_tokens": 96,
    }
    answer = client.post("/v1/chat/completions", json=body)
    answer.raise_for_status()
    calls = answer.json()["choices"][0]["message"].get("tool_calls") or []
    try:
        (call,) = [(one["function"]["name"], json.loads(one["function"]["arguments"])) for one in calls]
    except ValueError:
        return False, False
    return True, call == (name, arguments)


if __name__ == "__main__":
    main()
