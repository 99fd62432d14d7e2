"""``saccade info``: what a model is, what it takes, and what of it fits into this machine's memory."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from saccade.machine import available_bytes, show_bytes

if TYPE_CHECKING:
    from saccade.models.facts import ModelFacts

ENGINE_BYTES = 300 << 20  # what runs beside weights, keys and values


def info(
    model: Annotated[str, typer.Argument(help="A GGUF file, a checkpoint folder, or a model's name.")],
    quantize: Annotated[str | None, typer.Option("--quantize", help="int4 or int8: as its weights are then.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show a model's family, size, formats, context and tokenizer, and how many tokens fit here beside its weights.

    saccade info model-Q4_K_M.gguf; saccade info qwen2.5-coder --quantize int4
    """
    from saccade.models.facts import facts_of
    from saccade.models.folders import checkpoint_folder

    facts = facts_of(checkpoint_folder(model), quantize)
    free = available_bytes()
    fits = facts.tokens_in(free - ENGINE_BYTES)
    if as_json:
        data = {**asdict(facts), "path": str(facts.path), "memory_available": free, "tokens_that_fit": fits}
        print(json.dumps(data, indent=2))
        return
    for name, value in rows(facts, free, fits).items():
        print(f"{name:<16} {value}")


def rows(facts: ModelFacts, free: int, fits: int) -> dict[str, Any]:
    """What is printed, by lines."""
    family = facts.family if facts.architecture in (None, facts.family) else f"{facts.family} ({facts.architecture})"
    stored = facts.weight_bytes
    formats = ", ".join(f"{name} {show_bytes(count)}" for name, count in facts.formats.items())
    windows = f", {facts.windows} of them over a window" if facts.windows else ""
    room = f"{show_bytes(free)} free here: "
    if fits == facts.context:
        room += f"its whole context fits beside the weights ({show_bytes(fits * facts.token_bytes)} of keys and values)"
    elif fits:
        room += f"{fits:,} tokens of its {facts.context:,} fit beside the weights"
    else:
        room += f"the weights and a token need {show_bytes(stored + ENGINE_BYTES + facts.token_bytes)}"
    return {
        "file": facts.path,
        "family": f"{family}, layers run {'in one loop' if facts.own_loop else 'by transformers'}",
        "parameters": f"{facts.parameters / 1e6:,.1f} million",
        "layers": f"{facts.layers}{windows}",
        "heads": f"{facts.heads}, {facts.kv_heads} of keys and values, {facts.head_dim} wide",
        "context": f"{facts.context:,} tokens",
        "weights": f"{show_bytes(stored)}, {8 * stored / max(1, facts.parameters):.2f} bits each: {formats}",
        "activations": facts.dtype,
        "tokenizer": f"{facts.tokenizer or 'none: give token ids'}, {facts.vocabulary:,} tokens, "
        f"{'a' if facts.chat_template else 'no'} chat template",
        "keys and values": f"{show_bytes(facts.token_bytes)} a token",
        "memory": room,
    }
