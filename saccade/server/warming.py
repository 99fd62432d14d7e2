"""What a server on a GPU does before it takes requests, so that none of them waits for a compiler: kernels are compiled
by processes side by side, decode steps recorded, and a few prompts run.

Which kernels those are is found by a dry run: a process of its own loads the model's first layers, runs the same steps
and prompts, and launches no kernel (``ops.compiling``). It is gone before the engine asks how much memory there is;
its processes compile on while weights are loaded. Where it fails, kernels are compiled one after another, as they are
launched.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import replace
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

from saccade import ranks
from saccade.engine.sampling.params import SamplingParams
from saccade.engine.settings.config import EngineConfig
from saccade.errors import SaccadeError
from saccade.llm import LLM
from saccade.machine import parse_bytes
from saccade.methods.policy import Policy
from saccade.models.checkpoint import open_config
from saccade.models.folders import checkpoint_folder
from saccade.ops import compiling
from saccade.parent import end_with_parent
from saccade.server.logs import logger
from saccade.server.warmed import mark_of

SECONDS = 30.0  # that steps are recorded for, all policies together, and that a dry run may take
COMPILING = 60.0  # seconds, at most, that a server waits for the compiling processes
LENGTHS = 40, 1500  # tokens of prompts, beside one that is longer than a chunk
BEYOND = 700  # tokens of that one behind its first chunk
DRY_MEMORY = 1 << 30  # bytes of keys and values of a dry run, at most
LEAST_LAYERS = 2  # of a dry run: what the first leaves, the second finds
PROCESSES = 16  # that compile, at most


class KernelsAhead:
    """Processes that compile what a model's engine will launch under ``policies``. To be made before this process has
    threads or asks for its GPU, since they are forks of it; they close the file ``descriptors``."""

    def __init__(self, config: EngineConfig, policies: Sequence[Policy], descriptors: Sequence[int] = ()) -> None:
        self._began = time.perf_counter()
        forking = get_context("fork")
        self._found, theirs = forking.Pipe(duplex=False)
        self._dry = forking.Process(target=_dry, args=(config, policies, theirs, descriptors), daemon=True)
        self._dry.start()
        theirs.close()
        self._processes = max(1, min(PROCESSES, len(os.sched_getaffinity(0)) - 1))
        self._pool = ProcessPoolExecutor(self._processes, forking, _as_child, (os.getpid(), descriptors))
        self._kernels: list[Future[tuple[str, float]]] = [self._pool.submit(_nothing)]  # forks all of them
        self.trouble: str | None = None  # why it is not known what there is to compile, or not all of it

    def collect(self) -> None:
        """Until the dry run has ended. What it finds is being compiled meanwhile, and afterwards."""
        ends = time.monotonic() + SECONDS
        with suppress(EOFError, OSError):
            while self._found.poll(max(0.0, ends - time.monotonic())):
                kind, data = self._found.recv()
                if kind == "kernel":
                    self._kernels.append(self._pool.submit(_compile, data))
                else:
                    self._add(data)
            self._add(f"the dry run took more than {SECONDS:g} s")
        self._dry.kill()
        self._dry.join()

    def _add(self, trouble: str) -> None:
        self.trouble = trouble if self.trouble is None else f"{self.trouble}; {trouble}"

    def settle(self) -> dict[str, Any]:
        """Until all are compiled: how many, by how many processes, and in how long."""
        done, late = wait(self._kernels[1:], COMPILING)
        failed = [one for one in done if one.exception() is not None]
        self._pool.shutdown(wait=False, cancel_futures=True)
        if failed:
            self._add(f"{len(failed)} kernels were not compiled: {failed[0].exception()}")
        if late:
            self._add(f"{len(late)} kernels took more than {COMPILING:g} s")
        seconds = [one.result()[1] for one in done if one not in failed]
        return {
            "kernels": len(seconds),
            "processes": self._processes,
            "seconds": round(time.perf_counter() - self._began, 1),
            "compiler_seconds": round(sum(seconds), 1),
        }


def begin(config: EngineConfig, policies: Sequence[Policy], descriptors: Sequence[int] = ()) -> KernelsAhead | None:
    """See :class:`KernelsAhead`; None where there is nothing to compile, all was compiled by a server before this one,
    or only this process would do so."""
    on_gpu = str(config.device).startswith("cuda") and compiling.cache_folder() is not None
    if not policies or not on_gpu or config.backend == "reference" or sys.platform != "linux":
        return None
    mark = mark_of(config, policies)
    if len(os.sched_getaffinity(0)) == 1 or (mark is not None and mark.exists()):
        return None
    return KernelsAhead(config, policies, descriptors)


def settle(llm: LLM) -> None:
    """Find what a default policy that is settled later may become, before a request has to wait for it. What is timed
    for that runs outside the engine's loop, so that nothing else says when it is over: the pulse rests from here on."""
    try:
        if llm.policy.deferred:
            logger.info("auto", extra={"fields": {"offer": llm.engine.automatic.offer().said}})
    finally:
        llm.engine.watch.pulse.rest()


