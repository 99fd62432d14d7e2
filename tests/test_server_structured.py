"""Answers that follow a grammar, calls of tools, and thoughts apart from what is said."""

from __future__ import annotations

import json
import re

import pytest
from engine_helpers import make
from server_helpers import error, serving, streamed_calls
from tiny_models import CHAT_TEMPLATE, make_checkpoint

from saccade.server import reasoning

SAMPLED = {"temperature": 1.0, "max_tokens": 400, "ignore_eos": False}
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "now",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Bern", "Oslo"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


def template_with_tools(folder) -> None:
    """Have a tiny checkpoint's template show tools and read what they gave."""
    roles = CHAT_TEMPLATE.replace("'assistant']", "'assistant', 'tool']")
    template = "{% if tools %}{{ tools | tojson }}{% endif %}" + roles
    (folder / "chat_template.jinja").write_text(template)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = make_checkpoint("llama", tmp_path_factory.mktemp("m") / "tools", max_position_embeddings=2048)
    template_with_tools(folder)
    with serving(make(folder), tool_parser="hermes", reasoning_parser="qwen3") as running:
        yield running
        running.idle()


# --- grammars


@pytest.mark.parametrize("seed", range(4))
def test_json_follows_its_schema(server, seed):
    wanted = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}
    choice = server.chat(**SAMPLED, seed=seed, response_format=wanted).json()["choices"][0]
    value = json.loads(choice["message"]["content"])
    assert choice["finish_reason"] == "stop"
    assert set(value) == {"name", "age"}
    assert 0 <= value["age"] <= 120
    assert len(value["name"]) <= 8


def test_any_json_object(server):
    fields = {**SAMPLED, "max_tokens": 1000, "seed": 3, "logit_bias": {str(token): -4.0 for token in range(97, 123)}}
    for asked in ({"response_format": {"type": "json_object"}}, {"structured_outputs": {"json_object": True}}):
        choice = server.complete("x", **fields, **asked).json()["choices"][0]
        if choice["finish_reason"] == "stop":
            assert isinstance(json.loads(choice["text"]), dict)
        assert choice["text"].lstrip().startswith("{")


@pytest.mark.parametrize(
    ("asked", "pattern"),
    [
        ({"regex": "[0-9]{3}-(ab|cd)"}, "[0-9]{3}-(ab|cd)"),
        ({"choice": ["yes", "no", "maybe so"]}, "yes|no|maybe so"),
        ({"grammar": 'start: "a"+ b\nb: "b" | "c"'}, "a+[bc]"),
        ({"grammar": 'root ::= "x" [0-9] "y"'}, "x[0-9]y"),
        ({"json": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 2}}, r"\[.*\]"),
        ({"json": '{"enum": [1, 2]}'}, "[12]"),
    ],
)
def test_other_grammars(server, asked, pattern):
    for seed in range(3):
        got = server.complete("x", **SAMPLED, seed=seed, n=2, structured_outputs=asked).json()["choices"]
        for choice in got:
            assert choice["finish_reason"] == "stop"
            assert re.fullmatch(pattern, choice["text"], re.DOTALL), choice["text"]


def test_a_grammar_in_a_stream_beside_requests_without(server):
    body = {"prompt": "x", **SAMPLED, "seed": 1, "structured_outputs": {"regex": "(ab){5}"}}
    events = server.events("/v1/completions", body)[:-1]
    assert "".join(event["choices"][0]["text"] for event in events) == "ababababab"
    assert events[-1]["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize(
    "fields",
    [
        {"structured_outputs": {"regex": "(["}},
        {"structured_outputs": {"grammar": "start: nothing_here"}},
        {"structured_outputs": {"json": "{"}},
        {"structured_outputs": {"json": {"type": "nix"}}},
        {"structured_outputs": {"choice": []}},
        {"structured_outputs": {"choice": ["a"]}, "ignore_eos": True},
        {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"$ref": "http://x/y"}}}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"pattern": "("}}}},
    ],
)
def test_a_grammar_that_is_none_is_refused(server, fields):
    assert error(server.complete("x", **{**SAMPLED, **fields}))[0] == 400


def test_what_a_grammar_and_min_tokens_forbid_together_is_an_error_of_the_request(server):
    response = server.complete("x", **SAMPLED, min_tokens=9, structured_outputs={"choice": ["a"]})
    assert error(response)[:2] == (400, "generation_failed")


# --- tools


