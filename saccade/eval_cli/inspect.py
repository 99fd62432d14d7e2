"""``saccade inspect``: pictures of what each head read over the true attention, and what was kept of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from saccade.cli.inputs import gather_prompt
from saccade.cli.options import CHUNK, DEVICE, DTYPE, MAX_LENGTH, MEMORY, MODEL, POLICY, load_model
from saccade.cli.progress import reading
from saccade.errors import RequestError, SaccadeError

if TYPE_CHECKING:
    from saccade.eval.inspect import Inspection
    from saccade.llm import LLM


def inspect(
    prompt: Annotated[
        str | None, typer.Argument(help="The prompt; after --prompt-file, what follows the document.")
    ] = None,
    prompt_file: Annotated[
        Path | None, typer.Option("--prompt-file", "--file", "-f", help="UTF-8 text file; - is standard input.")
    ] = None,
    model: Annotated[str, MODEL] = "retriever",
    policy: Annotated[str, POLICY] = "flexprefill(min_budget=256)+psa",
    layers: Annotated[str | None, typer.Option(help="Layers to draw, for example 0,3-5; all by default.")] = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the pictures.")] = Path("inspect"),
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-n", help="Most tokens to generate.")] = 33,
    pixels: Annotated[int, typer.Option(help="Cells of a map's side; longer prompts are max-pooled.")] = 160,
    promises: Annotated[
        bool, typer.Option("--promises", help="Print what FlexPrefill and LoopServe promise and keep instead.")
    ] = False,
    rows: Annotated[int, typer.Option(help="Query rows that --promises samples per layer.")] = 64,
    task: Annotated[
        list[str] | None,
        typer.Option(
            "--task", "-t", help="With --promises, evaluation tasks to take prompts from; several may be given."
        ),
    ] = None,
    length: Annotated[int, typer.Option(help="Tokens of the prompts that --task makes.")] = 2048,
    seed: Annotated[int, typer.Option(help="Seed of the sampled rows.")] = 0,
    dtype: Annotated[str, DTYPE] = "auto",
    max_model_len: Annotated[int | None, MAX_LENGTH] = None,
    kv_memory: Annotated[str | None, MEMORY] = None,
    prefill_chunk: Annotated[int | None, CHUNK] = None,
    device: Annotated[str, DEVICE] = "auto",
) -> None:
    """Draw what each head read in prefill and decode over the attention it would have paid when dense.

    saccade inspect -f book.txt "The password is" --policy "flexprefill+psa" --layers 0,3-5 --out pictures
    """
    if task and not promises:
        raise RequestError("--task makes prompts for --promises alone; give that too, or a prompt instead of --task")
    text = "" if task else gather_prompt(prompt, prompt_file)
    wanted = parse_layers(layers)
    from saccade.methods.policy import Policy

    chosen = Policy.parse(policy)
    llm = load_model(
        model=model,
        dtype=dtype,
        max_model_len=max_model_len,
        kv_memory=kv_memory,
        prefill_chunk=prefill_chunk,
        device=device,
        enable_prefix_caching=False,  # whole prompts are looked at
    )
    if promises:
        from saccade.eval.micro import promised_against_measured, text_table

        prompts = task_prompts(llm, task, length) if task else [text]
        print(text_table(promised_against_measured(llm, prompts, rows=rows, seed=seed)), end="")
        return
    from saccade.eval.inspect import inspect as draw_maps

    with reading(llm, "watching"):
        paths, seen = draw_maps(llm, text, out, chosen, layers=wanted, max_tokens=max_tokens, pixels=pixels)
    _print(seen)
    for path in paths:
        print(path)


def task_prompts(llm: LLM, tasks: Sequence[str], length: int) -> list[list[int]]:
    """The first turn of each task's first sample, as ids."""
    from saccade.eval.render import render
    from saccade.eval.sources import find_tasks

    return [render(llm.tokenizer, [], task.sample(length, 0, 0).turns[0]).ids for task in find_tasks(tasks)]


def parse_layers(text: str | None) -> list[int] | None:
    """``0,3-5`` as [0, 3, 4, 5]; None for None. SaccadeError for anything else."""
    if text is None:
        return None
    chosen: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()) or (dash and int(last) < int(first)):
            raise SaccadeError(f"layers={text!r} cannot be read; write numbers and ranges, for example 0,3-5")
        chosen += range(int(first), int(last or first) + 1)
    return chosen


def _print(seen: Inspection) -> None:
    from saccade.eval.micro import text_table

    rows = [
        {"layer": layer, "phase": phase, "heads": len(found.mass), "density": float(found.density.mean())}
        | {"retained_mass": float(found.mass.mean()), "lowest_head": float(found.mass.min())}
        for (phase, layer), found in sorted(seen.maps.items(), key=lambda item: (item[0][1], item[0][0] != "prefill"))
    ]
    print(text_table(rows))
