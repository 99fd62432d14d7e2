"""Requests that no client of good will sends, and what must hold whatever comes.

As a test: a few hundred of each kind. By hand, against a server of its own: ``make fuzz-server COUNT=100000``.
"""

from __future__ import annotations

import json
import random
import re
import socket
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

ODD: list[Any] = [None, True, False, 0, -1, 1, 2**31, 2**63, -(2**63), 10**30, 1e308, -1e-320, 0.5, "", " ", "\x00"]
ODD += ["\ud800", "\udfff\ud83d", "é", "😀" * 50, "x" * 3000, "${jndi:x}", "../../etc/passwd", "a\r\nset-cookie: b=c"]
ODD += [{"a": "\ud800"}, {"a": float("inf")}, [{"type": "message", "role": "user", "content": "\ud800"}]]
ODD += [[], {}, [[]], [None], [0, -1], {"": None}, [{}], {"$ref": "#"}, {"a": {"b": [1, {"c": None}]}}, ["x", 5]]
FIELDS = [
    "model prompt messages max_tokens temperature top_p top_k min_p n stop seed logprobs top_logprobs echo stream",
    "stream_options presence_penalty frequency_penalty repetition_penalty logit_bias bad_words min_tokens",
    "stop_token_ids response_format structured_outputs policy session_id report deadline_seconds user metadata",
    "tools tool_choice input instructions previous_response_id store chat_template_kwargs request_id tokens text",
    "truncate_prompt_tokens reasoning priority best_of suffix prompt_logprobs add_generation_prompt",
    "max_output_tokens cache_salt kv_transfer_params layers pixels system thinking stop_sequences cache_control",
    "output_config context_management mcp_servers continue_final_message",
]
NAMES = " ".join(FIELDS).split()
FIELDS += ["audit audit_steps target certify bounds"]
# Numbers at the ends of what a float holds, for options that are shares, thresholds or seconds.
EXTREME = [5e-324, -5e-324, 1e-320, 2.2250738585072014e-308, 1e-300, 1 - 2**-53, 1 + 2**-52, 1.7976931348623157e308]
HALF = "\ud83d"  # of a surrogate pair
NAMED = ["s", "t", "a/b ..\u00e9", HALF, f"x{HALF}y", "../../x", "x" * 256, "\x00", "head", "lock", "process.0"]
SCHEMAS: list[Any] = [
    {"type": "object", "properties": {"a": {"enum": ["b", "c"]}}, "required": ["a"], "additionalProperties": False},
    *({"const": HALF}, {"enum": [HALF, 1]}, {"type": "object", "properties": {HALF: {"type": "integer"}}}),
    *({"pattern": "("}, {"$ref": "#/nowhere"}, {"type": "string", "maxLength": 10**18}, {"minimum": 5e-324}),
]
GRAMMARS: list[Any] = [
    *({"choice": ["a", "b"]}, {"choice": [HALF]}, {"regex": "[ab]"}, {"regex": HALF}, {"regex": "a{1,999999999}"}),
    *({"grammar": "start: /a/"}, {"grammar": f'start: "{HALF}"'}, {"json": "{"}, {"json_object": True}),
    *({"json": schema} for schema in SCHEMAS),
]
TOOLS: list[Any] = [
    [{"type": "function", "function": {"name": name, "description": HALF, "parameters": schema}}]
    for name in ("f", HALF, "x" * 300)
    for schema in SCHEMAS
]
# Half of the requests have such values for these fields, which bring them further than odd ones do.
LIKELY: dict[str, list[Any]] = {
    **{name: [0.5, 1.0, *EXTREME] for name in ("audit", "audit_steps", "target", "bounds")},
    **dict.fromkeys(("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty"), EXTREME),
    "certify": [[0.1, 0.1], [5e-324, 0.5], [0.5, 5e-324], [1 - 2**-53] * 2],
    "logit_bias": [{"5": number} for number in EXTREME],
    "deadline_seconds": EXTREME,
    "session_id": NAMED,
    "cache_salt": NAMED,
    "policy": ["topk(k=4)", "cis(k=4)", "vattention", "psa(epsilon=5e-324)", f"dense{HALF}"],
    "stop": [HALF, ["a", HALF]],
    "bad_words": [[HALF]],
    "user": [HALF],
    "model": [HALF],
    "structured_outputs": GRAMMARS,
    "response_format": [{"type": "json_schema", "json_schema": {"name": HALF, "schema": one}} for one in SCHEMAS],
    "tools": TOOLS,
    "tool_choice": ["required", "auto", {"type": "function", "function": {"name": HALF}}],
    "prompt": [HALF, [5, 6, 7], "a longer prompt, so that there is something to select from " * 3],
}
# Blocks of Anthropic's messages, good ones and bad ones.
_CALL = {"type": "tool_use", "id": "t", "name": "f", "input": {"a": "b"}}
BLOCKS: list[Any] = [
    *({"type": "text", "text": text} for text in ("x", "", HALF, "<think>", "</tool_call>", 5, None)),
    *({"type": "thinking", "thinking": text, "signature": ""} for text in ("x", HALF, None)),
    *({**_CALL, name: value} for name in ("id", "name", "input") for value in ("t", {}, None, HALF, {"a": 1e308}, [])),
    *({"type": "tool_result", "tool_use_id": name, "content": content, "is_error": True}
      for name in ("t", HALF, 5) for content in ("x", None, [], [{"type": "text", "text": "x"}], [5], {})),
    *({"type": "document", "source": source} for source in (None, {"type": "text", "data": HALF}, {"type": "base64"})),
    *({"type": name} for name in ("image", "redacted_thinking", "nix", HALF, 5, None)),
    *(None, 5, "x", [], {}, {"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}),
]  # fmt: skip
ANTHROPIC: dict[str, list[Any]] = {
    "system": ["x", HALF, [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], [{"type": "image"}], [5], []],
    "thinking": [{"type": "adaptive"}, {"type": "disabled"}, {"type": "enabled", "budget_tokens": 1024}, {"type": 5}],
    "tools": [[{"name": name, "input_schema": schema}] for name in ("f", HALF, 5) for schema in (*SCHEMAS, None)],
    "tool_choice": [{"type": "any"}, {"type": "auto"}, {"type": "tool", "name": "f"}, {"type": "tool"}, {"type": HALF}],
    "stop_sequences": [["x"], [HALF], [""], ["x"] * 99],
    "output_config": [{"format": {"type": "json_schema", "schema": one}} for one in SCHEMAS] + [{"effort": HALF}],
    "context_management": [{"edits": []}, {"edits": [{"type": "clear_thinking_20251015"}]}, {"edits": {"a": 1}}],
    "structured_outputs": GRAMMARS,
    "session_id": NAMED,
    "chat_template_kwargs": [{"a": HALF}, {"tokenize": True}, {"continue_final_message": True}],
}
# Calls in each format, of which a request has the model say one, whole or bent; the server speaks any format.
_OBJECT = '{"name": "f", "arguments": {"a": "b"}}'
SAID = [
    f"<tool_call>{_OBJECT}</tool_call>",
    "<tool_call><function=f><parameter=a>b</parameter></function></tool_call>",
    "<tool_call>f\n<arg_key>a</arg_key><arg_value>b</arg_value></tool_call>",
    f"[TOOL_CALLS] [{_OBJECT}, {_OBJECT}]",
    '[TOOL_CALLS]f[ARGS]{"a": "b"}',
    '<|python_tag|>f.call(a="b")',
    "[f(a='b'), f()]",
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "<|channel|>analysis<|message|>x<|end|><|start|>assistant"
    ' to=functions.f<|channel|>commentary json<|message|>{"a": 1}',
    "<think>x</think>" + _OBJECT,
]
_F = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}}
KEYS = {"one": "sk-fuzz-0123456789abcdef", "two": "sk-fuzz-fedcba9876543210"}
PATHS = ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/selection_maps", "/v1/documents"]
PATHS += ["/tokenize", "/detokenize"]
PATHS += ["/v1/messages", "/v1/messages", "/v1/messages/count_tokens"]
METHODS = ["GET", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS", "TRACE", "CONNECT", "post", "NIX", "GET / POST"]
GOOD: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "x", "max_tokens": 1},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1},
    "/v1/responses": {"input": "x", "max_output_tokens": 1},
    "/v1/selection_maps": {"prompt": "x", "max_tokens": 1},
    "/v1/messages": {"model": "m", "messages": [{"role": "user", "content": "x"}], "max_tokens": 1},
    "/v1/messages/count_tokens": {"model": "m", "messages": [{"role": "user", "content": "x"}]},
    "/v1/documents": {"name": "a.html", "data": "PGh0bWw+PHA+eA=="},
    "/tokenize": {"prompt": "x"},
    "/detokenize": {"tokens": [5]},
}


