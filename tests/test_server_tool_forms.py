"""Calls of every format through a server: chats, responses and messages, streamed and whole."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from engine_helpers import make
from server_helpers import error, serving, streamed_calls
from test_server_structured import template_with_tools
from test_server_tool_formats import TEMPLATES, rendered
from tiny_models import make_checkpoint

from saccade.server import reasoning
from saccade.server.reader import BROKEN
from saccade.server.tool_formats import FORMATS

CITY = {"type": "string", "enum": ["Bern", "Oslo"]}
SCHEMA = {"type": "object", "properties": {"city": CITY}, "required": ["city"], "additionalProperties": False}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
SAMPLED = {"temperature": 1.0, "seed": 1, "max_tokens": 400, "ignore_eos": False}
WHOLE = {"city": "Bern"}
FORMAT = {"type": "json_schema", "json_schema": {"schema": SCHEMA}}


def some(names, usual):
    """All of ``names``, of which ``usual`` are not thorough."""
    return [name if name in usual else pytest.param(name, marks=pytest.mark.thorough) for name in names]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = make_checkpoint("llama", tmp_path_factory.mktemp("m") / "tools", max_position_embeddings=2048)
    template_with_tools(folder)
    with serving(make(folder), tool_parser="hermes") as running:
        yield running
        running.idle()


@pytest.fixture
def speaks(server, monkeypatch):
    """Have the server's model speak a format."""

    def change(name, thinks=None):
        config = replace(server.serving.config, tool_parser=name, reasoning_parser=thinks)
        monkeypatch.setattr(server.serving, "config", config)

    return change


def chat(server, **fields):
    """(thoughts, content, calls, finish reason, notes) of a chat, the same streamed and whole."""
    body = {"messages": [{"role": "user", "content": "hello"}], **SAMPLED, **fields}
    whole = server.ask("/v1/chat/completions", body).json()
    [choice], notes = whole["choices"], whole["usage"]["saccade"]["notes"]
    message = choice["message"]
    told = server.events("/v1/chat/completions", {**body, "stream_options": {"include_usage": True}})
    deltas = [one["choices"][0]["delta"] for one in told[:-1] if one["choices"]]
    calls = streamed_calls(deltas)
    if BROKEN not in notes:
        assert [one["function"] for one in calls] == [one["function"] for one in message.get("tool_calls", [])]
    said = "".join(delta.get("content") or "" for delta in deltas)
    thoughts = "".join(delta.get("reasoning") or "" for delta in deltas)
    assert (thoughts, said) == (message.get("reasoning", ""), message["content"] or "")
    assert told[-2]["usage"]["saccade"]["notes"] == notes
    last = next(one for one in told[-2::-1] if one["choices"])
    assert last["choices"][0]["finish_reason"] == choice["finish_reason"]
    made = [
        (one["function"]["name"], json.loads(one["function"]["arguments"])) for one in message.get("tool_calls", [])
    ]
    return thoughts, said, made, choice["finish_reason"], notes


@pytest.mark.parametrize("name", some([*FORMATS, None], ("qwen3_coder", "deepseek_v31", None)))
def test_a_forced_call_is_made_in_every_format(server, speaks, name):
    """By each API; without a known format in JSON. Of two tools either may be called, and of one call no more."""
    speaks(name)
    other = {"type": "function", "function": {**TOOL["function"], "name": "w2"}}
    one = {"tools": [TOOL, other], "tool_choice": "required", "parallel_tool_calls": False}
    _, said, calls, reason, notes = chat(server, **one)
    assert (said, reason, notes, len(calls)) == ("", "tool_calls", [], 1)
    assert calls[0][0] in ("weather", "w2")
    assert calls[0][1] in (WHOLE, {"city": "Oslo"})
    named = {"tools": [TOOL, other], "tool_choice": {"type": "function", "function": {"name": "weather"}}}
    assert chat(server, **named)[2][0][0] == "weather"
    flat = [{"type": "function", **tool["function"]} for tool in (TOOL, other)]
    asked = {"input": "x", "tools": flat, "tool_choice": {"type": "function", "name": "w2"}, "store": False}
    asked |= {"temperature": 1.0, "seed": 2, "max_output_tokens": 400}
    output = server.ask("/v1/responses", asked).json()["output"]
    assert [(item["type"], item["name"]) for item in output] == [("function_call", "w2")]
    told = server.events("/v1/responses", asked)[:-1]
    assert next(one["item"] for one in told if one["type"] == "response.output_item.done")["name"] == "w2"
    pieces = [one["delta"] for one in told if one["type"] == "response.function_call_arguments.delta"]
    assert json.loads("".join(pieces)) in (WHOLE, {"city": "Oslo"})
    tools = [{"name": tool["function"]["name"], "input_schema": SCHEMA} for tool in (TOOL, other)]
    asked = {"model": None, "messages": [{"role": "user", "content": "x"}], "max_tokens": 400, "tools": tools}
    asked |= {"model": server.serving.names[0], "tool_choice": {"type": "tool", "name": "w2"}, "temperature": 1.0}
    message = server.ask("/v1/messages", asked).json()
    assert message["stop_reason"] == "tool_use"
    assert [(block["type"], block["name"]) for block in message["content"]] == [("tool_use", "w2")]
    assert message["content"][0]["input"] in (WHOLE, {"city": "Oslo"})


