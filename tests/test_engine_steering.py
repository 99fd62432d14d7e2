"""What requests do to logits, against a reference in plain Python that follows vLLM's documented order."""

from __future__ import annotations

import math
import random

import pytest
import torch
from engine_helpers import make
from tiny_models import EOS, make_checkpoint, random_ids
from transformers import MinNewTokensLengthLogitsProcessor, NoBadWordsLogitsProcessor, SequenceBiasLogitsProcessor

from saccade import LLM, SamplingParams
from saccade.engine.sampling.sampler import Sampler
from saccade.engine.sampling.steering import Steering
from saccade.engine.sampling.stopping import StopText
from saccade.errors import RequestError

VOCAB, PROMPT = 12, [3, 1, 4, 1, 5]


def reference(logits: list[float], answer: list[int], params: SamplingParams, ends, words) -> list[float]:
    """bad words, min_tokens, logit_bias, repetition, frequency, presence: one token at a time."""
    scores = list(logits)
    for token in range(len(scores)):
        score = scores[token]
        for word in words:
            if word[-1] == token and (len(word) == 1 or answer[-(len(word) - 1) :] == list(word[:-1])):
                score = -math.inf
        if token in ends and len(answer) < params.min_tokens:
            score = -math.inf
        score += (params.logit_bias or {}).get(token, 0.0)
        if token in PROMPT + answer:
            score = score / params.repetition_penalty if score > 0 else score * params.repetition_penalty
        score -= params.frequency_penalty * answer.count(token)
        if token in answer:
            score -= params.presence_penalty
        scores[token] = score
    return scores


def test_against_the_reference():
    rng = random.Random(0)
    for _ in range(300):
        answer = [rng.randrange(VOCAB) for _ in range(rng.randrange(7))]
        options = {
            "repetition_penalty": rng.choice([1.0, 0.5, 1.7]),
            "frequency_penalty": rng.choice([0.0, -2.0, 0.7]),
            "presence_penalty": rng.choice([0.0, 2.0, -0.3]),
            "min_tokens": rng.choice([0, 3, 16]),
            "logit_bias": rng.choice([None, {}, {2: 100.0, 7: -3.5}]),
            "temperature": 0,
        }
        words = rng.choice([(), ((4,),), ((answer[-1:] or [0]) + [6], [1, 2, 3])])
        params, ends = SamplingParams(**options), [9, 11]
        sampler = Sampler(params, Steering(params, len(PROMPT), ends, words))
        logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(rng.randrange(10**6)))
        kept = logits.clone()
        ours = sampler.processed(PROMPT + answer, logits)
        expected = torch.tensor(reference(logits.tolist(), answer, params, ends, words))
        torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)
        assert torch.equal(logits, kept)  # log-probabilities are of what the model said
        assert sampler.sample(PROMPT + answer, logits, 9) == int(expected.argmax())


def test_against_transformers():
    """min_tokens, bad words and biases of single tokens are also processors of transformers, over the answer's ids."""
    logits, answer = torch.randn(VOCAB, generator=torch.Generator().manual_seed(1)), [7, 2, 8]
    ids = torch.tensor([PROMPT + answer])
    cases = [
        ({"min_tokens": 4}, MinNewTokensLengthLogitsProcessor(len(PROMPT), 4, [9, 11], device="cpu")),
        ({"min_tokens": 3}, MinNewTokensLengthLogitsProcessor(len(PROMPT), 3, [9, 11], device="cpu")),
        ({"logit_bias": {2: 1.5, 7: -4}}, SequenceBiasLogitsProcessor([[[2], 1.5], [[7], -4.0]])),
    ]
    for options, theirs in cases:
        params = SamplingParams(**options)
        ours = Steering(params, len(PROMPT), [9, 11]).restrict(ids[0].tolist(), logits)
        torch.testing.assert_close(ours, theirs(ids, logits[None].clone())[0])
    words = [[6], [2, 8, 1], [8, 3], [5, 7, 2, 8, 4]]  # the last one began in the prompt, where it does not count
    ours = Steering(SamplingParams(), len(PROMPT), [], words).restrict(ids[0].tolist(), logits)
    theirs = NoBadWordsLogitsProcessor(words[:3], eos_token_id=None)(ids, logits[None].clone())[0]
    torch.testing.assert_close(ours, theirs)
    assert not math.isinf(ours[4])


@pytest.fixture(scope="module")
def llm(tiny_llama):
    engine = make(tiny_llama)
    yield engine
    assert engine.engine.pool.used_blocks == 0


IDS = random_ids(60, seed=5)


def run(llm: LLM, prompt=IDS, **options):
    return llm.generate(prompt, SamplingParams(**{"temperature": 0, "max_tokens": 12, **options}))[0].outputs[0]


NEUTRAL = {"presence_penalty": 0.0, "frequency_penalty": 0, "min_tokens": 0, "logit_bias": {}, "bad_words": []}


