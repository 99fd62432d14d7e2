"""What the engine's test files share: one small model, five policies and their prompts."""

from __future__ import annotations

import signal
import threading
from typing import Any

import torch
from method_matrix import MATRIX
from tiny_models import random_ids

from saccade import LLM, SamplingParams
from saccade.engine.core import Engine
from saccade.kv.format import KVFormat
from saccade.methods.policy import Policy

BLOCK_BYTES = KVFormat(torch.float32, 2, 16, 32).block_bytes
LAYERS = 3
FIVE = (  # each sparse at 200 tokens
    "dense",
    "topk(k=24)",
    "streaming(sinks=2, window=40)",
    "flexprefill(gamma=0.5, block_size=64, min_budget=0)",
    "flexprefill(gamma=0.5, block_size=64, min_budget=0)+psa(epsilon=0.4, block_size=16, microbatch=1)",
)
EVERY = [Policy.parse(case.methods()[0]) for case in MATRIX]  # one of every registered method
GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)


def make(folder, blocks: int = 400, **options: Any) -> LLM:
    """A small engine that keeps nothing of ended requests, unless it is told to: tests count blocks and tokens."""
    options.setdefault("enable_prefix_caching", False)
    return LLM(
        folder, dtype="float32", kv_memory=blocks * BLOCK_BYTES, prefill_chunk=options.pop("chunk", 64), **options
    )


def tokens(output) -> list[int]:
    return output.outputs[0].token_ids


def preempted(folder, llm: LLM, policy: str | Policy):
    """Three requests grow in a pool that holds little more than two: the last ones are computed again, and agree with
    those of ``llm``, alone. The small engine and their outputs."""
    ids = [random_ids(length, seed=length) for length in (127, 125, 126)]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    alone = [tokens(llm.generate(one, params, policy=policy)[0]) for one in ids]
    small = make(folder, blocks=3 * LAYERS * 4 + LAYERS)
    outputs = small.generate(ids, params, policy=policy)
    assert [tokens(output) for output in outputs] == alone
    assert sum(output.report["preemptions"] for output in outputs) > 0
    return small, outputs


def check_cancelled_turn(llm: LLM, policy: str | Policy) -> None:
    """A turn that was cancelled in its middle leaves no trace: the next one is what it is without it."""
    first, second, third = (random_ids(length, seed=length) for length in (127, 125, 126))
    with llm.session(policy) as session:
        session.generate(first, GREEDY)
        wanted = tokens(session.generate(second, GREEDY))
    with llm.session(policy) as session:
        session.generate(first, GREEDY)
        running = session.stream(third, GREEDY)
        next(running), next(running)
        running.close()
        assert tokens(session.generate(second, GREEDY)) == wanted


def start(llm: LLM, ids: list[int], params: SamplingParams = GREEDY, policy: str | Policy = "dense"):
    return llm.engine.add(ids, params, Policy.parse(policy))


def finish(engine: Engine) -> None:
    for _ in range(500):
        if not engine.busy:
            return
        engine.step()
    raise AssertionError("the engine does not come to an end")


def interrupt() -> None:
    """Ctrl-C: it reaches the thread that waits for answers, never the one that runs them."""
    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