@pytest.mark.parametrize("name", some(sorted(TEMPLATES.keys() - {"harmony"}), ("mistral_args", "lfm2")))
def test_a_call_that_the_model_makes_is_read_in_every_format(server, speaks, name):
    """The model is too small to call a tool by itself: a grammar of one text has it say what its template would. In
    harmony a grammar is one of the channel of texts."""
    speaks(name)
    said = rendered(name, [("weather", WHOLE)])
    fields = {"tools": [TOOL], "structured_outputs": {"choice": [said]}}
    assert chat(server, **fields) == ("", "", [("weather", WHOLE)], "tool_calls", [])
    cut = said[: said.index("Bern") + 2]
    _, text, calls, reason, notes = chat(server, tools=[TOOL], structured_outputs={"choice": [cut]})
    assert (text, calls, reason, notes) == (cut, [], "stop", [BROKEN])


def test_a_call_that_is_cut_short_is_told_by_each_api(server, speaks):
    speaks("hermes")
    said = '<tool_call>{"name": "weather", "arguments": {"city": "Be'
    forced = {"structured_outputs": {"choice": [said]}}
    flat = [{"type": "function", **TOOL["function"]}]
    asked = {"input": "x", "tools": flat, "max_output_tokens": 400, **forced}
    whole = server.ask("/v1/responses", asked).json()
    assert [item["content"][0]["text"] for item in whole["output"]] == [said]
    assert whole["usage"]["saccade"]["notes"] == [BROKEN]
    told = server.events("/v1/responses", asked)[:-1]
    output = told[-1]["response"]["output"]
    assert [one["item"] for one in told if one["type"] == "response.output_item.done"] == output
    assert [(item["type"], item["status"]) for item in output] == [
        ("function_call", "incomplete"),
        ("message", "completed"),
    ]
    assert (output[0]["arguments"], output[1]["content"][0]["text"]) == ('{"city": "Be', said)
    again = {"input": [{"role": "user", "content": "x"}, *output], "tools": flat, "max_output_tokens": 1}
    assert server.ask("/v1/responses", again).status_code == 200
    behind = {"input": "so", "previous_response_id": told[-1]["response"]["id"], "max_output_tokens": 1}
    assert server.ask("/v1/responses", behind).status_code == 200
    tools = [{"name": "weather", "input_schema": SCHEMA}]
    body = {"model": server.serving.names[0], "messages": [{"role": "user", "content": "x"}], "tools": tools}
    message = server.ask("/v1/messages", {**body, "max_tokens": 400, **forced}).json()
    assert [(block["type"], block["text"]) for block in message["content"]] == [("text", said)]
    assert (message["stop_reason"], message["usage"]["saccade"]["notes"]) == ("end_turn", [BROKEN])
    told = server.events("/v1/messages", {**body, "max_tokens": 400, **forced})
    begun = [one["content_block"]["type"] for one in told if one["type"] == "content_block_start"]
    assert begun == ["tool_use", "text"]
    assert [one["index"] for one in told if one["type"] == "content_block_stop"] == [0, 1]


@pytest.mark.parametrize(
    "fields", [{"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}, {}]
)
def test_harmony_has_thoughts_text_and_calls_in_channels(server, speaks, monkeypatch, fields):
    """A grammar of an answer holds in the channel of texts; forced calls are messages to functions. Thoughts of a few
    letters may come before: a random model would never end them."""
    from saccade.server import grammar_parts

    monkeypatch.setattr(grammar_parts, "THOUGHTS", "[a-z]{0,4}")
    speaks("harmony", reasoning.HARMONY)
    for seed in range(3):
        if fields:
            thoughts, said, calls, reason, _ = chat(server, tools=[TOOL], seed=seed, **fields)
            assert (json.loads(said)["city"] in CITY["enum"], calls, reason) == (True, [], "stop")
        else:
            thoughts, said, calls, reason, _ = chat(server, tools=[TOOL], seed=seed, tool_choice="required")
            assert (said, [name for name, _ in calls], reason) == ("", ["weather"], "tool_calls")
        assert len(thoughts) <= 4
        assert "<|" not in thoughts


def test_a_message_that_is_gone_on_with_may_lead_to_a_call(server, speaks):
    """``continue_final_message`` with tools: what the client began, then a call, forced or not; in harmony the message
    is ended first. Half of a call that the client began is no call."""
    turns = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "let me see"}]
    more = {"messages": turns, "continue_final_message": True, "add_generation_prompt": False, "tools": [TOOL]}
    for name in ("hermes", "mistral", "llama3_json", "harmony"):
        speaks(name, reasoning.HARMONY if name == "harmony" else None)
        _, said, calls, reason, _ = chat(server, **more, tool_choice="required", parallel_tool_calls=False)
        assert (said, [one for one, _ in calls], reason) == ("", ["weather"], "tool_calls"), name
    speaks("hermes")
    choice = {"structured_outputs": {"choice": [": " + rendered("hermes", [("weather", WHOLE)])]}}
    assert chat(server, **more, **choice) == ("", ": ", [("weather", WHOLE)], "tool_calls", [])
    same = {"messages": turns, "tools": [TOOL], "add_generation_prompt": False}
    counts = [server.ask("/tokenize", {**same, "continue_final_message": on}).json()["count"] for on in (True, False)]
    assert counts[0] < counts[1]
    assert error(server.ask("/v1/chat/completions", {**more, "add_generation_prompt": True}))[2] == (
        "continue_final_message"
    )
