"""Choosing tokens as transformers would, and ending where the request says."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from covering import quick
from engine_helpers import LAYERS, make, tokens
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tiny_models import EOS, make_checkpoint, oracle, oracle_logits, random_ids
from transformers.generation.logits_process import TopPLogitsWarper

from saccade import LLM, SamplingParams
from saccade.engine.sampling.sampler import Sampler, top_logprobs
from saccade.engine.sampling.stopping import StopText
from saccade.errors import RequestError
from saccade.models.warpers import TopP

PROMPT = random_ids(60, seed=5)


@pytest.fixture(scope="module")
def llm(tiny_llama):
    engine = LLM(tiny_llama, dtype="float32", kv_memory="20MiB", enable_prefix_caching=False)
    yield engine
    assert engine.engine.pool.used_blocks == 0


@pytest.fixture(scope="module")
def theirs(tiny_llama):
    return oracle(tiny_llama)


def run(llm: LLM, prompt=PROMPT, **options):
    return llm.generate(prompt, SamplingParams(**{"temperature": 0, "max_tokens": 12, **options}))[0].outputs[0]


# --- against transformers


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.7},
        {"top_k": 5},
        {"top_p": 0.6},
        {"min_p": 0.2},
        {"temperature": 1.7, "top_k": 40, "top_p": 0.8, "min_p": 0.05, "repetition_penalty": 1.3},
        {"temperature": 0.3, "repetition_penalty": 0.8},
    ],
)
def test_probabilities_are_those_of_generate(llm, theirs, options):
    """transformers' generate reports processed scores; our processors must give the same distribution at every step."""
    prompt = torch.tensor([PROMPT])
    settings = {"top_k": 0, **options}
    torch.manual_seed(0)
    out = theirs.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=5,
        do_sample=True,
        output_scores=True,
        output_logits=True,
        return_dict_in_generate=True,
        pad_token_id=0,
        **settings,
    )
    sampler = Sampler(SamplingParams(**options))
    for step, (scores, raw) in enumerate(zip(out.scores, out.logits)):
        ids = out.sequences[0, : 60 + step].tolist()
        ours = torch.softmax(sampler.warpers.process(ids, raw[0].float()), -1)
        torch.testing.assert_close(ours, torch.softmax(scores[0].float(), -1), atol=1e-6, rtol=1e-5)


def stable_top_p(scores: torch.Tensor, top_p: float) -> torch.Tensor:
    """transformers' rule over a sort that leaves equals in their order."""
    rising, order = torch.sort(scores, stable=True)
    gone = rising.softmax(-1).cumsum(-1) <= 1 - top_p
    gone[..., -1] = False
    return scores.masked_fill(gone.scatter(1, order, gone), -math.inf)


