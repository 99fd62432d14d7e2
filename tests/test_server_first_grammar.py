"""llguidance holds Python's lock while it reads a tokenizer, seconds for a large vocabulary. A server has done so
before it takes requests, so that the first grammar holds no running answer up."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from chat_templates import byte_level
from engine_helpers import BLOCK_BYTES, make
from server_helpers import serving
from tiny_models import make_checkpoint
from tokenizers import Tokenizer as Core

from saccade.engine.settings.config import EngineConfig
from saccade.server import engine_client, engine_launch, matchers
from saccade.server.engine_client import EngineProcess
from saccade.server.grammars import Grammars
from saccade.server.matchers import Compiler

SCHEMA = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"]}
GRAMMAR = {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint("llama", tmp_path_factory.mktemp("m") / "model", max_position_embeddings=2048)


@pytest.fixture
def notes(tmp_path, monkeypatch) -> Path:
    """Where an engine's process notes what it reads, and when."""
    file, load = tmp_path / "notes", engine_client.load_tokenizer

    def loads(path):
        file.with_suffix(".parent").touch()
        return load(path)

    monkeypatch.setattr(engine_client, "load_tokenizer", loads)
    monkeypatch.setenv("READING_ENGINE", str(file))
    program = Path(__file__).with_name("reading_engine.py")
    monkeypatch.setattr(engine_launch, "PROGRAM", (sys.executable, str(program)))
    return file


def started(folder) -> EngineProcess:
    config = EngineConfig.of(model=folder, dtype="float32", kv_memory=400 * BLOCK_BYTES, max_requests=4)
    return EngineProcess(config, "warning")


def whole(answer) -> bool:
    return answer.status_code == 200 and json.loads(answer.json()["choices"][0]["text"]) == {"a": 1}


def test_an_engine_of_another_process_has_read_the_tokenizer_beside_the_server(folder, notes):
    engine = started(folder)
    assert notes.read_text() == "beside\n", "before it is ready, and while the server reads its own"
    with serving(engine) as server:
        assert whole(server.complete("x", ignore_eos=False, max_tokens=60, **GRAMMAR))
    assert notes.read_text() == "beside\n", "once"


def test_an_engine_of_this_process_has_read_the_tokenizer(folder, monkeypatch):
    reads, read = [], matchers.read_tokenizer
    monkeypatch.setattr(matchers, "read_tokenizer", lambda told: (reads.append(told), read(told))[1])
    with serving(make(folder)) as server:
        assert len(reads) == 1
        assert whole(server.complete("x", ignore_eos=False, max_tokens=60, **GRAMMAR))
    assert len(reads) == 1


def test_what_a_helper_is_told_is_ready_before_the_first_grammar(folder, monkeypatch):
    """To write a tokenizer as text holds the lock, too, of the process that sends answers."""
    told, tell = [], Compiler.told
    monkeypatch.setattr(Compiler, "told", lambda self: (told.append(self), tell(self))[1])
    with serving(make(folder)) as server:
        before = len(told)
        assert whole(server.complete("x", ignore_eos=False, max_tokens=60, **GRAMMAR))
    assert len(told) == before


@pytest.mark.parametrize("hf", [None, "unreadable"])
def test_a_server_without_grammars_starts_and_says_why_once(hf, caplog):
    if hf is not None:
        hf = byte_level()
        from tokenizers import decoders

        hf.backend_tokenizer.decoder = decoders.Sequence([])
    compiler = Compiler(hf, 300, [1])
    compiler.prepare()
    Grammars(compiler).prepare()
    said = [one.getMessage() for one in caplog.records]
    assert len(said) == (hf is not None)
    assert all("structured outputs and forced calls are off here" in one and "\n" not in one for one in said)


@pytest.mark.parametrize("given", ["plain", "padding", "truncation"])
def test_a_tokenizer_is_told_without_padding_and_truncation_and_keeps_its_own(given):
    hf = byte_level()
    backend = hf.backend_tokenizer
    if given == "padding":
        backend.enable_padding(length=7)
    if given == "truncation":
        backend.enable_truncation(5)
    before = backend.to_str()
    told = Core.from_str(Compiler(hf, len(hf), [hf.eos_token_id]).told()["tokenizer"])
    assert (told.padding, told.truncation) == (None, None)
    assert told.get_vocab() == backend.get_vocab()
    assert backend.to_str() == before