def body(rng: random.Random, path: str) -> bytes:
    """A request whose JSON is valid and whose fields are odd, mostly."""
    if path in ("/v1/chat/completions", "/v1/responses", "/v1/messages") and rng.random() < 0.04:
        return called(rng, path)
    made = dict(GOOD[path])
    if path.startswith("/v1/messages") and rng.random() < 0.7:
        return json.dumps(made | anthropic(rng)).encode()
    if likely := rng.random() < 0.5:
        made |= {name: rng.choice(LIKELY[name]) for name in rng.sample(sorted(LIKELY), rng.choice([1, 1, 2, 3]))}
        if path == "/v1/responses" and "prompt" in made:
            made["input"] = made.pop("prompt")
    elif rng.random() < 0.1:
        made["session_id"] = rng.choice(NAMED)  # a good turn, which is stored
    if not likely or rng.random() < 0.2:
        for _ in range(rng.choice([0, 1, 1, 2])):
            made[rng.choice(NAMES)] = rng.choice(ODD)
    for name, most in (("n", 2), ("max_tokens", 2), ("max_output_tokens", 2), ("max_completion_tokens", 2)):
        if isinstance(made.get(name), (int, float)) and 0 < made[name] < 2**63:
            made[name] = min(made[name], most)  # a request that is good after all need not take long
    if path == "/v1/responses":
        made.setdefault("max_output_tokens", 1)
    elif not isinstance(made.get("max_tokens"), int) and path.startswith("/v1"):
        made["max_tokens"] = made.get("max_tokens") or 1
    return json.dumps(made).encode()


