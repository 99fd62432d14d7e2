"""Answers follow their grammars to the end, whatever text these ask for; what cannot be compiled or followed costs its
own request alone."""

from __future__ import annotations

import json
import random
import re
import threading
import time
from dataclasses import replace

import pytest
import torch
from chat_templates import SPECIALS, by_pieces, byte_level
from drafters import draft_by
from engine_helpers import finish, make
from server_helpers import error, serving
from tiny_models import EOS, VOCAB, make_checkpoint, random_ids

from saccade import Policy, SamplingParams
from saccade.engine.core import new_request_id
from saccade.engine.messages import AddRequest
from saccade.errors import RequestError, SaccadeError
from saccade.models.tokenizer import Tokenizer
from saccade.server import grammars
from saccade.server.grammar import grammar_of
from saccade.server.grammar_check import checked
from saccade.server.matchers import Compiler, Grammar
from saccade.server.protocol import CompletionRequest

TEXTS = [
    "<|im_end|>", "</s>", "a<|im_end|>b", "<|im_start|>system\n<|im_end|>", "<|im_end|><|im_end|>", "<|im_", "[INST] é",
    "🙂<s>",
]  # fmt: skip
PATTERN = r"a{1,2}(<\|im_end\|>|</s>){2}b"


def one_of(text: str) -> bool:
    return text in TEXTS


def const(text: str) -> tuple[dict, object]:
    return {"json": {"const": text}}, lambda got: json.loads(got) == text


KINDS = {
    **{f"const {text!r}": const(text) for text in TEXTS},
    "enum": ({"json": {"enum": TEXTS}}, lambda got: one_of(json.loads(got))),
    "object": (
        {"json": {"type": "object", "properties": {"</s>": {"const": "<s>"}}, "required": ["</s>"],
                  "additionalProperties": False}},
        lambda got: json.loads(got) == {"</s>": "<s>"},
    ),
    "choice": ({"choice": TEXTS}, one_of),
    "one choice": ({"choice": TEXTS[:1]}, one_of),
    "regex": ({"regex": PATTERN}, lambda got: re.fullmatch(PATTERN, got)),
    "bare regex": ({"regex": r"<\|im_end\|>"}, lambda got: got == "<|im_end|>"),
    "lark": (
        {"grammar": 'start: "</s>" x\nx: "a" | "c" "<|im_end|>"'}, lambda got: got in ("</s>a", "</s>c<|im_end|>")
    ),
    "gbnf": ({"grammar": 'root ::= "x" [0-9] "<|im_end|>"'}, lambda got: re.fullmatch(r"x[0-9]<\|im_end\|>", got)),
}  # fmt: skip


@pytest.fixture(scope="module", params=["byte_level", "by_pieces"])
def tokenizer(request) -> Tokenizer:
    return Tokenizer({"byte_level": byte_level, "by_pieces": lambda: by_pieces(strips=False)}[request.param]())


def compiled(tokenizer: Tokenizer, asked: dict, ends) -> Grammar:
    """What the server makes of a request's grammar."""
    found = grammar_of(CompletionRequest.model_validate({"prompt": "x", "structured_outputs": asked}))
    compiler = Compiler(tokenizer.hf, tokenizer.vocab_size, ends)
    return Grammar(checked(compiler.tokens, found[0])["source"], "the grammar of structured_outputs", compiler)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ends", [("</s>",), ("<|im_end|>", "</s>", "a")], ids=str)
def test_text_of_added_tokens_is_written_with_others(tokenizer, kind, ends):
    """Any token that is allowed may come. Ends of several kinds are among what the grammar asks for."""
    asked, follows = KINDS[kind]
    ends = [tokenizer.hf.convert_tokens_to_ids(text) for text in ends]
    grammar, rng = compiled(tokenizer, asked, ends), random.Random(4)
    for _ in range(3):
        matcher, answer = grammar.begin(), []
        while True:
            allowed = matcher.allowed(answer).nonzero()[:, 0].tolist()
            token = rng.choice(allowed)
            if token in ends and matcher.accepts(answer):
                break
            answer.append(token)
            assert len(answer) < 200
        text = tokenizer.decode(answer, skip_special_tokens=False)
        assert follows(text), text
        assert not set(answer) & {tokenizer.hf.convert_tokens_to_ids(one) for one in SPECIALS}


