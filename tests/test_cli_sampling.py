"""Every setting of sampling has a flag, the same one for each command that samples, and the flags arrive."""

from __future__ import annotations

import dataclasses

import pytest
from typer.testing import CliRunner

from saccade import SamplingParams
from saccade.cli import main
from saccade.cli.options import ENGINE
from saccade.cli.sampling import SAMPLING, biases
from saccade.errors import RequestError
from saccade.llm import LLM
from saccade.session import Session

NOT_FOR_COMMANDS = {"n", "sample", "logprobs", "prompt_logprobs", "prompt_logprobs_start"}
OF_THE_ENGINE = {"audit", "audit_steps", "target"}  # whose flags say it for all requests
OTHER_NAMES = {"include_stop": "include_stop_str_in_output", "special_tokens": "skip_special_tokens"}
FLAGS = [
    *("--max-tokens", "3", "--temperature", "0.5", "--top-p", "0.9", "--top-k", "7", "--min-p", "0.1"),
    *("--repetition-penalty", "1.1", "--frequency-penalty", "0.2", "--presence-penalty", "0.3", "--min-tokens", "2"),
    *("--stop", "a", "--stop", "b", "--include-stop", "--stop-token-id", "5", "--bad-word", "no", "--seed", "4"),
    *("--logit-bias", "3=1.5", "--logit-bias", "4=-2", "--ignore-eos", "--special-tokens"),
    *("--certify", "0.1", "0.05"),
]
WANTED = SamplingParams(
    max_tokens=3,
    temperature=0.5,
    top_p=0.9,
    top_k=7,
    min_p=0.1,
    repetition_penalty=1.1,
    frequency_penalty=0.2,
    presence_penalty=0.3,
    min_tokens=2,
    stop=["a", "b"],
    include_stop_str_in_output=True,
    stop_token_ids=[5],
    bad_words=["no"],
    seed=4,
    logit_bias={3: 1.5, 4: -2.0},
    ignore_eos=True,
    skip_special_tokens=False,
    certify=(0.1, 0.05),
)


class Arrived(Exception):
    pass


@pytest.fixture
def arrived(monkeypatch):
    """What the first request asks for; nothing runs."""
    seen = []

    def ask(self, prompt, params=None, **rest):
        seen.append(params)
        raise Arrived

    monkeypatch.setattr(LLM, "stream", ask)
    monkeypatch.setattr(Session, "stream_chat", ask)
    return seen


def test_every_setting_of_sampling_has_a_flag():
    fields = {one.name for one in dataclasses.fields(SamplingParams)}
    assert {OTHER_NAMES.get(name, name) for name in SAMPLING} == fields - NOT_FOR_COMMANDS - OF_THE_ENGINE
    assert ENGINE.keys() >= OF_THE_ENGINE


@pytest.mark.parametrize(("command", "length"), [("generate", 128), ("chat", 2048)])
def test_flags_arrive_at_the_request(tiny_llama, arrived, command, length):
    words = ["hello"] if command == "generate" else []
    for flags, wanted in ((FLAGS, WANTED), ([], SamplingParams(temperature=0, max_tokens=length))):
        line = [command, *words, "-m", str(tiny_llama), "--kv-memory", "4MiB", *flags]
        done = CliRunner().invoke(main.app, line, input="" if words else "hello\n")
        assert isinstance(done.exception, Arrived), (done.exception, done.output)
        assert arrived.pop() == wanted


def test_biases_that_are_none():
    assert biases(None) is biases([]) is None
    for text in ("42", "a=1", "42=x", "=", ""):
        with pytest.raises(RequestError, match="must be TOKEN=BIAS"):
            biases([text])
    with pytest.raises(RequestError, match="logit_bias"):
        SamplingParams(logit_bias=biases(["3=nan"]))
