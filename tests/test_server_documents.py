"""``POST /v1/documents``: files are read as the command line reads them, in a process of their own."""

from __future__ import annotations

import base64

import pytest
from server_helpers import serving
from test_documents import PAGE, SHOWN, book, word

from saccade import LLM
from saccade.server import documents
from saccade.server.page import page


@pytest.fixture(scope="module")
def server():
    with LLM("retriever", max_model_len=512, kv_memory="16MiB") as llm, serving(llm) as running:
        yield running


def read(server, data: bytes, name: str = "a.bin"):
    return server.ask("/v1/documents", {"name": name, "data": base64.b64encode(data).decode()})


def test_documents_are_read(server):
    assert read(server, PAGE.encode(), "a.html").json() == {"text": SHOWN}
    assert read(server, book()).json() == {"text": "One\n\nCafé\n\nTwo\n"}
    assert read(server, word("<w:p><w:r><w:t>hello</w:t></w:r></w:p>")).json() == {"text": "hello\n"}
    assert read(server, "für\n".encode("utf-16")).json() == {"text": "für\n"}


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"{\\rtf1 x}", "a b.rtf is an RTF file, and text is read alone; make text of it: pandoc"),
        (b"\n", "a b.rtf is empty"),
        (word("<w:p>"), "a b.rtf is a damaged archive"),
        ("für".encode("latin1"), "a b.rtf is not UTF-8 text"),
    ],
)
def test_what_cannot_be_read_is_one_line(server, data, says):
    answer = read(server, data, "a\n b.rtf")
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "data")
    assert error["message"].startswith(says)
    assert "\n" not in error["message"]


def test_what_is_no_base64_is_refused(server):
    answer = server.ask("/v1/documents", {"data": "%%%"})
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, "data must be the file's bytes in base64")


def test_one_that_takes_too_long_is_given_up(server, monkeypatch):
    monkeypatch.setattr(documents, "SECONDS", 0.5)
    monkeypatch.setattr(documents, "PROGRAM", ("sleep", "60"))
    answer = read(server, b"x", "20")
    assert answer.status_code == 400
    assert "takes more than 0.5 s to read" in answer.json()["error"]["message"]


def test_one_whose_process_is_ended_is_refused(server, monkeypatch):
    monkeypatch.setattr(documents, "PROGRAM", ("sh", "-c", "kill -9 $$"))
    assert "takes more time or memory" in read(server, b"x").json()["error"]["message"]


def test_no_more_are_held_than_may_be(server, monkeypatch):
    monkeypatch.setattr(documents, "MOST_WAITING", 0)
    answer = read(server, b"x")
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "2")


def test_the_page_is_whole():
    """Its library among its own scripts, nothing that would end them early, and nothing from elsewhere."""
    answer = page()
    text, rules = answer.body.decode(), answer.headers["content-security-policy"]
    assert "markdown-it 14" in text
    assert text.count("<script>") == text.count("</script>") == 1
    assert "<!--" not in text
    assert "sourceMappingURL" not in text
    assert "default-src 'none'" in rules
    assert "unsafe" not in rules