def called(rng: random.Random, path: str) -> bytes:
    """A request whose answer is a call, or nearly one, or must be one."""
    made = dict(GOOD[path])
    responses = path == "/v1/responses"
    tools = [{"type": "function", **_F}] if responses else [{"type": "function", "function": _F}]
    made["tools"] = [{"name": "f", "input_schema": _F["parameters"]}] if path == "/v1/messages" else tools
    made["max_output_tokens" if responses else "max_tokens"] = rng.choice([40, 150])
    if rng.random() < 0.3:
        made["tool_choice"] = {"type": "any"} if path == "/v1/messages" else "required"
    else:
        said = rng.choice(SAID)
        for _ in range(rng.choice([0, 0, 1, 2, 5])):
            at = rng.randrange(len(said) + 1)
            said = (
                said[:at]
                + rng.choice(["", said[at + 1 : at + 9], '"', "{", "]", "\n", "<", "\\", "😀"])
                + said[at + 1 :]
            )
        made["structured_outputs"] = {"choice": [said or "x"]}
    return json.dumps(made | {"stream": rng.random() < 0.5}).encode()


def anthropic(rng: random.Random) -> dict[str, Any]:
    """Fields of a message, most of which fit, and a conversation of blocks."""
    made = {name: rng.choice(ANTHROPIC[name]) for name in rng.sample(sorted(ANTHROPIC), rng.choice([0, 1, 1, 2]))}
    good = [block for block in BLOCKS if isinstance(block, dict) and block in (BLOCKS[0], _CALL, BLOCKS[-1])]
    messages = [{"role": "user", "content": "x"}]
    for _ in range(rng.randrange(4)):
        role = rng.choice(["user", "assistant", "assistant", "system", "tool"] if rng.random() < 0.3 else ["assistant"])
        blocks = [rng.choice(good if rng.random() < 0.6 else BLOCKS) for _ in range(rng.randrange(4))]
        messages.append({"role": role, "content": blocks})
    if rng.random() < 0.3:
        made["stream"] = True
    if rng.random() < 0.2:
        made[rng.choice(NAMES)] = rng.choice(ODD)
    return {"messages": messages, **made}


