"""The API: answers are the library's, in OpenAI's form, and what cannot be honoured is refused by its name."""

from __future__ import annotations

import pytest
from engine_helpers import make
from openai import OpenAI
from server_helpers import GREEDY, error, serving
from tiny_models import VOCAB, random_ids

from saccade import SamplingParams, __version__

PSA = "psa(epsilon=0.4, block_size=16, microbatch=1)"
SPARSE = f"flexprefill(gamma=0.5, block_size=64, min_budget=0)+{PSA}"


@pytest.fixture(scope="module")
def server(tiny_llama):
    with serving(make(tiny_llama, max_model_len=800), names=("tiny", "alias")) as running:
        yield running
        running.idle()


@pytest.fixture(scope="module")
def openai(server):
    with OpenAI(base_url=server.url + "/v1", api_key="none", _strict_response_validation=True, max_retries=0) as client:
        yield client


def library(server, ids, policy=None, **params):
    return server.llm.generate([ids], SamplingParams(**{**GREEDY, **params}), policy=policy)[0]


# --- answers are the library's


@pytest.mark.parametrize("policy", ["dense", "streaming(sinks=2, window=40)", SPARSE])
def test_greedy_answers_are_those_of_the_library(server, policy):
    ids = random_ids(220, seed=3)
    want = library(server, ids, policy)
    got = server.complete(ids, policy=policy, report=True).json()
    assert got["choices"][0]["text"] == want.outputs[0].text
    cost, report = got["usage"]["saccade"], want.report
    for phase in ("prefill", "decode"):
        assert cost["density"][phase] == pytest.approx(report[phase]["density"])
        assert cost["keys_read_per_token"][phase] == pytest.approx(report[phase]["keys_attended_per_row"], abs=0.01)
        assert got["choices"][0]["report"][phase]["density_per_head"] == report[phase]["density_per_head"]
    assert (cost["density"]["prefill"] < 0.9) == (policy != "dense")
    assert cost["policy"] == want.report["policy"]


def test_samples_seeds_and_penalties_are_those_of_the_library(server):
    asked = {"n": 3, "seed": 7, "temperature": 0.8, "top_p": 0.9, "top_k": 50, "min_p": 0.01, "repetition_penalty": 1.1}
    asked |= {"presence_penalty": 0.5, "frequency_penalty": 0.25, "logit_bias": {"70": 2.0}}
    asked |= {"min_tokens": 4, "max_tokens": 12, "ignore_eos": False}
    want = library(server, server.llm.encode("some text"), **asked)
    got = server.complete("some text", **asked).json()
    assert [choice["text"] for choice in got["choices"]] == [one.text for one in want.outputs]
    assert [choice["finish_reason"] for choice in got["choices"]] == [one.finish_reason for one in want.outputs]
    assert [choice["index"] for choice in got["choices"]] == [0, 1, 2]
    assert got["usage"]["completion_tokens"] == sum(len(one.token_ids) for one in want.outputs)


def test_a_chat_goes_through_the_template(server):
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
    want = server.llm.chat(messages, SamplingParams(**GREEDY))[0]
    parts = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "hello"}]},
    ]
    for given in (messages, parts):
        got = server.ask("/v1/chat/completions", {"messages": given, **GREEDY, "max_completion_tokens": 10}).json()
        assert got["choices"][0]["message"]["content"] == want.outputs[0].text
        assert got["usage"]["prompt_tokens"] == len(want.prompt_token_ids)
        assert got["usage"]["saccade"]["policy"] == "dense"