@pytest.mark.parametrize("vocab", [1, 2, 50, 32_000, 128_256])
def test_top_p_equals_transformers_to_the_last_bit(vocab):
    random = torch.Generator().manual_seed(vocab)
    plain = torch.randn(1, vocab, generator=random) * 3
    few = torch.where(plain < plain.topk(min(vocab, 20))[0][:, -1:], -math.inf, plain)  # as top-k leaves them
    cases = {
        "plain": plain,
        "few": few,
        "bfloat16": plain.bfloat16().float(),  # equal logits everywhere, as a model in bfloat16 gives them
        "coarse": plain.round(),
        "all alike": torch.zeros(1, vocab),
        "signed zeros": torch.where(plain < 0, -0.0, 0.0),
        "one": torch.where(torch.arange(vocab) == vocab // 2, 0.0, -math.inf)[None],
        "too great": plain * 1e39,
        "no number": torch.where(torch.arange(vocab) == vocab // 2, math.nan, plain),
    }
    for name, scores in cases.items():
        for top_p in (0.001, 0.3, 0.8, 0.95, 0.999, 1.0 - 1e-9):
            given = scores.clone()
            got = TopP(top_p)(torch.empty(1, 0, dtype=torch.long), given)
            assert torch.equal(given.nan_to_num(7.0), scores.nan_to_num(7.0)), name
            wanted = [stable_top_p(scores, top_p)]
            if name in ("plain", "few", "one"):
                wanted.append(TopPLogitsWarper(top_p)(torch.empty(1, 0, dtype=torch.long), scores))
            for one in wanted:
                assert torch.equal(got.view(torch.int32), one.view(torch.int32)), (name, top_p)


def test_greedy_with_repetition_penalty_equals_generate(llm, theirs):
    prompt = torch.tensor([PROMPT])
    for penalty in (1.3, 2.5):
        expected = theirs.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=12,
            do_sample=False,
            repetition_penalty=penalty,
            pad_token_id=0,
        )[0, 60:].tolist()
        assert run(llm, repetition_penalty=penalty).token_ids == expected
    assert run(llm).token_ids != run(llm, repetition_penalty=2.5).token_ids


def test_logprobs_are_log_softmax_of_the_raw_logits(llm, theirs):
    """Processing (temperature, penalty) does not touch them."""
    for options in ({}, {"temperature": 2.0, "seed": 3, "repetition_penalty": 1.5, "top_k": 30}):
        output = run(llm, logprobs=4, **options)
        ids = PROMPT + output.token_ids
        expected = torch.log_softmax(oracle_logits(theirs, ids), -1)[59:-1]
        assert len(output.logprobs) == len(output.token_ids)
        total = 0.0
        for token, entries, row in zip(output.token_ids, output.logprobs, expected):
            assert token in entries
            assert 4 <= len(entries) <= 5
            assert list(entries)[:4] == row.topk(4).indices.tolist()
            for other, entry in entries.items():
                assert entry.logprob == pytest.approx(float(row[other]), abs=1e-4)
                assert entry.rank == int((row > row[other]).sum()) + 1
                assert isinstance(entry.decoded_token, str)
            total += float(row[token])
        assert output.cumulative_logprob == pytest.approx(total, abs=1e-3)


def test_logprobs_zero_gives_the_chosen_token_alone(llm):
    output = run(llm, logprobs=0, seed=1, temperature=3.0)
    assert [list(entries) for entries in output.logprobs] == [[token] for token in output.token_ids]
    assert run(llm).logprobs is None
    assert run(llm).cumulative_logprob is None


def test_top_logprobs_ranks_the_chosen_one_beyond_the_top():
    entries = top_logprobs(torch.tensor([0.0, 3.0, 1.0, 2.0]), 0, 2)
    assert {token: rank for token, (_, rank) in entries.items()} == {1: 1, 3: 2, 0: 4}


# --- the sampler


CHI_SQUARE = {2: 13.8, 3: 16.3, 4: 18.5}  # by degrees of freedom: exceeded by chance once in 1000 seeds


ALONG = ("position", "sample", "seed")


@pytest.mark.parametrize(
    ("options", "along"),
    quick(
        product([{}, {"temperature": 2.5}, {"top_k": 3}, {"repetition_penalty": 2.0}], ALONG),
        lambda options, along: not options or along == ALONG[len(str(options)) % 3],
    ),
)
def test_draws_follow_the_distribution(options, along):
    """Whichever of seed, sample and position runs, the draws are independent ones from the softmax."""
    logits, count = torch.tensor([0.0, 1.0, 2.0, -1.0, 0.5]), 4000
    places = [{"seed": 3, "sample": 1, "position": 9, along: i} for i in range(count)]
    draws = torch.tensor([draw(logits, place, options) for place in places])
    wanted = torch.softmax(Sampler(SamplingParams(**options)).warpers.process([0, 2], logits), -1) * count
    found = torch.bincount(draws, minlength=5)
    assert bool((found[wanted == 0] == 0).all())
    wanted, found = wanted[wanted > 0], found[wanted > 0]
    assert float(((found - wanted) ** 2 / wanted).sum()) < CHI_SQUARE[len(wanted) - 1]
    again = (draws[1:] == draws[:-1]).double().mean()  # neighbours are equal as often as independent draws are
    assert float(again) == pytest.approx(float(((wanted / count) ** 2).sum()), abs=0.04)


def draw(logits: torch.Tensor, place: dict[str, int], options: dict) -> int:
    params = SamplingParams(seed=place["seed"], sample=place["sample"], **options)
    return Sampler(params).sample([0, 2], logits, place["position"])


def test_a_draw_depends_on_nothing_drawn_before():
    logits = torch.randn(50, generator=torch.Generator().manual_seed(0))
    sampler = Sampler(SamplingParams(seed=5))
    forwards = [sampler.sample([0], logits, position) for position in range(40)]
    backwards = [sampler.sample([0], logits, position) for position in reversed(range(40))]
    assert backwards[::-1] == forwards
    assert len(set(forwards)) > 5
    unseeded = Sampler(SamplingParams())
    assert [unseeded.sample([0], logits, 7) for _ in range(5)] == [unseeded.sample([0], logits, 7)] * 5


@pytest.mark.parametrize("options", [{"top_k": 2}, {"top_p": 0.7}, {"min_p": 0.5}])
def test_filtered_tokens_are_never_drawn(options):
    logits = torch.tensor([5.0, 0.1, 4.6, 0.2, 0.1])
    sampler = Sampler(SamplingParams(seed=1, **options))
    assert {sampler.sample([0], logits, position) for position in range(300)} == {0, 2}


def test_greedy_ties_go_to_the_lower_id():
    assert Sampler(SamplingParams(temperature=0)).sample([0], torch.tensor([1.0, 7.0, 7.0, 0.0]), 1) == 1


@pytest.mark.parametrize("temperature", [1e-3, 1e-6, 1e-30, 1e-44])
def test_a_tiny_temperature_is_greedy_in_the_limit(temperature):
    logits = torch.tensor([1.0, 7.0, 6.9, 0.0])
    sampler = Sampler(SamplingParams(temperature=temperature, seed=0))
    assert {sampler.sample([0], logits, position) for position in range(20)} == {1}


def test_n_samples_are_reproducible_and_independent_of_the_batch(llm):
    params = SamplingParams(n=3, seed=11, max_tokens=8, temperature=1.5, ignore_eos=True)
    first = llm.generate(PROMPT, params)[0]
    assert [output.index for output in first.outputs] == [0, 1, 2]
    ids = [output.token_ids for output in first.outputs]
    assert len({tuple(one) for one in ids}) == 3
    assert len(first.reports) == 3
    beside = llm.generate([random_ids(33, seed=1), PROMPT], [SamplingParams(max_tokens=5), params])[1]
    assert [output.token_ids for output in beside.outputs] == ids
    for index in range(3):  # each sample alone; the first is what n=1 gives
        alone = SamplingParams(seed=11, sample=index, max_tokens=8, temperature=1.5, ignore_eos=True)
        assert llm.generate(PROMPT, alone)[0].outputs[0].token_ids == ids[index]
    other = llm.generate(PROMPT, SamplingParams(n=3, seed=12, max_tokens=8, temperature=1.5, ignore_eos=True))[0]
    assert not {tuple(output.token_ids) for output in other.outputs} & {tuple(one) for one in ids}


def test_a_sampled_answer_survives_preemption(tiny_llama, llm):
    """A request that lost its blocks, and so is computed again, draws the same tokens."""
    ids = [random_ids(length, seed=length) for length in (127, 125, 126)]
    params = SamplingParams(seed=4, max_tokens=10, temperature=1.5, ignore_eos=True)
    small = make(tiny_llama, blocks=3 * LAYERS * 4 + LAYERS)
    outputs = small.generate(ids, params)
    assert any(output.report["preemptions"] for output in outputs)
    assert [tokens(output) for output in outputs] == [tokens(output) for output in llm.generate(ids, params)]


def test_a_turn_taken_again_draws_the_same(llm):
    """Draws hang on the place in the sequence: cutting an answer off and asking again gives it once more, and the turn
    after it draws others."""
    params = SamplingParams(seed=6, max_tokens=8, temperature=3.0, ignore_eos=True)
    with llm.session() as session:
        first = tokens(session.complete(PROMPT, params))
        assert tokens(session.complete(PROMPT, params)) == first
        assert tokens(session.generate(PROMPT[:5], params)) != first


def test_without_a_seed_runs_differ(llm):
    runs = {tuple(run(llm, temperature=3.0, ignore_eos=True).token_ids) for _ in range(3)}
    assert len(runs) == 3


def test_the_largest_seed_serves_many_samples(llm):
    outputs = llm.generate(PROMPT, SamplingParams(n=2, seed=2**63 - 1, max_tokens=2))[0].outputs
    assert len(outputs) == 2
    assert not llm.engine.busy


# --- where a request ends


def test_max_tokens_and_finish_reasons(llm, tiny_llama):
    for count in (1, 5):
        output = run(llm, max_tokens=count, ignore_eos=True)
        assert len(output.token_ids) == count
        assert output.finish_reason == "length"
    short = LLM(tiny_llama, dtype="float32", kv_memory="20MiB", max_model_len=64, enable_prefix_caching=False)
    for most in (None, 10):
        output = short.generate(PROMPT, SamplingParams(temperature=0, max_tokens=most, ignore_eos=True))[0].outputs[0]
        assert len(output.token_ids) == 4
        assert output.finish_reason == "length"


def test_stop_token_ids_end_after_the_token(llm):
    whole = run(llm, ignore_eos=True).token_ids
    stop = whole[5]
    output = run(llm, stop_token_ids=[stop, 9999], ignore_eos=True)
    assert output.token_ids == whole[: whole.index(stop) + 1]
    assert output.finish_reason == "stop"


def test_the_end_token_ends_unless_ignored(tmp_path_factory, tiny_llama):
    """The end token is made the likeliest token by naming the one that greedy decoding picks."""
    llm = LLM(tiny_llama, dtype="float32", kv_memory="20MiB", enable_prefix_caching=False)
    whole = run(llm, ignore_eos=True).token_ids
    folder = make_checkpoint(
        "llama", tmp_path_factory.mktemp("eos"), max_position_embeddings=2048, eos_token_id=[EOS, whole[3]]
    )
    ends = LLM(folder, dtype="float32", kv_memory="20MiB", enable_prefix_caching=False)
    output = run(ends)
    assert output.token_ids == whole[: whole.index(whole[3]) + 1]
    assert output.finish_reason == "stop"
    assert run(ends, ignore_eos=True).token_ids == whole


def test_stop_strings_cut_the_text_before_them(llm):
    whole = run(llm, max_tokens=40, ignore_eos=True)
    text = whole.text
    assert len(text) > 10
    for at, size in ((3, 1), (5, 3), (0, 2), (len(text) - 4, 2)):
        stop = text[at : at + size]
        output = run(llm, max_tokens=40, ignore_eos=True, stop=stop)
        assert output.text == text[: text.index(stop)]
        assert output.finish_reason == "stop"
        assert output.token_ids == whole.token_ids[: len(output.token_ids)]
        assert len(output.token_ids) <= len(whole.token_ids)
    two = run(llm, max_tokens=40, ignore_eos=True, stop=[text[9:11], text[4:6]])
    assert two.text == text[: min(text.index(text[9:11]), text.index(text[4:6]))]
    assert run(llm, max_tokens=40, ignore_eos=True, stop="never in there").text == text


@pytest.mark.parametrize("options", [{}, {"stop": "zzz"}, {"stop_at": 4}])
def test_streamed_text_adds_up(llm, options):
    text = run(llm, max_tokens=40, ignore_eos=True).text
    params = {"max_tokens": 40, "ignore_eos": True, "temperature": 0}
    if "stop_at" in options:
        params["stop"] = [text[options["stop_at"] : options["stop_at"] + 3], "zzz"]
    elif options:
        params.update(options)
    expected = llm.generate(PROMPT, SamplingParams(**params))[0].outputs[0]
    steps = list(llm.stream(PROMPT, SamplingParams(**params)))
    assert "".join(step.new_text for step in steps) == expected.text
    assert [token for step in steps for token in step.new_tokens] == expected.token_ids
    assert [step.finished for step in steps] == [False] * (len(steps) - 1) + [True]
    shown = ""
    for step in steps:
        shown += step.new_text
        assert expected.text.startswith(shown)


def test_streaming_tells_how_far_the_prefill_is(tiny_llama):
    llm = LLM(tiny_llama, dtype="float32", kv_memory="20MiB", prefill_chunk=25, enable_prefix_caching=False)
    steps = list(llm.stream(PROMPT, SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)))
    assert {step.prefill_total for step in steps} == {60}
    seen = [(step.prefilled, len(step.new_tokens)) for step in steps]  # a slow reader gets several at once
    assert [prefilled for prefilled, _ in seen] == sorted(prefilled for prefilled, _ in seen)
    assert {prefilled for prefilled, _ in seen} <= {25, 50, 60}
    assert all(prefilled == 60 for prefilled, tokens in seen if tokens)
    assert sum(tokens for _, tokens in seen) == 3


