"""transformers on the same model as we: a prompt by torch's sdpa, and greedy decode steps over its own caches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from engine_steps import STEPS, Bench
from harness import seconds
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import DynamicCache, StaticCache

from saccade.models import attention
from saccade.models.rebuilt import cache_argument

PEERS = {  # what transformers' sdpa may use; the first is its own choice
    "": nullcontext,
    " (cuDNN)": lambda: sdpa_kernel(SDPBackend.CUDNN_ATTENTION),
    " (flash)": lambda: sdpa_kernel(SDPBackend.FLASH_ATTENTION),
}


def attention_kernels(call: Callable[[], Any]) -> str:
    """The kernels that a call of torch's attention runs, by the names that they have in a profile."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        call()
        torch.cuda.synchronize()
    known = ("flash", "fmha", "cudnn", "sdpa", "attention")
    names = {row.key for row in seen.key_averages() if any(word in row.key.lower() for word in known)}
    return "; ".join(sorted(name.split("<")[0].removeprefix("void ")[:70] for name in names)) or "not attention's own"


@contextmanager
def own_attention(model: Any, attention_name: str) -> Iterator[None]:
    """``model`` with transformers' own attention."""
    model.set_attn_implementation(attention_name)
    try:
        with torch.inference_mode():
            yield
    finally:
        model.set_attn_implementation(attention.ATTENTION_NAME)


def first_token(bench: Bench, tokens: int, kernel: str) -> None:
    """A row of a prompt's time by one of PEERS."""
    ids = torch.randint(0, 128256, (1, tokens), device="cuda")
    with own_attention(bench.model, "sdpa"), PEERS[kernel]():
        ran = attention_kernels(lambda: bench.model(ids[:, :4096], use_cache=True, logits_to_keep=1))
        taken = seconds(lambda: bench.model(ids, use_cache=True, logits_to_keep=1))
    bench.results.add(
        what="time to first token",
        context=tokens,
        batch=1,
        policy=f"transformers sdpa{kernel}",
        seconds=taken,
        density=1.0,
        backends=ran,
        speedup=None,
    )


def decode(bench: Bench, tokens: int, batch: int, attention_name: str, static: bool) -> None:
    """A row of greedy steps of transformers' model over its own cache, whose keys and values are random."""
    bench.empty()
    with own_attention(bench.model, attention_name):
        cache = _cache(bench, tokens, batch, static)
        ids = torch.full((batch, 1), 7, device="cuda")
        at = tokens

        def step() -> None:
            nonlocal ids, at
            position = torch.full((batch, 1), at, device="cuda")
            named = {cache_argument(bench.model.forward): cache}
            out = bench.model(ids, **named, position_ids=position, use_cache=True)
            ids, at = out.logits[:, -1:].argmax(-1), at + 1
            ids.tolist()

        steps = STEPS // 32 if static else STEPS // 8  # the slowest rows
        for _ in range(2):
            step()
        taken = seconds(lambda: [step() for _ in range(steps)]) / steps
    name = f"transformers {attention_name}, {'static' if static else 'dynamic'} cache"
    bench.results.add(
        what="decode",
        context=tokens,
        batch=batch,
        policy=name,
        ms_per_step=1000 * taken,
        tokens_per_second=batch / taken,
    )


def _cache(bench: Bench, tokens: int, batch: int, static: bool) -> Any:
    config = bench.model.config
    cache = StaticCache(config, max_cache_len=tokens + STEPS + 8) if static else DynamicCache(config=config)
    for layer in range(bench.spec.layers):
        shape = (batch, 8, tokens, 128)
        k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        cache.update(k, v, layer, {"cache_position": torch.arange(tokens, device="cuda")})
    return cache
