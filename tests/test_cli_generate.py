"""``saccade generate`` asks through a model's chat template, and says where an answer is empty for want of it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from engine_helpers import make
from test_cli import run
from tiny_models import EOS, make_checkpoint

from saccade import LLM, SamplingParams
from saccade.engine.scheduling.answers import UNASKED
from saccade.eval import suite
from saccade.eval.metrics import score
from saccade.models.tokenizer import Tokenizer, load_tokenizer

ENDS = SamplingParams(temperature=0, max_tokens=8, logit_bias={EOS: 100.0})  # the model ends its answer at once
QUESTION = "What is the capital?"


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model without a chat template."""
    folder = make_checkpoint("llama", tmp_path_factory.mktemp("bare"))
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    assert not load_tokenizer(folder).has_chat_template
    return folder


def test_a_prompt_is_asked_through_the_template_unless_it_is_raw(capsys, tiny_llama, tmp_path):
    with make(tiny_llama) as llm:
        asked = llm.chat([{"role": "user", "content": QUESTION}], SamplingParams(temperature=0, max_tokens=6))[0]
        plain = llm.generate(QUESTION, SamplingParams(temperature=0, max_tokens=6))[0]
    assert len(asked.prompt_token_ids) > len(plain.prompt_token_ids)
    options = ["-m", str(tiny_llama), "-n", "6", "--report", str(tmp_path / "report.json")]
    for raw, expected in ((False, asked), (True, plain)):
        code, out, _ = run(capsys, "generate", QUESTION, *options, *(["--raw"] if raw else []))
        report = json.loads((tmp_path / "report.json").read_text())
        assert (code, out) == (0, expected.outputs[0].text + "\n")
        assert (report["chat_template"], report["prompt_tokens"]) == (not raw, len(expected.prompt_token_ids))


def test_a_document_and_its_question_are_one_message(capsys, tiny_llama, tmp_path):
    (tmp_path / "text.txt").write_text("It rained.\n")
    report = tmp_path / "report.json"
    run(capsys, "generate", "Where?", "-f", str(tmp_path / "text.txt"), "-m", str(tiny_llama), "--report", str(report))
    message = [{"role": "user", "content": "It rained.\nWhere?"}]
    expected = load_tokenizer(tiny_llama).apply_chat_template(message)
    assert json.loads(report.read_text())["prompt_tokens"] == len(expected)


def test_a_model_without_a_template_completes(capsys, bare, tmp_path):
    report = tmp_path / "report.json"
    for option in ([], ["--raw"]):
        assert run(capsys, "generate", "abc", "-m", str(bare), "-n", "2", "--report", str(report), *option)[0] == 0
        written = json.loads(report.read_text())
        assert (written["chat_template"], written["prompt_tokens"]) == (False, len(load_tokenizer(bare).encode("abc")))


def test_an_empty_answer_has_a_note_where_the_template_was_left_out(capsys, tiny_llama, bare):
    with make(tiny_llama) as llm:
        assert UNASKED in llm.generate(QUESTION, ENDS)[0].report["notes"]
        assert UNASKED in list(llm.stream(QUESTION, ENDS))[-1].outcome.report["notes"]
        message = [{"role": "user", "content": QUESTION}]
        assert UNASKED not in llm.chat(message, ENDS)[0].report["notes"]
        text = llm.get_tokenizer().apply_chat_template(message, tokenize=False, add_generation_prompt=True)
        ids = llm.get_tokenizer().encode(text, add_special_tokens=False)
        assert UNASKED not in llm.generate(ids, ENDS)[0].report["notes"]
        for other in (
            SamplingParams(temperature=0, max_tokens=2),  # an answer
            SamplingParams(temperature=0, max_tokens=1, logit_bias={65: 100.0}, stop=["A"]),  # stopped as asked
            SamplingParams(temperature=0, max_tokens=2, logit_bias={EOS: 100.0}, ignore_eos=True),
        ):
            assert UNASKED not in llm.generate(QUESTION, other)[0].report["notes"]
    with make(bare) as llm:
        assert UNASKED not in llm.generate(QUESTION, ENDS)[0].report["notes"]
    options = ["-m", str(tiny_llama), "--logit-bias", f"{EOS}=100"]
    assert f"saccade: note: {UNASKED}" in run(capsys, "generate", QUESTION, "--raw", *options)[2]
    assert UNASKED not in run(capsys, "generate", QUESTION, *options)[2]


def test_a_template_that_only_joins_lines_asks_for_nothing(capsys, tmp_path):
    """The retriever's: its prompts are the same with it and without."""
    with LLM("retriever") as llm:
        assert llm.tokenizer.template_end == ()
        assert llm.tokenizer.apply_chat_template([{"role": "user", "content": "ab"}]) == llm.encode("ab")
    report = tmp_path / "report.json"
    assert UNASKED not in run(capsys, "generate", "hello", "--report", str(report))[2]
    assert UNASKED not in json.loads(report.read_text())["notes"]


def test_template_end_is_what_follows_every_message(tiny_llama):
    tokenizer = load_tokenizer(tiny_llama)
    end = tokenizer.template_end
    assert end
    for text in ("", "x", "two words\n"):
        assert tuple(tokenizer.apply_chat_template([{"role": "user", "content": text}])[-len(end) :]) == end
    assert tuple(tokenizer.encode("x")[-len(end) :]) != end
    assert Tokenizer(None).template_end == ()


def test_a_template_that_rejects_a_lone_question_names_the_way_out(capsys, tiny_llama, tmp_path):
    folder = tmp_path / "strict"
    folder.mkdir()
    for file in tiny_llama.iterdir():
        (folder / file.name).symlink_to(file)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    (folder / "chat_template.jinja").write_text("{{ raise_exception('a system message must come first') }}")
    code, out, err = run(capsys, "generate", QUESTION, "-m", str(folder))
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert "a system message must come first; --raw completes" in err
    assert run(capsys, "generate", QUESTION, "-m", str(folder), "--raw", "-n", "2", "-q")[0] == 0


def test_the_reference_model_answers_a_question_of_its_tasks(capsys, tmp_path):
    """It was trained on messages: asked through the template it finds the fact."""
    turn = suite.sample("generate", replace(suite.TASKS["shared"], wanted=1, asked=1), 640, 0, 3).turns[0]
    (tmp_path / "document.txt").write_text(turn.message())
    limit = str(turn.max_new_tokens)
    code, out, _ = run(capsys, "generate", "-m", "reference", "-f", str(tmp_path / "document.txt"), "-n", limit, "-q")
    assert (code, score(turn.metric, out.strip(), turn.answers)) == (0, 1.0)