def test_neutral_settings_stay_on_the_greedy_path_and_others_leave_it():
    def likeliest(**options):
        params = SamplingParams(temperature=0, **options)
        return Sampler(params, Steering(params, words=[[1]] if params.bad_words else ())).takes_likeliest

    assert likeliest(**NEUTRAL)
    given = {"presence_penalty": 0.1, "frequency_penalty": -0.1, "min_tokens": 1, "logit_bias": {1: 0.0}}
    for name, value in {**given, "bad_words": ["a"]}.items():
        assert not likeliest(**{name: value}), name


def test_a_whole_answer_follows_the_reference(llm):
    """Token by token: each one is the reference's choice from the model's own log-probabilities."""
    options = {"frequency_penalty": 1.5, "presence_penalty": 0.5, "repetition_penalty": 1.2, "ignore_eos": True}
    options["logit_bias"] = {run(llm, max_tokens=1).token_ids[0]: -100}
    params = SamplingParams(temperature=0, max_tokens=12, logprobs=0, **options)
    answer = llm.generate(IDS, params)[0].outputs[0].token_ids
    assert answer != run(llm, ignore_eos=True).token_ids
    assert len(set(answer)) > len(set(run(llm, ignore_eos=True).token_ids)) - 1
    for at, token in enumerate(answer):
        raw = llm.generate(IDS + answer[:at], SamplingParams(temperature=0, max_tokens=1, logprobs=100))[0]
        scores = dict.fromkeys(range(llm.model.spec.vocab_size), -math.inf)
        scores |= {other: entry.logprob for other, entry in raw.outputs[0].logprobs[0].items()}
        assert token in scores
    again = llm.generate([IDS, IDS], [params, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)])
    assert again[0].outputs[0].token_ids == answer  # whatever else is in the batch
    assert again[1].outputs[0].token_ids == run(llm, ignore_eos=True).token_ids


def test_a_heavy_presence_penalty_never_repeats(llm):
    answer = run(llm, max_tokens=40, ignore_eos=True, logit_bias={}, presence_penalty=2.0, frequency_penalty=2.0)
    flat = run(llm, max_tokens=40, ignore_eos=True)
    assert len(set(answer.token_ids)) > len(set(flat.token_ids))


def test_no_end_before_min_tokens(tmp_path_factory, tiny_llama, llm):
    whole = run(llm, ignore_eos=True).token_ids
    folder = make_checkpoint(
        "llama", tmp_path_factory.mktemp("eos"), max_position_embeddings=2048, eos_token_id=[EOS, whole[0]]
    )
    with make(folder) as ends:
        assert run(ends).token_ids == whole[:1]
        longer = run(ends, min_tokens=5)
        assert len(longer.token_ids) > 5 or longer.finish_reason == "length"
        assert whole[0] not in longer.token_ids[:5]
    stopped = run(llm, stop_token_ids=[whole[0]], ignore_eos=True)
    assert (stopped.token_ids, stopped.stop_reason) == (whole[:1], whole[0])
    assert whole[0] not in run(llm, stop_token_ids=[whole[0]], ignore_eos=True, min_tokens=6).token_ids[:6]


def test_stop_strings_count_after_min_tokens(llm):
    """Only one that ends after the first ``min_tokens`` tokens does, as in vLLM."""
    whole = run(llm, max_tokens=40, ignore_eos=True)
    stop = whole.text[:2]
    assert run(llm, max_tokens=40, ignore_eos=True, stop=stop).text == ""
    later = run(llm, max_tokens=40, ignore_eos=True, stop=stop, min_tokens=10)
    assert len(later.token_ids) > 10
    watcher = StopText(["ab", "b"])
    assert [watcher.add("a", False), watcher.add("b", False), watcher.add("c"), watcher.add("xb")] == [False] * 3 + [
        True
    ]
    assert (watcher.text, watcher.met) == ("abcx", "b")


def test_the_stop_string_stays_where_it_is_asked_for(llm):
    whole = run(llm, max_tokens=40, ignore_eos=True).text
    stop = whole[10:13]
    at = whole.index(stop)
    cut = run(llm, max_tokens=40, ignore_eos=True, stop=[stop])
    kept = run(llm, max_tokens=40, ignore_eos=True, stop=[stop], include_stop_str_in_output=True)
    assert (cut.text, kept.text) == (whole[:at], whole[: at + 3])
    assert cut.stop_reason == kept.stop_reason == stop
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, stop=stop, include_stop_str_in_output=True)
    assert "".join(step.new_text for step in llm.stream(IDS, params)) == kept.text


def test_bad_words_never_come(llm):
    whole = run(llm, max_tokens=30, ignore_eos=True)
    letter = next(char for char in whole.text if char.isalnum())
    answer = run(llm, max_tokens=30, ignore_eos=True, bad_words=[letter])
    assert letter in whole.text
    assert letter not in answer.text


