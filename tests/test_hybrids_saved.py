"""Sessions of models whose layers keep a state come back with the snapshots between, and prefixes whose snapshot went
keep no keys."""

from __future__ import annotations

import pytest
from engine_helpers import tokens
from memory_store import MemoryStore
from test_hybrids import FAST, GREEDY, Pair
from tiny_models import make_checkpoint, one_thread, random_ids  # noqa: F401

from saccade.kv import sequence_states
from saccade.kv.sequence_states import spaced
from saccade.kv.states import StatePool

EVERY = 16  # in place of 4,096


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return Pair(make_checkpoint(FAST[1], tmp_path_factory.mktemp("model")))


@pytest.fixture(autouse=True)
def near(monkeypatch):
    monkeypatch.setattr(sequence_states, "EVERY", EVERY)


def talk(session, turns: int = 5) -> list[int]:
    said: list[int] = []
    for number in range(turns):
        turn = random_ids(11 + number, seed=number)
        said += turn + tokens(session.generate(turn, GREEDY))
    return said


def edited_everywhere(pair, open_one, said: list[int]) -> None:
    """Whatever place is edited, the last snapshot before it is at most ``EVERY`` tokens back."""
    for cut in range(5, len(said), 13):
        with open_one() as session:
            assert session.note is None
            ids = said[:cut] + random_ids(7, seed=cut)
            output = session.complete(ids, GREEDY)
            pair.check(ids, output)
            report = output.report
            assert report["recomputed_tokens"] <= EVERY
            assert report["cached_tokens"] + report["recomputed_tokens"] >= cut - 1
            assert bool(report["recomputed_tokens"]) == any("again" in note for note in report["notes"])


def test_a_file_has_them(pair, tmp_path):
    with pair.llm(prefill_chunk=8) as llm, llm.session() as session:
        said = talk(session)
        session.save(tmp_path / "talk")
    with pair.llm(prefill_chunk=8) as llm:
        edited_everywhere(pair, lambda: llm.restore(tmp_path / "talk"), said)
        assert llm.pool.states.used == 0


class Counted(MemoryStore):
    def __init__(self, content: dict[str, bytes] | None = None) -> None:
        super().__init__()
        self.content |= content or {}
        self.written: list[str] = []

    def put(self, key: str, content: bytes) -> None:
        self.written.append(key)
        super().put(key, content)


def test_named_sessions_write_each_once(pair):
    store = Counted()
    with pair.llm(prefill_chunk=8, session_store=store) as llm, llm.session(name="talk") as session:
        said = talk(session)
        llm.sessions.flush()
    written = [key for key in store.written if "/state-" in key]
    assert len(written) == len(set(written)) > 3
    assert {key for key in store.content if "/state-" in key} == set(written)
    content = dict(store.content)

    def opened():
        store.content = dict(content)
        return llm.session(name="talk")

    store = Counted(content)
    with pair.llm(prefill_chunk=8, session_store=store) as llm:
        edited_everywhere(pair, opened, said)
        llm.sessions.flush()
        assert llm.pool.states.used == 0


@pytest.mark.parametrize("harm", ["missing", "torn", "swapped", "head"])
def test_a_snapshot_that_is_damaged_is_done_without(pair, harm):
    store = Counted()
    with pair.llm(prefill_chunk=8, session_store=store) as llm, llm.session(name="talk") as session:
        said = talk(session)
    store = Counted(store.content)
    states = sorted(key for key in store.content if "/state-" in key)
    (head,) = (key for key in store.content if key.endswith("/head"))
    if harm == "missing":
        del store.content[states[1]]
    elif harm == "torn":
        store.content[states[1]] = store.content[states[1]][:-40]
    elif harm == "swapped":
        store.content[states[1]] = store.content[states[0]]
    else:
        torn = bytearray(store.content[head])
        torn[-3] ^= 0xFF
        store.content[head] = bytes(torn)
    with pair.llm(prefill_chunk=8, session_store=store) as llm, llm.session(name="talk") as session:
        assert (session.note is not None) == (harm == "head")
        cut = int(states[1].split("-")[1]) + 3
        ids = said + random_ids(4, seed=0) if harm == "head" else said[:cut] + random_ids(7, seed=cut)
        output = session.complete(ids, GREEDY)
        pair.check(ids, output)
        assert output.report["recomputed_tokens"] == (0 if harm == "head" else cut - int(states[0].split("-")[1]))