@pytest.mark.parametrize("stop", [None, "whole"])
def test_a_stream_joins_to_the_whole_answer(server, stop):
    ids = random_ids(60, seed=5)
    plain = library(server, ids, n=2, temperature=0.7, seed=3, logprobs=2)
    stops = None if stop is None else [plain.outputs[0].text[3:5]]
    want = library(server, ids, n=2, temperature=0.7, seed=3, logprobs=2, stop=stops)
    body = {"prompt": ids, **GREEDY, "n": 2, "temperature": 0.7, "seed": 3, "logprobs": 2, "stop": stops}
    events = server.events("/v1/completions", {**body, "stream_options": {"include_usage": True}})
    assert events.pop() == "[DONE]"
    last = events.pop()
    assert last["choices"] == []
    whole = server.complete(ids, **{name: value for name, value in body.items() if name != "prompt"}).json()
    assert last["usage"] == whole["usage"]
    for index in range(2):
        chunks = [event["choices"][0] for event in events if event["choices"][0]["index"] == index]
        assert "".join(chunk["text"] for chunk in chunks) == want.outputs[index].text
        reasons = [chunk["finish_reason"] for chunk in chunks]
        assert reasons[:-1] == [None] * (len(chunks) - 1)
        assert reasons[-1] == want.outputs[index].finish_reason
        scores = [chunk["logprobs"] for chunk in chunks if chunk["logprobs"]]
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            joined = [one for score in scores for one in score[name]]
            assert joined == whole["choices"][index]["logprobs"][name]


def test_a_streamed_chat_tells_usage_in_every_chunk_if_asked(server):
    body = {"messages": [{"role": "user", "content": "hello"}], **GREEDY, "logprobs": True, "top_logprobs": 2}
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = server.events("/v1/chat/completions", {**body, "stream_options": options})[:-1]
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    counted = [event["usage"]["completion_tokens"] for event in events]
    assert counted == sorted(counted)
    assert counted[-1] == 10
    whole = server.ask("/v1/chat/completions", body).json()["choices"][0]
    scores = [event["choices"][0]["logprobs"] for event in events[:-1] if event["choices"][0]["logprobs"]]
    assert [one for score in scores for one in score["content"]] == whole["logprobs"]["content"]
    assert len(whole["logprobs"]["content"]) == 10
    assert all(len(one["top_logprobs"]) == 2 for one in whole["logprobs"]["content"])
    text = "".join(event["choices"][0]["delta"].get("content", "") for event in events[:-1])
    assert text == whole["message"]["content"]


def test_an_echoed_prompt_is_scored(server):
    ids = random_ids(30, seed=9)
    want = library(server, ids, logprobs=2, prompt_logprobs=2)
    for most in (10, 0):
        got = server.complete(ids, echo=True, logprobs=2, max_tokens=most).json()
        choice, answer = got["choices"][0], want.outputs[0].token_ids[:most]
        assert choice["text"] == server.llm.tokenizer.decode(ids) + server.llm.tokenizer.decode(answer)
        entries = [*want.prompt_logprobs, *want.outputs[0].logprobs[:most]]
        scores = [None if row is None else row[token].logprob for token, row in zip([*ids, *answer], entries)]
        assert choice["logprobs"]["token_logprobs"] == scores
        assert len(choice["logprobs"]["tokens"]) == len(choice["logprobs"]["text_offset"]) == 30 + most
        assert got["usage"]["completion_tokens"] == most
    named = server.complete(ids, prompt_logprobs=1).json()["choices"][0]["prompt_logprobs"]
    assert named[0] is None
    assert named[3][str(ids[3])]["logprob"] == pytest.approx(want.prompt_logprobs[3][ids[3]].logprob)


def test_many_prompts_of_both_kinds(server):
    prompts = [random_ids(20, seed=1), random_ids(40, seed=2)]
    want = [library(server, ids).outputs[0].text for ids in prompts]
    got = server.complete(prompts, n=2, temperature=0).json()
    assert [choice["text"] for choice in got["choices"]] == [want[0], want[0], want[1], want[1]]
    assert got["usage"]["prompt_tokens"] == 60
    texts = server.complete(["one text", "another"]).json()
    assert [one["text"] for one in texts["choices"]] == [
        library(server, server.llm.encode(text)).outputs[0].text for text in ("one text", "another")
    ]


# --- the client that most users have


