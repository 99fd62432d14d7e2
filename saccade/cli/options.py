"""The options of a model and its engine, as the commands share them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from saccade.engine.config import EngineConfig

MODEL = typer.Option("--model", "-m", help="Checkpoint folder, or a built-in model: retriever or reference.")
POLICY = typer.Option("--policy", "-p", help="For example dense, streaming, flexprefill+psa(epsilon=0.98).")
DTYPE = typer.Option("--dtype", help="auto, float32, bfloat16 or float16.")
MAX_LENGTH = typer.Option("--max-model-len", help="Most tokens of prompt and answer together.")
MEMORY = typer.Option("--kv-memory", help="Memory for keys and values, for example 4GiB.")
CHUNK = typer.Option("--prefill-chunk", help="Most prompt tokens computed in one step.")
BACKEND = typer.Option("--backend", help="auto, cpu, triton or reference.")
THREADS = typer.Option("--threads", help="Threads for kernels and matrix products.")
DEVICE = typer.Option("--device", help="cpu, cuda or cuda:N.")


def engine_config(
    model: str,
    dtype: str,
    max_model_len: int | None,
    kv_memory: str | None,
    prefill_chunk: int,
    backend: str,
    threads: int | None,
    device: str,
) -> EngineConfig:
    """The engine's settings from a command's options."""
    from saccade.engine.config import EngineConfig

    return EngineConfig.of(
        model=model,
        dtype=dtype,
        max_model_len=max_model_len,
        kv_memory=kv_memory,
        prefill_chunk=prefill_chunk,
        backend=backend,
        threads=threads,
        device=device,
    )