def warm(llm: LLM, policies: Sequence[Policy], ahead: KernelsAhead | None = None) -> None:
    """Before the first request: record steps under ``policies`` and run a few prompts, on a GPU; what ``ahead`` has
    compiled is there by then. What was done is logged. A policy that fails is left to the request that asks for it."""
    if not policies or llm.model.device.type != "cuda":
        return
    if (lost := compiling.why_not_kept()) is not None:
        logger.warning(lost)
    if ahead is not None:
        logger.info("compiled", extra={"fields": ahead.settle()})
        if ahead.trouble is not None:
            logger.warning("not all kernels were compiled ahead: %s", ahead.trouble)
    began, compiled = time.perf_counter(), compiling.compiled
    before = replace(compiled)
    recorded = run_through(llm, policies)
    llm.reset_prefix_cache()
    if (mark := mark_of(llm.config, policies)) is not None:
        with suppress(OSError):
            mark.touch()
    fields = {
        "policies": [one.text for one in policies],
        "recorded_steps": recorded,
        "seconds": round(time.perf_counter() - began, 1),
        "kernels": compiled.kernels - before.kernels,  # that were not compiled before
        "compiler_seconds": round(compiled.seconds - before.seconds, 1),
    }
    logger.info("warm", extra={"fields": fields})


def run_through(llm: LLM, policies: Sequence[Policy]) -> int:
    """Record steps and run prompts under each policy; how many steps are recorded."""
    recorded = 0
    for policy in policies:
        with _left_out(policy):
            llm.engine.checks.policy(policy)
            done = llm.engine.prepare(policy, SECONDS / len(policies), len(policies))
            recorded += 0 if done is None else done.recorded
    most = min(llm.max_model_len, llm.engine.checks.most_tokens) - 8
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    for policy in policies:
        chunk = llm.config.dense_chunk if policy.prefill.is_dense else llm.config.chunk
        for length in sorted({min(most, one) for one in (*LENGTHS, chunk + BEYOND)}):
            ids = random.Random(length).choices(range(llm.model.spec.vocab_size), k=max(1, length))
            with _left_out(policy):
                llm.generate({"prompt_token_ids": ids}, params, policy=policy)
    return recorded


@contextmanager
def _left_out(policy: Policy) -> Iterator[None]:
    """What fails under a policy before it was asked for is logged."""
    try:
        yield
    except Exception as error:
        logger.warning("'%s' is not made ready: %s: %s", policy.text, type(error).__name__, error)


def _dry(config: EngineConfig, policies: Sequence[Policy], found: Connection, descriptors: Sequence[int]) -> None:
    """The dry run's process: sends each kernel, and what went wrong."""
    _as_child(os.getppid(), descriptors)
    logger.disabled = True
    warnings.simplefilter("ignore")
    try:
        with ranks.alone(), compiling.collecting(lambda data: found.send(("kernel", data))):
            run_through(LLM(config=dry_config(config)), policies)
    except BaseException as error:
        with suppress(OSError):
            found.send(("trouble", f"{type(error).__name__}: {error}"))
    found.close()
    os._exit(0)  # its GPU's state is of no use, and takes a while to put in order


def dry_config(config: EngineConfig) -> EngineConfig:
    """The same engine over the model's first layers, as many as it takes for each kind of them to be there, with little
    memory and nothing on a disk."""
    said = open_config(checkpoint_folder(config.model, config.revision)).config
    kinds = said.get("layer_types") or []
    layers = max(LEAST_LAYERS, *(1 + kinds.index(kind) for kind in set(kinds))) if kinds else LEAST_LAYERS
    if not isinstance(there := said.get("num_hidden_layers"), int):
        raise SaccadeError("config.json does not say how many layers the model has")
    memory = DRY_MEMORY
    with suppress(SaccadeError):  # "profile", say
        memory = min(memory, parse_bytes(config.kv_memory or memory))
    return replace(
        config,
        layers=min(layers, there),
        lora=None,
        kv_memory=memory,
        kv_host=None,
        kv_disk=None,
        kv_unit="block",
        kv_compute="device",
        kv_pool="unified",
        session_dir=None,
        session_shared=False,
        fa4=False,  # whose compiler has a cache of its own, or none
        enable_prefix_caching=False,
    )


def _compile(data: bytes) -> tuple[str, float]:
    try:
        return compiling.compile_wanted(data)
    except Exception as error:  # Triton's own do not pass from process to process
        said = str(error).strip()
        raise RuntimeError(f"{type(error).__name__}: {said.splitlines()[-1] if said else 'no message'}") from None


def _nothing() -> tuple[str, float]:
    return "", 0.0


def _as_child(parent: int, descriptors: Sequence[int]) -> None:
    """End with the parent, whatever ends that, and hold nothing of its open; leave signals to it."""
    end_with_parent(lambda: os.getppid() != parent)
    for one in (signal.SIGINT, signal.SIGTERM):
        signal.signal(one, signal.SIG_IGN)
    for descriptor in descriptors:
        with suppress(OSError):
            os.close(descriptor)
