"""``saccade calibrate``: what methods learn of a model once, offline, stored beside its weights."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from saccade.cli.inputs import read_text
from saccade.cli.options import CHUNK, DEVICE, DTYPE, MEMORY, MODEL, load_model
from saccade.errors import RequestError

if TYPE_CHECKING:
    from saccade.llm import LLM

PROSE_CHARACTERS = 40_000  # of a built-in text, where none is given


def calibrate(
    kind: Annotated[
        str,
        typer.Argument(
            help="patterns (minference), locality (psaw, cpe), or a kind that a method of another package brings."
        ),
    ],
    model: Annotated[str, MODEL] = "retriever",
    file: Annotated[Path | None, typer.Option("--file", "-f", help="UTF-8 text; by default generated prose.")] = None,
    tokens: Annotated[int, typer.Option(help="Most tokens of the text to look at.")] = 4096,
    keys: Annotated[
        int | None, typer.Option(help="patterns: keys a row that each pattern may read.", show_default="512")
    ] = None,
    dtype: Annotated[str, DTYPE] = "auto",
    kv_memory: Annotated[str | None, MEMORY] = None,
    prefill_chunk: Annotated[int | None, CHUNK] = None,
    device: Annotated[str, DEVICE] = "auto",
) -> None:
    """Learn what a method needs to know of a model from a text, once, and store it in the model's folder.

    saccade calibrate patterns --model path/to/checkpoint
    """
    from saccade.methods.minference import CALIBRATION
    from saccade.methods.offline import KINDS
    from saccade.methods.outside import load_outside
    from saccade.methods.policy import Policy
    from saccade.methods.prehoc import LOCALITY

    load_outside()
    if kind not in KINDS:
        raise RequestError(f"calibration {kind!r} is unknown; known: {', '.join(sorted(KINDS))}")
    if tokens < 2:
        raise RequestError(f"tokens={tokens} must be at least 2")
    if keys is not None and kind != CALIBRATION:
        raise RequestError(f"--keys is for {CALIBRATION}; {kind} has no such number")
    if keys is not None and keys < 64:
        raise RequestError(f"keys={keys} must be at least 64")
    text = None if file is None else read_text(file)
    llm = load_model(
        model=model,
        dtype=dtype,
        kv_memory=kv_memory,
        prefill_chunk=prefill_chunk,
        device=device,
        enable_prefix_caching=False,  # whole prompts are looked at
    )
    typer.echo(run(llm, kind, _prompt(llm, text, tokens, kind == LOCALITY), keys))
    if kind == LOCALITY:
        _, said = llm.engine.checks.located(Policy.parse("psaw"))
        typer.echo(said or "'psaw' leaves a model of so few layers as it is")


def run(llm: LLM, kind: str, ids: list[int], keys: int | None = None) -> Path:
    """Compute ``ids`` densely, let the calibration see every layer's queries, keys and values, and store what it makes
    of them; returns the file. ``keys``: of a search for patterns. RequestError where the text is too short for it."""
    import torch

    from saccade.engine.observing import observing
    from saccade.engine.sampling.params import SamplingParams
    from saccade.engine.watch.observe import AttentionCall
    from saccade.kv import KVView
    from saccade.methods.base import Chunk
    from saccade.methods.offline import KINDS
    from saccade.models.calibration import save_calibration

    options = {} if keys is None else {"keys": keys}
    layers = [KINDS[kind](**options) for _ in range(llm.model.spec.layers)]

    def look(call: AttentionCall) -> None:
        if call.phase == "prefill":
            shape = call.selection.shape.to(torch.device("cpu"))
            keys, values = (part(0, shape.q_start + shape.q_len) for part in (call.kv.keys, call.kv.values))
            kv = KVView.from_tensors(keys.float().cpu(), values.float().cpu())
            layers[call.layer].add(Chunk(call.q.float().cpu(), kv, shape, call.spec.scale, call.spec.softcap))

    with observing(llm.engine, look):
        output = llm.generate(ids, SamplingParams(temperature=0, max_tokens=1), policy="dense")[0]
    if output.error is not None:
        raise RequestError(f"the calibration text could not be computed: {output.error}")
    return save_calibration(llm.model.path, kind, [layer.result() for layer in layers])


def _prompt(llm: LLM, text: str | None, tokens: int, looks_up: bool = False) -> list[int]:
    """The text's first ``tokens``, or so many of generated prose; with ``looks_up`` facts of it are said again in its
    last quarter, so that rows there look far back."""
    from saccade.passage import made_passage
    from saccade.prose import generate

    most = min(tokens, llm.max_model_len - 1)
    if text is None and looks_up and most >= 2048:
        made = made_passage(lambda part, first: llm.encode(part, first), most - 1, most // 4, seed=0)
        return list(made.ids)[:most]
    source = generate(PROSE_CHARACTERS, seed=0) if text is None else text
    ids = llm.tokenizer.encode(source)[:most]
    if len(ids) < 2:
        raise RequestError("the calibration text has fewer than 2 tokens; give a longer one")
    return ids
