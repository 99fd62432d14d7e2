"""Whole model: time to first token and decode rate of a random 8B-shaped Llama, beside transformers.

The weights are random, so attention is nearly uniform and no share of it lets blocks be skipped: densities are set by
budgets (``max_budget``, ``epsilon``) and reported as measured. Nothing here says anything about answers.
"""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from harness import Results, measured_limits, say
from tiles import drawn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, StaticCache
from unions import Unions

from saccade.engine.attention import Watch
from saccade.engine.core import new_request_id
from saccade.engine.memory.sequence import Sequence
from saccade.engine.request import Request
from saccade.engine.rows.calls import Setting
from saccade.engine.sampling.params import SamplingParams
from saccade.engine.scheduling.scheduler import next_rows, step_input
from saccade.engine.steps.step import RequestResult, ScheduledRequest
from saccade.engine.worker import Worker
from saccade.kv import BlockManager, KVFormat, KVStorage
from saccade.methods.policy import Policy
from saccade.models import attention
from saccade.models.calibration import Calibrations
from saccade.models.families import FAMILIES
from saccade.models.interface import ModelSpec
from saccade.models.llama import LlamaDecoder
from saccade.models.llama_weights import NamedTensors, Use, read_weights
from saccade.models.rebuilt import cache_argument
from saccade.models.runner import HFRunner
from saccade.ops import triton
from saccade.ops.block_weights import FORMATS as BLOCKS
from saccade.ops.fp8_weights import Fp8Matrix
from saccade.ops.group_rounding import BITS, rounded_matrix
from saccade.ops.matrices import Matrix
from saccade.ops.planes import packed
from saccade.ops.triton import common
from saccade.selection.forms import LABELS

CHUNK = 16384
STEPS = int(os.environ.get("STEPS", "128"))  # decode steps timed: the median counts
PREFILLED = 64  # tokens of a decode row's context that are computed; the others are random
GREEDY = SamplingParams(temperature=0, max_tokens=None)
LONGEST = int(os.environ.get("LONGEST", str(1 << 18)))  # tokens of a sequence, at most
LAYERS = int(os.environ.get("LAYERS", "32"))
PREFILL = os.environ.get(
    "PREFILL", "dense; flexprefill(lines=block, max_budget=16384); flexprefill(lines=block, max_budget=8192)"
).split("; ")
DECODE = os.environ.get(
    "DECODE",
    "dense arkvale(budget=8192) arkvale(budget=2048) quest(budget=2048) psa(epsilon=0.125) psa(epsilon=0.02)",
).split()
# Context and batch; eight of 128K do not fit.
SIZES = tuple(
    (int(context), int(batch))
    for context, batch in (
        one.split("x") for one in os.environ.get("SIZES", "65536x8 98304x8 131072x1 131072x4").split()
    )
)
PREFILL_SIZES = tuple(int(one) for one in os.environ.get("PREFILL_SIZES", "32768 131072").split())
PEERS = {  # what transformers' sdpa may use; the first is its own choice
    "": nullcontext,
    " (cuDNN)": lambda: sdpa_kernel(SDPBackend.CUDNN_ATTENTION),
    " (flash)": lambda: sdpa_kernel(SDPBackend.FLASH_ATTENTION),
}
# Where a step's time goes, by kernels that start when those before them have ended (common.begin), which takes longer:
# else a kernel's time has in it what it waits for.
PROFILED = bool(os.environ.get("PROFILE"))
VECTORS = {"cuboid": 2, "minmax": 2, "stored_mean": 1, "moments": 2}  # of a block's summary, a KV head
# The same rows again with other weights, beside the dense of before: "fp8", "int4" and "int8" (head too), or a format
# of blocks, "Q4_K" say, of random codes, whose head is Q6_K.
QUANTIZE = os.environ.get("QUANTIZE")
FA4 = bool(os.environ.get("FA4"))  # FlashAttention-4's kernels where they serve
WANTED = os.environ.get("WANTED", "prefill decode transformers").split()