def test_a_named_tool_is_called(server):
    fields = {**SAMPLED, "tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "weather"}}}
    choice = server.chat(**fields, seed=1).json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    [call] = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "weather"
    assert json.loads(call["function"]["arguments"])["city"] in ("Bern", "Oslo")
    assert choice["message"]["content"] is None
    body = {"messages": [{"role": "user", "content": "hello"}], **fields, "seed": 1}
    deltas = [one["choices"][0]["delta"] for one in server.events("/v1/chat/completions", body)[:-1]]
    [streamed] = streamed_calls(deltas)
    assert streamed["function"] == call["function"]
    assert sum(len(delta.get("tool_calls", [])) for delta in deltas) > 1  # arguments come as they are written


def test_some_tool_is_called_if_one_must_be(server):
    other = {"type": "function", "function": {"name": "clock"}}
    limited = {**TOOL, "function": {**TOOL["function"], "name": "w2"}}
    for seed in range(3):
        choice = server.chat(**SAMPLED, seed=seed, tools=[limited, TOOL], tool_choice="required").json()["choices"][0]
        if choice["finish_reason"] == "tool_calls":
            assert {call["function"]["name"] for call in choice["message"]["tool_calls"]} <= {"weather", "w2"}
            break
    else:
        raise AssertionError("no tool was called")
    assert error(server.chat(tools=[other], tool_choice={"type": "function", "function": {"name": "nix"}}))[2]


def test_a_conversation_with_calls_goes_through_the_template(server):
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bern"}'}}
    messages = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "rain"},
    ]
    body = {"messages": messages, "max_tokens": 2, "temperature": 0}
    assert server.ask("/v1/chat/completions", {**body, "tools": [TOOL]}).status_code == 200
    bare = server.ask("/v1/chat/completions", {**body, "tools": [TOOL], "tool_choice": "none"}).json()["usage"]
    full = server.ask("/v1/chat/completions", {**body, "tools": [TOOL]}).json()["usage"]
    assert full["prompt_tokens"] > bare["prompt_tokens"]


def read(reader, text: str, size: int):
    """What a reader makes of a text that comes in pieces of ``size``: strings joined, lists too."""
    first, second = None, None
    for at in range(0, len(text), size):
        one, other = reader.feed(text[at : at + size])
        first, second = (one, other) if first is None else (first + one, second + other)
    one, other = reader.feed("", True)
    return (one, other) if first is None else (first + one, second + other)


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(
    ("format", "text", "thoughts", "rest"),
    [
        ("qwen3", "<think>\nwell </t then\n</think>\n\nyes <think>", "well </t then\n", "yes <think>"),
        ("qwen3", "no thoughts </think>", "", "no thoughts </think>"),
        ("qwen3", "<think>never ends", "never ends", ""),
        ("qwen3", "<thi", "", "<thi"),
        ("qwen3", "\n<think></think>", "", ""),
        ("deepseek_r1", "well then</think>yes", "well then", "yes"),
        ("deepseek_r1", "<think>well</think>yes", "well", "yes"),
        ("granite", "Here is my thought process: hm Here is my response: yes", " hm ", " yes"),
    ],
)
def test_thoughts_are_read_however_the_text_comes(size, format, text, thoughts, rest):
    assert read(reasoning.ReasoningReader(reasoning.FORMATS[format]), text, size) == (thoughts, rest)


def test_thoughts_and_calls_have_places_of_their_own_in_the_answer(server, monkeypatch):
    """The model is too small to think, so a grammar has it say what a larger one would."""
    said = '<think>hm</think>ok <tool_call>{"name": "weather", "arguments": {"city": "Bern"}}</tool_call>'
    fields = {**SAMPLED, "tools": [TOOL], "structured_outputs": {"choice": [said]}}
    message = (choice := server.chat(**fields).json()["choices"][0])["message"]
    assert (message["reasoning"], message["content"], choice["finish_reason"]) == ("hm", "ok ", "tool_calls")
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"city": "Bern"}
    body = {"messages": [{"role": "user", "content": "hello"}], **fields}
    events = server.events("/v1/chat/completions", body)[:-1]
    deltas = [event["choices"][0]["delta"] for event in events]
    assert "".join(delta.get("reasoning", "") for delta in deltas) == "hm"
    assert "".join(delta.get("content") or "" for delta in deltas) == "ok "
    assert [call["function"] for call in streamed_calls(deltas)] == [message["tool_calls"][0]["function"]]
    assert events[-1]["choices"][0]["finish_reason"] == "tool_calls"
    twice = {**fields, "structured_outputs": {"choice": [said + said[said.index("<tool_call>") :]]}}
    for parallel, count in ((True, 2), (False, 1)):
        message = server.chat(**twice, parallel_tool_calls=parallel).json()["choices"][0]["message"]
        assert len(message["tool_calls"]) == count
    quiet = server.chat(**fields, include_reasoning=False).json()["choices"][0]["message"]
    assert "reasoning" not in quiet