def test_an_added_token_that_a_grammar_names_is_that_token(tokenizer):
    end = tokenizer.hf.convert_tokens_to_ids("<|im_end|>")
    compiler = Compiler(tokenizer.hf, tokenizer.vocab_size, [tokenizer.hf.eos_token_id])
    matcher = Grammar('start: "a" <|im_end|> "c"', "g", compiler).begin()
    first, last = (tokenizer.hf.convert_tokens_to_ids(letter) for letter in "ac")
    assert matcher.allowed([first]).nonzero()[:, 0].tolist() == [end]
    assert not matcher.accepts([first])
    assert matcher.allowed([first, end]).nonzero()[:, 0].tolist() == [last]


def test_what_no_token_can_write_is_said_so():
    hf = byte_level()
    compiler = Compiler(hf, len(hf), [hf.eos_token_id])
    matcher = Grammar("start: <|im_end|>", "the grammar of structured_outputs", compiler).begin()
    with pytest.raises(RequestError, match="the grammar of structured_outputs") as caught:
        matcher.allowed([hf.convert_tokens_to_ids("a")])
    assert not any(word in str(caught.value).lower() for word in ("parser", "lexer", "state", "byte"))


# --- in the engine


def spelling(letters: list[int]):
    """Allows one answer: ``letters``, which may be end tokens."""

    class Spelling:
        name = "the grammar of response_format"

        def begin(self):
            return self

        def allowed(self, answer):
            mask = torch.zeros(VOCAB, dtype=torch.bool)
            mask[[*letters, EOS][len(answer)]] = True
            return mask

        def accepts(self, answer):
            return answer == letters

    return Spelling()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint("llama", tmp_path_factory.mktemp("m") / "grammar", max_position_embeddings=2048)


def test_end_and_stop_tokens_end_nothing_in_the_middle(folder):
    llm = make(folder)
    letters = [65, EOS, 66, 65, EOS, 67]
    for stops in ((), (65,), (66, 67), (EOS,)):
        params = SamplingParams(temperature=0, max_tokens=20, stop_token_ids=stops)
        request = llm.engine.add([5, 6], params, Policy.parse("dense"), constraint=spelling(letters))
        finish(llm.engine)
        assert request.finish_reason == "stop", request.error
        assert request.final_ids[: len(letters)] == letters
        assert request.text == llm.tokenizer.decode(letters)
    llm.close()


class Slow:
    """Allows all, once ``go`` is set."""

    name = "the grammar of response_format"

    def __init__(self) -> None:
        self.go = threading.Event()
        self.asked = threading.Event()

    def begin(self):
        return self

    def allowed(self, answer):
        if answer:
            self.asked.set()
            assert self.go.wait(20)
        return torch.ones(VOCAB, dtype=torch.bool)

    def accepts(self, answer):
        return True


def asked(constraint=None, most: int = 6, **fields) -> AddRequest:
    params = SamplingParams(temperature=0, max_tokens=most, ignore_eos=True, **fields)
    return AddRequest(new_request_id(), random_ids(40, 3), params, Policy.parse("dense"), constraint=constraint)


def test_others_go_on_while_a_mask_is_computed(folder):
    """Their answers are whole before the mask is there, and the answer that waits for it is what it would be."""
    llm, slow = make(folder), Slow()
    want = llm.generate(random_ids(40, 3), SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))[0]
    with llm.loop.asked([asked(slow)]) as (held,):
        assert slow.asked.wait(20)
        with llm.loop.asked([asked(most=50), asked(most=30)]) as others:
            for stream in others:
                assert list(llm.loop.outputs(stream))[-1].outcome.finish_reason == "length"
        assert not slow.go.is_set()
        slow.go.set()
        outcome = list(llm.loop.outputs(held))[-1].outcome
    assert outcome.token_ids == want.outputs[0].token_ids
    llm.close()


def test_samples_of_a_slow_prompt_and_those_who_leave(folder):
    llm, slow = make(folder), Slow()
    first = asked(slow)
    second = replace(first, request_id=new_request_id(), shares=first.request_id, constraint=Slow())
    second.constraint.go.set()
    with llm.loop.asked([first, second]) as (_, other):
        assert list(llm.loop.outputs(other))[-1].outcome.finish_reason == "length"
        assert slow.asked.wait(20)
    assert llm.loop.running == 0  # it was cancelled while its mask was computed
    slow.go.set()
    assert llm.generate([[5, 6]], SamplingParams(max_tokens=2))[0].error is None
    llm.close()


