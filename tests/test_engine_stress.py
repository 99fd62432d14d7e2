"""Random traffic over a pool that is too small: nothing leaks, nothing hangs, every answer is a quiet engine's."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import pytest
import torch
from kv_helpers import check_blocks
from tiny_models import random_ids

from saccade import LLM, SamplingParams
from saccade.engine.request import Request
from saccade.kv.format import KVFormat
from saccade.methods.policy import Policy

BLOCK_BYTES = KVFormat(torch.float32, 2, 16, 32).block_bytes
POLICIES = (
    "dense",
    "topk(k=16)",
    "streaming(sinks=2, window=24)",
    "flexprefill(gamma=0.4, block_size=64, min_budget=0)+psa(epsilon=0.3, block_size=8, microbatch=1)",
)


def make(folder, blocks: int, **options: Any) -> LLM:
    return LLM(
        folder,
        dtype="float32",
        kv_memory=blocks * BLOCK_BYTES,
        prefill_chunk=32,
        **{"enable_prefix_caching": False, **options},
    )


def check_accounts(llm: LLM, sequences: list) -> None:
    """Every block belongs to exactly one live sequence or is free."""
    check_blocks(llm.engine.pool, [sequence.kv for sequence in sequences])
    for sequence in sequences:
        assert sequence.computed <= sequence.reached <= len(sequence.tokens)
        assert sequence.kv.length == sequence.computed
        assert [span.start for span in sequence.spans[1:]] == [span.stop for span in sequence.spans[:-1]]


@pytest.mark.parametrize("seed", range(6))
def test_random_traffic(tiny_llama, seed):
    rng = random.Random(seed)
    busy = make(tiny_llama, blocks=3 * rng.choice([9, 12, 17]), max_requests=rng.choice([2, 3, 64]), max_model_len=260)
    engine = busy.engine
    sessions = [busy.session(rng.choice(POLICIES)) for _ in range(3)]
    turns: list[list[tuple[Request, list[int], SamplingParams]]] = [[] for _ in sessions]
    alone: list[tuple[Request, list[int], SamplingParams, str]] = []

    def sampling() -> SamplingParams:
        count = rng.randint(1, 14)
        return SamplingParams(
            temperature=rng.choice([0, 1]), seed=rng.randint(0, 99), max_tokens=count, ignore_eos=True
        )

    for _ in range(70):
        action = rng.random()
        if action < 0.2:
            ids, params, policy = random_ids(rng.randint(1, 150), rng.randint(0, 999)), sampling(), rng.choice(POLICIES)
            alone.append((engine.add(ids, params, Policy.parse(policy)), ids, params, policy))
        elif action < 0.4:
            which = rng.randrange(3)
            session, ids, params = sessions[which], random_ids(rng.randint(1, 40), rng.randint(0, 999)), sampling()
            if session.sequence.turn is None and len(session.token_ids) + len(ids) < 230:
                turns[which].append((engine.add(ids, params, session.policy, session.sequence), ids, params))
        elif action < 0.47 and engine.busy:
            engine.cancel(rng.choice([*engine.scheduler.running, *engine.scheduler.waiting]))
        else:
            for _ in range(rng.randint(1, 6)):
                engine.step()
        live = [request.sequence for request in (*engine.scheduler.running, *engine.scheduler.waiting)]
        live += [session.sequence for session in sessions if session.sequence.turn is None]
        check_accounts(busy, live)
    for _ in range(3000):
        if not engine.busy:
            break
        engine.step()
    assert not engine.busy
    check_accounts(busy, [session.sequence for session in sessions])

    quiet = make(tiny_llama, blocks=600)
    compared = 0
    for request, ids, params, policy in alone:
        compared += assert_same(request, partial(quiet.generate, [ids], params, policy=policy))
    for session, mine in zip(sessions, turns):
        replay = quiet.session(session.policy)
        for request, ids, params in mine:
            if request.finish_reason == "cancelled":
                continue
            compared += assert_same(request, partial(replay.generate, ids, params))
            if request.report.notes and "KV pool is full" in request.report.notes[-1]:
                break  # the context is shorter than the replay's from here on
        replay.close()
        session.close()
    assert compared >= 8
    assert busy.engine.pool.used_blocks == quiet.engine.pool.used_blocks == 0


def assert_same(request: Request, run: partial) -> int:
    """1 if the request ended by itself, with what ``run`` gives on a quiet engine; 0 if it was cancelled."""
    assert request.error is None
    if request.finish_reason == "cancelled":
        return 0
    result = run()
    expected = (result[0] if isinstance(result, list) else result).outputs[0]
    got = request.final_ids
    if len(got) < len(expected.token_ids):  # ended early only where the pool or the length ran out
        assert any("KV pool is full" in note for note in request.report.notes) or request.finish_reason == "length"
    assert got == expected.token_ids[: len(got)]
    return 1
