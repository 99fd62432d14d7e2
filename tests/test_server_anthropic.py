"""Anthropic's Messages API, as the ``anthropic`` client validates it: answers, events, errors, what the cache gave."""

from __future__ import annotations

import json

import pytest
from engine_helpers import make
from server_helpers import GREEDY, serving
from test_server_structured import TOOL, template_with_tools
from tiny_models import make_checkpoint

from saccade.server.anthropic_system import BILLING, SystemHeads
from saccade.server.keys import Key, KeyRing, digest

anthropic = pytest.importorskip("anthropic")
types = pytest.importorskip("anthropic.types")
pydantic = pytest.importorskip("pydantic")

SECRET = "sk-first-key-of-tests"
FUNCTION = TOOL["function"]
WEATHER = {"name": "weather", "description": "now", "input_schema": FUNCTION["parameters"]}
SAID = '<think>hm</think>ok <tool_call>{"name": "weather", "arguments": {"city": "Bern"}}</tool_call>'
SAMPLED = {"temperature": 1.0, "ignore_eos": False, "seed": 1}
FORCED = {**SAMPLED, "structured_outputs": {"choice": [SAID]}}
EVENT = pydantic.TypeAdapter(types.RawMessageStreamEvent)
USER = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = make_checkpoint("llama", tmp_path_factory.mktemp("m") / "tools", max_position_embeddings=2048)
    template_with_tools(folder)
    llm = make(folder, 2000, enable_prefix_caching=True)
    keys = KeyRing([Key("one", digest(SECRET))])
    with serving(llm, names=("tiny",), keys=keys, tool_parser="hermes", reasoning_parser="qwen3") as running:
        running.client.headers["x-api-key"] = SECRET
        yield running
        running.idle()


@pytest.fixture(scope="module")
def client(server):
    with anthropic.Anthropic(
        base_url=server.url, api_key=SECRET, _strict_response_validation=True, max_retries=0
    ) as client:
        yield client


def ask(server, messages=USER, path="/v1/messages", **fields):
    body = {"model": "tiny", "messages": messages, "temperature": 0, "ignore_eos": True, "max_tokens": 6, **fields}
    return server.ask(path, {name: value for name, value in body.items() if value is not None})


def wrong(response):
    """(status, type) of an error, whose form is Anthropic's."""
    body = response.json()
    assert body["type"] == "error"
    assert set(body["error"]) <= {"type", "message", "code"}
    assert body["error"]["message"]
    assert response.headers["request-id"]
    return response.status_code, body["error"]["type"]


def chat(server, messages, **fields):
    body = {"messages": messages, **GREEDY, "max_tokens": 6, **fields}
    return server.ask("/v1/chat/completions", body).json()


def events(server, **fields):
    """(names, data) of a stream, each of which the client's types take."""
    body = {"model": "tiny", "messages": USER, "max_tokens": 400, **fields, "stream": True}
    with server.client.stream("POST", "/v1/messages", json=body) as response:
        assert response.status_code == 200, response.read()
        lines = list(response.iter_lines())
    names = [line.removeprefix("event: ") for line in lines if line.startswith("event: ")]
    data = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    assert names == [one["type"] for one in data]
    for one in data:
        if one["type"] not in ("ping", "error"):
            EVENT.validate_python(one)
    return data


# --- what is asked and answered


def test_a_message_says_what_a_chat_says(server, client):
    system = [{"type": "text", "text": "be", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "brief"}]
    want = chat(server, [{"role": "system", "content": "be\nbrief"}, *USER])
    got = client.messages.create(
        model="tiny", max_tokens=6, system=system, messages=USER, extra_body={"ignore_eos": True, "temperature": 0}
    )
    assert got.content[0].text == want["choices"][0]["message"]["content"]
    assert (got.stop_reason, got.stop_sequence, got.model, got.role) == ("max_tokens", None, "tiny", "assistant")
    used = got.usage
    whole = used.input_tokens + used.cache_read_input_tokens + used.cache_creation_input_tokens
    assert whole == want["usage"]["prompt_tokens"]
    assert used.output_tokens == 6
    counted = client.messages.count_tokens(model="tiny", system=system, messages=USER)
    assert counted.input_tokens == whole
    sparse = ask(server, policy="psa", report=True).json()
    assert sparse["report"]["policy"] == sparse["usage"]["saccade"]["policy"] == "psa"


