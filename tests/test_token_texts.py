"""Bytes, texts and places of tokens: joined bytes are the text's, each token stands where it says, and no alternative
is lost, over characters of several tokens."""

from __future__ import annotations

import random

import pytest
from chat_templates import by_pieces, byte_level
from engine_helpers import make
from server_helpers import serving
from tiny_models import make_checkpoint

from saccade import SamplingParams
from saccade.engine.messages import TokenLogprob
from saccade.models.token_texts import TokenTexts
from saccade.models.tokenizer import Tokenizer
from saccade.server.logprobs import TextLogprobs, chat_logprobs

PARTS = [
    "a",
    " the",
    "é",
    "e\u0301",
    "東京",
    "🙂",
    "👩‍👩‍👧",
    " ",
    "\n",
    "\t",
    "<|im_end|>",
    "</think>",
    "ﷺ",
    "\ufffd",
    "x" * 9,
]


@pytest.fixture(scope="module", params=["byte_level", "by_pieces", "pieces_that_strip"])
def tokenizer(request) -> Tokenizer:
    return Tokenizer(byte_level() if request.param == "byte_level" else by_pieces(strips="strip" in request.param))


def texts(seed: int, count: int) -> list[str]:
    rng = random.Random(seed)
    return ["".join(rng.choice(PARTS) for _ in range(rng.randint(1, 12))) for _ in range(count)]


@pytest.mark.parametrize("skip", [True, False])
def test_bytes_are_those_of_the_text_and_places_are_right(tokenizer, skip):
    for text in texts(5, 60):
        ids, stream, taken = tokenizer.encode(text, add_special_tokens=False), tokenizer.stream(skip), []
        places = TokenTexts(tokenizer, skip)
        for token in ids:
            taken.append(places.take(token, stream.step(token), ids[:3])[0])
        whole = tokenizer.decode(ids, skip_special_tokens=skip)
        stood = [one for one in taken if one.data is not None]
        assert b"".join(one.data for one in stood) == whole.encode()
        assert all(whole[one.offset :].startswith(one.text) for one in stood)
        if "\ufffd" not in whole:
            assert "".join(one.text for one in stood) == whole
        hidden = [token for token in ids if tokenizer.hf.convert_ids_to_tokens(token) == "<|im_end|>" and skip]
        assert len(stood) == len(ids) - len(hidden)


def test_bytes_that_are_no_text_are_given_as_they_are(tokenizer):
    emoji = tokenizer.encode("a🙂", add_special_tokens=False)[:-1]
    stream, places = tokenizer.stream(), TokenTexts(tokenizer)
    taken = [places.take(token, stream.step(token))[0] for token in emoji]
    assert b"".join(one.data for one in taken) in ("a🙂".encode()[:-1], " a🙂".encode()[:-1])
    assert taken[-1].text == ""


def test_alternatives_right_after_half_a_character(tokenizer):
    """Each has a name of its own, and one that ends the character bears it."""
    ids = tokenizer.encode("🙂", add_special_tokens=False)
    stream, places = tokenizer.stream(), TokenTexts(tokenizer)
    for token in ids[:-1]:
        places.take(token, stream.step(token))
    last, others = ids[-1], [*ids, tokenizer.encode("a", add_special_tokens=False)[-1]]
    mine, named = places.take(last, stream.step(last), others)
    assert mine.text == named[last].text == "🙂"
    assert mine.data == "🙂".encode()[-1:]
    row = {
        other: TokenLogprob(-float(rank), rank, *(mine if other == last else named[other]))
        for rank, other in enumerate(dict.fromkeys(others), start=1)
    }
    scores = TextLogprobs(len(row), False).chunk([last], [row])
    assert scores["tokens"] == ["🙂"]
    assert sorted(scores["top_logprobs"][0].values()) == sorted(entry.logprob for entry in row.values())
    assert scores["top_logprobs"][0]["🙂"] == row[last].logprob
    (content,) = chat_logprobs([last], [row], len(row), False)["content"]
    assert [one["bytes"] for one in content["top_logprobs"]] == [list(entry.token_bytes) for entry in row.values()]


# --- in the server, whose model writes any bytes


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = make_checkpoint("llama", tmp_path_factory.mktemp("m") / "texts", max_position_embeddings=2048)
    with serving(make(folder)) as running:
        yield running
        running.idle()


SAID = "é東🙂 e\u0301<eos>b"
ASKED = {"structured_outputs": {"choice": [SAID]}, "max_tokens": 60, "ignore_eos": False, "logprobs": 3}


def joined(content) -> bytes:
    return b"".join(bytes(one["bytes"]) for one in content if one["bytes"] is not None)


def test_chats_responses_and_streams(server):
    fields = {**ASKED, "logprobs": True, "top_logprobs": 4}
    content = server.chat(**fields).json()["choices"][0]["logprobs"]["content"]
    assert joined(content) == SAID.encode()
    assert "".join(one["token"] for one in content[:-1]) == SAID
    assert content[-1]["token"] == "<eos>"
    assert content[-1]["bytes"] is None  # it is no part of the text
    body = {"messages": [{"role": "user", "content": "hello"}], "temperature": 0, **fields}
    events = server.events("/v1/chat/completions", body)[:-1]
    streamed = [one for event in events if (scores := event["choices"][0]["logprobs"]) for one in scores["content"]]
    assert streamed == content
    asked = {"input": "x", "temperature": 0, "top_logprobs": 2, "max_output_tokens": 60}
    asked |= {"structured_outputs": ASKED["structured_outputs"]}
    (item,) = server.ask("/v1/responses", asked).json()["output"]
    assert joined(item["content"][0]["logprobs"]) == item["content"][0]["text"].encode() == SAID.encode()


@pytest.mark.parametrize("skip", [True, False])
def test_completions_with_and_without_their_prompt(server, skip):
    prompt = "x<eos>東é🙂y"
    for echo in (False, True):
        fields = {**ASKED, "echo": echo, "skip_special_tokens": skip, "add_special_tokens": False}
        choice = server.complete(prompt, **fields).json()["choices"][0]
        scores, text = choice["logprobs"], choice["text"]
        assert text == (prompt.replace("<eos>", "" if skip else "<eos>") if echo else "") + SAID
        stood = [one for one in zip(scores["tokens"], scores["text_offset"]) if one[0] != "<eos>"]
        assert all(text[offset:].startswith(token) for token, offset in stood)
        assert scores["text_offset"] == sorted(scores["text_offset"])
        assert all(token in row for token, row in zip(scores["tokens"], scores["top_logprobs"]) if row is not None)
        if not echo:
            events = server.events("/v1/completions", {"prompt": prompt, "temperature": 0, **fields})[:-1]
            parts = [event["choices"][0]["logprobs"] for event in events if event["choices"][0]["logprobs"]]
            assert {name: [value for part in parts for value in part[name]] for name in scores} == scores


def test_scores_of_a_prompt_and_of_python(server):
    llm, prompt = server.llm, "東é🙂"
    ids = llm.tokenizer.encode(prompt, add_special_tokens=False)
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=2, logprobs=1)
    [output] = llm.generate([ids], params)
    rows = output.prompt_logprobs
    assert b"".join(row[token].token_bytes for token, row in zip(ids[1:], rows[1:])) == prompt.encode()[1:]
    assert "".join(row[token].decoded_token for token, row in zip(ids[1:], rows[1:])) == prompt
    scored = server.complete(ids, prompt_logprobs=2).json()["choices"][0]["prompt_logprobs"]
    assert scored[3][str(ids[3])]["decoded_token"] == rows[3][ids[3]].decoded_token
