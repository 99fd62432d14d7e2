"""Sessions with a name: saved behind every turn, only what is new, and never read as anything but what was written."""

from __future__ import annotations

import random
import re

import pytest
from engine_helpers import BLOCK_BYTES, make, tokens
from memory_store import FAULTS, MemoryStore
from tiny_models import make_checkpoint, random_ids
from tiny_models import one_thread as one_thread

from saccade import SamplingParams
from saccade.errors import RequestError, SaccadeError
from saccade.methods.policy import Policy

SCORED = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=0)
SPARSE = "flexprefill(gamma=0.5, block_size=64, min_budget=0)"
POLICIES = (
    "dense",
    f"{SPARSE}+psa(epsilon=0.4, block_size=16, microbatch=1)",
    f"{SPARSE}+lfps(k=16, blocks=2, least=16, history=keep)",
    "cis(k=16, sinks=2, local=8)",
    "h2o(budget=48)",
    "snapkv(capacity=80)",
    "loopserve",
    "quest(budget=64, dense_layers=0)",
    "double_sparsity(dense_upto=0, k=32, source=prompt, dense_layers=0)",
)
FIRST, SECOND, THIRD = random_ids(201, seed=1), random_ids(33, seed=2), random_ids(70, seed=3)


def durable(folder, store=None, **options):
    llm = make(folder, session_store=store, **options)
    if llm.sessions is not None:
        llm.sessions.segments.size = 32
    return llm


def same(ours, theirs) -> None:
    assert ours.error is None, ours.error
    assert tokens(ours) == tokens(theirs)
    assert ours.outputs[0].cumulative_logprob == theirs.outputs[0].cumulative_logprob


def copied(store: MemoryStore) -> MemoryStore:
    other = MemoryStore()
    other.content, other.used, other.past = dict(store.content), dict(store.used), list(store.past)
    return other


@pytest.fixture(scope="module")
def talks(llm, tiny_llama):
    """By policy: what a store held after two turns of the session ``talk``, and the third turn of one that stayed."""
    made = {}

    def of(policy: str):
        if policy not in made:
            store = MemoryStore()
            first = durable(tiny_llama, store)
            with first.session(policy, name="talk") as session:
                session.generate(FIRST, SCORED)
                first.sessions.flush()
                before = set(store.content)
                session.generate(SECOND, SCORED)
                first.sessions.flush()
                said = session.token_ids
            first.close()
            with llm.session(policy) as session:
                session.generate(FIRST, SCORED)
                session.generate(SECOND, SCORED)
                assert session.token_ids == said
                expected = session.generate(THIRD, SCORED)
            made[policy] = store, before, expected
        store, before, expected = made[policy]
        return copied(store), before, expected

    return of


@pytest.mark.parametrize("policy", POLICIES)
def test_a_named_session_goes_on_bit_for_bit(talks, tiny_llama, policy):
    store, before, expected = talks(policy)
    assert before <= set(store.content)  # sealed segments are written once
    assert len(store.content) == 1 + (201 + 8 + 33 + 8 - 1) // 32
    later = durable(tiny_llama, store)
    session = later.session(name="talk")
    assert (session.note, session.policy) == (None, Policy.parse(policy))
    again = session.generate(THIRD, SCORED)
    same(again, expected)
    assert again.report["cached_tokens"] == expected.report["cached_tokens"]
    session.close()
    session = later.session(name="talk")  # and once more, after a turn in another process
    assert session.token_ids[-8:] == tokens(again)
    session.close()
    report = later.cache_report()["sessions"]
    assert (report["restores"], report["tokens_recomputed"], report["refused"]) == (2, 0, 0)
    later.close()
    assert later.pool.used_blocks == 0


@pytest.mark.parametrize("policy", ["dense", POLICIES[1], "h2o(budget=48)"])
def test_no_fault_gives_a_wrong_token(talks, tiny_llama, policy):
    store, _, expected = talks(policy)
    seen, rng = {}, random.Random(policy)
    stranger = durable(
        make_checkpoint("llama", tiny_llama.parent / "twin", max_position_embeddings=2048, seed=9), store
    )
    stranger.session("dense", name="other").generate(FIRST, SCORED)
    stranger.sessions.flush()
    store, whole = copied(store), store
    later = durable(tiny_llama, store)
    for fault in FAULTS:
        for _ in range(3 if policy == "dense" else 1):
            store.content = dict(whole.content)
            group = later.sessions.stored()
            keys = sorted(key for key in store.content if key.split("/")[0] in head_group(store, "talk"))
            assert group
            if not store.harm(rng.choice(keys), fault, rng):
                continue
            try:
                session = later.session(name="talk")
            except RequestError as error:
                seen[fault] = str(error)
                later.sessions.forget("talk")
                continue
            if not session.token_ids:  # the head is missing: a new one
                assert fault == "missing"
                continue
            again = session.generate(THIRD, SCORED)
            if len(session.token_ids) == 201 + 8 + 33 + 8 + 70 + 8:  # an older head is an older session
                same(again, expected)
            else:
                assert fault == "stale"
            if session.note is not None:
                seen[fault] = "recomputed"
                assert session.note in again.report["notes"]
            session.close()
    refused = [text for text in seen.values() if text != "recomputed"]
    assert "recomputed" in seen.values()
    assert all(re.search(r"the session 'talk'|the saved session is damaged", text) for text in refused)
    later.close()
    assert later.pool.used_blocks == 0