def test_blocks_become_a_conversation(server):
    """Every kind of block, beside the same conversation in OpenAI's form."""
    mark = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a", **mark}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "hm", "signature": "x"},
            {"type": "redacted_thinking", "data": "eA=="},
            {"type": "text", "text": "so"},
            {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Bern"}},
            {"type": "tool_use", "id": "t2", "name": "weather", "input": {"city": "Oslo"}},
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "t1", "content": "sun", **mark},
            {"type": "tool_result", "tool_use_id": "t2", "is_error": True, "content": [{"type": "text", "text": "x"}]},
            {"type": "document", "title": "T", "source": {"type": "text", "media_type": "text/plain", "data": "d"}},
            {"type": "text", "text": "and?"},
        ]},
    ]  # fmt: skip
    call = {"type": "function", "function": {"name": "weather", "arguments": "{}"}}
    same = [
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": "so", "tool_calls": [{"id": "t1", **call}, {"id": "t2", **call}]},
        {"role": "tool", "tool_call_id": "t1", "content": "sun"},
        {"role": "tool", "tool_call_id": "t2", "content": "Error: x"},
        {"role": "user", "content": "T\nd\nand?"},
    ]
    got = ask(server, messages, tools=[{**WEATHER, **mark}]).json()
    want = chat(server, same, tools=[TOOL])
    assert got["content"][0]["text"] == want["choices"][0]["message"]["content"]
    assert sum(got["usage"][name] for name in PARTS) == want["usage"]["prompt_tokens"]


PARTS = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")


def test_thoughts_reach_the_template_as_reasoning_content():
    from saccade.server.anthropic_blocks import chat_messages

    [message] = chat_messages([{"role": "assistant", "content": [{"type": "thinking", "thinking": "hm"}]}])
    assert message == {"role": "assistant", "content": [], "reasoning_content": "hm"}


def test_thoughts_text_and_a_call_are_blocks(server, client):
    got = client.messages.create(model="tiny", max_tokens=400, messages=USER, tools=[WEATHER], extra_body=FORCED)
    assert [block.type for block in got.content] == ["thinking", "text", "tool_use"]
    assert (got.content[0].thinking, got.content[1].text) == ("hm", "ok ")
    assert (got.content[2].name, got.content[2].input) == ("weather", {"city": "Bern"})
    assert got.stop_reason == "tool_use"
    assert got.usage.output_tokens_details.thinking_tokens == 2
    with client.messages.stream(
        model="tiny", max_tokens=400, messages=USER, tools=[WEATHER], extra_body=FORCED
    ) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    assert kinds[0] == "message_start"
    assert kinds[-2:] == ["message_delta", "message_stop"]

    def plain(message):
        return [block.model_dump(exclude={"id", "parsed_output"}) for block in message.content]

    assert plain(final) == plain(got)
    assert final.usage.output_tokens == got.usage.output_tokens
    assert final.stop_reason == got.stop_reason
    # What was answered can be sent back.
    result = {"type": "tool_result", "tool_use_id": final.content[2].id, "content": "sun"}
    turns = [*USER, got.to_param(), {"role": "user", "content": [{**result, "tool_use_id": got.content[2].id}]}]
    assert client.messages.create(model="tiny", max_tokens=4, messages=turns, tools=[WEATHER]).usage.output_tokens


