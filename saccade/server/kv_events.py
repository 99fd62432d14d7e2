"""KV events over ZeroMQ, in vLLM's form, so that routers above know what each replica keeps (llm-d, Dynamo).

A PUB socket sends [topic, sequence number (8 bytes, big-endian), payload]; a ROUTER socket replays from the number that
a client sends, and ends with -1. The payload is msgpack of ``[time, [event, ...], data_parallel_rank]``, an event being
``["BlockStored", block_hashes, parent_block_hash, token_ids, block_size, lora_id, medium]``,
``["BlockRemoved", block_hashes, medium]`` or ``["AllBlocksCleared"]``.

Source: vllm/distributed/kv_events.py and examples/online_serving/kv_events_subscriber.py of vLLM 0.11.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any

import msgspec

from saccade.errors import SaccadeError, shown

if TYPE_CHECKING:
    from saccade.llm import LLM

KEPT = 10_000  # batches for those who ask again
WAITING = 100_000  # batches that a slow subscriber may have before it
END = (-1).to_bytes(8, "big", signed=True)


class Event(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, tag=True):
    """What happened to blocks. ``medium``: where they lie, ``GPU`` or ``CPU``."""


class BlockStored(Event):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None


class BlockRemoved(Event):
    block_hashes: list[int]
    medium: str | None


class AllBlocksCleared(Event):
    pass


class Batch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """Events of one step. ``ts``: seconds since the epoch."""

    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


class KVEvents:
    """Tells of the prefixes that one engine keeps (a PrefixListener). ``endpoint``: where to publish, such as
    ``tcp://*:5557``; ``replay``: where to answer those who missed something. SaccadeError where either is taken or is
    no address."""

    def __init__(self, llm: LLM, endpoint: str, replay: str | None = None, topic: str = "") -> None:
        try:
            import zmq
        except ImportError:
            raise SaccadeError("KV events need ZeroMQ: pip install 'saccade-llm[events]'") from None
        if llm.engine.prefixes is None:
            raise SaccadeError("KV events tell of shared prefixes; leave prefix caching on")
        self._medium = "GPU" if llm.model.device.type == "cuda" else "CPU"
        self._events: list[BlockStored | BlockRemoved | AllBlocksCleared] = []
        self._sent: deque[tuple[int, bytes]] = deque(maxlen=KEPT)
        self._lock, self._number, self._topic = threading.Lock(), 0, topic.encode()
        self._encode = msgspec.msgpack.Encoder().encode
        context: Any = zmq.Context.instance()
        self._publisher, self._router = context.socket(zmq.PUB), None
        self._publisher.set_hwm(WAITING)
        self._publisher.linger = 0
        self.endpoint = _bind(self._publisher, endpoint)
        if replay is not None:
            self._router = context.socket(zmq.ROUTER)
            self._router.linger = 0
            self.replay = _bind(self._router, replay)
            threading.Thread(target=self._replay, name="saccade-kv-replay", daemon=True).start()
        llm.engine.prefixes.listener = self
        llm.loop.after_steps(self.flush)

    def stored(self, hashes: list[int], parent: int | None, tokens: list[int], block_size: int) -> None:
        self._events.append(BlockStored(hashes, parent, tokens, block_size, None, self._medium))

    def removed(self, hashes: list[int]) -> None:
        self._events.append(BlockRemoved(hashes, self._medium))

    def cleared(self) -> None:
        self._events.append(AllBlocksCleared())

    def flush(self) -> None:
        """Publish what happened since the last time. Never waits: what a subscriber does not take is dropped for it,
        and it sees the gap in the numbers."""
        if not self._events:
            return
        payload = self._encode(Batch(time.time(), self._events, 0))
        self._events = []
        with self._lock:
            number, self._number = self._number, self._number + 1
            self._sent.append((number, payload))
        self._publisher.send_multipart([self._topic, number.to_bytes(8, "big"), payload])

    def _replay(self) -> None:
        assert self._router is not None
        while True:
            asked = self._router.recv_multipart()
            if len(asked) != 3 or len(asked[2]) != 8:
                continue
            first = int.from_bytes(asked[2], "big")
            with self._lock:
                batches = [one for one in self._sent if one[0] >= first]
            for number, payload in batches:
                self._router.send_multipart([asked[0], b"", number.to_bytes(8, "big"), payload])
            self._router.send_multipart([asked[0], b"", END, b""])


def _bind(socket: Any, endpoint: str) -> str:
    """Bind, and say where: a port of ``*`` is a free one."""
    import zmq

    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        raise SaccadeError(f"cannot publish KV events at {shown(endpoint)}: {error}; give tcp://HOST:PORT") from error
    return str(socket.last_endpoint.decode())