def head_group(store: MemoryStore, name: str) -> set[str]:
    return {key.split("/")[0] for key, content in store.content.items() if f'"name\\": \\"{name}'.encode() in content}


def test_what_lies_before_a_torn_segment_is_kept(talks, tiny_llama):
    store, _, expected = talks("dense")
    keys = sorted(store.content)
    at = next(number for number, key in enumerate(keys) if "/0000000096" in key)
    store.content[keys[at]] = store.content[keys[at]][:-1]
    later = durable(tiny_llama, store)
    session = later.session(name="talk")
    assert re.search(r"tokens 96 to 127 are damaged: .*v\); tokens 64 to 249 are computed again", session.note)
    again = session.generate(THIRD, SCORED)
    same(again, expected)
    assert again.report["prefill"]["tokens"] < 201 + 70
    assert session.note in again.report["notes"]
    assert session.note not in session.generate(SECOND, SCORED).report["notes"]
    session.close()
    assert durable(tiny_llama, store).session(name="talk").note is None  # mended by the saves since
    later.close()


def test_a_context_that_is_cut_is_written_anew_from_there(llm, tiny_llama):
    store = MemoryStore()
    first = durable(tiny_llama, store)
    context = FIRST[:100] + SECOND
    with first.session(name="talk") as session:
        session.complete(FIRST, SCORED)
        first.sessions.flush()
        before = {key for key in store.content if not key.endswith("/head")}
        session.complete(context, SCORED)
        first.sessions.flush()
        after = {key for key in store.content if not key.endswith("/head")}
    assert {int(key.split("/")[1][:10]) for key in before & after} == {0, 32, 64}
    assert {int(key.split("/")[1][:10]) for key in after} == {0, 32, 64, 96}
    session = durable(tiny_llama, store).session(name="talk")
    assert session.note is None
    with llm.session() as stayed:
        stayed.complete(FIRST, SCORED)
        stayed.complete(context, SCORED)
        same(session.generate(THIRD, SCORED), stayed.generate(THIRD, SCORED))


def test_a_store_that_fails_costs_nothing_but_the_save(tiny_llama, llm):
    store = MemoryStore()
    first = durable(tiny_llama, store)
    session = first.session(name="talk")
    session.generate(FIRST, SCORED)
    first.sessions.flush()
    store.fail = {"put"}
    session.generate(SECOND, SCORED)
    first.sessions.flush()
    assert first.sessions.counts["failed"] == 1
    assert "the session 'talk' was not saved: the store cannot put" in first.sessions.last_error
    store.fail = {"delete"}
    session.generate(SECOND, SCORED)
    first.sessions.flush()
    store.fail = set()
    session.generate(THIRD, SCORED)
    said = session.token_ids
    session.close()
    first.close()
    store.fail = set()
    again = durable(tiny_llama, store).session(name="talk")
    assert (again.note, again.token_ids) == (None, said)


def test_the_least_recently_used_go_first(tiny_llama):
    store = MemoryStore()
    first = durable(tiny_llama, store)
    sessions = {}
    for name in "abc":
        sessions[name] = first.session(name=name)
        sessions[name].generate(FIRST, SCORED)
        first.sessions.flush()
    each = first.sessions.size // 3
    sessions["a"].generate(SECOND, SCORED)
    first.sessions.flush()
    first.sessions.limit = int(3.7 * each)
    with first.session(name="d") as session:
        session.generate(FIRST, SCORED)
    assert [one.name for one in first.sessions.stored()] == ["d", "a", "c"]
    sessions["b"].generate(SECOND, SCORED)  # it lives on, and is saved whole
    first.sessions.flush()
    assert {one.name for one in first.sessions.stored()} == {"b", "d", "a"}
    assert first.cache_report()["sessions"]["removed"] == 2
    first.sessions.limit = each // 2  # too little for one: what was said is kept
    sessions["a"].generate(THIRD, SCORED)
    said = sessions["a"].token_ids
    first.close()
    store.fail = set()
    assert sum(map(len, store.content.values())) <= each // 2 + 8 * len(said)
    later = durable(tiny_llama, store)
    assert [one.name for one in later.sessions.stored()] == ["a"]  # the index was built again
    session = later.session(name="a")
    assert session.token_ids == said
    assert "computed again" in session.note


