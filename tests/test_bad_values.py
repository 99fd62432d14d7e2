"""What a caller may get wrong: a SaccadeError of one line that names the value, and nothing left behind."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from engine_helpers import GREEDY, make, tokens

from saccade import LLM, SamplingParams
from saccade.engine.sampling.sampler import Sampler
from saccade.errors import RequestError, SaccadeError
from saccade.methods.policy import Policy, parse_part
from saccade.methods.registry import KNOWN

HUGE = 10**400  # no float holds it
LONGER = 10**5000  # nor can it be printed
ODD = (
    HUGE,
    -HUGE,
    LONGER,
    float("nan"),
    float("inf"),
    [],
    {},
    "a",
    np.array([1, 2]),
    torch.tensor([1.0, 2.0]),
    1j,
    True,
)
NUMBERS = [one.name for one in dataclasses.fields(SamplingParams) if one.name != "stop"]
FINE = {
    "stop_token_ids": list,
    "bad_words": list,
    "logit_bias": dict,
    "ignore_eos": bool,
    "include_stop_str_in_output": bool,
    "skip_special_tokens": bool,
}


def one_line(error: BaseException) -> bool:
    return 0 < len(str(error)) < 3000 and len(str(error).splitlines()) == 1


def refusal(call) -> SaccadeError | None:
    try:
        call()
    except SaccadeError as error:
        return error
    return None


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", ODD, ids=lambda value: type(value).__name__)
def test_sampling_parameters_that_are_no_such_numbers_are_refused(name, value):
    if type(value) is FINE.get(name):
        return
    with pytest.raises(RequestError, match=f"^{name}=") as caught:
        SamplingParams(**{name: value})
    assert one_line(caught.value)


@pytest.mark.parametrize("name", sorted(KNOWN))
def test_policy_options_of_any_type_give_a_policy_or_an_error_of_one_line(name):
    """Arrays raised numpy's own error, and text with line breaks came back with them."""
    for field in dataclasses.fields(KNOWN[name]):
        for value in (*ODD, None, "two\nlines\r\u2028more", b"x", 1e-320, -0.0, 32.0):
            error = refusal(lambda: KNOWN[name](**{field.name: value}))  # noqa: B023  (called at once)
            assert error is None or (one_line(error) and (field.name in str(error) or "before, after" in str(error)))


def test_policy_texts_with_line_breaks_are_refused_in_one_line():
    for text in ("topk\n(k=1,\nz=2)", "a\nb", "psa(epsilon='x\ny')", "psa(epsilon=\n", "prefill=a\rb", "topk(k=1e999)"):
        with pytest.raises(SaccadeError) as caught:
            Policy.parse(text)
        assert one_line(caught.value)
    with pytest.raises(SaccadeError):
        parse_part("topk(k=1" + "0" * 400 + ")")


@pytest.mark.parametrize(
    "setting",
    [
        "kv_memory",
        "block_size",
        "dtype",
        "device",
        "backend",
        "threads",
        "prefill_chunk",
        "max_requests",
        "max_waiting",
        "generation_config",
        "cuda_graphs",
    ],
)
@pytest.mark.parametrize("value", [*ODD[:-1], 32.0, "x\ny", "x" * 5000], ids=lambda value: type(value).__name__)
def test_settings_that_are_none_are_refused(tiny_llama, setting, value):
    with pytest.raises(SaccadeError) as caught:
        LLM(tiny_llama, **{setting: value})
    assert one_line(caught.value)


@pytest.mark.parametrize("name", ["stop", "bad_words"])
def test_stop_strings_are_bounded(name):
    """A million of them, or one of a gigabyte, was looked for at every token."""
    for texts in ([str(number) for number in range(257)], ["a" * 1025]):
        with pytest.raises(RequestError, match=f"{name} holds .* at most 256 strings of up to 1024") as caught:
            SamplingParams(**{name: texts})
        assert one_line(caught.value)
    SamplingParams(**{name: ["a" * 1024, *map(str, range(255))]})


def test_an_add_that_fails_changes_nothing(tiny_llama, prompts, monkeypatch):
    """A session went on answering for ever, the prompts before it ran as orphans, and close() broke."""
    llm = make(tiny_llama)
    session = llm.session()
    first = session.generate(prompts[0], GREEDY)
    before, blocks = session.token_ids, llm.pool.used_blocks

    real = Sampler.__init__

    def fails(self, params, *rest):
        if params.seed == 7:
            raise OverflowError("planted")
        real(self, params, *rest)

    monkeypatch.setattr(Sampler, "__init__", fails)
    bad = SamplingParams(temperature=0, seed=7)
    with pytest.raises(OverflowError):
        session.generate(prompts[1][:20], bad)
    with pytest.raises(OverflowError):
        session.complete([*prompts[0][:100], *prompts[2][:20]], bad)
    with pytest.raises(OverflowError):
        llm.generate(prompts[:3], [GREEDY, GREEDY, bad])
    assert not llm.engine.busy
    assert session.token_ids == before
    assert llm.pool.used_blocks == blocks
    assert session.sequence.turn is None
    assert set(llm.engine.worker.memories) == {session.sequence.id}
    again = session.generate(prompts[1][:20], GREEDY)
    fresh = llm.generate([*prompts[0], *tokens(first), *prompts[1][:20]], GREEDY)[0]
    assert tokens(again) == tokens(fresh)
    session.close()
    assert llm.pool.used_blocks == 0
    llm.close()


def test_parameters_of_the_wrong_type_are_refused_everywhere(llm, prompts):
    for call in (
        lambda: next(llm.stream(prompts[0], {"temperature": 0})),
        lambda: llm.generate(prompts[0], 3),
        lambda: llm.session().generate(prompts[0], "greedy"),
        lambda: next(llm.session().stream(prompts[0], 0.5)),
        lambda: llm.session().complete(prompts[0], GREEDY, keep="a"),
        lambda: llm.session().complete(prompts[0], GREEDY, keep=-1),
        lambda: llm.session().complete(prompts[0], GREEDY, decoded=1.5),
        lambda: llm.session().chat(["a", "b"]),
        lambda: llm.generate(None),
        lambda: llm.generate([["a"], 3]),
        lambda: llm.generate(prompts[0], policy=3),
    ):
        with pytest.raises(SaccadeError) as caught:
            call()
        assert one_line(caught.value)
