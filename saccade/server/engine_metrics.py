"""What Prometheus reads off the engine at each scrape: requests, memory and its tiers, sessions, what was compiled."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from saccade.server.engines import EngineFace

_TIERS = {  # a part is one layer's keys and values of a block; since the engine began
    "hits": "KV parts that were in memory when they were asked for.",
    "misses": "KV parts that were asked for and not in memory.",
    "evicted": "KV parts that left memory.",
    "prefetched": "KV parts whose load began before they were wanted.",
    "bytes_read": "Bytes of KV read from the tier.",
    "bytes_written": "Bytes of KV written to the tier.",
    "retries": "Reads and writes of KV that failed and were tried again.",
    "lost": "KV parts that the tier could not give back.",
    "wait_seconds": "Seconds in which attention waited for the tier.",
    "attended_on_host": "KV parts that the CPU attended in host memory.",
    "bytes_down": "Bytes of queries and new rows that went to the host to be attended there.",
    "bytes_up": "Bytes of results that came back from there.",
    "slots": "KV parts that memory holds at most.",
    "cells": "KV parts that the tier holds at most.",
    "free_cells": "KV parts that the tier has room for.",
}
_STATES = {  # of models with layers that keep a state
    "slots": "States of sequences that there is room for.",
    "in_use": "States that requests compute with.",
    "snapshots": "States that sequences may go back to.",
    "given_up": "Snapshots that went for others since the engine began.",
    "orphaned": "Tokens of kept prefixes that were given up, as the states behind them had gone.",
    "bytes": "Bytes of all of them, in the KV pool's memory.",
}
_STORED = {  # counts of DurableSessions.report
    "saves": "Turns after which a session was stored.",
    "restores": "Sessions that came back from the folder.",
    "bytes_written": "Bytes of sessions written.",
    "bytes_read": "Bytes of sessions read.",
    "tokens_restored": "Tokens whose keys and values came back.",
    "tokens_recomputed": "Tokens of restored sessions that had to be computed again.",
    "refused": "Stored sessions that could not be used.",
    "failed": "Saves that failed.",
}
_COMPILED = {
    "compiled_kernels": "Kernels that the engine compiled at their first use.",
    "compile_seconds": "Seconds for which it did so, and requests waited.",
}
_BYTES = {
    "kv_cache_bytes": "Bytes of keys and values that are taken, by tier.",
    "kv_cache_capacity_bytes": "Bytes that there are for keys and values, by tier.",
}


class EngineMetrics(Collector):
    """What is read off the engine at each scrape."""

    def __init__(self, engine: EngineFace, model: str) -> None:
        self._engine, self._model = engine, model

    def collect(self) -> Iterator[Metric]:
        now = self._engine.statistics()
        stored = now.stored or {}
        used = max(now.kept_blocks, now.used_blocks)  # the engine goes on meanwhile
        rows: Iterable[tuple[str, str, float]] = (
            ("num_requests_running", "Samples that the engine works on.", now.running),
            ("num_requests_waiting", "Samples that wait for the engine.", now.waiting),
            (
                "kv_cache_usage_perc",
                "Share of the KV pool that is taken, 0 to 1.",
                (used - now.kept_blocks) / now.num_blocks,
            ),
            (
                "kv_cache_kept_perc",
                "Share that holds what ended requests left, for others.",
                now.kept_blocks / now.num_blocks,
            ),
            ("num_sessions", "Sessions that are kept.", now.sessions),
        )
        if stored:
            rows = (
                *rows,
                ("num_stored_sessions", "Sessions in the folder.", stored["sessions"] or 0),
                ("stored_session_bytes", "Bytes of them.", stored["bytes"] or 0),
            )
        if now.graphs is not None:
            rows = (
                *rows,
                ("recorded_steps", "Kinds of step that are recorded as CUDA graphs.", now.graphs[0]),
                ("recorded_steps_max", "As many as may be; the least recently used goes first.", now.graphs[1]),
            )
        rows = (
            *rows,
            *((f"layer_states_{name}", said, (now.states or {})[name]) for name, said in _STATES.items() if now.states),
        )
        for name, said, value in rows:
            gauge = GaugeMetricFamily(f"saccade:{name}", said, labels=["model_name"])
            gauge.add_metric([self._model], value)
            yield gauge
        tier = "disk" if "device" not in now.bytes_by_tier else "host"
        for name, value in (now.tiers or {}).items():
            said = _TIERS[name.removeprefix("disk_")]
            full = name if name.startswith("disk_") else f"{tier}_{name}"
            gauge = GaugeMetricFamily(f"saccade:kv_{full}", said, labels=["model_name"])
            gauge.add_metric([self._model], value)
            yield gauge
        for name, said in _STORED.items() if stored else ():
            counted = CounterMetricFamily(f"saccade:session_{name}", said, labels=["model_name"])
            counted.add_metric([self._model], stored[name] or 0)
            yield counted
        for (name, said), value in zip(_COMPILED.items(), now.compiled):
            counted = CounterMetricFamily(f"saccade:{name}", said, labels=["model_name"])
            counted.add_metric([self._model], value)
            yield counted
        for place, (name, said) in enumerate(_BYTES.items()):
            gauge = GaugeMetricFamily(f"saccade:{name}", said, labels=["model_name", "tier"])
            for tier, sizes in now.bytes_by_tier.items():
                gauge.add_metric([self._model, tier], sizes[place])
            yield gauge
