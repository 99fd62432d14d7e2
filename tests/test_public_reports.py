"""A table of faults that users of other engines have reported in public, each tried here in our own words.

A row names the report and what was lost there; the function below it says what must hold instead. ``REPORTS`` is the
table: each function is one of its tests.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from engine_helpers import GREEDY, LAYERS, make, tokens
from server_helpers import error, parsed, serving
from tiny_models import EOS, VOCAB, make_checkpoint, oracle, oracle_greedy, random_ids

from saccade import SamplingParams
from saccade.errors import RequestError

REPORTS: list[tuple[str, str, Callable]] = []
ANSWER = {"temperature": 0, "max_tokens": 40}
FOREVER = {"temperature": 0, "logit_bias": {str(EOS): -100.0}}


def report(source: str, lost: str) -> Callable[[Callable], Callable]:
    def row(function: Callable) -> Callable:
        REPORTS.append((source, lost, function))
        return function

    return row


@pytest.fixture(scope="module")
def server(tiny_llama):
    with serving(make(tiny_llama, max_model_len=400), reasoning_parser="deepseek_r1", tool_parser="hermes") as running:
        yield running
        running.idle()


# --- memory, prefixes, sessions


@report("vllm#16832", "answers of requests that were preempted and computed again")
def preempted(tiny_llama, llm, **_):
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    prompts = [random_ids(length, seed=length) for length in (127, 125, 126)]
    alone = [tokens(llm.generate(ids, params)[0]) for ids in prompts]
    small = make(tiny_llama, blocks=3 * LAYERS * 4 + 2 * LAYERS)
    outputs = small.generate(prompts, params)
    assert sum(one.report["preemptions"] for one in outputs) > 0
    assert [tokens(one) for one in outputs] == alone
    assert [one.num_cached_tokens for one in outputs] == [0, 0, 0]  # vllm#25780: what is computed again is no cache hit
    small.close()


@report("vllm#7845", "the same answer when a prompt comes again and its prefix is stored")
def again(tiny_llama, **_):
    engine, ids = make(tiny_llama, enable_prefix_caching=True), random_ids(200, 4)
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=0)
    first, second = (engine.generate(ids, params)[0] for _ in range(2))
    assert first.num_cached_tokens == 0
    assert second.num_cached_tokens >= 192 - 32
    assert tokens(first) == tokens(second)
    for one, other in zip(first.outputs[0].logprobs, second.outputs[0].logprobs):
        (a,), (b,) = one.values(), other.values()
        assert a.logprob == pytest.approx(b.logprob, abs=1e-5)
    engine.close()


@report("vllm#49449", "prefixes of a session whose last token was taken back")
def taken_back(tiny_llama, **_):
    prompt, other = [10] * 47, [11, 13]
    fresh = make(tiny_llama)
    engine = make(tiny_llama, enable_prefix_caching=True)
    with engine.session() as session:
        said = tokens(session.generate(prompt, SamplingParams(temperature=0, max_tokens=18, ignore_eos=True)))
        session.complete([*prompt, *other], GREEDY)  # the answer is taken back, and something else stands there
    for ids in ([*prompt, *said[:17], *other], [*prompt, *other, *said], [*prompt, *said, 28]):
        assert tokens(engine.generate(ids, GREEDY)[0]) == tokens(fresh.generate(ids, GREEDY)[0])
    fresh.close()
    engine.close()


@report("llama.cpp#13126", "what is stored of a conversation whose second question is asked anew")
def edited(tiny_llama, **_):
    def said(*texts: str) -> list[dict[str, str]]:
        return [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(texts)]

    engine, document = make(tiny_llama, enable_prefix_caching=True), "a long document " * 12
    first = engine.chat(said(document), GREEDY)[0]
    answer = first.outputs[0].text
    engine.chat(said(document, answer, "and why?"), GREEDY)
    third = engine.chat(said(document, answer, "and when?"), GREEDY)[0]
    assert third.num_cached_tokens >= len(first.prompt_token_ids) - 32  # whole blocks
    engine.close()
    fresh = make(tiny_llama)
    assert tokens(third) == tokens(fresh.generate(third.prompt_token_ids, GREEDY)[0])
    fresh.close()


@report("llama.cpp#16983", "other conversations after one that filled its context")
def filled(tiny_llama, **_):
    engine = make(tiny_llama, max_model_len=128)
    with engine.session() as session, engine.session() as other:
        asked = SamplingParams(max_tokens=None, ignore_eos=True)  # drawn tokens may end an answer before
        assert session.generate(random_ids(120, 1), asked).outputs[0].finish_reason == "length"
        with pytest.raises(RequestError, match="128"):
            session.generate(random_ids(20, 2), GREEDY)
        assert len(tokens(other.generate(random_ids(60, 2), GREEDY))) == 10
    engine.close()


@report("llama.cpp#3969", "an end: answers at the context's length went on for ever")
def at_the_length(server, **_):
    answer = server.ask(
        "/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 380}], **FOREVER}
    ).json()
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["total_tokens"] == 400


@report("mlxcel#678", "windows that a prefill in chunks wrote over (chunks shorter, equal and longer than the window)")
def windows(tmp_path, **_):
    folder = make_checkpoint("gemma3_text", tmp_path / "m")
    ids = random_ids(100, 6)
    want = oracle_greedy(oracle(folder), ids, 30)
    for chunk in (3, 7, 16, 64, 128):
        engine = make(folder, chunk=chunk, max_model_len=200)
        got = tokens(engine.generate(ids, SamplingParams(temperature=0, max_tokens=30))[0])
        engine.close()
        assert got == want, chunk


# --- samples


@report("tt-metal#53077", "differences between the samples of a request with a seed")
def samples(server, **_):
    asked = {"n": 4, "seed": 5, "temperature": 1.0, "max_tokens": 12}
    first, second = ([one["text"] for one in server.complete("x", **asked).json()["choices"]] for _ in range(2))
    assert first == second
    assert len(set(first)) == 4


@report("mlx-vlm#1844", "chance, where a request has no seed")
def no_seed(server, **_):
    texts = {server.complete("x", temperature=1.0, max_tokens=12).json()["choices"][0]["text"] for _ in range(3)}
    assert len(texts) == 3


@report("vllm#5607", "a row's own penalties beside rows without")
def penalties_in_a_batch(llm, **_):
    ids = random_ids(40, 7)
    rows = [
        SamplingParams(temperature=0, max_tokens=12, ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=9, ignore_eos=True, repetition_penalty=2.0),
        SamplingParams(seed=9, max_tokens=11, ignore_eos=True, frequency_penalty=1.5),
        SamplingParams(seed=9, max_tokens=10, ignore_eos=True, top_k=1),
    ]
    alone = [tokens(llm.generate(ids, row)[0]) for row in rows]
    for order in ([0, 1, 2, 3], [3, 2, 1, 0], [1, 3, 0, 2]):
        together = llm.generate([ids] * 4, [rows[at] for at in order])
        assert [tokens(one) for one in together] == [alone[at] for at in order]


@report("vllm#16529", "the engine, by the bias of a token that the model does not have")
def biased_out_of_range(server, **_):
    refused = server.complete("x", logit_bias={"191222": -100})
    assert error(refused)[0] == 400
    assert "191222" in refused.json()["error"]["message"]
    assert server.complete("x").status_code == 200


@report("vllm#54195", "the engine, by a stop token that the model does not have")
def stopped_out_of_range(server, **_):
    body = {"stop_token_ids": [151645], "min_tokens": 5}
    asked = server.complete("x", **body)
    assert asked.status_code in (200, 400)  # it can never come, or is refused
    assert asked.status_code == 200 or "151645" in asked.json()["error"]["message"]
    assert (
        server.complete("x").json()["choices"][0]["text"]
        == server.complete("x", min_tokens=5).json()["choices"][0]["text"]
    )


@report("vllm#26797", "the engine, by a prompt's token that the model does not have")
def prompt_out_of_range(server, **_):
    for token in (VOCAB, 5279552648203111001, -1):
        refused = server.complete([5, token])
        assert error(refused)[0] == 400
        assert str(token) in refused.json()["error"]["message"]


@report("vllm#13175", "answers with tokens of the model that its tokenizer does not have")
def beyond_the_tokenizer(server, **_):
    padded = {str(token): 100.0 for token in range(264, VOCAB)}
    answer = server.complete("x", logit_bias=padded, logprobs=3).json()["choices"][0]
    assert isinstance(answer["text"], str)
    assert len(answer["logprobs"]["tokens"]) == 10
    again = server.complete([5, VOCAB - 1])  # as a prompt they are what they were as an answer
    assert again.status_code == 200


# --- text


@report("vllm#3574", "a stop string, of which the beginning was streamed")
def stop_in_a_stream(server, **_):
    forced = {"structured_outputs": {"regex": "ABCDEFGHIJ"}, **ANSWER, "stop": ["DEFGHIJ"]}
    got = [one for one in server.events("/v1/completions", {"prompt": "x", **forced}) if one != "[DONE]"]
    assert "".join(one["choices"][0]["text"] for one in got if one["choices"]) == "ABC"
    assert [one["choices"][0]["finish_reason"] for one in got if one["choices"]][-1] == "stop"


@report("vllm#11089", "the answer, where a stop string was asked for that never came")
def stop_that_never_comes(server, **_):
    want = server.complete("hello").json()["choices"][0]["text"]
    assert want
    assert server.complete("hello", stop=["no such words"]).json()["choices"][0]["text"] == want


@report("vllm#13087", "first chunks that say something, where stop strings are asked for")
def no_empty_chunks(server, **_):
    body = {"prompt": "x", "structured_outputs": {"regex": "abcdefgh"}, **ANSWER, "stop": ["zz"]}
    texts = [one["choices"][0]["text"] for one in server.events("/v1/completions", body)[:-1] if one["choices"]]
    assert texts[0]
    assert "".join(texts) == "abcdefgh"


@report("oobabot#9", "characters of several tokens, streamed as U+FFFD")
def emoji_in_a_stream(server, **_):
    body = {"messages": [{"role": "user", "content": "x"}], "structured_outputs": {"choice": ["a👍🏽é漢"]}, **ANSWER}
    got = [one["choices"][0]["delta"].get("content") or "" for one in server.events("/v1/chat/completions", body)[:-1]]
    assert "".join(got) == "a👍🏽é漢"
    assert not any("�" in text for text in got)


@report("ollama#13497", "bytes of a character's parts among log-probabilities")
def bytes_of_parts(server, **_):
    choice = server.chat(structured_outputs={"choice": ["a😊b"]}, logprobs=True, top_logprobs=2, ignore_eos=False)
    said = choice.json()["choices"][0]
    joined = bytes(byte for one in said["logprobs"]["content"] for byte in one["bytes"] or [])
    assert said["message"]["content"] == "a😊b"
    assert joined.startswith("a😊b".encode())


@report("llama.cpp#27174", "log-probabilities of an echoed prompt, without which every scored choice is chance")
def echoed(server, **_):
    said = server.complete("hello there", echo=True, logprobs=1, max_tokens=1).json()
    scores = said["choices"][0]["logprobs"]["token_logprobs"]
    assert len(scores) == said["usage"]["prompt_tokens"] + 1
    assert scores[0] is None
    assert all(score < 0 for score in scores[1:])


@report("vllm#2703", "log-probabilities, without a word, of a stream that echoes its prompt")
def echoed_in_a_stream(server, **_):
    body = {"prompt": "hello", "temperature": 0, "max_tokens": 5, "ignore_eos": True, "echo": True, "logprobs": 2}
    refused = server.ask("/v1/completions", {**body, "stream": True})
    assert error(refused) == (400, "unsupported_field", "logprobs")
    assert "stream=false" in refused.json()["error"]["message"]
    whole = server.ask("/v1/completions", body).json()["choices"][0]
    assert (
        len(whole["logprobs"]["tokens"]) == len(whole["logprobs"]["text_offset"]) == 5 + 1 + 5
    )  # <bos>, prompt, answer


@report("vllm-mlx#628", "the reason why a streamed answer ended by itself")
def reasons_in_a_stream(server, **_):
    for bias, reason in ((100.0, "stop"), (-100.0, "length")):
        body = {"messages": [{"role": "user", "content": "x"}], **ANSWER, "logit_bias": {str(EOS): bias}}
        got = server.events("/v1/chat/completions", body)
        assert got[-1] == "[DONE]"
        assert [one["choices"][0]["finish_reason"] for one in got[:-1] if one["choices"]].count(reason) == 1


# --- answers in form


@report("vllm#48863", "a chosen answer, taken for thoughts (include_reasoning=false too)")
def answers_beside_thoughts(server, **_):
    for shown in (True, False):
        asked = {"structured_outputs": {"choice": ["positive", "negative"]}, "include_reasoning": shown}
        message = server.chat(**asked, ignore_eos=False).json()["choices"][0]["message"]
        assert message["content"] in ("positive", "negative")


@report("mlx-openai-server#205", "an assistant's turn that calls a tool and says nothing (content null)")
def calls_without_content(server, **_):
    call = {"id": "c1", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "the time?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "user", "content": "and now?"},
    ]
    asked = server.ask("/v1/chat/completions", {"messages": messages, **ANSWER})
    assert asked.status_code == 200
    blank = server.ask(
        "/v1/chat/completions", {"messages": [messages[0], {"role": "assistant", "content": ""}, messages[2]], **ANSWER}
    )
    assert asked.json()["usage"]["prompt_tokens"] == blank.json()["usage"]["prompt_tokens"]


@report("llama.cpp#22828", "answers to good requests after one that ended badly")
def after_a_bad_one(server, **_):
    want = server.complete("hello").json()["choices"][0]["text"]
    for body in ({"prompt": random_ids(380, 1), "max_tokens": 30, "deadline": 1e-3}, {"prompt": "", "max_tokens": 3}):
        server.ask("/v1/completions", body)
    server.chat(structured_outputs={"regex": "("})
    threads = [threading.Thread(target=server.complete, args=(random_ids(300, n),)) for n in range(4)]
    for thread in threads:
        thread.start()
    got = [server.complete("hello").json()["choices"][0]["text"] for _ in range(3)]
    for thread in threads:
        thread.join()
    assert got == [want] * 3


@report("vllm#15119", "a stream that echoes its prompt without log-probabilities")
def echo_alone(server, **_):
    body = {"prompt": "hello", "temperature": 0, "max_tokens": 3, "ignore_eos": True, "echo": True, "stream": True}
    with server.client.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200
        texts = [one["choices"][0]["text"] for one in parsed(response.iter_lines())[:-1] if one["choices"]]
    assert "".join(texts).startswith("hello")


@pytest.mark.parametrize(("source", "lost", "holds"), REPORTS, ids=[source for source, *_ in REPORTS])
def test_what_was_reported_elsewhere_does_not_happen_here(source, lost, holds, request):
    wanted = holds.__code__.co_varnames[: holds.__code__.co_argcount]
    holds(**{name: request.getfixturevalue(name) for name in wanted})


def test_the_table_names_each_report_once():
    sources = [source for source, *_ in REPORTS]
    assert len(set(sources)) == len(sources) >= 26


def test_a_request_error_is_one_line():
    with pytest.raises(RequestError) as caught:
        SamplingParams(max_tokens=0)
    assert "\n" not in str(caught.value)