def test_events_come_in_order(server):
    told = events(server, tools=[WEATHER], **FORCED)
    blocks, kinds = [], []
    for one in told:
        if one["type"] == "content_block_start":
            blocks.append(one["content_block"]["type"])
            assert one["index"] == len(blocks) - 1
        if one["type"] in ("content_block_delta", "content_block_stop"):
            assert one["index"] == len(blocks) - 1
        kinds.append(one["delta"]["type"] if one["type"] == "content_block_delta" else one["type"])
    merged = [kind for at, kind in enumerate(kinds) if at == 0 or kinds[at - 1] != kind]
    block = ["content_block_start", "{}", "content_block_stop"]
    assert merged == [
        *("message_start", "ping", "content_block_start", "thinking_delta", "signature_delta", "content_block_stop"),
        *(one.format("text_delta") for one in block),
        *(one.format("input_json_delta") for one in block),
        *("message_delta", "message_stop"),
    ]
    assert told[0]["message"]["content"] == []
    assert told[0]["message"]["stop_reason"] is None
    start, end = told[0]["message"]["usage"], told[-2]["usage"]
    assert [start[name] for name in PARTS] == [end[name] for name in PARTS]
    hidden = events(server, tools=[WEATHER], **FORCED, thinking={"type": "adaptive", "display": "omitted"})
    assert "hm" not in json.dumps([one.get("delta") for one in hidden])
    assert any(one.get("delta", {}).get("type") == "signature_delta" for one in hidden)


@pytest.mark.parametrize(
    ("fields", "reason", "sequence"),
    [
        ({"structured_outputs": {"choice": ["yes"]}}, "end_turn", None),
        ({"structured_outputs": {"choice": ["so it is"]}, "stop_sequences": ["it"]}, "stop_sequence", "it"),
        ({"structured_outputs": {"choice": ["yes"]}, "max_tokens": 2}, "max_tokens", None),
        ({"ignore_eos": True, "max_tokens": 5000, "messages": [{"role": "user", "content": "x" * 2030}]},
         "model_context_window_exceeded", None),
    ],
)  # fmt: skip
def test_how_an_answer_ended(server, fields, reason, sequence):
    got = ask(server, **{**SAMPLED, "max_tokens": 50, **fields}).json()
    assert (got["stop_reason"], got["stop_sequence"]) == (reason, sequence)
    [delta] = [one for one in events(server, **{**SAMPLED, **fields}) if one["type"] == "message_delta"]
    assert (delta["delta"]["stop_reason"], delta["delta"]["stop_sequence"]) == (reason, sequence)


@pytest.mark.parametrize("choice", [{"type": "tool", "name": "weather"}, {"type": "any"}])
def test_a_call_can_be_forced(server, client, choice):
    other = {**WEATHER, "name": "climate"} if choice["type"] == "any" else {"name": "clock", "input_schema": {}}
    got = client.messages.create(
        model="tiny", max_tokens=400, messages=USER, tools=[WEATHER, other],
        tool_choice={**choice, "disable_parallel_tool_use": True}, extra_body={"seed": 1, "temperature": 1.0},
    )  # fmt: skip
    [call] = got.content
    assert got.stop_reason == "tool_use"
    assert call.input["city"] in ("Bern", "Oslo")
    assert call.name == "weather" or choice["type"] == "any"
    unasked = ask(server, **{**FORCED, "max_tokens": 400}, tools=[WEATHER], tool_choice={"type": "none"}).json()
    assert [block["type"] for block in unasked["content"]] == ["thinking", "text"]