def build(device: str) -> tuple[Any, ModelSpec]:
    attention.register()
    config = LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=LAYERS,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=LONGEST,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
    )
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation=attention.ATTENTION_NAME
        )
    spec = ModelSpec(
        family="llama",
        layers=LAYERS,
        heads=32,
        kv_heads=8,
        head_dim=128,
        vocab_size=128256,
        max_position=LONGEST,
        dtype=torch.bfloat16,
        windows=(None,) * LAYERS,
    )
    return model.eval().requires_grad_(False), spec


class Packed(NamedTensors):
    """Matrices in integers of ``quantize`` bits, or in random blocks of that format; the head in 8 bits or Q6_K."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], quantize: str) -> None:
        super().__init__(tensors)
        self._quantize = quantize

    def matrix(self, name: str, bias: bool = False, use: Use = "matrix") -> Matrix:
        plain, head = super().matrix(name, bias, use), name == "lm_head"
        if use == "table":
            return plain
        if self._quantize in BLOCKS:
            return drawn("Q6_K" if head else self._quantize, plain.outputs, plain.channels)
        return packed(rounded_matrix(plain.weight, 8 if head else BITS[self._quantize]))


def seconds(call: Callable[[], Any]) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - began


def profile(step: Callable[[], Any], steps: int = 4) -> None:
    """Print where the device's time goes in a step."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    rows = sorted(seen.key_averages(), key=lambda row: -row.self_device_time_total)[:16]
    for row in rows:
        say(f"  {row.self_device_time_total / steps:9.1f} us {row.count / steps:6.1f} calls  {row.key[:90]}")