def test_openai_python_accepts_every_answer(server, openai):
    extra = {"ignore_eos": True, "policy": PSA, "report": True}
    messages = [{"role": "user", "content": "hello"}]
    chat = openai.chat.completions.create(
        model="alias", messages=messages, max_tokens=5, logprobs=True, top_logprobs=1, n=2, extra_body=extra
    )
    assert (chat.model, len(chat.choices), chat.choices[0].finish_reason) == ("alias", 2, "length")
    assert chat.usage.saccade["policy"] == PSA
    chunks = list(
        openai.chat.completions.create(
            model="tiny", messages=messages, max_tokens=5, stream=True, stream_options={"include_usage": True}
        )
    )
    assert chunks[-1].usage.total_tokens > 0
    text = openai.completions.create(model="tiny", prompt="hello", max_tokens=3, logprobs=1, extra_body=extra)
    assert text.usage.completion_tokens == 3
    # Its types want a finish_reason in every chunk of a text completion, which OpenAI itself does not send.
    with OpenAI(base_url=server.url + "/v1", api_key="none") as lenient:
        assert [one.choices[0].text for one in lenient.completions.create(model="tiny", prompt="a", stream=True)]
    assert {model.id for model in openai.models.list()} == {"tiny", "alias"}
    assert openai.models.retrieve("alias").owned_by == "saccade"
    with pytest.raises(Exception, match="maximum context length") as caught:
        openai.chat.completions.create(model="tiny", messages=messages, max_tokens=5000)
    assert (caught.value.status_code, caught.value.code) == (400, "context_length_exceeded")
    with pytest.raises(Exception, match="does not exist") as caught:
        openai.chat.completions.create(model="gpt-4", messages=messages)
    assert (caught.value.status_code, caught.value.code) == (404, "model_not_found")


# --- what else there is


def test_tokens_models_and_state(server):
    get = server.client.get
    tokens = server.ask("/tokenize", {"prompt": "hello", "return_token_strs": True}).json()
    assert tokens["tokens"] == server.llm.encode("hello")
    assert tokens["max_model_len"] == 800
    assert "".join(tokens["token_strs"]) == "<bos>hello"
    assert server.ask("/detokenize", {"tokens": tokens["tokens"]}).json() == {"prompt": "<bos>hello"}
    chat = server.ask("/tokenize", {"messages": [{"role": "user", "content": "hi"}]}).json()["tokens"]
    assert chat == server.llm.tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])
    assert get("/version").json() == {"version": __version__}
    assert get("/health").status_code == get("/ready").status_code == 200
    assert get("/v1/models/none").status_code == 404
    card = get("/v1/models").json()["data"][0]
    assert (card["id"], card["max_model_len"]) == ("tiny", 800)
    schema = get("/openapi.json").json()
    assert set(schema["paths"]["/v1/chat/completions"]["post"]["responses"]) == {"200", "default"}
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses"):
        answers = schema["paths"][path]["post"]["responses"]["200"]["content"]
        assert set(answers) == {"application/json", "text/event-stream"}
    assert "ValidationError" not in str(schema)
    server.complete([5, 6], policy=PSA)
    metrics = get("/metrics").text
    gauges = "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "longest_token_gap_seconds"
    for name in (*gauges, "generation_tokens_total", "prefill_suspensions_total"):
        assert f'saccade:{name}{{model_name="tiny"}}' in metrics
    assert 'saccade:density_count{method="psa",model_name="tiny",phase="decode"}' in metrics


