"""The options of a model and its engine, as the commands share them."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from saccade.engine.config import EngineConfig
    from saccade.llm import LLM

MODEL = typer.Option("--model", "-m", help="Checkpoint folder, or a built-in model: retriever or reference.")
POLICY = typer.Option("--policy", "-p", help="For example dense, streaming, flexprefill+psa(epsilon=0.98).")
DTYPE = typer.Option("--dtype", help="auto, float32, bfloat16 or float16.")
MAX_LENGTH = typer.Option("--max-model-len", help="Most tokens of prompt and answer together.")
MEMORY = typer.Option("--kv-memory", help="Memory for keys and values, for example 4GiB.")
CHUNK = typer.Option("--prefill-chunk", help="Most prompt tokens computed in one step.")
BACKEND = typer.Option("--backend", help="auto, cpu, triton or reference.")
THREADS = typer.Option("--threads", help="Threads for kernels and matrix products.")
DEVICE = typer.Option("--device", help="cpu, cuda, cuda:N, or auto: the GPU where there is one.")


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


def load_model(config: EngineConfig | None = None, *, quiet: bool = False, **settings: Any) -> LLM:
    """A model of a config, or of some settings. Its ``threads`` become torch's too."""
    import torch

    from saccade.engine.config import EngineConfig
    from saccade.llm import LLM

    config = config or EngineConfig.of(**settings)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    llm = LLM(config=config)
    return llm if quiet else say_device(llm)


def say_device(llm: LLM) -> LLM:
    """Tell on which device a model runs, where that is not plain."""
    from saccade.machine import device_note

    note = device_note(llm.model.device)
    if note:
        print(f"saccade: note: {note}", file=sys.stderr)
    return llm
