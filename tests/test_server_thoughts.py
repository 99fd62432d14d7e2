"""Where thoughts end and an answer begins, beside grammars of every kind: what a grammar made is content."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
from engine_helpers import make
from server_helpers import serving
from tiny_models import CHAT_TEMPLATE, byte_tokenizer, make_checkpoint

from saccade.server import grammar_parts, reasoning
from saccade.server.matchers import Grammar
from saccade.server.messages import conversation

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"enum": ["Bern", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}
# No more white space than a grammar asks for: answers are short.
SAMPLED = {"temperature": 1.0, "max_tokens": 300, "ignore_eos": False, "seed": 5}
SAMPLED["logit_bias"] = {str(one): -100.0 for one in byte_tokenizer().encode(" \t\n", add_special_tokens=False)}
CITY = r'\{"city":"(Bern|Oslo)"\}'
# The template's last words, by variables of the request: thoughts are opened, closed, or not spoken of.
ENDS = {"open": "{{ begin }}\n", "shut": "{{ begin }}\n\n{{ end }}\n\n", "free": ""}


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    folder = make_checkpoint("llama", tmp_path_factory.mktemp("m") / "thinks", max_position_embeddings=2048)
    last = "".join(f"{{% if ends == '{name}' %}}{text}{{% endif %}}" for name, text in ENDS.items())
    roles = CHAT_TEMPLATE.replace("'assistant']", "'assistant', 'tool']")
    (folder / "chat_template.jinja").write_text("{% if tools %}{{ tools | tojson }}{% endif %}" + roles + last)
    return make(folder)


@pytest.fixture(scope="module")
def server(llm):
    with serving(llm, tool_parser="hermes", reasoning_parser="deepseek_r1") as running:
        yield running
        running.idle()


NAMED = {"type": "function", "function": {"name": "weather"}}
SCHEMA = {"type": "json_schema", "json_schema": {"schema": PARAMETERS}}
GRAMMARS = {
    "json_schema": ({"response_format": SCHEMA}, CITY),
    "regex": ({"structured_outputs": {"regex": r"[0-9]{3}\n"}}, r"[0-9]{3}\n"),
    "choice": ({"structured_outputs": {"choice": ["yes", "\nno"]}}, "yes|\nno"),
    "grammar": ({"structured_outputs": {"grammar": 'start: "a" b\nb: "b" | "c"'}}, "a[bc]"),
    "required": ({"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}, CITY),
    "named": ({"tools": [TOOL], "tool_choice": NAMED}, CITY),
}


def asked(kind: str, ends: str, parser: str, **fields):
    format = reasoning.FORMATS[parser]
    variables = {"ends": ends, "begin": format.begin, "end": format.end}
    return {**SAMPLED, **GRAMMARS[kind][0], "chat_template_kwargs": variables, **fields}


def chat_answer(server, streamed: bool, fields) -> tuple[str, str]:
    """(thoughts, content or a call's arguments) of a chat."""
    body = {"messages": [{"role": "user", "content": "hello"}], **fields}
    if streamed:
        said = [event["choices"][0]["delta"] for event in server.events("/v1/chat/completions", body)[:-1]]
    else:
        said = [server.ask("/v1/chat/completions", body).json()["choices"][0]["message"]]
    calls = [call["function"]["arguments"] for one in said for call in one.get("tool_calls") or ()]
    return "".join(one.get("reasoning", "") for one in said), "".join(
        [one.get("content") or "" for one in said] + calls
    )


def response_answer(server, streamed: bool, fields) -> tuple[str, str]:
    """The same of a response, whose fields have other names."""
    body = {**fields, "input": "hello", "max_output_tokens": fields["max_tokens"], "store": False}
    del body["max_tokens"]
    if wanted := body.pop("response_format", None):
        body["text"] = {"format": {"type": "json_schema", "name": "x", "schema": wanted["json_schema"]["schema"]}}
    body["tools"] = [{"type": "function", **tool["function"]} for tool in body.get("tools") or ()]
    if isinstance(choice := body.get("tool_choice"), dict):
        body["tool_choice"] = {"type": "function", "name": choice["function"]["name"]}
    if streamed:
        events = server.events("/v1/responses", body)
        output = events[-2]["response"]["output"]
        told = [event["item"] for event in events[:-1] if event["type"] == "response.output_item.done"]
        assert told == output
    else:
        output = server.ask("/v1/responses", body).json()["output"]
    parts = [part for item in output for part in item.get("content") or ()]
    thoughts = "".join(part["text"] for part in parts if part["type"] == "reasoning_text")
    texts = [part["text"] for part in parts if part["type"] == "output_text"]
    return thoughts, "".join([*texts, *(item["arguments"] for item in output if item["type"] == "function_call")])


@pytest.mark.parametrize(
    ("parser", "kind"),
    [*(("deepseek_r1", kind) for kind in GRAMMARS), ("qwen3", "choice"), ("granite", "named")],
)
def test_what_a_grammar_made_is_content(server, monkeypatch, parser, kind):
    """However the prompt ends, whatever is asked for. Thoughts that the prompt opened come before, here a few letters:
    a random model would never end them by itself."""
    monkeypatch.setattr(grammar_parts, "THOUGHTS", "[a-z]{0,4}")
    monkeypatch.setattr(server.serving, "config", replace(server.serving.config, reasoning_parser=parser))
    odd = list(GRAMMARS).index(kind) + list(reasoning.FORMATS).index(parser)
    for number, ends in enumerate(ENDS):
        for index, answer in enumerate((chat_answer, response_answer)):
            # Each setting is met beside each other one.
            streamed, shown = bool((odd + number + index) % 2), bool((odd // 2 + index) % 2)
            thoughts, content = answer(server, streamed, asked(kind, ends, parser, include_reasoning=shown))
            assert re.fullmatch(GRAMMARS[kind][1], content), (ends, content)
            assert re.fullmatch("[a-z]{0,4}" if ends == "open" and shown else "", thoughts), (ends, thoughts)


@pytest.mark.parametrize(
    ("parser", "ends", "variables", "grammar", "begins"),
    [
        ("deepseek_r1", "hi<assistant>", {}, False, "thoughts"),
        ("deepseek_r1", "hi<assistant>", {}, True, "either"),
        ("deepseek_r1", "hi<assistant>", {"enable_thinking": False}, False, "either"),
        ("deepseek_r1", "hi<assistant>", {"thinking": False}, False, "either"),
        ("deepseek_r1", "hi<assistant></think>", {}, False, "answer"),
        ("deepseek_r1", "hi<assistant><think>\n", {"enable_thinking": False}, True, "thoughts"),
        ("qwen3", "hi<assistant>", {"enable_thinking": True}, False, "either"),
        ("qwen3", "what is <think> for?<assistant>", {}, False, "either"),
        ("qwen3", "hi<assistant><think>\n", {}, False, "thoughts"),
        ("qwen3", "hi<assistant><think>\n\n</think>\n\n", {}, False, "answer"),
        ("granite", "hi<assistant>Here is my thought process:", {}, True, "thoughts"),
        ("granite", "hi<think>", {}, True, "either"),
    ],
)
def test_how_an_answer_begins(parser, ends, variables, grammar, begins):
    assert reasoning.beginning(reasoning.FORMATS[parser], ends, variables, grammar) == begins


@pytest.mark.parametrize(("parser", "ends"), [(parser, ends) for parser in reasoning.FORMATS for ends in ENDS])
def test_an_answer_without_a_grammar_is_read_as_its_prompt_ends(server, monkeypatch, parser, ends):
    """A random model writes no markers: its text is all thoughts, or all content."""
    monkeypatch.setattr(server.serving, "config", replace(server.serving.config, reasoning_parser=parser))
    format = reasoning.FORMATS[parser]
    variables = {"ends": ends, "begin": format.begin, "end": format.end}
    fields = {"temperature": 0, "max_tokens": 6, "ignore_eos": True, "chat_template_kwargs": variables}
    thinks = ends == "open" or (ends == "free" and format.inside)
    for answer in (chat_answer, response_answer):
        for streamed in (False, True):
            thoughts, content = answer(server, streamed, fields)
            assert (bool(thoughts), bool(content)) == (thinks, not thinks)


def test_a_model_may_think_before_a_grammar_where_it_is_told_to(server, monkeypatch):
    """``enable_thinking`` set, and a prompt that opens no thoughts: they may come first, marked as such."""
    monkeypatch.setattr(server.serving, "config", replace(server.serving.config, reasoning_parser="qwen3"))
    said = "<think>hm</think>ok"
    fields = asked("choice", "free", "qwen3", structured_outputs={"choice": [said]})
    assert chat_answer(server, False, fields) == ("hm", "ok")
    source = reasoning.FORMATS["qwen3"].before('start: "ok"', server.serving.words, opened=False, calls=False)
    compiled = Grammar(source, "grammar", server.serving.grammars.compiler)
    tokens = server.serving.tokenizer.encode(said, add_special_tokens=False)
    for answer in (tokens, tokens[-2:]):
        matcher = compiled.begin()
        for at, token in enumerate(answer):
            assert matcher.allowed(answer[:at])[token]
    assert not compiled.begin().allowed([])[tokens[1]]


def test_line_breaks_that_a_grammar_made_are_kept_behind_thoughts():
    format = reasoning.FORMATS["qwen3"]
    for exact, rest in ((True, "\n\nyes"), (False, "yes")):
        for size in (1, 100):
            reader = reasoning.ReasoningReader(format, True, exact)
            text = "hm</think>\n\nyes"
            read = [reader.feed(text[at : at + size]) for at in range(0, len(text), size)] + [reader.feed("", True)]
            assert ("".join(one for one, _ in read), "".join(other for _, other in read)) == ("hm", rest)


def test_items_of_a_response_are_the_models_in_its_order(server, monkeypatch):
    """Streamed or not: thoughts, text, a call, text."""
    monkeypatch.setattr(server.serving, "config", replace(server.serving.config, reasoning_parser="qwen3"))
    own = '{"city":  "Bern", "n": 1e999}'
    said = f'<think>hm</think>one <tool_call>{{"name": "weather", "arguments": {own}}}</tool_call> two'
    tools = [{"type": "function", **TOOL["function"]}]
    fields = {**SAMPLED, "tools": tools, "structured_outputs": {"choice": [said]}, "input": "x", "store": False}
    fields["max_output_tokens"] = fields.pop("max_tokens")
    whole = server.ask("/v1/responses", {**fields, "include_reasoning": False}).json()
    streamed = server.events("/v1/responses", fields)[-2]["response"]
    for answer, first in ((whole, 1), (streamed, 0)):
        items = [item.get("arguments") or item["content"][0]["text"] for item in answer["output"]]
        assert items == ["hm", "one ", own, " two"][first:]
        assert answer["usage"]["output_tokens_details"]["reasoning_tokens"] == 2


def test_what_a_response_format_asks_for_is_no_call(server, monkeypatch):
    monkeypatch.setattr(server.serving, "config", replace(server.serving.config, tool_parser="llama3_json"))
    value = {"name": "weather", "parameters": {"city": "Bern"}}
    wanted = {"type": "json_schema", "json_schema": {"schema": {"const": value}}}
    choice = server.chat(**SAMPLED, tools=[TOOL], response_format=wanted).json()["choices"][0]
    assert (json.loads(choice["message"]["content"]), choice["finish_reason"]) == (value, "stop")
    free = {"structured_outputs": {"choice": [json.dumps(value)]}}
    choice = server.chat(**SAMPLED, tools=[TOOL], **free).json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == (None, "tool_calls")
    record = {"structured_outputs": {"choice": ['{"name": "Alice", "parameters": {"age": 3}}']}}
    choice = server.chat(**SAMPLED, tools=[TOOL], **record).json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == (
        record["structured_outputs"]["choice"][0],
        "stop",
    )


@pytest.mark.parametrize("kind", ["required", "named"])
def test_half_a_call_is_content(server, kind):
    fields = asked(kind, "free", "qwen3", max_tokens=5)
    for streamed in (False, True):
        thoughts, content = chat_answer(server, streamed, fields)
        assert (thoughts, len(content)) == ("", 5)
        assert response_answer(server, streamed, fields) == ("", content)
    choice = server.chat("hello", **fields).json()["choices"][0]
    assert choice["finish_reason"] == "length"
    assert "tool_calls" not in choice["message"]


def test_arguments_of_earlier_calls_reach_the_template_with_all_their_digits():
    digits = "9" * 5000
    call = {"function": {"name": "f", "arguments": f'{{"a": 1e999, "b": {digits}, "c": 1.5, "d": 7}}'}}
    [message] = conversation([{"role": "assistant", "tool_calls": [call]}])
    arguments = message["tool_calls"][0]["function"]["arguments"]
    assert arguments == {"a": "1e999", "b": digits, "c": 1.5, "d": 7}


@pytest.mark.parametrize("parser", reasoning.FORMATS)
def test_thoughts_are_read_alike_for_every_split(parser):
    """Marked or not, ended or not, exact or not: two pieces give what the whole gives, and no letter is lost."""
    format = reasoning.FORMATS[parser]
    for text in ("{b}\n\nhm {e}\n\n yes {e}", "hm {e}yes{b}", " {b}hm", "yes", "\n\n", "{b}{e}", "{b} {b} {e}"):
        said = text.format(b=format.begin, e=format.end)
        for inside, exact in ((True, True), (True, False), (False, True), (False, False)):
            whole = None
            for cut in range(len(said) + 1):
                reader = reasoning.ReasoningReader(format, inside, exact)
                pieces = [reader.feed(said[:cut]), reader.feed(said[cut:]), reader.feed("", True)]
                read = "".join(one for one, _ in pieces), "".join(other for _, other in pieces)
                whole = whole or read
                assert read == whole
            assert letters("".join(whole or ()), format) == letters(said, format)


def letters(text: str, format: reasoning.ReasoningFormat) -> str:
    """A text without markers and white space."""
    return "".join(text.replace(format.begin, "").replace(format.end, "").split())
