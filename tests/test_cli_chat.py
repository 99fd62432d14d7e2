"""``saccade chat``: a conversation with documents, commands and a history cut to fit, at a terminal and from a pipe."""

from __future__ import annotations

import io
import os
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import fork_server
import pexpect
import pytest
from pexpect.fdpexpect import fdspawn

from saccade import LLM, SamplingParams
from saccade.cli.chat import talk
from saccade.cli.conversation import Conversation
from saccade.cli.inputs import Part
from saccade.errors import PolicyError, RequestError
from saccade.methods.policy import Policy

FACT = "The secret password of the lighthouse keeper is 7391-XKQ."
ASK = "The secret password of the lighthouse keeper is"
PARAMS = SamplingParams(temperature=0, max_tokens=9)


@pytest.fixture(scope="module")
def llm():
    with LLM(
        "retriever", dtype="float32", max_model_len=1024, kv_memory="64MiB", enable_prefix_caching=False
    ) as engine:
        yield engine


@pytest.fixture
def notes():
    return []


@pytest.fixture
def conversation(llm, notes):
    talked = Conversation(llm, Policy.parse("dense"), PARAMS, notes.append)
    yield talked
    talked.session.close()
    assert llm.pool.used_blocks == 0


PROMPT = r"\x1b\[\?2004h"  # the prompt takes pastes


@contextmanager
def terminal(*arguments: str) -> Iterator[fdspawn]:
    """``saccade chat`` in a pseudo-terminal that answers no questions about itself; it ends in order."""
    ours, theirs = os.openpty()
    termios.tcsetwinsize(theirs, (40, 200))
    env = {**os.environ, "PROMPT_TOOLKIT_NO_CPR": "1", "TERM": "xterm"}
    process = fork_server.Forked(["-m", "saccade", "chat", *arguments], (theirs,) * 3, env=env, session=True)
    os.close(theirs)
    child = fdspawn(ours, timeout=60, encoding="utf-8")
    try:
        child.expect("Ctrl-D ends")
        child.expect(PROMPT)
        yield child
        child.expect(pexpect.EOF)
        assert process.wait(60) == 0
    finally:  # it would go on and on behind a test that fails
        process.kill()
        child.close()


def said(conversation, text: str) -> str:
    return "".join(step.new_text for step in conversation.say(text))


def test_a_document_goes_before_the_next_message_and_stays(conversation, notes, tmp_path):
    file = tmp_path / "fact.txt"
    file.write_text(FACT + "\n", encoding="utf-8")
    conversation.command(f"/load {file}")
    assert notes == [f"{file}: {len(FACT) + 1} tokens; they go before your next message"]
    assert said(conversation, ASK) == " 7391-XKQ"
    assert conversation.session.messages[0]["content"] == f"{FACT}\n\n{ASK}"
    assert (conversation.documents, conversation.session.messages[0]["document"]) == ([], True)
    assert "7391-XK" in said(conversation, ASK)
    conversation.command("/reset")
    assert conversation.session.messages == []
    assert said(conversation, ASK) != " 7391-XKQ"


def test_a_document_is_read_while_the_user_types(llm, notes, tmp_path):
    """What was read so is not computed again, and the answer is what it is without; so with two documents, and sparse
    prefills. Methods that evict wait for the question."""
    files = [tmp_path / name for name in ("one.txt", "two.txt")]
    for file, text in zip(files, ("it rains in spring. " * 15, f"{'wind and weather. ' * 5}{FACT}")):
        file.write_text(text, encoding="utf-8")
    for policy in ("dense", "a_shape(window=64)+lfps"):
        cached = []
        for ahead in (True, False):
            talked = Conversation(llm, Policy.parse(policy), PARAMS, notes.append, ahead=ahead)
            for file in files:
                talked.load(file)
            for one in talked._ahead:
                one.wait()
            assert talked.reading() == ""
            assert said(talked, ASK) == " 7391-XKQ"
            assert "7391-XK" in said(talked, ASK)
            talked.command("/reset")
            talked.load(files[1])
            assert said(talked, ASK) == " 7391-XKQ"
            cached.append(talked.last.report["cached_tokens"])
            talked.end()
            talked.session.close()
        assert cached[1] == 0 < cached[0]
    talked = Conversation(llm, Policy.parse("snapkv"), PARAMS, notes.append, ahead=True)
    talked.load(files[1])
    assert "it is read with your message, for 'snapkv' keeps what that asks about" in notes
    talked.session.close()


def test_reading_can_be_given_up(llm, notes, tmp_path):
    (tmp_path / "fact.txt").write_text(FACT, encoding="utf-8")
    talked = Conversation(llm, Policy.parse("dense"), PARAMS, notes.append, ahead=True)
    talked.load(tmp_path / "fact.txt")
    for one in talked._ahead:
        one.stop()
    assert said(talked, ASK) == " 7391-XKQ"
    talked.load(tmp_path / "fact.txt")
    talked.command("/reset")
    assert llm.pool.used_blocks == 0
    talked.session.close()


