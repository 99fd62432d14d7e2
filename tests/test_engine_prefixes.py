"""Requests that begin alike share their prefix: each answers as it would alone, and nothing is computed twice."""

from __future__ import annotations

import random

import pytest
from engine_helpers import FIVE, GREEDY, LAYERS, finish, make, start, tokens
from kv_helpers import check_blocks
from tiny_models import random_ids

from saccade import SamplingParams
from saccade.engine.scheduling.prefix_hashes import Origin, PrefixHashes
from saccade.methods.policy import Policy

CHUNK = 64
DOCUMENT = random_ids(3 * CHUNK, seed=1)
SCORED = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, logprobs=0)
PREFILLS = (
    "dense",
    "flexprefill(gamma=0.5, block_size=64, min_budget=0)",
    "minference(vertical=20, slash=20)",
    "xattention(threshold=0.5, block_size=32, stride=4)",
    "streaming(sinks=2, window=40)",
    "loopserve",
    "topk(k=24, prefill=true)",
)
DECODES = (
    "topk(k=24)",
    "lfps(k=16, blocks=2, least=16)",
    "cis(k=16, sinks=2, local=8)",
    "psa(epsilon=0.4, block_size=16, microbatch=1)",
    "quest(budget=64, dense_layers=0)",
    "snapkv(capacity=80)",
    "double_sparsity(dense_upto=0, k=32, source=prompt, dense_layers=0)",
    "loopserve",
)


@pytest.fixture
def sharing(tiny_llama):
    return make(tiny_llama, chunk=CHUNK, enable_prefix_caching=True)


def question(number: int, length: int = 70) -> list[int]:
    return random_ids(length + number, seed=100 + number)


def cached(output) -> int:
    return output.report["cached_tokens"]


def same(ours, theirs) -> None:
    assert ours.error is None, ours.error
    assert tokens(ours) == tokens(theirs)
    for mine, other in zip(ours.outputs[0].logprobs, theirs.outputs[0].logprobs):
        for token, entry in other.items():
            assert mine[token].logprob == pytest.approx(entry.logprob, abs=1e-4)


@pytest.mark.parametrize(
    "policy", [*(f"{one}+dense" for one in PREFILLS), *(f"dense+{one}" for one in DECODES), FIVE[-1]]
)
def test_questions_about_a_document_answer_as_alone(sharing, llm, policy):
    """The document ends on a chunk's border, so that sparse prefills share all of it."""
    for number in range(3):
        ids = DOCUMENT + question(number)
        output = sharing.generate(ids, SCORED, policy=policy)[0]
        same(output, llm.generate(ids, SCORED, policy=policy)[0])
        assert cached(output) == (len(DOCUMENT) if number else 0)
        assert output.report["prefill"]["tokens"] == len(ids) - cached(output)
    assert sharing.engine.prefixes.hits == 2 * len(DOCUMENT)
    assert sharing.engine.prefixes.queries == sum(len(DOCUMENT) + 70 + number for number in range(3))
    sharing.reset_prefix_cache()
    assert sharing.pool.used_blocks == 0


def test_a_sparse_prefill_shares_whole_chunks_and_a_dense_one_whole_blocks(sharing):
    ids = random_ids(2 * CHUNK + 50, seed=2)
    for policy, shared in (
        ("dense", 2 * CHUNK + 32),
        ("flexprefill(gamma=0.5, block_size=64, min_budget=0)", 2 * CHUNK),
    ):
        sharing.generate(ids, GREEDY, policy=policy)
        assert cached(sharing.generate(ids + question(0), GREEDY, policy=policy)[0]) == shared


def test_a_sparse_prefill_of_less_than_a_chunk_says_why_it_shares_nothing(sharing):
    for policy in ("dense", "streaming(sinks=2, window=40)"):
        for _ in range(2):
            output = sharing.generate(DOCUMENT[: CHUNK - 10], GREEDY, policy=policy)[0]
        said = [note for note in output.report["notes"] if note.startswith("prefix cache: ")]
        assert cached(output) == (0 if said else 32)
        assert said == (
            []
            if policy == "dense"
            else [
                "prefix cache: 'streaming' chooses for 64 tokens of a prompt at once and shares no fewer; this prompt "
                "has 54. A smaller prefill_chunk shares more"
            ]
        )


