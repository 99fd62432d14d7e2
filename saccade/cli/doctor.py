"""``saccade doctor``: what this installation can do on this machine."""

from __future__ import annotations

import json
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Annotated, Any

import typer

from saccade import __version__
from saccade.cli.fits import fits
from saccade.machine import available_bytes, best_device, device_note, processor, show_bytes, total_bytes

if TYPE_CHECKING:
    import torch


def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Show versions, instruction set, backends, GPU, memory and the models that fit it."""
    facts = collect()
    if as_json:
        print(json.dumps(facts, indent=2))
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(show_header=False, box=None)
    for section, entries in facts.items():
        table.add_row(f"[bold]{section}[/bold]", "")
        for name, value in entries.items():
            table.add_row(f"  {name}", escape(str(value)) if value not in (None, "") else "-")
    Console(soft_wrap=True).print(table)


def collect() -> dict[str, dict[str, Any]]:
    """Facts by section, plain data."""
    import torch

    from saccade.ops import compiling, cpu, fa4, fp8, triton

    gpus = (
        [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    )
    available, device = cpu.available(), torch.device(best_device())
    return {
        "versions": {
            "saccade": __version__,
            "python": platform.python_version(),
            **{
                name: _version(name)
                for name in ("torch", "transformers", "numpy", "tokenizers", "safetensors", "triton")
            },
        },
        "machine": {
            "system": platform.platform(),
            "processor": processor(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "memory": show_bytes(total_bytes()),
            "memory available": show_bytes(available_bytes()),
        },
        "backends": {
            "reference": "ready (torch)",
            "cpu": f"ready (C++, {cpu.isa()}; this machine can run {', '.join(cpu.supported_isas())})"
            if available
            else f"missing: {cpu.why_unavailable()}",
            "triton": "not needed: no GPU" if not gpus else triton.why_unavailable() or "ready",
            "fa4": "not needed: no GPU" if not gpus else fa4.why_not(device) or "ready",
        },
        "gpu": {
            "found": ", ".join(gpus) or "none",
            "used": "by default; --device cpu keeps to the CPU" if gpus else "no",
            "note": device_note(device) if not gpus else None,
            "compiled kernels": compiling.why_not_kept() or f"kept in {compiling.cache_folder()}" if gpus else None,
            "fp8 products": fp8.why_not(device, torch.bfloat16) or "ready: quantize='fp8'",
        },
        "what fits": {**fits(_memory(device)), "of one model": "saccade info MODEL, by its config alone"},
        "models": _models(device),
        "recorded decode steps": _recorded(),
        "tuned policies": _tuned(device),
    }


def _memory(device: torch.device) -> int:
    """Bytes that are free where models run."""
    import torch

    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_bytes()


def _models(device: torch.device) -> dict[str, str]:
    """What loads."""
    from saccade.models.families import FAMILIES
    from saccade.models.gguf_header import PLAIN
    from saccade.models.gguf_names import FAMILIES as READ
    from saccade.models.packed_config import READERS
    from saccade.models.rounded_weights import slow_products
    from saccade.models.text_part import WRAPPERS
    from saccade.ops.block_weights import FORMATS

    return {
        "families": ", ".join(FAMILIES),
        "the text of": ", ".join(WRAPPERS),
        "GGUF files of": ", ".join(READ),
        "GGUF files in": ", ".join((*FORMATS, *PLAIN)),
        "folders in": "plain numbers, " + ", ".join(READERS),
        "plain weights as": "quantize='int4' or 'int8'",
        "products with integers": slow_products(device) or "ready: AWQ, GPTQ, compressed-tensors, int4 and int8",
        "other products": "mxfp4 on a GPU, and fp8 on a CPU or by blocks, are dequantised by torch",
    }


def _tuned(device: torch.device) -> dict[str, str]:
    """What ``saccade tune`` found, by file, and whether ``auto`` goes by it on this machine and its default threads."""
    from saccade.models.tuned import host_of
    from saccade.models.tuned_places import differences, policy_files, said_of

    here, told = host_of(device, None), dict[str, str]()
    for file, data in policy_files().items():
        place, differs = data["place"], differences(data["place"], here)
        model = f"{place.get('family')}, {place.get('layers')} layers, {place.get('dtype')}"
        why = f"not used here by default: {said_of(differs)}" if differs else "used here"
        told[file.name] = f"'{data['policy']}', {model}, of {data.get('made')}: {why}"
    return told or {"found": "none: saccade tune MODEL writes one, by which auto goes"}


def _recorded() -> dict[str, str]:
    """Which methods a GPU decodes by in steps that many requests share; and why it takes the row path for others."""
    from saccade.methods.outside import load_outside
    from saccade.methods.registry import METHODS

    load_outside()
    methods = [method for method in METHODS.values() if "decode" in method.phases]
    served = sorted(method.name for method in methods if method.rows_only is None)
    others = {method.name: f"on the row path: {method.rows_only}" for method in methods if method.rows_only is not None}
    lossless = "drafts and plain steps as their methods; verifications are launched one by one by the row path"
    listed = [method.name for method in methods if method.name in served and _listed(method)]
    return {
        "methods": ", ".join(served),
        "bring KV in from kv_host": f"{', '.join(sorted(listed))}; others need all of their KV on the GPU",
        **dict(sorted(others.items())),
        "lossless": lossless,
    }


def _listed(method: Any) -> bool:
    """Whether recorded steps of a method, as it is by default, know what they read before they read it."""
    import torch

    from saccade.models.interface import ModelSpec

    plan = method().device_plan(ModelSpec("llama", 4, 8, 2, 64, 1000, 4096, torch.bfloat16, (None,) * 4))
    return plan is not None and plan.listed


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