def test_a_document_that_is_much_too_long_is_refused_at_once_or_read_in_part(conversation, tmp_path):
    file = tmp_path / "long.txt"
    file.write_text(FACT + " and so on" * 200_000, encoding="utf-8")
    with pytest.raises(RequestError, match=r"about 2,000,0\d\d tokens \(1.9 MiB\).*room for 1,024.*--last 512"):
        conversation.load(file)
    with pytest.raises(RequestError, match="--last 0 must be"):
        Part(last=0)
    assert (
        Part(first=30, last=10).of(FACT + "x" * 99, conversation.llm.tokenizer)
        == FACT[:30] + "\n\n[...]\n\n" + "x" * 10
    )
    assert Part(first=30, last=200).of(FACT, conversation.llm.tokenizer) == FACT
    conversation.load(file, Part(first=len(FACT)))
    assert said(conversation, ASK) == " 7391-XKQ"


def test_an_answer_that_is_stopped_or_cut_stays_said(conversation, capsys, llm):
    """Its keys and values too: the next turn goes on from them."""
    endless = ("round and round we go, " * 10).strip()
    conversation.params = replace(PARAMS, max_tokens=500)
    assert not conversation.session.stop()
    seen = ""
    for step in conversation.say(endless):
        seen += step.new_text
        if len(seen) > 30:
            assert conversation.session.stop() or step.finished
    assert 30 < len(seen) < 400
    assert conversation.session.messages[-1] == {"role": "assistant", "content": seen}
    stored = conversation.session.token_ids
    assert llm.tokenizer.decode(stored).endswith(seen)
    said(conversation, "and more")
    assert conversation.session.token_ids[: len(stored) - len(seen)] == stored[: -len(seen)]
    conversation.params = replace(PARAMS, max_tokens=5)
    lines = iter([endless, None])
    talk(conversation, lambda: next(lines), "a model")
    assert "cut after 5 tokens; -n allows more, and 'go on' has it continued" in capsys.readouterr().err


def test_streamed_turns_equal_whole_ones(conversation, llm):
    with llm.session() as whole:
        for text in (FACT, ASK, "and more"):
            assert said(conversation, text) == whole.chat(text, PARAMS).outputs[0].text
            assert conversation.session.messages == whole.messages
            assert conversation.session.token_ids == whole.token_ids


def test_the_oldest_turns_go_when_the_context_is_full_and_documents_stay(conversation, notes, tmp_path):
    (tmp_path / "fact.txt").write_text(FACT, encoding="utf-8")
    conversation.load(tmp_path / "fact.txt")
    assert said(conversation, ASK) == " 7391-XKQ"
    texts = [f"turn {number}: " + "and so on, " * 20 for number in range(8)]
    for text in texts:
        said(conversation, text)
        assert len(conversation.session.token_ids) < 1024
    kept = [message["content"] for message in conversation.session.messages if message["role"] == "user"]
    assert kept[0] == f"{FACT}\n\n{ASK}"
    assert 1 < len(kept) - 1 < len(texts)
    assert kept[1:] == texts[-(len(kept) - 1) :]
    assert any("the context is full: the oldest 1 of the turns were dropped" in note for note in notes)
    assert "7391-XK" in said(conversation, ASK)
    with pytest.raises(RequestError, match="the context has room for 1,024"):
        said(conversation, "x" * 1200)
    assert conversation.session.messages[0]["content"] == kept[0]


def test_commands(conversation, notes):
    conversation.command("/policy")
    conversation.command("/policy topk(k=16)")
    said(conversation, f"{FACT} {ASK}")
    conversation.command("/report")
    assert notes[:2] == ["policy: dense", "policy: topk(k=16)"]
    assert "prefill: " in notes[3]
    assert "by topk(k=16), density 0." in notes[4]
    with pytest.raises(PolicyError, match="topk"):
        conversation.command("/policy topkk")
    assert conversation.policy.text == "topk(k=16)"
    with pytest.raises(RequestError, match=r"/polcy is no command; did you mean /policy\?"):
        conversation.command("/polcy dense")
    with pytest.raises(RequestError, match="/help"):
        conversation.command("/zzz")
    with pytest.raises(RequestError, match="does not exist"):
        conversation.command("/load absent.txt")
    assert not conversation.command("/quit")
    conversation.command("/help")
    assert all(f"/{name}" in notes[-1] for name in conversation.commands)