def bent(rng: random.Random, data: bytes) -> bytes:
    """JSON that is broken, too deep, or no UTF-8."""
    kind = rng.randrange(7)
    at = rng.randrange(len(data) + 1)
    if kind == 0:
        return data[:at]
    if kind == 1:
        return data[:at] + bytes([rng.randrange(256)]) + data[at:]
    if kind == 2:
        return b'{"prompt": ' + rng.choice([b"[", b'{"a":']) * rng.randint(30, 3000)
    if kind == 3:
        return rng.randbytes(rng.randint(0, 200))
    if kind == 4:
        return b'{"prompt": "\xff\xfe\x80"}'
    if kind == 5:
        return b'{"prompt": 1' + b"0" * rng.randint(300, 6000) + b"}"
    return rng.choice([b"NaN", b"[]", b"null", b'""', b'{"prompt": Infinity}', b'{"a":1,"a":2}', b"\xef\xbb\xbf{}"])


def request(rng: random.Random) -> bytes:
    """One request as bytes on a connection of its own."""
    path = rng.choice(PATHS)
    data = body(rng, path)
    kind = rng.randrange(12)
    if kind < 4:
        data = bent(rng, data)
    method, version, extra = "POST", "HTTP/1.1", ""
    length = str(len(data))
    if kind == 4:
        method = rng.choice(METHODS)
    elif kind == 5:
        odd = ["/", "/v1/models/..%2f..%2fetc", "/v1/%ff%fe", "//", "/v1/sessions/" + "x" * 300, "*", "/\u2603"]
        path = rng.choice([*odd, "/v1/sessions/s", "/v1/sessions/%ed%a0%80", "/v1/sessions/..%2fhead"])
        method = "DELETE" if "sessions" in path else method
        path += rng.choice(["", "?" + "a" * 2000, "?%00", "#x"])
    elif kind == 6:
        length = rng.choice(["-1", "x", "", "99999999999999999999999", "0", "1e3", str(len(data) + 5)])
    elif kind == 7:
        odd = [
            "x-session-id: a\x00b",
            "x-session-id: \ud800",
            "x-request-id: " + "y" * 500,
            "content-type: text/xml",
            "host: evil.example",
        ]
        extra = (
            rng.choice([*odd, "authorization: Bearer x", "expect: 100-continue", "broken header", ": empty"]) + "\r\n"
        )
    elif kind == 8:
        version = rng.choice(["HTTP/9.9", "HTTP/1.0", "", "FTP/1.1", "HTTP/1.1 "])
    elif kind == 9:
        extra = "transfer-encoding: chunked\r\n"
        data = rng.choice([b"5\r\nabc", b"zz\r\n", b"ffffffffffffffff\r\n", b"3\r\nabc\r\n0\r\n\r\n"])
    head = f"{method} {path} {version}\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    if "authorization" not in extra and rng.random() < 0.95:
        head += f"authorization: Bearer {rng.choice(list(KEYS.values()))}\r\n"
    head += extra + ("" if "chunked" in extra else f"content-length: {length}\r\n") + "connection: close\r\n\r\n"
    return head.encode("utf-8", "surrogatepass") + data


def send(address: tuple[str, int], data: bytes, rng: random.Random) -> bytes:
    """What a server answers; nothing where it closes, or where the client does so first."""
    with socket.create_connection(address, timeout=20) as client, suppress(ConnectionError):
        way = rng.randrange(20)
        if way == 0:  # half of it, and gone
            client.sendall(data[: rng.randrange(len(data))])
            return b""
        if way == 1:  # in small pieces
            for at in range(0, len(data), 97):
                client.sendall(data[at : at + 97])
        else:
            client.sendall(data)
        if way == 2:  # half closed, which a server takes for a client that has gone
            client.shutdown(socket.SHUT_WR)
        received = b""
        while part := client.recv(1 << 16):
            received += part
        return received
    return b""