def test_a_restored_session_takes_no_room_from_what_is_worth_more(pair, monkeypatch, tmp_path):
    monkeypatch.setattr("saccade.pools.StatePool", lambda format, slots, device: StatePool(format, 3, device))
    with pair.llm(prefill_chunk=8) as llm, llm.session() as session:
        said = talk(session)
        session.save(tmp_path / "talk")
    with pair.llm(prefill_chunk=8) as llm:
        for _ in range(3):
            with llm.restore(tmp_path / "talk") as session:
                ids = said + random_ids(3, seed=3)
                output = session.complete(ids, GREEDY)
                pair.check(ids, output)
                assert output.report["recomputed_tokens"] == 0
        assert llm.pool.states.used == 0


def test_the_fewest_that_lie_close_enough():
    assert spaced((), 100) == []
    assert spaced((3, 9, 16, 20, 30, 33, 60, 77), 78) == [16, 30, 33, 60, 77]
    assert spaced((3, 9, 16, 20, 30, 44, 60, 76), 78, last=30) == [44, 60, 76]
    assert spaced((3, 9, 16, 20, 30, 44, 60, 76), 77, last=30) == [44, 60, 76]
    assert spaced((3, 9, 16, 20, 30, 44, 60, 76), 76, last=30) == [44, 60]
    assert spaced((5, 10), 16) == []
    assert spaced((17,), 17) == []


def test_prefixes_whose_snapshot_went_keep_no_keys(pair, monkeypatch):
    monkeypatch.setattr(sequence_states, "EVERY", 4096)
    monkeypatch.setattr("saccade.pools.StatePool", lambda format, slots, device: StatePool(format, 4, device))
    llm, removed = pair.llm(enable_prefix_caching=True), []

    class Listens:
        def stored(self, hashes, parent, tokens, block_size):
            pass

        def removed(self, hashes):
            removed.extend(hashes)

        def cleared(self):
            pass

    llm.engine.prefixes.listener = Listens()
    for number in range(8):
        ids = random_ids(100, seed=number)
        pair.check(ids, llm.generate(ids, GREEDY)[0])
        llm.engine.prefixes.tidy()
        kept = list(llm.engine.prefixes._kept.values())
        memories = llm.engine.worker.memories
        assert kept
        for one in kept:
            memory = memories[one.id]
            assert memory.kept.before(96) == len(one.tokens) == memory.kv.length == 96
        assert llm.pool.used_blocks == len(kept) * llm.pool.layers * 6
    assert llm.pool.states.numbers()["orphaned"] == 96 * (8 - len(kept))
    assert len(removed) == 6 * (8 - len(kept))
    ids = [*random_ids(100, seed=7), 5]
    output = llm.generate(ids, GREEDY)[0]
    pair.check(ids, output)
    assert output.report["cached_tokens"] == 96
    llm.reset_prefix_cache()
    assert (llm.pool.used_blocks, llm.pool.states.used) == (0, 0)


def test_sessions_whose_states_went_give_keys_back_first(pair, monkeypatch):
    """What is computed again anyway is no reason to drop another session."""
    monkeypatch.setattr(sequence_states, "EVERY", 4096)
    monkeypatch.setattr("saccade.pools.StatePool", lambda format, slots, device: StatePool(format, 3, device))
    probe = pair.llm()
    blocks = 3 * probe.model.spec.layers * 7
    llm = pair.llm(kv_memory=3 * probe.pool.states.format.nbytes + blocks * probe.pool.format.block_bytes)
    monkeypatch.setattr("saccade.pools.StatePool", StatePool)
    talks = [(llm.session(), random_ids(100, seed=number)) for number in range(4)]
    said = []
    for session, ids in talks:
        said.append(ids + pair.check(ids, session.generate(ids, GREEDY)))
    for (session, _), context in zip(talks[::-1], said[::-1]):
        output = session.generate(random_ids(5, seed=9), GREEDY)
        pair.check(context + random_ids(5, seed=9), output)
        report = output.report
        assert report["cached_tokens"] + report["recomputed_tokens"] <= len(context)
    for session, _ in talks:
        session.close()
    assert (llm.pool.used_blocks, llm.pool.states.used) == (0, 0)