def test_words_come_with_and_without_a_space():
    with LLM("reference", enable_prefix_caching=False) as words:
        tokenizer = words.tokenizer
        bare, spaced = tokenizer.words(["harbour"]), tokenizer.encode(" harbour", add_special_tokens=False)
        assert bare[0] == tokenizer.encode("harbour", add_special_tokens=False)
        assert (spaced in bare) == (len(spaced) == len(bare[0]))
        assert tokenizer.words([" harbour"]) == bare


def test_special_tokens_are_shown_or_skipped(llm):
    options = {"logit_bias": {EOS: 1000.0}, "max_tokens": 3, "ignore_eos": True}
    shown = llm.tokenizer.decode([EOS], skip_special_tokens=False)
    assert run(llm, **options).text == ""
    assert run(llm, **options, skip_special_tokens=False).text == shown * 3
    ended = run(llm, logit_bias={EOS: 1000.0}, skip_special_tokens=False)
    assert (ended.text, ended.token_ids, ended.stop_reason) == ("", [EOS], None)
    kept = run(llm, logit_bias={EOS: 1000.0}, skip_special_tokens=False, include_stop_str_in_output=True)
    assert kept.text == shown


def test_penalties_look_at_this_turns_answer_alone(llm):
    """A session's earlier answers are prompt: frequency and presence do not count them."""
    params = SamplingParams(temperature=0, max_tokens=6, presence_penalty=2.0, frequency_penalty=2.0, ignore_eos=True)
    with llm.session() as session:
        session.generate(IDS, params)
        before = session.token_ids
        second = session.generate(IDS[:9], params).outputs[0].token_ids
    assert second == run(llm, before + IDS[:9], **{**NEUTRAL, **vars(params), "n": 1}).token_ids


def test_tokens_that_the_model_lacks_are_named_and_change_nothing(llm):
    vocab = llm.model.spec.vocab_size
    bad = SamplingParams(logit_bias={vocab: 1.0})
    with pytest.raises(RequestError, match=f"token {vocab}; this model has tokens 0 to {vocab - 1}"):
        llm.generate(IDS, bad)
    with llm.session() as session:
        session.generate(IDS, SamplingParams(max_tokens=2, temperature=0))
        before = session.token_ids
        with pytest.raises(RequestError, match="logit_bias"):
            session.generate([5, 6], bad)
        assert session.token_ids == before
        session.generate([5, 6], SamplingParams(max_tokens=2))


def test_a_request_that_forbids_everything_ends_with_an_error():
    params = SamplingParams(temperature=0)
    sampler = Sampler(params, Steering(params, words=[[token] for token in range(VOCAB)]))
    with pytest.raises(RequestError, match="forbid every token"):
        sampler.sample([], torch.zeros(VOCAB), 0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"presence_penalty": 2.1}, "presence_penalty=2.1 must be a number at least -2 and at most 2"),
        ({"frequency_penalty": -2.5}, "frequency_penalty=-2.5"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty=nan"),
        ({"presence_penalty": "1"}, "presence_penalty='1'"),
        ({"min_tokens": -1}, "min_tokens=-1"),
        ({"min_tokens": 17}, "min_tokens=17 must be an integer from 0 to 16"),
        ({"min_tokens": True}, "min_tokens=True"),
        ({"logit_bias": [1]}, "logit_bias=[1] must map token ids"),
        ({"logit_bias": {-1: 0.0}}, "logit_bias={-1: 0.0}"),
        ({"logit_bias": {1: float("inf")}}, "logit_bias={1: inf}"),
        ({"logit_bias": {1: float("nan")}}, "logit_bias={1: nan}"),
        ({"logit_bias": {1: 10**400}}, "logit_bias="),
        ({"logit_bias": {"x": 1}}, "logit_bias={'x': 1}"),
        ({"logit_bias": {1: True}}, "logit_bias={1: True}"),
        ({"bad_words": "word"}, "bad_words='word' must be a list"),
        ({"bad_words": ["", "x"]}, "bad_words=['', 'x']"),
        ({"bad_words": [" "]}, "not blank"),
        ({"bad_words": [1]}, "bad_words=[1]"),
        ({"include_stop_str_in_output": 1}, "include_stop_str_in_output=1 must be True or False"),
        ({"skip_special_tokens": None}, "skip_special_tokens=None"),
    ],
)
def test_bad_parameters_are_named(options, message):
    with pytest.raises(RequestError) as caught:
        SamplingParams(**options)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_json_spellings_are_understood():
    assert SamplingParams(logit_bias={"5": 1, 6: 2}).logit_bias == {5: 1.0, 6: 2.0}
    assert hash(SamplingParams(logit_bias={5: 1})) == hash(SamplingParams(logit_bias={5: 1}))
    assert SamplingParams(max_tokens=None, min_tokens=1000).min_tokens == 1000