def test_a_pool_that_is_short_is_no_reason_to_wait(talks, tiny_llama):
    store, _, expected = talks("dense")
    small = durable(tiny_llama, store, blocks=3 * 6)  # of 32 tokens, in 3 layers
    session = small.session(name="talk")
    assert "no room" in session.note or "blocks" in session.note
    small.close()
    store.fail = set()
    session = durable(tiny_llama, store).session(name="talk")
    assert session.note is None
    same(session.generate(THIRD, SCORED), expected)


@pytest.mark.parametrize("policy", ["dense", "quest(budget=64, dense_layers=0)"])
def test_sessions_survive_beside_a_disk_tier(talks, tiny_llama, tmp_path, policy):
    """A pool of 9 slots of a layer over a disk: sessions go there by themselves, what lies on the disk included."""
    _, _, expected = talks(policy)
    small = {"blocks": 9, "kv_disk": f"{tmp_path}:64MiB"}
    first = durable(tiny_llama, **small)
    with first.session(policy, name="talk") as session:
        session.generate(FIRST, SCORED)
        session.generate(SECOND, SCORED)
        assert first.pool.absent
    assert first.sessions.counts["failed"] == 0
    with pytest.warns(UserWarning, match=r"do not survive it: .* is in use by another process"):
        assert make(tiny_llama, **small).sessions is None
    first.close()
    later = durable(tiny_llama, **small)
    session = later.session(name="talk")
    assert session.note is None
    assert tokens(session.generate(THIRD, SCORED)) == tokens(expected)
    session.close()
    later.close()


def test_names_and_owners(talks, tiny_llama, llm, tmp_path):
    store, _, _ = talks("dense")
    later = durable(tiny_llama, store)
    session = later.session(name="talk")
    with pytest.raises(RequestError, match="open already"):
        later.session(name="talk")
    assert later.sessions.has("talk")
    assert not later.sessions.has("talk", owner="somebody")
    assert later.sessions.forget("talk")
    assert not later.sessions.forget("talk")
    session.close()
    assert later.session(name="talk").token_ids == []
    with pytest.raises(RequestError, match="session_dir"):
        llm.session(name="talk")
    with pytest.raises(RequestError, match="must be a text of 1 to 256"):
        later.session(name="")
    with pytest.raises(SaccadeError, match=r"session_dir=.*folder"):
        make(tiny_llama, session_dir="")
    first = make(tiny_llama, session_dir=f"{tmp_path}/kept:1GiB")
    assert first.sessions.limit == 2**30
    with pytest.raises(RequestError, match="is in use by another process"):
        make(tiny_llama, session_dir=tmp_path / "kept")
    first.close()
    make(tiny_llama, session_dir=tmp_path / "kept").close()


def test_another_models_session_is_refused_with_the_way_out(talks, tiny_llama):
    store, _, _ = talks(POLICIES[1])
    twin = make_checkpoint("llama", tiny_llama.parent / "twin2", max_position_embeddings=2048, seed=9)
    other = durable(twin, store)
    with pytest.raises(RequestError, match=r"another model.*recompute=True"):
        other.session(name="talk")
    session = other.session("dense", name="talk", recompute=True)
    said = session.token_ids
    same(session.generate(SECOND, SCORED), other.generate(said + SECOND, SCORED)[0])
    with pytest.raises(RequestError, match="prefill_chunk=64"):
        durable(tiny_llama, talks(POLICIES[1])[0], chunk=32).session(name="talk")


def test_sessions_in_half_a_pool_of_another_block_size(talks, tiny_llama):
    store, _, expected = talks("dense")
    other = durable(tiny_llama, store, block_size=16)
    session = other.session(name="talk")
    assert session.note is None
    assert other.pool.used_blocks * 16 // 3 == 256 - 256 % 16
    assert other.pool.format.block_bytes * 2 == BLOCK_BYTES
    assert tokens(session.generate(THIRD, SCORED)) == tokens(expected)


def test_a_turn_before_the_save_is_done_waits_for_nothing(tiny_llama, llm):
    """Turns that follow each other while the store is slow: the last of them is what is there in the end."""
    import threading

    store, gate = MemoryStore(), threading.Event()
    real = store.put
    store.put = lambda key, content: (gate.wait(60), real(key, content))
    first = durable(tiny_llama, store)
    session = first.session("cis(k=16, sinks=2, local=8)", name="talk")
    for number in range(5):
        session.generate(random_ids(40, seed=number), SCORED)
    gate.set()
    said = session.token_ids
    first.sessions.flush()
    first.close()
    store.fail = set()
    restored = durable(tiny_llama, store).session(name="talk")
    assert (restored.token_ids, restored.note) == (said, None)
    with llm.session(session.policy) as stayed:
        for number in range(5):
            stayed.generate(random_ids(40, seed=number), SCORED)
        same(restored.generate(THIRD, SCORED), stayed.generate(THIRD, SCORED))