def test_an_answer_goes_on_with_what_was_begun(server):
    begun = [*USER, {"role": "assistant", "content": "The answer is"}]
    got = ask(server, begun).json()
    text = "<bos><user>hello<assistant>The answer is"
    ids = server.llm.tokenizer.encode(text, add_special_tokens=False)
    want = server.complete(ids, max_tokens=6).json()
    assert got["content"][0]["text"] == want["choices"][0]["text"]
    same = {"continue_final_message": True, "add_generation_prompt": False}
    assert chat(server, begun, **same)["choices"][0]["message"]["content"] == want["choices"][0]["text"]
    for fields in (same, {"continue_final_message": True}):
        assert server.ask("/tokenize", {"messages": begun, **fields}).json()["tokens"] == ids
    both = {"continue_final_message": True, "add_generation_prompt": True}
    assert server.ask("/tokenize", {"messages": begun, **both}).status_code == 400
    empty = [*USER, {"role": "assistant", "content": ""}]
    assert server.ask("/tokenize", {"messages": empty, "continue_final_message": True}).status_code == 400


# --- what the cache gave


def test_the_cache_is_told_of_as_it_is(server):
    """Blocks of the prompt that an earlier request had, those that a later one can have, and the rest."""
    size = server.llm.pool.format.block_size
    document = {"role": "user", "content": "of a document that two requests share " * 8}
    first = ask(server, [document], cache_control={"type": "ephemeral"}).json()["usage"]
    whole = sum(first[name] for name in PARTS)
    assert first["cache_read_input_tokens"] < size * 2  # what all prompts begin with
    assert first["cache_creation_input_tokens"] + first["cache_read_input_tokens"] == whole // size * size
    again = ask(server, [document]).json()["usage"]
    assert again["cache_read_input_tokens"] == (whole - 1) // size * size
    assert sum(again[name] for name in PARTS) == whole
    told = events(server, messages=[document], temperature=0)
    assert told[0]["message"]["usage"]["cache_read_input_tokens"] == again["cache_read_input_tokens"]
    for number in range(2):
        held = ask(server, [document], session_id="held").json()["usage"]
        assert held["input_tokens"] == 0, "a session keeps all of it"
        assert (held["cache_read_input_tokens"] >= whole - 1) == (number == 1)
    server.client.delete("/v1/sessions/held")


@pytest.mark.parametrize("head", [BILLING + " cch={};", "Today is day {}."])
def test_a_system_prompt_that_begins_otherwise_each_time_keeps_its_prefix(server, head):
    rest = {"type": "text", "text": "a long system prompt, the same in each call. " * 8 + head}
    messages, known = [{"role": "user", "content": "begin"}], head.startswith(BILLING)
    for number in range(4):
        system = [{"type": "text", "text": head.format(number)}, rest]
        got = ask(server, messages, system=system).json()
        moved = known or number > 0
        assert any("first block" in note for note in got["usage"]["saccade"]["notes"]) == moved
        told = f"<system>\n{head.format(number)}\n</system>" if moved else ""
        first, *others = ([rest] if moved else system), *messages
        same = [{"role": "system", "content": first}, *others]
        if moved:
            same[-1] = {**same[-1], "content": f"{same[-1]['content']}\n{told}"}
        assert got["content"][0]["text"] == chat(server, same)["choices"][0]["message"]["content"]
        read, whole = got["usage"]["cache_read_input_tokens"], sum(got["usage"][name] for name in PARTS)
        if number > (0 if known else 1):
            assert whole - read < 160, "what was new, and the block"
        messages = [*messages, {"role": "assistant", "content": "so"}, {"role": "user", "content": f"go {number}"}]


def test_a_system_prompt_that_stays_is_left_as_it_is(server):
    for number in range(2):
        system = [{"type": "text", "text": "of one user"}, {"type": "text", "text": "the rest"}]
        got = ask(server, [{"role": "user", "content": f"question {number}"}], system=system).json()
        assert got["usage"]["saccade"]["notes"] == []
    for user in ("one", "other"):  # who begin with the same words
        system = [{"type": "text", "text": f"of the {user} user"}, {"type": "text", "text": "the rest"}]
        assert ask(server, system=system).json()["usage"]["saccade"]["notes"] == []