def test_the_whole_prompt_again_computes_what_a_decode_method_wants_to_see(sharing, llm):
    """The last row at least; and the last queries where a method begins with them."""
    ids = random_ids(4 * CHUNK, seed=3)
    for policy, most in (("dense", 7 * 32), ("snapkv(capacity=80, window=40)", 6 * 32)):
        first, again = (sharing.generate(ids, SCORED, policy=policy)[0] for _ in range(2))
        same(again, llm.generate(ids, SCORED, policy=policy)[0])
        same(again, first)
        assert cached(again) == most


@pytest.mark.parametrize("policy", ["h2o(budget=64)", "lfps(k=16, blocks=2, least=16, history=keep)", "dense"])
def test_who_follows_the_whole_prefill_or_scores_it_computes_it(sharing, policy):
    params = SamplingParams(temperature=0, max_tokens=4, prompt_logprobs=0 if policy == "dense" else None)
    for number in range(2):
        output = sharing.generate(DOCUMENT + question(number), params, policy=policy)[0]
        assert output.error is None
        assert cached(output) == 0


def test_a_conversation_without_a_session_goes_on_from_its_dense_answers(sharing, llm):
    ids = list(DOCUMENT)
    for policy, whole in (("dense", True), ("psa(epsilon=0.4, block_size=16, microbatch=1)", False)):
        context = ids + question(4 if whole else 5, 60)
        output = sharing.generate(
            context, SamplingParams(temperature=0, max_tokens=40, ignore_eos=True), policy=policy
        )[0]
        longer = context + tokens(output) + question(6)
        again = sharing.generate(longer, SCORED, policy=policy)[0]
        # The last token was never computed. Sparse decode steps store what a prefill would not have stored.
        known = len(context) + 39 if whole else len(context)
        assert cached(again) == known // 32 * 32
        if whole:
            same(again, llm.generate(longer, SCORED, policy=policy)[0])


def test_nothing_is_shared_across_prefills_windows_and_salts(sharing):
    def run(policy: str, salt: str = "") -> int:
        request = sharing.engine.add(DOCUMENT + question(0), GREEDY, Policy.parse(policy), cache_salt=salt)
        finish(sharing.engine)
        return request.report.cached_tokens

    whole = "flexprefill(gamma=0.5, block_size=64, min_budget=0)"
    assert [run("dense"), run(whole), run("dense+psaw"), run("dense", "another")] == [0, 0, 0, 0]
    assert [run("topk(k=24)"), run(f"{whole}+topk(k=24)"), run("dense", "another")] == [
        8 * 32, 4 * CHUNK, 8 * 32,
    ]  # fmt: skip
    assert run("dense+etf") == 0  # a freeze counts from the prompt's end


def test_a_session_whose_turns_name_unequal_salts_shares_nothing(sharing):
    def asked(salt: str, ids=None, session=None) -> int:
        request = sharing.engine.add(ids or DOCUMENT + question(0), GREEDY, Policy(), session, cache_salt=salt)
        finish(sharing.engine)
        return request.report.cached_tokens

    alike, torn = (sharing.engine.sessions[sharing.engine.sessions.open()] for _ in range(2))
    asked("a", session=alike)
    asked("a", question(1), alike)
    assert asked("a") == len(DOCUMENT) + 64  # whole blocks of what the session holds
    sharing.engine.sessions.forget(alike.id)
    sharing.reset_prefix_cache()
    asked("a", session=torn)
    asked("b", question(1), torn)
    assert [asked("a"), asked("b"), asked("")] == [0, 0, 0]
    sharing.reset_prefix_cache()
    assert asked("a", question(2), torn) == len(torn.tokens) - 70 - 2 - 10 - 1  # it goes on by itself
    sharing.engine.sessions.forget(torn.id)
    assert len(sharing.engine.prefixes) == 0
    assert sharing.pool.used_blocks == 0


