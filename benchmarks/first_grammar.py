"""What the first grammar does to others: the longest stop of a running stream, before it came and beside it, and how
long a server takes to start.

    python benchmarks/first_grammar.py --model qwen2.5-coder.gguf [--kind schema --kind call] [--runs 3] [--threads 1]

Starts ``saccade serve`` once for each run. A stream runs; one request comes beside it whose answer must follow a JSON
schema, or be a call. Each is the first grammar of its server. Times are a client's, over HTTP; the start is the time
from the command until the server answers.
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
import random
import time

from token_gap import SHORT, STREAM, Asked, ids, serving, wait_for

ALONE = 3.0  # seconds of the stream before the grammar comes
AFTER = 3.0  # and after its answer
SCHEMA = {"type": "object", "properties": {"name": {"enum": ["Ada", "Bob"]}}, "required": ["name"]}
TOOL = {"type": "function", "function": {"name": "greet", "parameters": SCHEMA}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "greet", "schema": SCHEMA}}
MESSAGES = [{"role": "user", "content": "Greet Ada."}]
KINDS: dict[str, tuple[str, dict[str, object]]] = {
    "none": ("completions", {"prompt": "Greet Ada."}),
    "schema": ("completions", {"prompt": "Greet Ada.", "response_format": FORMAT}),
    "call": ("chat/completions", {"messages": MESSAGES, "tools": [TOOL], "tool_choice": "required"}),
}


def asked(address: tuple[str, int], kind: str) -> float:
    """Seconds until a request of ``kind`` has its answer."""
    path, asks = KINDS[kind]
    body = {"max_tokens": 24, "temperature": 0, **asks}
    began, client = time.perf_counter(), http.client.HTTPConnection(*address)
    client.request("POST", f"/v1/{path}", json.dumps(body), {"content-type": "application/json"})
    answer = client.getresponse()
    said = answer.read().decode()
    client.close()
    if answer.status != 200:
        raise RuntimeError(said)
    return time.perf_counter() - began


def stops(times: list[float], since: float, until: float) -> list[float]:
    """Seconds between two tokens, of those that came in that time."""
    return [after - at for at, after in itertools.pairwise(times) if after > since and at < until]


def measure(address: tuple[str, int], kind: str, rng: random.Random) -> list[float]:
    """Columns of the table after the start's."""
    stream = Asked(address, ids(SHORT, rng), STREAM, "dense")
    wait_for(stream, 20)
    began = time.perf_counter()
    time.sleep(ALONE)
    came = time.perf_counter()
    took = asked(address, kind)
    ended = time.perf_counter()
    time.sleep(AFTER)
    alone, beside = stops(stream.times, began, came), stops(stream.times, came, ended)
    stream.left = True
    stream.join()
    return [max(alone), max(beside), took, asked(address, kind)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--kind", action="append", choices=list(KINDS))
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--kv-memory", default="512MiB")
    given = parser.parse_args()
    print("kind  start s  longest stop alone s  beside s  first answer s  second s")
    for number, kind in itertools.product(range(given.runs), given.kind or ["schema", "call"]):
        began = time.perf_counter()
        with serving(given.model, "0.5", given) as address:
            row = [time.perf_counter() - began, *measure(address, kind, random.Random(number))]
        print(kind, *(f"{value:.2f}" for value in row), sep="  ", flush=True)


if __name__ == "__main__":
    main()