PIECES = st.lists(st.text(alphabet="abc", min_size=0, max_size=4), max_size=12)
STOPS = st.lists(st.text(alphabet="abc", min_size=1, max_size=5), max_size=3)


@settings(max_examples=300, deadline=None)
@given(pieces=PIECES, stops=STOPS)
@example(pieces=["aacc"], stops=["c", "acca"])  # the shorter one is met inside a beginning of the longer one
def test_stop_text_equals_a_search_in_the_whole(pieces, stops):
    """However the text is cut: it ends before the first completed stop string, and nothing shown is ever taken back."""
    watcher, shown, seen = StopText(stops), "", ""
    for piece in pieces:
        seen += piece
        hits = [seen.find(stop) for stop in stops if stop in seen]
        assert watcher.add(piece) == bool(hits)
        shown += watcher.release(final=False)
        if hits:
            break
        longest = max((n for s in stops for n in range(len(s)) if seen.endswith(s[:n])), default=0)
        assert shown == seen[: len(seen) - longest]
    shown += watcher.release(final=True)
    expected = seen[: min((seen.find(stop) for stop in stops if stop in seen), default=len(seen))]
    assert shown == watcher.text == expected


# --- parameters


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n": 0}, "n=0"),
        ({"n": 2.0}, "n=2.0"),
        ({"max_tokens": 0}, "max_tokens=0 must be an integer >= 1"),
        ({"max_tokens": -5}, "max_tokens=-5"),
        ({"max_tokens": True}, "max_tokens=True"),
        ({"temperature": -0.1}, "temperature=-0.1"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"temperature": float("inf")}, "temperature=inf"),
        ({"temperature": "1"}, "temperature='1'"),
        ({"top_p": 0}, "top_p=0 must be a number above 0 and at most 1"),
        ({"top_p": 1.1}, "top_p=1.1"),
        ({"top_k": -2}, "top_k=-2"),
        ({"top_k": 1.5}, "top_k=1.5"),
        ({"min_p": -0.1}, "min_p=-0.1"),
        ({"min_p": 2}, "min_p=2"),
        ({"repetition_penalty": 0}, "repetition_penalty=0"),
        ({"seed": -1}, "seed=-1"),
        ({"seed": 2**63}, "seed="),
        ({"sample": -1}, "sample=-1 must be an integer from 0 to 2147483647"),
        ({"sample": 2**31 - 1, "n": 2}, "sample="),
        ({"logprobs": -1}, "logprobs=-1"),
        ({"logprobs": 101}, "logprobs=101"),
        ({"stop": ""}, "stop=''"),
        ({"stop": ["a", ""]}, "stop="),
        ({"stop": [1]}, "stop="),
        ({"stop": 5}, "stop=5"),
        ({"stop": b"x"}, "stop="),
        ({"stop_token_ids": 5}, "stop_token_ids=5"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids="),
        ({"stop_token_ids": "12"}, "stop_token_ids="),
    ],
)
def test_bad_parameters_are_named(options, message):
    with pytest.raises(RequestError) as caught:
        SamplingParams(**options)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_vllm_spellings_are_understood():
    params = SamplingParams(top_k=-1, stop="a")
    assert params.top_k == 0
    assert params.stop == ("a",)
    assert SamplingParams(stop=None).stop == ()
    assert SamplingParams(temperature=0).greedy
