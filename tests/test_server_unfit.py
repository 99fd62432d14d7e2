"""A tokenizer that llguidance cannot read is found out once: every request that needs a grammar is refused by the same
error, at once and before the engine, and the others go on."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import fork_server
import httpx
import pytest
from chat_templates import byte_level
from engine_helpers import make
from server_helpers import GREEDY, error, parsed, serving, until
from tiny_models import make_checkpoint, random_ids

from saccade import Policy, SamplingParams
from saccade.engine.core import new_request_id
from saccade.engine.messages import AddRequest
from saccade.errors import RequestError
from saccade.models.control_tokens import ControlTokens
from saccade.server import grammars, matchers
from saccade.server.grammars import Grammars, Helper, Unread
from saccade.server.matchers import Compiler, Grammar

MANY = 50
UNREADABLE = {"type": "Sequence", "decoders": []}  # to llguidance, which asks what kind of tokens they are
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = make_checkpoint("llama", tmp_path_factory.mktemp("m") / "unfit", max_position_embeddings=2048)
    file = made / "tokenizer.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "decoder": UNREADABLE}))
    template = made / "chat_template.jinja"
    template.write_text("{% if tools %}{{ tools }}{% endif %}" + template.read_text())
    return made


def unreadable():
    hf = byte_level()
    from tokenizers import decoders

    hf.backend_tokenizer.decoder = decoders.Sequence([])
    return hf


def said_by_helper(hf, ends) -> str:
    checks = Grammars(Compiler(hf, 300, ends))
    with pytest.raises(Unread) as caught:
        checks._check('start: "a"')
    checks.close()
    return str(caught.value)


def said_by_compiler(hf, ends) -> str:
    with pytest.raises(RequestError) as caught:
        Compiler(hf, 300, ends).matcher('start: "a"')
    return str(caught.value)


def test_the_server_and_the_engine_say_the_same_of_a_tokenizer():
    hf = byte_level()
    slow = SimpleNamespace(added_tokens_decoder={})
    for given, ends, told in (
        (unreadable(), [hf.eos_token_id], ("llguidance", "ValueError", "decoder")),
        (hf, [10**6], ("llguidance", "out of range")),
        (hf, [], ("fast tokenizer", "no end token")),
        (slow, [1], ("fast tokenizer", "a slow tokenizer")),
        (None, [1], ("fast tokenizer", "no tokenizer")),
    ):
        said = said_by_compiler(given, ends)
        assert said == said_by_helper(given, ends)
        assert all(part in said for part in told), said
        assert ("need a fast tokenizer" in said) == ("llguidance" not in told)


def test_a_type_error_is_told_as_what_it_is(monkeypatch):
    """As llguidance 1.6 raises it, which takes no list of end tokens."""

    def refuses(*given, **named):
        raise TypeError("argument 'eos_token': 'list' object cannot be interpreted as an integer")

    monkeypatch.setattr("saccade.server.grammar_check.LLTokenizer", refuses)
    hf = byte_level()
    said = said_by_compiler(hf, [hf.eos_token_id])
    assert "TypeError: argument 'eos_token': 'list' object" in said
    assert "need a fast tokenizer" not in said


@pytest.fixture
def begun(monkeypatch) -> list[str]:
    """What helpers are begun with."""
    told: list[str] = []
    begin = Helper.begin

    def counted(self, first):
        told.append(first)
        begin(self, first)

    monkeypatch.setattr(Helper, "begin", counted)
    return told


@pytest.fixture
def reads(monkeypatch) -> list[float]:
    """When this process had a tokenizer read, which takes as long as a large one's does."""
    at: list[float] = []
    read = matchers.read_tokenizer

    def counted(told):
        at.append(time.monotonic())
        time.sleep(0.3)
        return read(told)

    monkeypatch.setattr(matchers, "read_tokenizer", counted)
    return at


@pytest.mark.parametrize("ahead", [True, False])
def test_many_requests_ask_one_helper_and_nothing_reaches_the_engine(folder, begun, reads, monkeypatch, ahead):
    """``ahead``: whether the engine has found it out at its start, in which case no helper is asked at all."""
    if not ahead:
        monkeypatch.setattr(Compiler, "prepare", lambda self: None)
    asked = [
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"regex": "a+"}},
        {"tools": [TOOL], "tool_choice": "required"},
    ]
    with serving(make(folder), max_queue=2 * MANY) as server:
        with ThreadPoolExecutor(MANY) as threads:
            answers = list(threads.map(lambda at: server.chat("x", ignore_eos=False, **asked[at % 3]), range(MANY)))
        texts = {answer.json()["error"]["message"] for answer in answers if answer.status_code == 400}
        fields = {error(answer) for answer in answers}
        assert len(texts) == 1, texts
        assert "llguidance" in texts.pop()
        assert {(status, code) for status, code, _ in fields} == {(400, "unsupported_field")}
        assert {param for *_, param in fields} <= {"response_format", "structured_outputs", "tools"}
        assert (len(begun), len(reads)) == ((0, 1) if ahead else (1, 0))
        assert server.complete("x").status_code == 200
        server.idle()


def request(constraint=None, most: int = 40) -> AddRequest:
    params = SamplingParams(temperature=0, max_tokens=most, ignore_eos=True)
    return AddRequest(new_request_id(), random_ids(20, 3), params, Policy.parse("dense"), constraint=constraint)


