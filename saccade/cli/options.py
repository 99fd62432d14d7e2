"""The options of a model and its engine, as the commands share them."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from saccade.cli.model_names import check_name

if TYPE_CHECKING:
    from saccade.engine.settings.config import EngineConfig
    from saccade.llm import LLM

Command = Callable[..., Any]
MADE = ("params", "config")  # parameters that are made of many options; their types cost seconds to import

HELP_NAMES = {"help_option_names": ["-h", "--help"]}

MODEL = typer.Option(
    "--model",
    "-m",
    help="Checkpoint folder, GGUF file, hub name (Qwen/Qwen3-8B, perhaps with @revision), what saccade fetch brought, "
    "retriever or reference.",
)
FIRST = typer.Option("--first", help="Read the document's first tokens alone, so many.")
LAST = typer.Option("--last", help="Read the document's last tokens alone, so many.")
POLICY = typer.Option("--policy", "-p", help="For example dense, streaming, flexprefill+psa.")
DTYPE = typer.Option("--dtype", help="auto, float32, bfloat16 or float16.")
QUANTIZE = typer.Option(
    "--quantize", help="int4 or int8: weights rounded to integers as they load; fp8: 8-bit floats, on a GPU."
)
LORA = typer.Option("--lora", help="Folder of a LoRA adapter (peft's), added to the weights as they load.")
MAX_LENGTH = typer.Option("--max-model-len", help="Most tokens of prompt and answer together.")
MEMORY = typer.Option("--kv-memory", help="Memory for keys and values, for example 4GiB; profile has it measured.")
HOST = typer.Option("--kv-host", help="Host memory for what that has no room for on a GPU, for example 96GiB.")
UNIT = typer.Option("--kv-unit", help="What moves to host memory and back: block, or the head that reads it.")
COMPUTE = typer.Option("--kv-compute", help="Where decoding attends what lies there: device, host or auto.")
DISK = typer.Option("--kv-disk", help="Folder and size for what memory, or --kv-host, has no room for: ~/kv:100GiB.")
KV_DTYPE = typer.Option(
    "--kv-dtype", help="How keys and values are stored: auto (the model's dtype), bf16 (on a CPU), int8 or fp8."
)
KV_ROTATE = typer.Option(
    "--kv-rotate/--no-kv-rotate",
    help="Turn queries and keys by Hadamard products before these are stored; by default of int8.",
)
CHUNK = typer.Option(
    "--prefill-chunk",
    help="Most prompt tokens computed in one step; by default 8192 on a GPU from 32 GiB on, else 4096.",
)
GAP = typer.Option(
    "--max-token-gap", help="Most seconds between two tokens that prefills of others may cause; 0 or none: no bound."
)
BACKEND = typer.Option("--backend", help="auto, cpu, triton or reference.")
FA4 = typer.Option("--fa4/--no-fa4", help="FlashAttention-4's kernels for long prefills; by default where installed.")
THREADS = typer.Option("--threads", help="Threads for kernels and matrix products.")
AUDIT = typer.Option("--audit", help="Share of decode attention that is held against true attention (docs/audit.md).")
AUDIT_STEPS = typer.Option("--audit-steps", help="Share of decode steps that are replayed densely.")
TARGET = typer.Option("--target", help="Agreement with dense to hold by moving the method's dial.")
RANKS = typer.Option("--tensor-parallel-size", help="Processes that share out the KV heads, a GPU each; experimental.")
DEVICE = typer.Option("--device", help="cpu, cuda, cuda:N, or auto: the GPU where there is one.")


# Of saccade.engine.settings.config.EngineConfig, whose names these are.
ENGINE: dict[str, tuple[Any, Any]] = {
    "model": (Annotated[str, MODEL], "retriever"),
    "dtype": (Annotated[str, DTYPE], "auto"),
    "quantize": (Annotated[str | None, QUANTIZE], None),
    "lora": (Annotated[str | None, LORA], None),
    "max_model_len": (Annotated[int | None, MAX_LENGTH], None),
    "kv_memory": (Annotated[str | None, MEMORY], None),
    "kv_host": (Annotated[str | None, HOST], None),
    "kv_unit": (Annotated[str, UNIT], "block"),
    "kv_compute": (Annotated[str, COMPUTE], "device"),
    "kv_disk": (Annotated[str | None, DISK], None),
    "kv_dtype": (Annotated[str, KV_DTYPE], "auto"),
    "kv_rotate": (Annotated[bool | None, KV_ROTATE], None),
    "prefill_chunk": (Annotated[int | None, CHUNK], None),
    "max_token_gap": (Annotated[str | None, GAP], None),
    "backend": (Annotated[str, BACKEND], "auto"),
    "fa4": (Annotated[bool | None, FA4], None),
    "threads": (Annotated[int | None, THREADS], None),
    "device": (Annotated[str, DEVICE], "auto"),
    "audit": (Annotated[float, AUDIT], 0.0),
    "audit_steps": (Annotated[float, AUDIT_STEPS], 0.0),
    "target": (Annotated[float | None, TARGET], None),
    "tensor_parallel_size": (Annotated[int, RANKS], 1),
}


def takes_engine(**defaults: Any) -> Callable[[Command], Command]:
    """Gives a command with ``config: EngineConfig`` the options of a model and its engine; ``defaults`` of its own."""

    def make(given: dict[str, Any], others: dict[str, Any]) -> EngineConfig:
        from saccade.cli.progress import waiting

        if given["tensor_parallel_size"] > 1 and given["max_token_gap"] == defaults.get("max_token_gap"):
            given = {**given, "max_token_gap": None}  # a default that several ranks do not have
        check_name(given["model"])
        with waiting(f"loading {given['model']}", bool(others.get("quiet"))):  # torch alone takes seconds
            from saccade.engine.settings.config import EngineConfig

            return EngineConfig.of(**given)

    known = {name: (kind, defaults.get(name, default)) for name, (kind, default) in ENGINE.items()}
    return lambda command: replaced(command, "config", known, make)


def replaced(
    command: Command,
    name: str,
    options: dict[str, tuple[Any, Any]],
    make: Callable[[dict[str, Any], dict[str, Any]], Any],
) -> Command:
    """``command`` with ``options`` (type and default by name) in the place of its parameter ``name``, which becomes
    what ``make`` makes of them, and of the others that are given. What typer sees is a function that takes all of
    them."""
    signature = inspect.signature(command)
    others = SimpleNamespace(
        __annotations__={key: Any if key in MADE else kind for key, kind in command.__annotations__.items()}
    )
    hints = get_type_hints(others, getattr(command, "__globals__", {}), include_extras=True)
    parameters: list[inspect.Parameter] = []
    for one in signature.parameters.values():
        if one.name != name:
            parameters.append(one.replace(annotation=hints[one.name], kind=inspect.Parameter.KEYWORD_ONLY))
            continue
        parameters += [
            inspect.Parameter(option, inspect.Parameter.KEYWORD_ONLY, annotation=kind, default=default)
            for option, (kind, default) in options.items()
        ]

    def call(**given: Any) -> Any:
        own = {option: given.pop(option) for option in options}
        return command(**given, **{name: make(own, given)})

    call.__name__, call.__doc__ = command.__name__, command.__doc__
    call.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {one.name: one.annotation for one in parameters}
    return call


def load_model(config: EngineConfig | None = None, *, quiet: bool = False, **settings: Any) -> LLM:
    """A model of a config, or of some settings. Its ``threads`` become torch's too."""
    from saccade.cli.progress import waiting

    check_name(settings.get("model"))
    with waiting(f"loading {settings.get('model') if config is None else config.model}", quiet):
        import torch

        from saccade.engine.settings.config import EngineConfig
        from saccade.llm import LLM

        config = config or EngineConfig.of(**settings)
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        llm = LLM(config=config)
    return llm if quiet else say_device(llm)


def say_device(llm: LLM) -> LLM:
    """Tell on which device a model runs, where that is not plain, and what a profiling run found."""
    from saccade.machine import device_note

    note = device_note(llm.model.device)
    if note:
        print(f"saccade: note: {note}", file=sys.stderr)
    if llm.memory_profile is not None:
        print(f"saccade: note: {llm.memory_profile}", file=sys.stderr)
    return llm
