"""Open Responses: the resource and its events as openai-python validates them, and conversations that are kept."""

from __future__ import annotations

import json
import threading
from itertools import chain

import pytest
from engine_helpers import make
from openai import OpenAI
from response_events import RESOURCE, Order, follow
from server_helpers import GREEDY, error, parsed, serving
from test_server_structured import TOOL, template_with_tools
from tiny_models import make_checkpoint

from saccade.server.keys import Key, KeyRing, digest

FUNCTION = {"type": "function", **TOOL["function"]}
ASK = {"temperature": 0, "max_output_tokens": 6, "ignore_eos": True}
EXTRA = {"ignore_eos": True}
JSON = {"format": {"type": "json_object"}}
SAID = '<think>hm</think>ok <tool_call>{"name": "weather", "arguments": {"city": "Bern"}}</tool_call>'
PDF = {"type": "input_file", "filename": "x.pdf", "file_data": "data:application/pdf;base64,JVBERi0xLjQK"}
SECRET, OTHER = "sk-first-key-of-tests", "sk-second-key-of-tests"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = make_checkpoint("llama", tmp_path_factory.mktemp("m") / "tools", max_position_embeddings=2048)
    template_with_tools(folder)
    keys = KeyRing([Key("one", digest(SECRET)), Key("two", digest(OTHER))])
    with serving(
        make(folder), names=("tiny",), keys=keys, tool_parser="hermes", reasoning_parser="qwen3", max_responses=4
    ) as running:
        running.client.headers["authorization"] = f"Bearer {SECRET}"
        yield running
        running.idle()


@pytest.fixture(scope="module")
def openai(server):
    with OpenAI(base_url=server.url + "/v1", api_key=SECRET, _strict_response_validation=True, max_retries=0) as client:
        yield client


def respond(server, given, **fields):
    return server.ask("/v1/responses", {"input": given, **ASK, **fields})


def test_a_response_says_what_a_chat_says(server, openai):
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
    chat = server.ask("/v1/chat/completions", {"messages": messages, **GREEDY, "max_tokens": 6}).json()
    got = respond(server, "hello", instructions="be brief").json()
    assert set(got) >= RESOURCE
    [item] = got["output"]
    assert item["content"][0]["text"] == chat["choices"][0]["message"]["content"]
    assert (got["status"], got["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert got["usage"]["output_tokens"] == 6
    assert got["usage"]["saccade"]["density"]["prefill"] == 1.0
    typed = openai.responses.create(
        model="tiny", input=messages, temperature=0, max_output_tokens=6, extra_body={**EXTRA, "policy": "psa"}
    )
    assert typed.output_text == item["content"][0]["text"]
    assert typed.usage.input_tokens == chat["usage"]["prompt_tokens"]


def test_an_answer_that_ends_is_complete_and_never_without_an_item(server):
    got = respond(server, "x", **SAMPLED_ONCE, structured_outputs={"choice": ["yes"]}).json()
    assert (got["status"], got["incomplete_details"], got["error"]) == ("completed", None, None)
    assert got["completed_at"] >= got["created_at"]
    assert got["output"][0]["content"][0]["text"] == "yes"
    ends = {str(token): 1e6 for token in server.llm.model.eos_token_ids}
    silent = respond(server, "x", ignore_eos=False, logit_bias=ends).json()
    assert silent["status"] == "completed"
    assert silent["output"][0]["content"][0]["text"] == ""


SAMPLED_ONCE = {"temperature": 1.0, "max_output_tokens": 400, "ignore_eos": False, "seed": 1}


def test_events_tell_the_response_in_order(server, openai):
    body = {"input": "x", **SAMPLED_ONCE, "tools": [FUNCTION], "structured_outputs": {"choice": [SAID]}}
    events = server.events("/v1/responses", body)
    assert events.pop() == "[DONE]"
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    kinds = [event["type"].removeprefix("response.") for event in events if not event["type"].endswith(".delta")]
    part = ["output_item.added", "content_part.added", "{}.done", "content_part.done", "output_item.done"]
    assert kinds == [
        "created",
        "in_progress",
        *[one.format("reasoning_text") for one in part],
        *[one.format("output_text") for one in part],
        "output_item.added",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]
    final = events[-1]["response"]
    assert [item["type"] for item in final["output"]] == ["reasoning", "message", "function_call"]
    assert [event["item"] for event in events if event["type"] == "response.output_item.done"] == final["output"]
    texts = [event["delta"] for event in events if event["type"] == "response.output_text.delta"]
    assert "".join(texts) == final["output"][1]["content"][0]["text"] == "ok "
    assert json.loads(final["output"][2]["arguments"]) == {"city": "Bern"}
    assert final["usage"]["output_tokens_details"]["reasoning_tokens"] == 2
    whole = server.ask("/v1/responses", body).json()
    shape = [[item["type"], item.get("content"), item.get("arguments")] for item in final["output"]]
    assert [[item["type"], item.get("content"), item.get("arguments")] for item in whole["output"]] == shape
    fields = {**EXTRA, "ignore_eos": False, "structured_outputs": {"choice": [SAID]}}
    with openai.responses.stream(model="tiny", input="x", tools=[FUNCTION], extra_body=fields) as stream:
        typed = [event.type for event in stream]
        assert stream.get_final_response().output_text == "ok "
    assert typed[-1] == "response.completed"


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0, "max_output_tokens": 7},
        {**SAMPLED_ONCE, "tools": [FUNCTION], "structured_outputs": {"choice": [SAID]}},
        {**SAMPLED_ONCE, "structured_outputs": {"choice": ["<think>only thoughts"]}},
        {**SAMPLED_ONCE, "tools": [FUNCTION], "tool_choice": {"type": "function", "name": "weather"}},
        {"temperature": 0, "max_output_tokens": 5, "logit_bias": {"60": 100}, "top_logprobs": 2},
        {"temperature": 0, "max_output_tokens": 3, "instructions": "be brief", "store": False, "text": JSON},
    ],
    ids=["cut", "thoughts, text and a call", "thoughts", "a forced call", "log-probabilities", "cut JSON"],
)  # fmt: skip
def test_each_event_is_well_formed_and_in_its_place(server, fields):
    final = follow(server.events("/v1/responses", {"input": "x", "ignore_eos": False, **fields}))
    whole = server.ask("/v1/responses", {"input": "x", "ignore_eos": False, **fields}).json()
    assert [item["type"] for item in final["output"]] == [item["type"] for item in whole["output"]]
    assert final["usage"]["output_tokens"] == whole["usage"]["output_tokens"]


