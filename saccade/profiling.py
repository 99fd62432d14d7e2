"""How much memory keys and values may have: what a profiling run of the model leaves of it.

A run has the widest steps that the settings allow: a whole chunk of a prefill beside ``max_requests`` decoding
requests, under the default policy. What steps take beside keys and values is measured, not guessed; the rest is theirs.
PSA sizes its pool so (section 3.4), and so do the engines that it is compared with.
"""

from __future__ import annotations

import gc
import math
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch

from saccade.engine.core import Engine
from saccade.engine.rows.expanded import ROOM
from saccade.engine.sampling.params import SamplingParams
from saccade.engine.settings.config import PROFILE, EngineConfig
from saccade.errors import CapacityError, SaccadeError
from saccade.kv import BlockManager, KVFormat, KVStorage
from saccade.kv.states import StatePool
from saccade.machine import available_bytes, parse_bytes, peak_bytes, reset_peak, resident_bytes, show_bytes
from saccade.methods.policy import Policy
from saccade.models.loader import LoadedModel
from saccade.ops.movers import row_mover

SHARE = {"cuda": 0.95, "cpu": 0.8}  # of free memory: the rest is for recorded graphs, and for other processes
SHORT, ANSWER = 8, 6  # tokens of the prompt and of the answer of requests that only decode


@dataclass(frozen=True)
class MemoryProfile:
    """What a profiling run found, in bytes: ``free``, with the weights loaded; ``share`` of that may be taken;
    ``steps``: the most that steps of ``prefill_rows`` rows beside ``decode_rows`` took but for keys and values;
    ``kv``: what is left for those. ``exact``: whether the peak is of the run itself; else the process has had a greater
    one, and ``steps`` is at most that."""

    free: int
    share: float
    steps: int
    kv: int
    prefill_rows: int
    decode_rows: int
    seconds: float
    exact: bool = True

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers."""
        return asdict(self)

    def __str__(self) -> str:
        return (
            f"a step of {self.prefill_rows} prefill and {self.decode_rows} decode rows takes "
            f"{'' if self.exact else 'at most '}{show_bytes(self.steps)} beside keys and values; "
            f"{self.share:.0%} of {show_bytes(self.free)} free leaves {show_bytes(max(0, self.kv))} for these "
            f"({self.seconds:.1f} s)"
        )


def profile(config: EngineConfig, model: LoadedModel, layout: KVFormat, max_model_len: int) -> MemoryProfile:
    """Run ``model`` as ``config`` says over a pool of its own, which is gone afterwards. CapacityError where nothing is
    left for keys and values, SaccadeError where the run fails; both name the way out."""
    began, device = time.perf_counter(), model.device
    rows = max(1, min(config.dense_chunk, max_model_len - ANSWER - 1))
    decoding = max(1, config.max_requests - 1)
    short = min(SHORT, max(1, max_model_len - ANSWER - 1))
    blocks = layout.blocks(rows + ANSWER) + decoding * layout.blocks(short + ANSWER) + 1
    free = _free(device)
    if device.type == "cpu" and config.kv_host is not None:  # it lies in the same memory
        free -= parse_bytes(config.kv_host, "kv_host")
    storage = KVStorage(layout, blocks * model.spec.layers, device, row_mover(device))
    storage.k.zero_()  # so that its memory is there before the run
    storage.v.zero_()
    kept = model.spec.states
    states = None if kept is None else StatePool(kept, config.max_requests + 1, device)
    pool = BlockManager(storage, model.spec.layers, states=states)
    exact = model.spec.dtype == torch.float32 if config.exact is None else config.exact
    before, known = _taken(device), _begin(device)
    try:
        _run(Engine(config, model, pool, max_model_len, exact), rows, decoding, short)
    except CapacityError:
        raise
    except (SaccadeError, RuntimeError) as error:
        raise SaccadeError(
            f"kv_memory={PROFILE!r}: the profiling run failed ({str(error).splitlines()[0]}); give kv_memory in bytes"
        ) from error
    unseen = 0 if model.spec.value_dim is None else ROOM  # of keys and values of heads, which are few after so few rows
    steps = max(0, _peak(device) - before) + unseen
    del pool, storage, states
    _end(device)
    share = SHARE["cuda" if device.type == "cuda" else "cpu"]
    left = math.floor(share * free) - steps
    found = MemoryProfile(free, share, steps, left, rows, decoding, time.perf_counter() - began, known)
    if left < layout.block_bytes * model.spec.layers:
        raise CapacityError(f"kv_memory={PROFILE!r}: {found}; lower prefill_chunk or max_requests")
    return found


def _run(engine: Engine, rows: int, decoding: int, short: int) -> None:
    vocab, policy = engine.model.spec.vocab_size, Policy.parse(engine.config.policy)
    params = SamplingParams(temperature=1.0, top_p=0.9, seed=0, max_tokens=ANSWER, ignore_eos=True)
    asked = [engine.add([(number + at) % vocab for at in range(short)], params, policy) for number in range(decoding)]
    engine.step()
    asked.append(engine.add([at % vocab for at in range(rows)], params, policy))
    while engine.busy:
        engine.step()
    failed = next((one.error for one in asked if one.error is not None), None)
    if failed is not None:
        raise SaccadeError(failed)


def _free(device: torch.device) -> int:
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info(device)[0])
    return available_bytes()


def _begin(device: torch.device) -> bool:
    """Whether the peak from here on can be had by itself."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return True
    return reset_peak()


def _taken(device: torch.device) -> int:
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else resident_bytes()


def _peak(device: torch.device) -> int:
    return torch.cuda.max_memory_reserved(device) if device.type == "cuda" else peak_bytes()


def _end(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
