"""``saccade generate``: one prompt, completed as one watches."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from saccade.cli.inputs import gather_prompt, write_json
from saccade.cli.options import (
    BACKEND,
    CHUNK,
    DEVICE,
    DTYPE,
    MAX_LENGTH,
    MEMORY,
    MODEL,
    POLICY,
    THREADS,
    engine_config,
    load_model,
)
from saccade.cli.streaming import as_dict, hint, show_stream, summary
from saccade.machine import check_writable


def generate(
    prompt: Annotated[
        str | None, typer.Argument(help="The prompt; after --prompt-file, what follows the document.")
    ] = None,
    prompt_file: Annotated[
        Path | None, typer.Option("--prompt-file", "-f", help="UTF-8 text file; - is standard input.")
    ] = None,
    model: Annotated[str, MODEL] = "retriever",
    policy: Annotated[str, POLICY] = "dense",
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-n", help="Most tokens to generate.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Nucleus sampling.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Sample from the k likeliest; 0 is off.")] = 0,
    min_p: Annotated[float, typer.Option(help="Least probability relative to the likeliest.")] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(help="1 is off.")] = 1.0,
    stop: Annotated[list[str] | None, typer.Option(help="Stop at this text; may be given several times.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of sampling.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after an end token.")] = False,
    report: Annotated[Path | None, typer.Option(help="Write what was really done to this JSON file.")] = None,
    dtype: Annotated[str, DTYPE] = "auto",
    max_model_len: Annotated[int | None, MAX_LENGTH] = None,
    kv_memory: Annotated[str | None, MEMORY] = None,
    prefill_chunk: Annotated[int, CHUNK] = 4096,
    backend: Annotated[str, BACKEND] = "auto",
    threads: Annotated[int | None, THREADS] = None,
    device: Annotated[str, DEVICE] = "auto",
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print the answer alone.")] = False,
) -> None:
    """Complete a prompt; tokens are printed as they come.

    The document may come from a file or a pipe and the question as the argument:
    saccade generate -f book.txt "The password is" --policy "flexprefill+psa(epsilon=0.98)"
    cat book.txt | saccade generate "The password is"
    """
    text = gather_prompt(prompt, prompt_file)
    check_writable(report)
    from saccade.engine.params import SamplingParams
    from saccade.methods.policy import Policy

    chosen = Policy.parse(policy)
    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        stop=stop or None,
        seed=seed,
        ignore_eos=ignore_eos,
    )
    config = engine_config(model, dtype, max_model_len, kv_memory, prefill_chunk, backend, threads, device)
    llm = load_model(config, quiet=quiet)
    outcome = show_stream(llm.stream(text, params, policy=chosen), quiet)
    if report is not None:
        write_json(report, {"model": model, "text": outcome.text, **as_dict(outcome)})
    if not quiet:
        summary(outcome)
        hint(model, outcome.text)
    if outcome.error is not None:
        print(f"saccade: error: the request failed: {outcome.error}", file=sys.stderr)
        raise typer.Exit(1)