def test_events_out_of_order_are_seen(server):
    """The check of the test above can fail: without any one event but a delta, or with two of them swapped."""
    body = {"input": "x", **SAMPLED_ONCE, "tools": [FUNCTION], "structured_outputs": {"choice": [SAID]}}
    events = server.events("/v1/responses", body)
    follow(events)

    def renumbered(changed):
        return [one if one == "[DONE]" else {**one, "sequence_number": i} for i, one in enumerate(changed)]

    for place in range(len(events) - 1):
        with pytest.raises((AssertionError, KeyError)):
            follow(renumbered(events[:place] + events[place + 1 :]))
        swapped = [*events[:place], events[place + 1], events[place], *events[place + 2 :]]
        kinds = {one if one == "[DONE]" else one["type"] for one in swapped[place : place + 2]}
        if len(kinds) == 2:
            with pytest.raises((AssertionError, KeyError, TypeError)):
                follow(renumbered(swapped))
    with pytest.raises(AssertionError):
        Order().end()


def test_a_conversation_goes_on_from_a_stored_response(server, openai):
    first = openai.responses.create(model="tiny", input="hello", max_output_tokens=5, temperature=0, extra_body=EXTRA)
    second = openai.responses.create(
        model="tiny", input="and?", previous_response_id=first.id, max_output_tokens=5, temperature=0, extra_body=EXTRA
    )
    said = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "and?"},
    ]
    by_hand = server.ask("/v1/chat/completions", {"messages": said, **GREEDY, "max_tokens": 5}).json()
    assert second.output_text == by_hand["choices"][0]["message"]["content"]
    assert openai.responses.retrieve(second.id).output_text == second.output_text
    assert [item.role for item in openai.responses.input_items.list(second.id)] == ["user"]
    openai.responses.delete(second.id)
    assert server.client.get(f"/v1/responses/{second.id}").status_code == 404
    refused = respond(server, "x", previous_response_id=second.id)
    assert error(refused) == (404, "previous_response_not_found", "previous_response_id")


def test_what_is_not_stored_or_anothers_is_not_there(server):
    kept = respond(server, "x").json()
    other = {"authorization": f"Bearer {OTHER}"}
    assert server.client.get(f"/v1/responses/{kept['id']}", headers=other).status_code == 404
    assert server.client.delete(f"/v1/responses/{kept['id']}", headers=other).status_code == 404
    hidden = respond(server, "x", store=False).json()
    assert server.client.get(f"/v1/responses/{hidden['id']}").status_code == 404
    for _ in range(4):
        respond(server, "x")
    assert len(server.serving.responses) == 4
    assert server.client.get(f"/v1/responses/{kept['id']}").status_code == 404


