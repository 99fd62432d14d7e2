"""KV events: a subscriber that knows vLLM's form alone has, after each of them, just what the engine keeps."""

from __future__ import annotations

import msgspec
import pytest
from engine_helpers import GREEDY, make
from tiny_models import random_ids

from saccade.errors import SaccadeError
from saccade.server.kv_events import KVEvents

zmq = pytest.importorskip("zmq")
BLOCK = 32


class Subscriber:
    """``tokens``: of each block that is kept, with the hash of the one before it, by its own."""

    def __init__(self, events: KVEvents) -> None:
        self.socket = zmq.Context.instance().socket(zmq.SUB)
        self.socket.connect(events.endpoint)
        self.socket.subscribe(b"kv@")
        self.socket.rcvtimeo = 5000
        self.tokens: dict[int, tuple[int | None, tuple[int, ...]]] = {}
        self.numbers: list[int] = []

    def read(self) -> list[str]:
        """Take over the next batch; the kinds of its events."""
        topic, number, payload = self.socket.recv_multipart()
        assert topic == b"kv@a"
        self.numbers.append(int.from_bytes(number, "big"))
        seconds, events, rank = msgspec.msgpack.decode(payload)
        assert seconds > 1e9
        assert rank == 0
        for event in events:
            if event[0] == "BlockStored":
                _, hashes, parent, ids, size, lora, medium = event
                assert (size, lora, medium) == (BLOCK, None, "CPU")
                assert len(ids) == BLOCK * len(hashes)
                assert parent is None or parent in self.tokens
                for place, own in enumerate(hashes):
                    assert own not in self.tokens
                    self.tokens[own] = parent, tuple(ids[place * BLOCK : (place + 1) * BLOCK])
                    parent = own
            elif event[0] == "BlockRemoved":
                for own in event[1]:
                    assert own not in {before for before, _ in self.tokens.values()}, "something still follows it"
                    del self.tokens[own]
            else:
                assert event == ["AllBlocksCleared"]
                self.tokens.clear()
        return [event[0] for event in events]


def test_a_subscriber_knows_what_is_kept(tiny_llama):
    with make(tiny_llama, enable_prefix_caching=True) as llm:
        events = KVEvents(llm, "tcp://127.0.0.1:*", "tcp://127.0.0.1:*", "kv@a")
        known = Subscriber(events)
        warm = random_ids(40, 9)
        while not known.numbers:  # a subscription takes a moment to arrive
            llm.generate([warm], GREEDY)
            llm.reset_prefix_cache()
            if known.socket.poll(200):
                known.read()
        while known.socket.poll(100):
            known.read()
        assert not known.tokens
        first = len(known.numbers)

        ids = random_ids(200, 1)
        llm.generate([ids[:100]], GREEDY)
        assert known.read() == ["BlockStored"]
        assert [tokens for _, tokens in known.tokens.values()] == [
            tuple(ids[place : place + BLOCK]) for place in range(0, 96, BLOCK)
        ]
        three = set(known.tokens)
        llm.generate([ids], GREEDY)
        assert known.read() == ["BlockStored"]
        assert len(known.tokens) == 6  # the first three are told of once
        llm.generate([ids[:100]], GREEDY, policy="flexprefill")  # computed otherwise: blocks of their own
        assert known.read() == ["BlockStored"]
        assert len(known.tokens) == 8
        llm.engine.prefixes.evict()  # the first prompt's own blocks are held by the second one
        events.flush()
        assert not known.socket.poll(100)
        llm.engine.prefixes.evict()
        events.flush()
        assert known.read() == ["BlockRemoved"]
        assert len(known.tokens) == 2
        llm.reset_prefix_cache()
        assert known.read() == ["AllBlocksCleared"]
        assert known.numbers[first:] == list(range(known.numbers[first], known.numbers[first] + 5))

        asking = zmq.Context.instance().socket(zmq.REQ)
        asking.connect(events.replay)
        asking.send(known.numbers[first].to_bytes(8, "big"))
        number, payload = asking.recv_multipart()
        assert int.from_bytes(number, "big") == known.numbers[first]
        assert set(msgspec.msgpack.decode(payload)[1][0][1]) == three

    with make(tiny_llama, enable_prefix_caching=True) as other:  # the same blocks have the same names everywhere
        names: list[int] = []
        other.engine.prefixes.listener = Names(names)
        other.generate([ids[:100]], GREEDY)
        assert set(names) == three
        with pytest.raises(SaccadeError, match="tcp://HOST:PORT"):
            KVEvents(other, events.endpoint.replace("127.0.0.1", "no-such-host"))
    with make(tiny_llama) as without, pytest.raises(SaccadeError, match="prefix caching"):
        KVEvents(without, "tcp://127.0.0.1:*")


class Names:
    def __init__(self, names: list[int]) -> None:
        self.names = names

    def stored(self, hashes, parent, tokens, block_size) -> None:
        self.names += hashes

    def removed(self, hashes) -> None: ...

    def cleared(self) -> None: ...