def test_an_empty_document_is_refused(conversation, tmp_path):
    (tmp_path / "empty.txt").write_text("\n", encoding="utf-8")
    with pytest.raises(RequestError, match=r"empty\.txt is empty"):
        conversation.load(tmp_path / "empty.txt")
    assert conversation.documents == []


def test_an_interrupt_stops_one_answer_and_the_turn_was_never_said(conversation, llm, capsys, monkeypatch):
    endless = ("round and round we go, " * 10).strip()
    lines = iter([FACT, endless, ASK, None])
    real = conversation.say
    conversation.params = replace(PARAMS, max_tokens=500)

    def say(text):
        for step in real(text):
            yield step
            if text == endless:
                raise KeyboardInterrupt

    monkeypatch.setattr(conversation, "say", say)
    talk(conversation, lambda: next(lines), "a model")
    assert "stopped; this turn is forgotten" in capsys.readouterr().err
    assert [m["content"] for m in conversation.session.messages if m["role"] == "user"] == [FACT, ASK]
    with llm.session() as undisturbed:
        for text in (FACT, ASK):
            undisturbed.chat(text, conversation.params)
        assert conversation.session.messages == undisturbed.messages


def test_an_interrupt_at_the_prompt_drops_the_line(conversation):
    lines = iter([KeyboardInterrupt, None])

    def read():
        line = next(lines)
        if line is KeyboardInterrupt:
            raise line
        return line

    talk(conversation, read, "a model")
    assert conversation.session.messages == []


def test_lines_of_a_pipe(capsys, monkeypatch, tmp_path):
    from saccade.cli.main import main

    (tmp_path / "fact.txt").write_text(FACT, encoding="utf-8")
    lines = f"/lod x\n{ASK}\n//{ASK}\n/quit\nnever read\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    with pytest.raises(SystemExit) as ended:
        main(["chat", "-n", "9", "-f", str(tmp_path / "fact.txt")])
    out, err = capsys.readouterr()
    assert ended.value.code == 0
    assert out == " 7391-XKQ\n\n 7391-XK\n"
    assert "/lod is no command; did you mean /load?" in err


def test_a_built_in_model_that_has_nothing_to_say_says_what_it_can(capsys):
    from saccade.cli.main import main

    with pytest.raises(SystemExit) as ended:
        main(["generate", "hello"])
    out, err = capsys.readouterr()
    assert (ended.value.code, out) == (0, "\n")
    assert "the built-in model 'retriever' found nothing to say: it only completes sentences" in err
    assert "-m" in err


def test_a_model_without_chat_template_is_refused(tmp_path_factory):
    from tiny_models import make_checkpoint

    folder = make_checkpoint("llama", tmp_path_factory.mktemp("plain"))
    with LLM(folder, kv_memory="8MiB", enable_prefix_caching=False) as plain:
        plain.tokenizer.hf.chat_template = None
        with pytest.raises(RequestError, match="no chat template; saccade generate"):
            Conversation(plain, Policy.parse("dense"), PARAMS, print)


def test_at_a_terminal(tmp_path):
    """Ctrl-C in an answer without an end, a sentence that leads back into itself; then editing, a paste of many lines,
    commands, a line that is dropped, and Ctrl-D, in a pseudo-terminal."""
    fact, again = tmp_path / "fact.txt", tmp_path / "again.txt"
    fact.write_text(FACT, encoding="utf-8")
    again.write_text("round and round we go, and " * 40, encoding="utf-8")
    with terminal("-n", "30000", "--stop", ".", "-f", str(again)) as child:
        child.send("round and round we go, and\r")
        child.expect("round and round we go, and round and round we go")
        child.send("\x03")
        child.expect("stopped; what was said stays")
        child.expect(PROMPT)
        child.send("/report\r")
        child.expect(r"tokens before the answer, [\d,]+ of them .* kept from before")  # read while nothing was typed
        child.expect(PROMPT)
        child.send("/reset\r")
        child.expect(PROMPT)
        child.send(f"/load {fact}\r")
        child.expect("they go before your next message")
        child.expect(PROMPT)
        child.send(f"{ASK[:-2]}zz\x7f\x7fis\r")  # two characters taken back
        child.expect(" 7391-XKQ")
        child.expect(PROMPT)
        child.send("\x1b[200~first line of what is pasted here\nsecond line\nfirst.\nfirst line of what is\x1b[201~")
        child.send("\r")
        child.expect(r"pasted here\r\nsecond line\r\nfirst")  # the answer; the prompt draws lines otherwise
        child.expect(PROMPT)
        child.send("/polcy\r")
        child.expect(r"did you mean /policy\?")
        child.expect(PROMPT)
        child.send("/report\r")
        child.expect("by dense, density 1.000")
        child.expect(PROMPT)
        child.send("typed and dropped\x03")
        child.expect(PROMPT)
        child.send("\x04")