def test_what_a_client_sends_is_told_again_as_json(server):
    got = respond(server, "x", metadata={"half": "\ud83d", "none": float("inf"), "nan": float("nan")})
    assert got.status_code == 200
    assert got.json()["metadata"] == {"half": "\ud83d", "none": None, "nan": None}


def test_calls_and_their_outputs_are_items(server):
    call = {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "Oslo"}'}
    output = {"type": "function_call_output", "call_id": "c1", "output": "rain"}
    question = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "?"}]}
    thought = {"type": "reasoning", "summary": [], "content": []}
    got = respond(server, [question, thought, call, output], tools=[FUNCTION]).json()
    assert got["tools"][0]["name"] == "weather"
    forced = respond(
        server, [question], tools=[FUNCTION], tool_choice={"type": "function", "name": "weather"}, **SAMPLED_ONCE
    ).json()
    assert [item["type"] for item in forced["output"]] == ["function_call"]
    assert json.loads(forced["output"][0]["arguments"])["city"] in ("Bern", "Oslo")


def test_a_call_goes_there_and_its_output_back(server):
    """As items of one input, and behind the response that made the call."""
    question = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "?"}]}
    choice = {"type": "function", "name": "weather"}
    forced = respond(server, [question], tools=[FUNCTION], tool_choice=choice, **SAMPLED_ONCE).json()
    [call] = forced["output"]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "rain"}
    whole = respond(server, [question, call, result], tools=[FUNCTION]).json()
    behind = respond(server, [result], previous_response_id=forced["id"], tools=[FUNCTION]).json()
    longer = respond(server, [question, call, {**result, "output": "rain, rain"}], tools=[FUNCTION]).json()
    assert whole["status"] == behind["status"] == "incomplete"
    assert whole["output"][0]["content"] == behind["output"][0]["content"]
    assert whole["usage"]["input_tokens"] == behind["usage"]["input_tokens"]
    assert longer["usage"]["input_tokens"] == whole["usage"]["input_tokens"] + len(", rain")
    kept = server.client.get(f"/v1/responses/{whole['id']}/input_items").json()["data"]
    assert [item["type"] for item in kept] == ["message", "function_call", "function_call_output"]
    assert (kept[1]["call_id"], kept[1]["arguments"]) == (call["call_id"], call["arguments"])


def test_text_has_a_format_and_log_probabilities(server):
    format = {"type": "json_schema", "name": "n", "schema": {"enum": [1, 2]}, "strict": True}
    got = respond(server, "x", **SAMPLED_ONCE, text={"format": format}, top_logprobs=2).json()
    [part] = got["output"][0]["content"]
    assert json.loads(part["text"]) in (1, 2)
    assert got["text"]["format"] == format
    assert len(part["logprobs"][0]["top_logprobs"]) == 2


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": [{"type": "input_image", "image_url": "http://x"}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "http://x"}]}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_file", "file_url": "file:///x"}]}]}, "input"),
        ({"input": [{"role": "user", "content": [PDF]}]}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input"),
        ({"input": []}, "input"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"include": ["file_search_call.results"]}, "include"),
        ({"conversation": "c"}, "conversation"),
        ({"text": {"format": {"type": "json_schema"}}}, "text"),
        ({"text": {"verbosity": "high"}}, "verbosity"),
    ],
)
def test_what_is_wrong_with_a_response_is_named(server, fields, param):
    status, _, named = error(server.ask("/v1/responses", {"input": "x", **ASK, **fields}))
    assert (status, named) == (400, param)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"input": []}, "input: List should have"),
        ({"max_output_tokens": 0}, "max_output_tokens=0 must be"),
        ({"background": True}, "background=True is not supported: the caller waits"),
    ],
)
def test_an_error_calls_a_field_by_the_name_that_the_client_gave(server, fields, said):
    answer = server.ask("/v1/responses", {"input": "x", **ASK, **fields})
    assert error(answer)[2] == next(iter(fields))
    assert answer.json()["error"]["message"].startswith(said)


def test_a_response_that_fails_says_so_in_an_event(server, in_the_next_pass):
    begun = threading.Event()

    def fail():
        begun.wait(60)  # for the first token, and with it the stream's status
        raise RuntimeError("planted")

    in_the_next_pass(fail, "decode")
    with server.client.stream("POST", "/v1/responses", json={"input": "x", **ASK, "stream": True}) as response:
        lines = response.iter_lines()
        first = next(lines)
        begun.set()
        events = parsed(chain([first], lines))
    assert [event["type"] for event in events[-3:-1]] == ["error", "response.failed"]
    assert events[-2]["response"]["status"] == "failed"
    assert "planted" in events[-2]["response"]["error"]["message"]
