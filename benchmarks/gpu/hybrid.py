"""Whole steps of a random model of Qwen3.5's shape: three gated-delta layers to one that attends.

    python benchmarks/gpu/hybrid.py [--model 27b|4b] [--layers 8] [--prefill 32768 131072] [--decode 131072x8]
        [--policies dense "arkvale(budget=2048)"] [--profile]

Prefill beside its products and its attention: what their kernels take in it, by torch's profiler, over what the prompt
takes without one; and by themselves, each call over the same numbers of rows and keys, added up. Decode steps as an
engine runs them, after a context whose keys, values and states are random. The frame is ``engine_steps.py``'s; weights
are random, so densities are set by budgets.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import engine_steps
import torch
from harness import profile, say, seconds
from transformers import AutoModelForCausalLM, Qwen3_5TextConfig

from saccade.engine.attention import Watch
from saccade.engine.request import Request
from saccade.engine.rows.calls import Setting
from saccade.engine.worker import Worker
from saccade.kv import BlockManager, KVFormat, KVStorage
from saccade.kv.states import StatePool
from saccade.kv.view import KVView
from saccade.models import attention
from saccade.models.calibration import Calibrations
from saccade.models.families import FAMILIES, attending_layers
from saccade.models.interface import ModelSpec
from saccade.models.runner import HFRunner
from saccade.ops import Call, run, triton
from saccade.selection import Dense, Shape

CHUNK = 4096  # rows, as an engine has them where layers keep a state
# Hidden and inner channels; query, key-value, linear key and linear value heads.
SIZES = {"27b": (5120, 17408, 24, 4, 16, 48), "4b": (2560, 9216, 16, 4, 16, 32)}


def build(name: str, layers: int) -> tuple[Any, ModelSpec]:
    attention.register()
    hidden, inner, heads, kv_heads, linear_keys, linear_values = SIZES[name]
    config = Qwen3_5TextConfig(
        vocab_size=248320,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=256,
        linear_num_key_heads=linear_keys,
        linear_num_value_heads=linear_values,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        max_position_embeddings=1 << 18,
    )
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation=attention.ATTENTION_NAME
        )
    model = model.eval().requires_grad_(False)
    family = FAMILIES["qwen3_5_text"]
    places = attending_layers(family, config)
    shape = {"heads": heads, "kv_heads": kv_heads, "head_dim": 256, "vocab_size": 248320, "max_position": 1 << 18}
    spec = ModelSpec("qwen3_5_text", len(places), dtype=torch.bfloat16, windows=(None,) * len(places), **shape)
    return model, spec


class Bench(engine_steps.Bench):
    def __init__(self, name: str, layers: int) -> None:
        super().__init__("hybrid", build(name, layers))

    def serve(self, quantize: str | None) -> None:
        """See the class it derives from."""
        assert quantize is None
        self.quantize, family = None, FAMILIES["qwen3_5_text"]
        runner = HFRunner(self.model, family, self.spec)
        assert runner.keeping is not None
        places = attending_layers(family, self.model.config)
        named = {name: getattr(self.spec, name) for name in self.spec.__dataclass_fields__}
        self.spec = runner.spec = ModelSpec(**{**named, "places": places, "states": runner.keeping.format})
        self.step_bytes = (
            sum(2 * one.numel() for one in self.model.parameters()) - 2 * 248320 * runner.config.hidden_size
        )
        self.watch = Watch()
        self.worker = Worker(runner, Setting(self.spec, Calibrations(self.spec, None), self.watch))

    def room(self, tokens: int) -> None:
        """See the class it derives from: with states of a few sequences."""
        self.empty()
        layout = KVFormat(torch.bfloat16, self.spec.kv_heads, self.spec.head_dim)
        mover = triton.row_mover(torch.device("cuda"))
        storage = KVStorage(layout, self.spec.layers * layout.blocks(tokens), "cuda", mover)
        assert self.spec.states is not None
        self.pool = BlockManager(storage, self.spec.layers, states=StatePool(self.spec.states, 34, "cuda"))

    @contextmanager
    def begun(self, tokens: int, batch: int, policy: str, steps: int) -> Iterator[list[Request]]:
        """See the class it derives from: with random states, too."""
        assert self.pool is not None
        assert self.pool.states is not None
        for part in self.pool.states.tensors.values():
            part.normal_(0, 0.1)
        before = {name: one[:, 0].clone() for name, one in self.pool.states.tensors.items()}
        load = self.worker.memories.filled

        def filled(sequence: int, length: int) -> None:
            load(sequence, length)
            self.worker.memories.load_kept(sequence, length, before)

        self.worker.memories.filled = filled  # type: ignore[method-assign]
        try:
            with super().begun(tokens, batch, policy, steps) as requests:
                yield requests
        finally:
            del self.worker.memories.filled  # type: ignore[attr-defined]

    @torch.inference_mode()
    def alone(self, tokens: int) -> tuple[float, float]:
        """Seconds that the layers' products, and their attention, take by themselves over a prompt in chunks."""
        last, unread = self.spec.places[-1], ("q_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
        linear = [
            one
            for number, layer in enumerate(self.model.get_decoder().layers)
            for name, one in layer.named_modules()
            if type(one) is torch.nn.Linear and not (number == last and name.endswith(unread))  # which nobody reads
        ]
        by_width = {width: torch.randn(CHUNK, width, device="cuda", dtype=torch.bfloat16) for width in
                    {one.in_features for one in linear}}  # fmt: skip
        chunks = -(-tokens // CHUNK)

        def products() -> None:
            for one in linear:
                torch.nn.functional.linear(by_width[one.in_features], one.weight)

        products()
        taken = chunks * statistics.median(seconds(products) for _ in range(3))
        heads, kv_heads, dim = self.spec.heads, self.spec.kv_heads, self.spec.head_dim
        q = torch.randn(heads, CHUNK, dim, device="cuda", dtype=torch.bfloat16)
        k, v = torch.randn(2, kv_heads, tokens, dim, device="cuda", dtype=torch.bfloat16)
        views = [KVView.from_tensors(k[:, :stop], v[:, :stop]) for stop in range(CHUNK, tokens + 1, CHUNK)]

        def attends() -> None:
            for view in views:
                shape = Shape.suffix(heads, kv_heads, CHUNK, view.length, "cuda")
                run(Call.of(q, view, Dense(shape)))

        attends()
        return taken, (self.spec.layers - 1) * seconds(attends)

    def kernels(self, tokens: int) -> tuple[float, float]:
        """Seconds that the kernels of products, and of attention, take within a prompt."""
        request = self.request(tokens, "dense")
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
            self.prefill(request)
            torch.cuda.synchronize()
        request.sequence.close()
        names = [(row.key, 1e-6 * row.self_device_time_total) for row in seen.key_averages()]
        say(f"  {1000 * sum(one for _, one in names):9.2f} ms  in kernels, of which")
        for name, one in sorted(names, key=lambda row: -row[1])[:14]:
            say(f"  {1000 * one:9.2f} ms  {name[:90]}")
        products = sum(one for name, one in names if any(part in name for part in ("nvjet", "gemm", "_product")))
        return products, sum(one for name, one in names if name in ("_prefill", "_attend_groups"))

    def prefill_row(self, tokens: int) -> None:
        taken = statistics.median(self.first_token(tokens, "dense", None) for _ in range(2))
        for name, (products, attends) in (("within it", self.kernels(tokens)), ("alone", self.alone(tokens))):
            share = (products + attends) / taken
            parts = f"products {products:.3f} + attention {attends:.3f} {name}"
            say(f"prefill {tokens}: {taken:.3f} s; {parts}: {share:.3f}")

    def prefill(self, request: Request, chunk: int = CHUNK) -> None:
        """See the class it derives from: in chunks as an engine has them."""
        super().prefill(request, CHUNK)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SIZES, default="27b")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--prefill", type=int, nargs="*", default=[32768, 131072])
    parser.add_argument("--decode", nargs="*", default=["131072x8"])
    parser.add_argument("--policies", nargs="*", default=["dense", "arkvale(budget=2048)"])
    parser.add_argument("--profile", action="store_true", help="print where the device's time goes")
    asked = parser.parse_args()
    torch.manual_seed(0)
    bench = Bench(asked.model, asked.layers)
    decode(bench, asked.decode, asked.policies, asked.profile)
    if asked.prefill:
        bench.room(max(asked.prefill) + 64)
        bench.warm_up("dense")
        for tokens in asked.prefill:
            bench.prefill_row(tokens)
        if asked.profile:
            request = bench.request(8 * CHUNK, "dense")
            request.sequence.kv.reserve(8 * CHUNK)
            profile(lambda: bench.step([request], CHUNK), 4)
            request.sequence.close()


def decode(bench: Bench, sizes: Sequence[str], policies: Sequence[str], profiles: bool) -> None:
    engine_steps.PROFILED = profiles
    for size in sizes:
        tokens, batch = map(int, size.split("x"))
        bench.room(batch * (tokens + engine_steps.STEPS + 40))
        dense: float | None = None
        for policy in policies:
            taken = bench.decode(tokens, batch, policy, dense)
            dense = taken if policy == "dense" else dense


if __name__ == "__main__":
    main()