def test_a_constraint_that_takes_too_long_ends_its_own_request(folder):
    llm, slow = make(folder, grammar_seconds=0.05), Slow()
    with llm.loop.asked([asked(slow), asked(most=40)]) as (held, other):
        outcome = list(llm.loop.outputs(held))[-1].outcome
        assert outcome.finish_reason == "error"
        assert "the grammar of response_format" in outcome.error
        assert "grammar_seconds=0.05" in outcome.error
        assert list(llm.loop.outputs(other))[-1].outcome.finish_reason == "length"
    slow.go.set()
    llm.close()


def test_slow_masks_of_drafted_rows_leave_the_answer_as_it_is(folder):
    """A row whose mask is late is computed again."""

    class Late(Slow):
        def allowed(self, answer):
            time.sleep(0.012 if len(answer) % 3 == 1 else 0)
            return torch.ones(VOCAB, dtype=torch.bool)

    class Guess:
        def draft(self, tokens, most):
            return known[len(tokens) : len(tokens) + min(most, 4)]

    llm = make(folder)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    want = llm.generate(random_ids(40, 3), params)[0].outputs[0].token_ids
    known = [*random_ids(40, 3), *want]
    draft_by(llm.engine, Guess())
    request = llm.engine.add(random_ids(40, 3), params, Policy.parse("dense"), constraint=Late())
    finish(llm.engine)
    assert (request.error, request.final_ids) == (None, want)
    assert request.report.accepted_tokens > 0
    llm.close()


@pytest.mark.parametrize("value", [0, -1, "fast", float("nan"), 1e9])
def test_the_limit_must_be_seconds(folder, value):
    with pytest.raises(SaccadeError, match="grammar_seconds="):
        make(folder, grammar_seconds=value)


# --- in the server


@pytest.fixture(scope="module")
def server(folder):
    with serving(make(folder)) as running:
        yield running
        running.idle()


def follow(server, asked: dict, **fields):
    return server.complete("x", structured_outputs=asked, **{"max_tokens": 60, "ignore_eos": False, **fields})


def test_an_answer_may_hold_the_text_of_an_end_token(server):
    choice = follow(server, {"json": {"const": "<eos>"}}).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ('"<eos>"', "stop")


def test_thousands_of_choices(server):
    texts = [f"{number} of {number * number}" for number in range(3000)]
    assert follow(server, {"choice": texts}, temperature=1.0).json()["choices"][0]["text"] in texts


def test_grammars_that_never_compile_or_break_what_compiles_them(server, monkeypatch):
    """The process that compiles them ends, and the next one goes on."""
    monkeypatch.setattr(grammars, "SECONDS", 0.5)
    many = {"type": "string", "allOf": [{"pattern": f"a.{{{number}}}b"} for number in range(1, 40)]}
    count = 1500
    deep = {
        f"d{at}": {"anyOf": [{"$ref": f"#/$defs/d{(at * 7 + other) % count}"} for other in range(3)]}
        for at in range(count)
    }
    for schema, said in ((many, "more than 0.5 s"), ({"$defs": deep, "$ref": "#/$defs/d0"}, "make it simpler")):
        response = follow(server, {"json": schema})
        assert error(response)[::2] == (400, "structured_outputs")
        assert said in response.json()["error"]["message"]
        monkeypatch.setattr(grammars, "SECONDS", 20.0)
        assert follow(server, {"regex": "ab{2}"}).json()["choices"][0]["text"] == "abb"
    assert server.serving.engine.alive


def test_a_grammar_that_reads_in_many_ways_ends_with_its_name(folder):
    with serving(make(folder, grammar_seconds=0.3)) as running:
        asked = {"grammar": 'start: a\na: a a | "x" | "y" | a a a'}
        response = follow(running, asked, max_tokens=900, logit_bias={str(EOS): -100})
        assert error(response)[:2] == (400, "generation_failed")
        message = response.json()["error"]["message"]
        assert "the grammar of structured_outputs" in message
        assert "grammar_seconds=0.3" in message
        assert running.complete("x").status_code == 200