def attention_kernels(call: Callable[[], Any]) -> str:
    """The kernels that a call of torch's attention runs, by the names that they have in a profile."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        call()
        torch.cuda.synchronize()
    known = ("flash", "fmha", "cudnn", "sdpa", "attention")
    names = {row.key for row in seen.key_averages() if any(word in row.key.lower() for word in known)}
    return "; ".join(sorted(name.split("<")[0].removeprefix("void ")[:70] for name in names)) or "not attention's own"


class Bench:
    def __init__(self, part: str = "endtoend", built: tuple[Any, ModelSpec] | None = None) -> None:
        self.results = Results(part)
        self.model, self.spec = built or build("cuda")
        self.device = next(self.model.parameters()).device
        self.pool: BlockManager | None = None
        self.serve(None)
        self.limits = measured_limits()
        self.results.facts = {
            "limits": self.limits,
            "layers": self.spec.layers,
            "prefill_chunk": CHUNK,
            "parameters": sum(one.numel() for one in self.model.parameters()),
            "weights": "random",
        }
        self.results.write()
        say(str(self.results.facts))

    def serve(self, quantize: str | None) -> None:
        """Run the model by products of its own type, or ``quantize`` it for good."""
        self.quantize, family = quantize, FAMILIES["llama"]
        tensors = self.model.state_dict()
        if quantize in (None, "fp8"):
            convert = None if quantize is None else lambda matrix: Fp8Matrix.of(matrix.weight, matrix.bias)
            weights = read_weights(self.model, NamedTensors(tensors), join=True, convert=convert)
            self.model.load_state_dict(weights.named(), assign=True)  # parts of what was joined, held once
        else:
            weights = read_weights(self.model, Packed(tensors, quantize), join=True)
            for parameter in self.model.parameters():  # its modules do not run any more
                parameter.data = parameter.new_empty(0)
        del tensors
        self.step_bytes = weights.step_bytes
        torch.cuda.empty_cache()
        runner = HFRunner(self.model, family, self.spec, LlamaDecoder(weights))
        self.watch = Watch()
        self.worker = Worker(runner, Setting(self.spec, Calibrations(self.spec, None), self.watch, fa4=FA4))

    def room(self, tokens: int) -> None:
        """A pool for ``tokens`` tokens in place of the one before."""
        self.pool = None
        self.worker.memories.clear()
        gc.collect()  # requests and their reports hold each other
        torch.cuda.empty_cache()
        layout = KVFormat(torch.bfloat16, self.spec.kv_heads, self.spec.head_dim)
        mover = triton.row_mover(torch.device("cuda"))
        storage = KVStorage(layout, self.spec.layers * layout.blocks(tokens), "cuda", mover)
        self.pool = BlockManager(storage, self.spec.layers)

    def request(self, tokens: int, policy: str) -> Request:
        assert self.pool is not None
        sequence = Sequence(self.pool, self.worker.memories)
        vocab = self.spec.vocab_size
        ids = torch.randint(0, vocab, (tokens,), generator=torch.Generator().manual_seed(tokens)).tolist()
        request = Request(
            new_request_id(), ids, GREEDY, Policy.parse(policy), layers=self.spec.layers, detokenizer=None
        )
        request.begin(sequence, max_length=LONGEST)
        return request

    def step(self, requests: list[Request], chunk: int = CHUNK, goes_on: bool = False) -> dict[int, RequestResult]:
        """The next rows of all, as the engine runs them."""
        return self.run_rows([(request, next_rows(request, chunk)) for request in requests], goes_on)

    def run_rows(
        self, batch: list[tuple[Request, ScheduledRequest]], goes_on: bool = False
    ) -> dict[int, RequestResult]:
        """One step; ``goes_on``: the next one will most likely have the same requests, and may be launched already."""
        result = self.worker.run(step_input(batch), goes_on=goes_on)
        for request, rows in batch:
            own = result.requests[request.id]
            if own.error is not None:
                raise RuntimeError(own.error)
            request.report.take(rows, own, time.perf_counter())
            request.sequence.advance(rows.stop)
        return result.requests

    def prefill(self, request: Request, chunk: int = CHUNK) -> None:
        sequence = request.sequence
        length = len(sequence.tokens)
        sequence.kv.reserve(length)
        while sequence.computed < length:
            self.step([request], chunk)

    def warm_up(self, policy: str) -> None:
        """Compile what is compiled at first use. Selection kernels are compiled anew for every power of two of the
        number of blocks."""
        request = self.request(20000 if policy == "dense" else max(PREFILL_SIZES), policy)
        self.prefill(request)
        request.sequence.kv.free()

    def first_token(self, tokens: int, policy: str, dense: float | None) -> float:
        request = self.request(tokens, policy)
        taken = seconds(lambda: self.prefill(request))
        report = request.report.prefill.as_dict()
        request.sequence.kv.free()
        self.results.add(
            what="time to first token",
            context=tokens,
            batch=1,
            policy=policy,
            products=self.quantize or "bfloat16",
            seconds=taken,
            density=report["density"],
            backends=str(report["backends"]),
            speedup=None if dense is None else dense / taken,
        )
        return taken

    @contextmanager
    def begun(self, tokens: int, batch: int, policy: str, steps: int) -> Iterator[list[Request]]:
        """``batch`` requests of ``tokens`` tokens with random keys and values, and room for ``steps`` decode steps."""
        requests = [self.request(tokens, policy) for _ in range(batch)]
        shape = 2, self.spec.kv_heads, tokens - PREFILLED, self.spec.head_dim
        try:
            for request in requests:
                sequence = request.sequence
                sequence.kv.reserve(tokens + steps)
                for layer in range(self.spec.layers):
                    sequence.kv.append(layer, *torch.randn(*shape, device="cuda", dtype=torch.bfloat16))
                sequence.filled(tokens - PREFILLED)
                self.prefill(request)  # methods begin with what they see of a prompt's end
                sequence.extend([7], "decode", request.policy)
            yield requests
        finally:
            if self.worker.device is not None:
                self.worker.device.forget_ahead()
            for request in requests:
                request.sequence.close()

    def decode_step(self, requests: list[Request], goes_on: bool = False) -> None:
        found = self.step(requests, goes_on=goes_on)
        for request in requests:
            own = found[request.id]
            token = own.tokens[-1] if own.tokens is not None else int(own.logits[-1].argmax())
            request.sequence.extend([token], "decode", request.policy)

    def decode(self, tokens: int, batch: int, policy: str, dense: float | None) -> float:
        """Decode steps, tokens chosen and handed on, after a context whose keys and values are random."""
        with self.begun(tokens, batch, policy, STEPS + 12) as requests:
            step = partial(self.decode_step, requests, goes_on=not PROFILED)  # as an engine with these requests alone
            for _ in range(4):  # compiles, records, and replays twice
                step()
            before = requests[0].report.as_dict()["decode"]
            steps, began = [], time.perf_counter()
            for _ in range(STEPS):  # from one step's tokens to the next one's
                step()
                steps.append(time.perf_counter() - began)
                began += steps[-1]
            torch.cuda.synchronize()
            taken = statistics.median(steps)
            report = requests[0].report.as_dict()
            if PROFILED:
                profile(step)
            shares = None if policy == "dense" else self.results.attempt("union", lambda: self.union(requests))
        density = report["decode"]["density"]
        self.results.add(
            what="decode",
            context=tokens,
            batch=batch,
            policy=policy,
            products=self.quantize or "bfloat16",
            ms_per_step=1000 * taken,
            mean_ms_per_step=1000 * statistics.mean(steps),  # steps that search beside steps that do not
            floor_ms=self.floor(tokens * batch, policy, density),
            floor_union_ms=self.floor(tokens * batch, policy, density * (shares or 1.0)),
            tokens_per_second=batch / taken,
            density=density,
            scored=report["decode"]["keys_scored"] / max(1, report["decode"]["keys_causal"]),
            searching=share_of_searches(before, report["decode"]),
            backends=str(report["decode"]["backends"]),
            notes=str(report["notes"]),
            speedup=None if dense is None else dense / taken,
        )
        return taken

    def union(self, requests: list[Request]) -> float:
        """How many times as many keys as the density says one more step reads, if each key that any query head of a KV
        head reads is read once: 1 where they read the same, up to their number. Its kernels are launched one by one,
        by all layers."""
        self.watch.observer = seen = Unions()
        try:
            self.decode_step(requests)
        finally:
            self.watch.observer = None
        return seen.share

    def floor(self, tokens: int, policy: str, density: float) -> float:
        """Milliseconds in which the device copies as many bytes as a step has to read: weights, keys and values by the
        step's density, and summaries of all blocks. Reading alone may be as fast again as a copy's reads.

        ``floor_ms`` takes the density of a query head, as if all query heads of a KV head read the same keys.
        ``floor_union_ms`` takes what they read together, in one step behind the timed ones (:meth:`union`); it is
        ``floor_ms`` where lists are a KV head's, or are not to be had."""
        vector = 2 * self.spec.kv_heads * self.spec.head_dim * self.spec.layers
        plan = Policy.parse(policy).decode.device_plan(self.spec)
        blocks = None if plan is None else plan.blocks
        summaries = 0.0
        if blocks is not None and blocks.summary == LABELS:  # codes of all channels, and a key's range
            each = self.spec.head_dim * blocks.bits / 8 + 8
            summaries = tokens * each * self.spec.kv_heads * self.spec.layers
        elif blocks is not None:
            summaries = tokens // blocks.size * VECTORS[blocks.summary] * vector
        return 1e-6 * (self.step_bytes + 2 * tokens * density * vector + summaries) / self.limits["copy_gbps"]

    @contextmanager
    def as_transformers(self, attention_name: str) -> Iterator[None]:
        """The model with transformers' own attention."""
        self.model.set_attn_implementation(attention_name)
        try:
            with torch.inference_mode():
                yield
        finally:
            self.model.set_attn_implementation(attention.ATTENTION_NAME)

    def transformers(self, tokens: int, kernel: str) -> None:
        ids = torch.randint(0, 128256, (1, tokens), device="cuda")
        with self.as_transformers("sdpa"), PEERS[kernel]():
            ran = attention_kernels(lambda: self.model(ids[:, :4096], use_cache=True, logits_to_keep=1))
            taken = seconds(lambda: self.model(ids, use_cache=True, logits_to_keep=1))
        self.results.add(
            what="time to first token",
            context=tokens,
            batch=1,
            policy=f"transformers sdpa{kernel}",
            seconds=taken,
            density=1.0,
            backends=ran,
            speedup=None,
        )

    def transformers_decode(self, tokens: int, batch: int, attention_name: str, static: bool) -> None:
        """Greedy steps of transformers' model over its own cache, whose keys and values are random."""
        self.pool = None
        self.worker.memories.clear()
        gc.collect()
        torch.cuda.empty_cache()
        with self.as_transformers(attention_name):
            cache = self._cache(tokens, batch, static)
            ids = torch.full((batch, 1), 7, device="cuda")
            at = tokens

            def step() -> None:
                nonlocal ids, at
                position = torch.full((batch, 1), at, device="cuda")
                named = {cache_argument(self.model.forward): cache}
                out = self.model(ids, **named, position_ids=position, use_cache=True)
                ids, at = out.logits[:, -1:].argmax(-1), at + 1
                ids.tolist()

            steps = STEPS // 32 if static else STEPS // 8  # the slowest rows
            for _ in range(2):
                step()
            taken = seconds(lambda: [step() for _ in range(steps)]) / steps
        name = f"transformers {attention_name}, {'static' if static else 'dynamic'} cache"
        self.results.add(
            what="decode",
            context=tokens,
            batch=batch,
            policy=name,
            ms_per_step=1000 * taken,
            tokens_per_second=batch / taken,
        )

    def _cache(self, tokens: int, batch: int, static: bool) -> Any:
        config = self.model.config
        cache = StaticCache(config, max_cache_len=tokens + STEPS + 8) if static else DynamicCache(config=config)
        for layer in range(self.spec.layers):
            shape = (batch, 8, tokens, 128)
            k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2))
            cache.update(k, v, layer, {"cache_position": torch.arange(tokens, device="cuda")})
        return cache

    def run(self) -> None:
        dense: dict[tuple[str, int, int], float | None] = {}
        if "prefill" in WANTED:
            self.run_prefill(dense)
        if "decode" in WANTED:
            self.run_decode(dense)
        for tokens, batch in SIZES if "transformers" in WANTED else ():
            for static in (False, True):
                self.results.attempt(
                    f"transformers decode {tokens} x {batch}",
                    lambda n=tokens, b=batch, s=static: self.transformers_decode(n, b, "sdpa", s),
                )
        if QUANTIZE:  # last: transformers' modules do not run any more
            self.pool = None
            self.serve(QUANTIZE)
            if "prefill" in WANTED:
                self.run_prefill(dense)
            if "decode" in WANTED:
                self.run_decode(dense)

    def run_decode(self, dense: dict[tuple[str, int, int], float | None]) -> None:
        """``dense``: what dense takes by products of the model's own type, by phase, context and batch."""
        for tokens, batch in SIZES:
            self.room(batch * (tokens + STEPS + 40))
            key = "decode", tokens, batch
            for policy in DECODE:
                taken = self.results.attempt(
                    f"decode {tokens} x {batch} {policy}",
                    lambda p=policy, n=tokens, b=batch, k=key: self.decode(n, b, p, dense.get(k)),
                )
                if policy == "dense":
                    dense.setdefault(key, taken)

    def run_prefill(self, dense: dict[tuple[str, int, int], float | None]) -> None:
        attempt = self.results.attempt
        self.room(max(PREFILL_SIZES) + 64)
        for policy in (PREFILL[0], PREFILL[-1]):  # budgets are numbers to the same kernels
            attempt(f"warm up {policy}", lambda p=policy: self.warm_up(p))
        for tokens in PREFILL_SIZES:
            key = "prefill", tokens, 1
            for policy in PREFILL:
                taken = attempt(
                    f"prefill {tokens} {policy}",
                    lambda p=policy, n=tokens, k=key: self.first_token(n, p, dense.get(k)),
                )
                if policy == "dense":
                    dense.setdefault(key, taken)
            if self.quantize:
                continue
            for kernel in PEERS if tokens == min(PREFILL_SIZES) else ("",):
                attempt(f"transformers {tokens}{kernel}", lambda n=tokens, k=kernel: self.transformers(n, k))


def share_of_searches(before: dict[str, Any], after: dict[str, Any]) -> float | None:
    """Of the query heads that may search, those that did, since ``before``."""
    may = after["searchable"] - before["searchable"]
    return (after["searches"] - before["searches"]) / may if may else None


def main() -> None:
    torch.manual_seed(0)
    if PROFILED:
        common.is_hopper = lambda device: False
    Bench().run()


if __name__ == "__main__":
    main()
