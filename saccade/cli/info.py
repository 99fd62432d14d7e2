"""``saccade info``: what a model is, what it takes, and what sparse attention could gain, from its config alone."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from saccade.machine import available_bytes, show_bytes

if TYPE_CHECKING:
    from saccade.models.facts import ModelFacts, RefusedModel

ENGINE_BYTES = 300 << 20  # what runs beside weights, keys and values
LENGTHS = tuple(1 << power for power in range(12, 21))
READ = 0.05  # of keys and values: what the limit is stated for


def info(
    model: Annotated[str, typer.Argument(help="A GGUF file, a checkpoint folder, or a model's name.")],
    quantize: Annotated[str | None, typer.Option("--quantize", help="int4 or int8: as its weights are then.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show whether a model runs, its size, memory by context, and what sparse attention could gain; no weights needed.

    saccade info model-Q4_K_M.gguf; saccade info qwen2.5-coder --quantize int4; saccade info Qwen/Qwen3-8B
    """
    from saccade.models.facts import RefusedModel, described
    from saccade.models.folders import checkpoint_folder

    facts = described(checkpoint_folder(model, config_alone=True), quantize)
    if isinstance(facts, RefusedModel):
        _print_refused(facts, as_json)
        return
    free = available_bytes()
    fits = facts.tokens_in(free - ENGINE_BYTES)
    if as_json:
        data = {**asdict(facts), "path": str(facts.path), "memory_available": free, "tokens_that_fit": fits}
        data |= {"supported": True, "weights_read_each_step": facts.step_bytes, "half_of_a_step_at": facts.half_at}
        print(json.dumps({**data, "contexts": contexts(facts)}, indent=2))
        return
    for name, value in rows(facts, free, fits).items():
        print(f"{name:<16} {value}")
    print()
    for line in table(facts):
        print(line)


def _print_refused(facts: RefusedModel, as_json: bool) -> None:
    if as_json:
        print(json.dumps({**asdict(facts), "path": str(facts.path), "supported": False}, indent=2))
        return
    told = {"file": facts.path, "family": facts.family, "runs here": f"no: {facts.reason}"}
    if facts.parameters is not None:
        told["parameters"] = f"{facts.parameters / 1e6:,.1f} million"
    for name, value in told.items():
        print(f"{name:<16} {value}")


def rows(facts: ModelFacts, free: int, fits: int) -> dict[str, Any]:
    """What is printed, by lines."""
    family = facts.family if facts.architecture in (None, facts.family) else f"{facts.family} ({facts.architecture})"
    family += f", the text of {facts.multimodal}" if facts.multimodal else ""
    stored = facts.weight_bytes
    formats = ", ".join(f"{name} {show_bytes(count)}" for name, count in facts.formats.items())
    sizes = sorted({window for window in facts.layer_windows if window is not None})
    states = f", {facts.state_layers} of them keep a state" if facts.state_layers else ""
    windows = f", {facts.windows} of them over a window of {' and '.join(f'{one:,}' for one in sizes)}" if sizes else ""
    readers = len(facts.layer_windows) - facts.stored_layers
    shared = f", stored by {facts.stored_layers} layers and read by {readers} more" if readers else ""
    room = f"{show_bytes(free)} free here: "
    if fits == facts.context:
        room += f"its whole context fits beside the weights ({show_bytes(fits * facts.token_bytes)} of keys and values)"
    elif fits:
        room += f"{fits:,} tokens of its {facts.context:,} fit beside the weights"
    else:
        room += f"the weights and a token need {show_bytes(stored + ENGINE_BYTES + facts.token_bytes)}"
    return {
        "file": facts.path,
        "family": family,
        "runs here": f"yes, layers {'in one loop' if facts.own_loop else 'by transformers'}",
        "parameters": f"{facts.parameters / 1e6:,.1f} million",
        "layers": f"{facts.layers}{states}{windows}",
        "heads": f"{facts.heads}, one latent of {facts.head_dim} channels for all"
        if facts.latent
        else f"{facts.heads}, {_key_heads(facts)}",
        **_processes(facts),
        "context": f"{facts.context:,} tokens",
        "weights": f"{show_bytes(stored)}, {8 * stored / max(1, facts.parameters):.2f} bits each: {formats}"
        + ("" if facts.weights_here else " (no weights here: what config.json lets expect)"),
        "activations": facts.dtype,
        "tokenizer": f"{facts.tokenizer or 'none: give token ids'}, {facts.vocabulary:,} tokens, "
        f"{'a' if facts.chat_template else 'no'} chat template",
        "latents" if facts.latent else "keys and values": f"{show_bytes(facts.token_bytes)} a token{shared}",
        **({"states": f"{show_bytes(facts.state_bytes)} a sequence"} if facts.state_layers else {}),
        "memory": room,
    }