def test_what_is_kept_for_others_is_counted_apart(sharing):
    sharing.generate(DOCUMENT + question(0), GREEDY, policy="dense")
    prefixes = sharing.engine.prefixes
    assert prefixes.kept_slots == sharing.pool.used_blocks > 0
    session = sharing.engine.sessions[sharing.engine.sessions.open()]
    sharing.engine.add(DOCUMENT + question(1), GREEDY, Policy(), session)
    finish(sharing.engine)
    assert prefixes.kept_slots == sharing.pool.used_blocks - session.kv.blocks > 0
    report = sharing.cache_report()
    assert report["sessions"] is None
    assert report["prefixes"]["kept_bytes"] == prefixes.kept_slots * sharing.pool.format.block_bytes
    assert report["prefixes"]["hit_rate"] == len(DOCUMENT) / (2 * len(DOCUMENT) + 70 + 71)
    sharing.engine.sessions.forget(session.id)
    sharing.reset_prefix_cache()


def test_a_restored_session_lends(tiny_llama, llm, tmp_path):
    with llm.session() as session:
        session.generate(DOCUMENT + question(0), GREEDY)
        session.save(tmp_path / "talk")
    other = make(tiny_llama, chunk=CHUNK, enable_prefix_caching=True)
    restored = other.restore(tmp_path / "talk")
    restored.generate(question(1), GREEDY)
    output = other.generate(DOCUMENT + question(2), SCORED)[0]
    assert cached(output) == len(DOCUMENT)
    same(output, llm.generate(DOCUMENT + question(2), SCORED)[0])


def test_requests_of_one_batch_wait_for_what_another_computes(sharing, llm):
    prompts = [DOCUMENT + question(number) for number in range(6)]
    outputs = sharing.generate(prompts, SCORED, policy="dense")
    assert [cached(one) for one in outputs] == [0] + [len(DOCUMENT)] * 5
    for output, ids in zip(outputs, prompts):
        same(output, llm.generate(ids, SCORED, policy="dense")[0])


def test_a_short_common_beginning_keeps_nobody_waiting(sharing):
    prompts = [DOCUMENT[:32] + random_ids(150, seed=number) for number in range(3)]
    first, second = (start(sharing, ids) for ids in prompts[:2])
    sharing.engine.step()
    sharing.engine.step()
    assert first in sharing.engine.scheduler.running
    assert second in sharing.engine.scheduler.running
    finish(sharing.engine)


def test_a_request_that_ends_early_leaves_what_it_computed(sharing, llm):
    request = start(sharing, DOCUMENT + question(0))
    for _ in range(2):
        sharing.engine.step()
    sharing.engine.cancel(request)
    ids = DOCUMENT + question(1)
    output = sharing.generate(ids, SCORED)[0]
    assert cached(output) == 2 * CHUNK
    same(output, llm.generate(ids, SCORED)[0])


def test_sessions_borrow_and_lend(sharing, llm):
    sharing.generate(DOCUMENT + question(0), GREEDY)
    with sharing.session() as session:
        first = session.generate(DOCUMENT + question(1), SCORED)
        assert cached(first) == len(DOCUMENT)
        second = session.generate(question(2), SCORED)
        assert second.error is None
        said = session.token_ids
        beside = sharing.generate(said[: len(DOCUMENT) + 31] + question(3), GREEDY)[0]
        assert cached(beside) == len(DOCUMENT)
    with llm.session() as alone:
        same(first, alone.generate(DOCUMENT + question(1), SCORED))
        same(second, alone.generate(question(2), SCORED))
    longer = said[:-1] + question(4)  # the closed session's context is kept, too
    output = sharing.generate(longer, SCORED)[0]
    assert cached(output) > len(DOCUMENT) + 31
    same(output, llm.generate(longer, SCORED)[0])