def test_heads_of_conversations_are_few():
    known, turns = SystemHeads(most=2), [*USER, {"role": "assistant", "content": "x"}]

    def changes(owner, texts, messages, *marks):
        blocks = [{"cache_control": {}} if place in marks else {} for place in range(len(texts))]
        return known.changes(owner, blocks, texts, messages)

    marked = [{"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": {}}]}, *turns]
    plain = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}, *turns]
    assert not changes("", ["a", "r"], marked)
    assert not changes("other key", ["b", "r"], plain)
    assert changes("", ["b", "r"], plain), "marks of caches are no part of a conversation"
    assert changes("", ["b", "r"], USER), "what has changed once will in other conversations, too"
    assert not changes("", ["a", "q"], plain)
    assert not changes("", ["a", "p"], plain)
    assert not changes("", ["c", "r"], plain), "forgotten"
    assert not changes("", ["a"], plain)
    assert changes("", ["day 5", "s"], USER, 1)
    for head, marks in (("day", [1]), ("day 5", [0, 1]), ("day 5", []), ("day 5 " * 99, [1])):
        assert not changes("", [head, "s"], USER, *marks), "it may well stay"


# --- what is refused


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "eA=="}}


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0] is an image"),
        ({"messages": [*USER, {"role": "user", "content": [{"type": "nix"}]}]}, "messages[1].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x"}]}]}, "tool_use"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "role"),
        ({"messages": [{"role": "user"}]}, "content"),
        ({"messages": []}, "messages"),
        ({"system": [IMAGE]}, "system[0] is an image"),
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"stop": "x"}, "stop_sequences"),
        ({"n": 2}, "n"),
        ({"thinking": {"type": "enabled", "budget_tokens": 5}}, "budget_tokens"),
        ({"thinking": {"type": "nix"}}, "thinking"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": {"type": "tool", "name": "nix"}, "tools": [WEATHER]}, "nix"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "web_search_20250305"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name"),
        ({"tools": [{"name": "f", "input_schema": {"type": "string"}}]}, "tools[0].input_schema"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"context_management": {"edits": [{"type": "nix"}]}}, "context_management"),
        ({"nix": 1}, "nix"),
        ({"policy": "nix"}, "unknown method"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(server, fields, said):
    response = ask(server, **fields)
    assert wrong(response) == (400, "invalid_request_error")
    assert said in response.json()["error"]["message"]


def test_errors_are_those_that_the_client_knows(server, client):
    with pytest.raises(anthropic.NotFoundError) as none:
        client.messages.create(model="claude", max_tokens=1, messages=USER)
    assert none.value.body["error"]["type"] == "not_found_error"
    assert none.value.request_id
    assert wrong(ask(server, path="/v1/messages/batches")) == (404, "not_found_error")
    assert wrong(server.client.get("/v1/messages")) == (405, "invalid_request_error")
    big = [{"role": "user", "content": "x" * 4000}]
    assert wrong(ask(server, big)) == (400, "invalid_request_error")
    text = server.client.post("/v1/messages", content=b"x", headers={"content-type": "text/plain"})
    assert wrong(text) == (415, "invalid_request_error")
    headers = {"x-api-key": "sk-unknown-key-of-tests"}
    assert wrong(server.client.post("/v1/messages", json={}, headers=headers)) == (401, "authentication_error")
    bearer = {"x-api-key": "", "authorization": f"Bearer {SECRET}"}
    assert server.client.post("/v1/messages/count_tokens", json={"model": "tiny", "messages": USER}, headers=bearer)
    server.serving.admission.most = 0
    try:
        with pytest.raises(anthropic.BadRequestError):
            client.messages.create(model="tiny", max_tokens=1, messages=USER)
    finally:
        server.serving.admission.most = 1000


def test_a_stream_that_fails_ends_with_an_error_event(server):
    told = events(server, ignore_eos=True, temperature=0, max_tokens=1900, deadline_seconds=0.3)
    assert told[0]["type"] == "message_start"
    assert told[-1]["type"] == "error"
    assert told[-1]["error"]["type"] == "timeout_error"