def check(data: bytes, answer: bytes) -> int:
    """The status of an answer, 0 for none. AssertionError for one that no server should give."""
    if not answer:
        return 0
    found = re.match(rb"HTTP/1\.[01] (\d{3}) ", answer)
    assert found, (data[:400], answer[:400])
    status = int(found[1])
    assert status < 500, (data[:400], answer[:800])
    assert status != 422, (data[:400], answer[:800])
    assert b"Traceback" not in answer, (data[:400], answer[:800])
    assert b"set-cookie" not in answer.lower().split(b"\r\n\r\n")[0], (data[:400], answer[:400])
    return status


def fuzz(address: tuple[str, int], count: int, seed: int, change: Any = None) -> Counter[int]:
    """Send ``count`` requests; a good one after each thousand must be answered. Statuses and how often they came.
    ``change``: called before every twentieth."""
    rng, other, statuses = random.Random(seed), random.Random(seed), Counter[int]()
    for number in range(1, count + 1):
        if change is not None and number % 20 == 1:
            change(other)
        data = request(rng)
        statuses[check(data, send(address, data, rng))] += 1
        if number % 1000 == 0 or number == count:
            good = json.dumps(GOOD["/v1/completions"]).encode()
            head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            head += f"authorization: Bearer {KEYS['one']}\r\n"
            head += f"connection: close\r\ncontent-length: {len(good)}\r\n\r\n"
            with socket.create_connection(address, timeout=20) as client:
                client.sendall(head.encode() + good)
                assert b" 200 " in client.recv(1 << 16)[:20]
    return statuses


SHORT = {"body_seconds": 0.1, "header_seconds": 0.1, "max_body": 4096, "selection_maps": 64}


@contextmanager
def a_server() -> Iterator[Any]:
    import tempfile

    from engine_helpers import make
    from server_helpers import serving
    from test_server_structured import template_with_tools
    from tiny_models import make_checkpoint

    from saccade.server.keys import Key, KeyRing, digest

    with tempfile.TemporaryDirectory() as folder:
        model = make_checkpoint("llama", Path(folder) / "model")
        template_with_tools(model)
        llm = make(model, session_dir=f"{folder}/sessions:4MiB")
        keys = KeyRing(Key(name, digest(secret)) for name, secret in KEYS.items())
        settings = {**SHORT, "names": ("m",), "tool_parser": "hermes", "reasoning_parser": "qwen3"}
        with serving(llm, **settings, keys=keys) as server:
            server.client.headers["authorization"] = f"Bearer {KEYS['one']}"
            yield server


def speaks(server: Any, rng: random.Random) -> None:
    """Have the server's model speak some format."""
    from dataclasses import replace

    from saccade.server import reasoning
    from saccade.server.tool_formats import FORMATS

    calls, thoughts = rng.choice([*FORMATS, None]), rng.choice([*reasoning.FORMATS, None])
    server.serving.config = replace(server.serving.config, tool_parser=calls, reasoning_parser=thoughts)


def main(count: int, seed: int) -> None:
    """Fuzz a server of its own, in slices, with the memory after each."""
    import logging
    import resource

    logging.getLogger("saccade").setLevel(logging.CRITICAL)
    logging.getLogger("uvicorn").setLevel(logging.CRITICAL)
    with a_server() as server:
        slices = max(1, count // 5000)
        for part in range(slices):
            statuses = fuzz(server.server.address, count // slices, seed + part, partial(speaks, server))
            server.idle()
            now = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() // 2**20
            print(f"{(part + 1) * (count // slices)}: {now} MiB, {dict(sorted(statuses.items()))}", flush=True)
    print("no 5xx, no traceback; every thousandth good request was answered")


if __name__ == "__main__":
    import sys

    main(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0)
