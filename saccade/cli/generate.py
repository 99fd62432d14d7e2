"""``saccade generate`` and ``saccade chat``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

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
from saccade.errors import SaccadeError
from saccade.machine import check_writable

if TYPE_CHECKING:
    from saccade.engine.messages import RequestOutcome


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
    outcome = _stream(llm.stream(text, params, policy=chosen), quiet)
    if report is not None:
        write_json(report, {"model": model, "text": outcome.text, **_outcome(outcome)})
    if not quiet:
        _summary(outcome)
    if outcome.error is not None:
        print(f"saccade: error: the request failed: {outcome.error}", file=sys.stderr)
        raise typer.Exit(1)


def chat(
    model: Annotated[str, MODEL] = "retriever",
    policy: Annotated[str, POLICY] = "dense",
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-n", help="Most tokens of an answer.")] = 256,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    stop: Annotated[list[str] | None, typer.Option(help="Stop at this text; may be given several times.")] = None,
    dtype: Annotated[str, DTYPE] = "auto",
    max_model_len: Annotated[int | None, MAX_LENGTH] = None,
    kv_memory: Annotated[str | None, MEMORY] = None,
    prefill_chunk: Annotated[int, CHUNK] = 4096,
    backend: Annotated[str, BACKEND] = "auto",
    threads: Annotated[int | None, THREADS] = None,
    device: Annotated[str, DEVICE] = "auto",
) -> None:
    """Talk in turns; keys and values are kept, so a turn computes only what it adds. Ends with the input (Ctrl-D)."""
    from saccade.engine.params import SamplingParams
    from saccade.methods.policy import Policy

    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, stop=stop or None)
    chosen = Policy.parse(policy)
    llm = load_model(engine_config(model, dtype, max_model_len, kv_memory, prefill_chunk, backend, threads, device))
    session = llm.session(chosen)
    while True:
        if sys.stdin.isatty():
            print("> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line:
            return
        if not line.strip():
            continue
        try:
            answer = session.chat(line.rstrip("\n"), params)
            print(answer.outputs[0].text, flush=True)
            if answer.error is not None:
                print(f"saccade: error: the turn failed: {answer.error}", file=sys.stderr)
        except SaccadeError as error:  # the conversation goes on as it was before this turn
            print(f"saccade: error: {error}", file=sys.stderr)


def _stream(steps: Any, quiet: bool) -> RequestOutcome:
    """Print text as it comes, a progress bar on stderr while a long prompt is read; returns how it ended."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True, quiet=quiet or not sys.stderr.isatty())
    columns = (TextColumn("reading"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    outcome: RequestOutcome | None = None
    with Progress(*columns, console=console, transient=True) as progress:
        bar = None
        for step in steps:
            outcome = step.outcome
            if step.new_tokens or step.finished:
                if bar is not None:
                    progress.remove_task(bar)
                    bar = None
                progress.stop()
            elif bar is None:
                bar = progress.add_task("", total=step.prefill_total, completed=step.prefilled)
            else:
                progress.update(bar, completed=step.prefilled)
            if step.new_text:
                sys.stdout.write(step.new_text)
                sys.stdout.flush()
    assert outcome is not None, "a stream ends with an outcome"
    sys.stdout.write("\n")
    sys.stdout.flush()
    return outcome


def _outcome(outcome: RequestOutcome) -> dict[str, Any]:
    return {"finish_reason": outcome.finish_reason, "error": outcome.error, **outcome.report}


def _summary(outcome: RequestOutcome) -> None:
    report = outcome.report
    parts = []
    for phase in ("prefill", "decode"):
        stats = report[phase]
        if stats["tokens"]:
            read = "nothing read" if stats["density"] is None else f"density {stats['density']:.3f}"
            parts.append(
                f"{phase} {stats['tokens']} tokens by {stats['policy']}, {read}, "
                f"{stats['seconds']:.2f} s ({stats['tokens_per_second'] or 0:.1f} tokens/s)"
            )
    print(f"[{outcome.finish_reason}] " + "; ".join(parts), file=sys.stderr)
    for note in report["notes"]:
        print(f"saccade: note: {note}", file=sys.stderr)