def test_an_engine_that_is_asked_directly_finds_it_once_and_goes_on(folder, reads):
    llm = make(folder)
    compiler = Compiler(llm.get_tokenizer(), llm.model.spec.vocab_size, llm.model.eos_token_ids)
    with llm.loop.asked([request(most=200)]) as (other,):
        with llm.loop.asked([request(Grammar('start: "a"', "g", compiler)) for _ in range(MANY)]) as streams:
            for stream in streams:
                outcome = list(llm.loop.outputs(stream))[-1].outcome
                assert outcome.finish_reason == "error"
                assert "RequestError: structured outputs" in outcome.error
        assert list(llm.loop.outputs(other))[-1].outcome.finish_reason == "length"
    assert len(reads) == 1
    with pytest.raises(RequestError, match="llguidance"):  # it is not let in any more
        llm.engine.add([5, 6], SamplingParams(), Policy.parse("dense"), constraint=Grammar("x", "g", compiler))
    assert len(reads) == 1
    llm.close()


def test_a_helper_that_is_lost_is_tried_again_after_a_while(monkeypatch, begun):
    """That may pass, unlike what llguidance says of a tokenizer."""
    hf = byte_level()
    checks = Grammars(Compiler(hf, len(hf), [hf.eos_token_id]))
    monkeypatch.setattr(grammars, "START", 0.0)
    for _ in range(3):
        with pytest.raises(Unread, match=r"off here for 60 s: .*takes more than 0 s"):
            checks._check('start: "a"')
    assert len(begun) == 1
    monkeypatch.setattr(grammars, "START", 120.0)
    later = time.monotonic() + grammars.AGAIN
    monkeypatch.setattr(grammars, "time", SimpleNamespace(monotonic=lambda: later))
    assert checks._check('start: "a"') == 'start: "a"'
    checks.close()


def test_a_server_that_ends_ends_helpers_at_work():
    hf = byte_level()
    checks = Grammars(Compiler(hf, len(hf), [hf.eos_token_id]))
    checks._check('start: "a"')
    (helper,) = checks._free
    many = {"type": "string", "allOf": [{"pattern": f"a.{{{number}}}b"} for number in range(1, 60)]}
    failed: list[Exception] = []

    def check():
        try:
            checks._check(json.dumps(many))
        except RequestError as caught:
            failed.append(caught)

    thread = threading.Thread(target=check)
    thread.start()
    until(lambda: not checks._free)
    checks.close()
    thread.join(grammars.SECONDS / 2)
    assert not thread.is_alive()
    assert failed
    assert helper._process.poll() is not None


@pytest.mark.slow
def test_ctrl_c_is_heard_among_refusals(folder, tmp_path):
    """And an answer that runs meanwhile goes on to its end."""
    with (tmp_path / "said.txt").open("w") as said:
        words = ["serve", "-m", str(folder), "--port", "0", "--kv-memory", "8MiB", "--log-level", "info"]
        process = fork_server.Forked(["-m", "saccade", *words], (os.open(os.devnull, 0), said.fileno(), said.fileno()))
    told = lambda: (tmp_path / "said.txt").read_text()  # noqa: E731
    until(lambda: '"address"' in told() or "http://" in told() or process.poll() is not None, 120)
    assert process.poll() is None, told()
    address = "http://127.0.0.1:" + told().split("http://127.0.0.1:")[1].split('"')[0].split()[0].strip(",}")
    stop, refused, lost = threading.Event(), [], []
    asked = {"prompt": "x", "structured_outputs": {"regex": "a+"}}

    def ask() -> None:
        with httpx.Client(base_url=address, timeout=60) as client:
            while not stop.is_set():
                try:
                    refused.append(client.post("/v1/completions", json=asked).status_code)
                except httpx.HTTPError as caught:  # the server is gone
                    lost.append(caught)
                    return

    threads = [threading.Thread(target=ask) for _ in range(8)]
    with httpx.stream(
        "POST",
        f"{address}/v1/completions",
        json={"prompt": "x", **GREEDY, "max_tokens": 150, "stream": True},
        timeout=60,
    ) as answer:
        lines = answer.iter_lines()
        next(lines)
        for thread in threads:
            thread.start()
        until(lambda: len(refused) >= MANY)
        process.send_signal(signal.SIGINT)
        events = parsed(lines)
    assert events[-1] == "[DONE]"
    assert events[-2]["choices"][0]["finish_reason"] == "length"
    assert process.wait(60) in (0, 130), told()
    stop.set()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    assert set(refused) <= {400, 503}
    assert 400 in refused


def test_a_tokenizer_that_cannot_be_copied_is_copied_once(monkeypatch):
    """Messages that hold control tokens as text go by a copy with other names for them."""
    hf, tried = byte_level(), []

    def fails(text):
        tried.append(text)
        raise ValueError("no such model\nof tokens")

    monkeypatch.setattr("saccade.models.control_tokens.Core", SimpleNamespace(from_str=fails))
    control = ControlTokens(hf)
    said = set()
    for _ in range(3):
        with pytest.raises(RequestError, match="no such model") as caught:
            control.encode("a")
        said.add(str(caught.value))
    assert (len(tried), len(said)) == (1, 1)
    assert "allow_control_tokens=True" in said.pop()
