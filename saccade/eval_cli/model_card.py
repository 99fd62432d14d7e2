"""``saccade eval model-card``: measure every gate of a model card and write it as Markdown and JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from saccade.cli.inputs import write_json
from saccade.cli.options import CHUNK, DEVICE, DTYPE, MEMORY, MODEL, load_model
from saccade.documents import text_of
from saccade.errors import RequestError, SaccadeError
from saccade.files import write_text
from saccade.machine import check_writable


def model_card(
    model: Annotated[str, MODEL] = "reference",
    out: Annotated[Path, typer.Option("--out", "-o", help="Markdown file; the JSON is written beside it.")] = Path(
        "model-card.md"
    ),
    source: Annotated[str, typer.Option(help="Tasks: suite, or facts for the retriever.")] = "",
    lengths: Annotated[str, typer.Option(help="Lengths of dense accuracy in tokens.")] = "2048,4096,8192",
    length: Annotated[int, typer.Option(help="Length of everything else.")] = 4096,
    samples: Annotated[int, typer.Option(help="Samples of a task for accuracies.")] = 20,
    prompts: Annotated[int, typer.Option(help="Prompts of a task for attention.")] = 1,
    seed: Annotated[int, typer.Option(help="Seed of the samples.")] = 1_000_003,
    causes: Annotated[Path | None, typer.Option(help="JSON file: gate name -> one line on why it fails.")] = None,
    dtype: Annotated[str, DTYPE] = "auto",
    kv_memory: Annotated[str | None, MEMORY] = None,
    prefill_chunk: Annotated[int | None, CHUNK] = None,
    device: Annotated[str, DEVICE] = "auto",
) -> None:
    """Measure dense accuracy and the attention gates of a model; failures are reported, not hidden."""
    data = out.with_suffix(".json")
    for path in (out, data):
        check_writable(path)
    said = _causes(causes)
    from saccade.eval.gates_card import ROLES, Plan, markdown, measure_card, with_causes
    from saccade.eval.sources import find_tasks

    chosen = source or ("facts" if model == "retriever" else "suite")
    if chosen not in ROLES:
        raise RequestError(f"source={chosen!r} has no roles for the card; known: {', '.join(ROLES)}")
    plan = Plan(_lengths(lengths), length, samples, prompts, seed)
    llm = load_model(
        model=model,
        dtype=dtype,
        kv_memory=kv_memory,
        prefill_chunk=prefill_chunk,
        device=device,
        enable_prefix_caching=False,  # whole prompts are looked at
    )
    tasks = {task.task: task for task in find_tasks([f"{chosen}:all"], lambda text: len(llm.tokenizer.encode(text)))}
    card = measure_card(
        llm,
        lambda task, size, index, key: tasks[task].sample(size, index, key),
        ROLES[chosen].within(list(tasks)),
        plan,
        progress=lambda text: print(f"saccade: {text}", file=sys.stderr),
    )
    card = with_causes(card, said)
    write_text(out, markdown(card))
    write_json(data, card.as_dict())
    print(markdown(card), end="")


def _lengths(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise RequestError(f"lengths={text!r} must be token counts, for example 2048,4096")
    return tuple(int(part) for part in parts)


def _causes(path: Path | None) -> dict[str, str]:
    if path is None:
        return {}
    if not path.is_file():
        raise RequestError(f"causes file {path} does not exist")
    try:
        said = json.loads(text_of(path.read_bytes(), str(path)))
    except json.JSONDecodeError as error:
        raise SaccadeError(f"causes file {path} is not JSON: {error}") from None
    if not isinstance(said, dict) or not all(isinstance(value, str) for value in said.values()):
        raise RequestError(f"causes file {path} must hold an object of gate name -> text")
    return said