def _key_heads(facts: ModelFacts) -> str:
    """Heads of keys and values, and how wide they are; where layers differ, in how many of them."""
    if not facts.shapes:
        return f"{facts.kv_heads} of keys and values, {facts.head_dim} wide"
    kinds = Counter(facts.shapes)
    return "; ".join(
        f"in {layers} layers {heads} of keys and values, {width} wide" for (heads, width), layers in kinds.items()
    )


def _processes(facts: ModelFacts) -> dict[str, str]:
    """By how many processes its heads can be shared out, or why by none."""
    from saccade.models.families import FAMILIES
    from saccade.models.shards import fitting_ranks, why_whole

    reason = why_whole(FAMILIES[facts.family])
    if reason is not None:
        return {"processes": f"1 (tensor_parallel_size): it {reason}"}

    fitting = fitting_ranks(facts.heads, facts.kv_heads, facts.head_dim)
    few, more = ([str(one) for one in fitting if (one > facts.kv_heads) is many] for many in (False, True))
    said = f"; {', '.join(more)} store each KV head several times" if more else ""
    return {"processes": f"tensor_parallel_size {', '.join(few)}{said}"}


def contexts(facts: ModelFacts) -> list[dict[str, Any]]:
    """Memory for keys, values and states at lengths of context, what a decode step of one sequence reads of keys and
    values by the layers' windows, their share of all that is read, and how many times fewer bytes are read where layers
    without a window read ``READ`` of theirs."""
    return [
        {
            "tokens": tokens,
            "memory": tokens * facts.token_bytes + facts.state_bytes,
            "kv_bytes": facts.kv_bytes(tokens),
            "share_of_step": facts.kv_bytes(tokens)
            / (facts.kv_bytes(tokens) + facts.step_bytes + 2 * facts.state_bytes),
            "limit": facts.gain(tokens, READ),
        }
        for tokens in LENGTHS
    ]


def table(facts: ModelFacts) -> list[str]:
    """:func:`contexts` for people, and what it is reckoned by."""
    lines = [f"{'context':>11} {'held':>10} {'read a step':>12} {'of a step':>10} {f'limit at {READ:.0%}':>12}"]
    for one in contexts(facts):
        beyond = "  beyond its context" if one["tokens"] > facts.context else ""
        lines.append(
            f"{one['tokens']:>11,} {show_bytes(one['memory']):>10} {show_bytes(one['kv_bytes']):>12} "
            f"{one['share_of_step']:>10.1%} {one['limit']:>11.2f}x{beyond}"
        )
    half = facts.half_at
    weights = show_bytes(facts.step_bytes)
    states = f", its states ({show_bytes(facts.state_bytes)}), which it writes" if facts.state_bytes else ""
    when = "attention is never half of it" if half is None else f"attention is half of it at {half:,} tokens"
    return [
        *lines,
        "",
        f"A decode step of one sequence reads {weights} of weights{states}, and its keys and values:",
        f"{when} (with n sequences at once, at an n-th of that each).",
        "The limit is of bytes alone: how many times fewer are read where layers without a window read",
        f"{READ:.0%} of their keys and values, and choosing costs nothing.",
    ]