def test_a_cancelled_turn_leaves_the_session_without_what_it_borrowed(sharing, llm):
    sharing.generate(DOCUMENT + question(0), GREEDY)
    with sharing.session() as session:
        for step in session.stream(DOCUMENT + question(1), SCORED):
            if step.new_tokens:
                break
        assert session.token_ids == []
        same(session.generate(DOCUMENT + question(2), SCORED), llm.generate(DOCUMENT + question(2), SCORED)[0])
    sharing.reset_prefix_cache()
    assert sharing.pool.used_blocks == 0


def test_what_is_kept_gives_way_to_whoever_needs_room(tiny_llama, llm):
    """The least recently used goes first; a prefix that a running request shares stays readable."""
    small = make(tiny_llama, blocks=LAYERS * 22, chunk=CHUNK, enable_prefix_caching=True)
    one, other = (random_ids(6 * 32 + 5, seed=number) for number in (11, 12))
    for ids in (one, other, one):
        small.generate(ids + question(0), GREEDY)
    assert len(small.engine.prefixes) == 3
    ids = random_ids(9 * 32, seed=13)
    same(small.generate(ids, SCORED)[0], llm.generate(ids, SCORED)[0])
    assert cached(small.generate(one + question(1), GREEDY)[0]) > 0
    assert cached(small.generate(other + question(1), GREEDY)[0]) == 0
    small.reset_prefix_cache()
    assert small.pool.used_blocks == 0


def test_a_crowd_in_little_room_answers_as_alone(tiny_llama, llm):
    """Few documents, many questions, cancellations, preemptions: answers of a fresh engine, and every block returns."""
    rng = random.Random(5)
    small = make(tiny_llama, blocks=LAYERS * 34, chunk=CHUNK, enable_prefix_caching=True)
    documents = [random_ids(length, seed=length) for length in (CHUNK, 2 * CHUNK, 3 * CHUNK)]
    mixed = (
        "dense",
        "topk(k=24)",
        "flexprefill(gamma=0.5, block_size=64, min_budget=0)+lfps(k=16, blocks=2, least=16)",
    )
    asked = []
    for number in range(36):
        ids = rng.choice(documents) + random_ids(rng.randint(1, 60), seed=1000 + number)
        asked.append((start(small, ids, policy=rng.choice(mixed)), ids))
        for _ in range(rng.randint(0, 3)):
            small.engine.step()
        if rng.random() < 0.2:
            small.engine.cancel(rng.choice(asked)[0])
    finish(small.engine)
    assert small.engine.prefixes.hits > 500
    for request, ids in asked:
        if request.finish_reason == "cancelled":
            continue
        assert request.error is None
        expected = llm.generate(ids, GREEDY, policy=request.policy)[0]
        assert request.final_ids == tokens(expected)
    check_blocks(small.pool, [donor.kv for donor in small.engine.prefixes._kept.values()])
    small.reset_prefix_cache()
    assert small.pool.used_blocks == 0
    assert len(small.engine.prefixes._index) == 0


def test_hashes_taken_over_equal_those_of_a_fresh_start():
    """Prefixes that end earlier, go on longer, or differ at a block's border or inside one, under two origins."""
    hashes = PrefixHashes(16)
    document = random_ids(200, seed=1)
    asked = [document, document[:100], [*document, 5, 6, 7] * 2, [*document[:96], *random_ids(50, seed=2)]]
    asked += [[*document[:97], 3, *document[98:]], [9, *document[1:]], document[:15], [], document]
    for turn, prompt in enumerate(asked * 2):
        for origin in (Origin("dense", "", 0, ""), Origin("dense", "", turn % 2, "a")):
            assert hashes.of(origin, prompt, len(prompt)) == PrefixHashes(16).of(origin, prompt, len(prompt))
            assert len(hashes.of(origin, prompt, len(prompt))) == len(prompt) // 16