def test_a_session_keeps_what_it_computed(server):
    first = server.complete(random_ids(100, 1), session_id="s").json()
    text = random_ids(100, 1) + server.llm.encode(first["choices"][0]["text"], first=False)
    longer = text + random_ids(20, 2)
    again = server.ask("/v1/completions", {"prompt": longer, **GREEDY}, **{"x-session-id": "s"}).json()
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= 99
    assert again["choices"][0]["text"] == library(server, longer).outputs[0].text
    assert error(server.complete([5], session_id="s", n=2))[2] == "session_id"
    assert error(server.complete([5], session_id=""))[2] == "session_id"
    assert server.client.delete("/v1/sessions/s").json()["deleted"]
    assert server.client.delete("/v1/sessions/s").status_code == 404
    assert server.complete(longer, session_id="s").json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert server.client.delete("/v1/sessions/s").json()["deleted"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"n": 0}, "n"),
        ({"n": 10**30}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 801}, "prompt"),
        ({"stop": [""]}, "stop"),
        ({"seed": 2**64}, "seed"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {str(VOCAB): 1}}, None),
        ({"logprobs": 101}, "logprobs"),
        ({"policy": "none_such"}, "policy"),
        ({"policy": {"prefill": 5}}, "policy"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [VOCAB]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": "\ud800"}, None),
        ({"prompt": None}, "prompt"),
        ({"prompt": [0] * 801}, "prompt"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, None),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"deadline_seconds": 0}, "deadline_seconds"),
        # What cannot be honoured is named.
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 3}, "best_of"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"priority": 1}, "priority"),
        ({"allowed_token_ids": [5]}, "allowed_token_ids"),
        ({"no_such_field": 1}, "no_such_field"),
    ],
)
def test_what_is_wrong_is_named(server, fields, param):
    body = {"prompt": "hello", **{k: v for k, v in GREEDY.items() if "structured" not in str(fields)}, **fields}
    status, code, named = error(server.ask("/v1/completions", body))
    assert (status, named) == (400, param)
    long = fields.get("max_tokens") == 801 or len(fields.get("prompt") or "") == 801
    assert (code == "context_length_exceeded") == long
    server.idle()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"content": "x"}]}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, None),
        ({"messages": [{"role": "assistant", "content": "x", "tool_calls": [{"function": {}}]}]}, "messages"),
        ({"max_tokens": 5, "max_completion_tokens": 0}, "max_completion_tokens"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"functions": [{}]}, "functions"),
        ({"chat_template": "{{ 1 }}"}, "chat_template"),
        ({"chat_template_kwargs": {"tokenize": True}}, None),
        ({"modalities": ["audio"]}, "modalities"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"store": True}, "store"),
    ],
)
def test_what_is_wrong_with_a_chat_is_named(server, fields, param):
    status, _, named = error(server.chat(**fields))
    assert (status, named) == (400, param)


def test_routes_methods_and_bodies_that_are_none(server):
    post = server.client.post
    assert error(server.client.get("/v1/completions"))[:2] == (405, "method_not_allowed")
    assert error(server.client.get("/nowhere"))[:2] == (404, "unknown_path")
    json_type = {"content-type": "application/json"}
    for content in (b"", b"{", b"[1]", b"\xff\xfe", b'"text"', b"NaN", b"{" * 60, b'{"prompt": 1' + b"0" * 6000 + b"}"):
        assert error(post("/v1/completions", content=content, headers=json_type))[0] == 400, content[:20]
    assert error(post("/v1/completions", content=b"prompt=5"))[:2] == (415, "unsupported_media_type")
    assert error(post("/v1/completions", content=b"[" * 65, headers=json_type))[:2] == (400, "too_deep")


def test_errors_say_what_came_and_what_to_give(server):
    """As curl's users meet them first."""
    json_type = {"content-type": "application/json"}
    for content, said in (
        (b"", "the body is empty; send a JSON object"),
        (b'{"prompt": x}', "the body is not valid JSON: Expecting value at character 11"),
        (b'{"prompt": "x", "temperature": "hot"}', "temperature: Input should be a valid number, got 'hot'"),
        (b'{"prompt": "x", "seed": "%s"}' % (b"9" * 9000), "seed: Input should be a valid integer, got '9999"),
        (b'{"prompt": "x", "stop": 5}', "stop: Input should be a valid string or a valid list, got 5"),
        (b'{"prompt": "x", "stop": ["a", 5]}', "stop.1: Input should be a valid string"),
        (b'{"prompt": ["a", [3]]}', "prompt.1: Input should be a valid string"),
        (b'{"prompt": "x", "policy": 3}', "policy: Input should be a valid string or a valid dictionary, got 3"),
    ):
        message = server.client.post("/v1/completions", content=content, headers=json_type).json()["error"]["message"]
        assert said in message
        assert len(message) < 200
    form = {"content-type": "application/x-www-form-urlencoded"}  # what curl -d sends by itself
    answer = server.client.post("/v1/completions", content=b'{"prompt": "x"}', headers=form).json()
    assert "must be application/json, not 'application/x-www-form-urlencoded'" in answer["error"]["message"]
    assert "it knows POST" in server.client.get("/v1/completions").json()["error"]["message"]
