"""``saccade bench recall``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from saccade.bench import options
from saccade.cli.options import DEVICE
from saccade.errors import SaccadeError
from saccade.eval_cli.inspect import parse_layers
from saccade.machine import best_device, check_threads, check_writable

if TYPE_CHECKING:
    import torch

    from saccade.bench.inputs import Problem
    from saccade.llm import LLM
    from saccade.models.interface import LayerAttention

CAPTURE = "capture:"
LEAST = 128  # tokens of the shortest input
QUESTION = 128  # last tokens of a task's prompt, which are kept


def recall(
    phase: Annotated[str, typer.Option(help="prefill or decode.")] = "prefill",
    family: Annotated[
        str, typer.Option(help="Families of inputs, separated by commas: topics, needles, code, flat.")
    ] = "topics",
    given: Annotated[
        str | None,
        typer.Option(
            "--input",
            help="capture:MODEL for what a model asks and stores, in place of a family: a folder, retriever or "
            "reference.",
        ),
    ] = None,
    task: Annotated[
        str, typer.Option(help="With --input, the evaluation task whose first sample is the prompt.")
    ] = "multikey",
    prompt_file: Annotated[
        Path | None, typer.Option(help="With --input, a UTF-8 text to read in place of a task.")
    ] = None,
    layers: Annotated[
        str | None, typer.Option(help="With --input, layers to look at, for example 0,3-5; all by default.")
    ] = None,
    lengths: Annotated[str, typer.Option(help="Context lengths, separated by commas.")] = "8192,32768",
    heads: Annotated[int, typer.Option(help="Query heads of a family.")] = 8,
    kv_heads: Annotated[int, typer.Option(help="KV heads of a family.")] = 2,
    head_dim: Annotated[int, typer.Option(help="Channels of a head of a family: even, at least 16.")] = 128,
    dtype: options.Storage = "bfloat16",
    methods: Annotated[
        str | None,
        typer.Option(
            help="Methods, separated by semicolons: a name for thresholds of its own, xattention(threshold=0.8|0.9) "
            "for those given."
        ),
    ] = None,
    rows: Annotated[int, typer.Option(help="Rows of a prefill that are looked at, or steps of a decode.")] = 128,
    mean: Annotated[float, typer.Option(help="Mean recall of the second table.")] = 0.9,
    worst: Annotated[float, typer.Option(help="Recall of the worst head in the second table.")] = 0.8,
    times: Annotated[bool, typer.Option(help="Time choosing and attention.")] = True,
    repeats: options.Repeats = 3,
    threads: options.Threads = 1,
    seed: Annotated[int, typer.Option(help="Of a family's draws.")] = 0,
    clock: options.Clock = "wall",
    device: Annotated[str, DEVICE] = "auto",
    json_file: options.JsonFile = None,
    markdown_file: options.MarkdownFile = None,
) -> None:
    """Selections at equal recall: what share of the true attention they keep, at what density and in what time.

    saccade bench recall --lengths 8192 --methods "xattention;flexprefill(lines=block, gamma=0.9|0.95)"
    """
    import torch

    from saccade.bench.cli import write_facts
    from saccade.bench.recall.equal import at_equal_recall
    from saccade.bench.recall.ladders import ladders
    from saccade.bench.recall.measure import Settings, measure
    from saccade.bench.recall.table import markdown, print_recall
    from saccade.bench.timing import CLOCKS, torch_threads
    from saccade.files import write_text
    from saccade.models.target import checked_device

    options.choice("phase", phase, ("prefill", "decode"))
    stored = options.storage(dtype)
    options.choice("clock", clock, tuple(CLOCKS))
    for name, value in (("rows", rows), ("repeats", repeats)):
        options.at_least(name, value, 1)
    for name, share in (("mean", mean), ("worst", worst)):
        if not 0 < share <= 1:
            raise SaccadeError(f"{name}={share} must be above 0 and at most 1")
    check_threads(threads)
    check_writable(json_file, "result file")
    check_writable(markdown_file, "result file")
    wanted = ladders(None if methods is None else options.parts(methods, ";"), phase)
    sizes = options.lengths(lengths, LEAST)
    if phase == "decode" and rows >= min(sizes):
        raise SaccadeError(f"rows={rows} must leave a prompt: give fewer than the shortest of lengths={lengths}")
    on = str(checked_device(best_device() if device == "auto" else device))
    settings = Settings(phase, rows, repeats, threads, times, mean, clock)
    if given is None:
        inputs = _families(family, sizes, heads, kv_heads, head_dim, stored, on, seed)
    else:
        inputs = _captured(given, task, prompt_file, layers, sizes, dtype, on, threads)
    found = []
    with torch.inference_mode(), torch_threads(threads):
        for name, problems in inputs:
            _check_room(problems, rows)
            for row in measure(settings, name, problems, wanted, lambda text: typer.echo(f"  {text}", err=True)):
                found.append(row)
                taken = f", {row.ms:.2f} ms of which {row.choosing_ms:.2f} choosing" if times else ""
                what = f"{name} {row.context} {row.method}: density {row.density:.3f}, recall {row.recall:.3f}"
                typer.echo(f"  {what}, worst head {row.worst:.3f}{taken}", err=True)
    equal = at_equal_recall(found, mean, worst)
    write_facts(json_file, clock, found, None, phase=phase, equal=[row.as_dict() for row in equal])
    if markdown_file is not None:
        write_text(markdown_file, markdown(found, equal, mean, worst))
    print_recall(found, equal, mean, worst)


def _families(
    names: str, sizes: list[int], heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: str, seed: int
) -> Iterator[tuple[str, list[Problem]]]:
    from saccade.bench.inputs import problem_of
    from saccade.bench.recall.families import FAMILIES, generate

    listed = options.parts(names, ",")
    for name in listed or [names]:
        options.choice("family", name, tuple(FAMILIES))
    for what, value in (("heads", heads), ("kv_heads", kv_heads)):
        options.at_least(what, value, 1)
    if heads % kv_heads:
        raise SaccadeError(f"heads={heads} must be a multiple of kv_heads={kv_heads}")
    if head_dim < 16 or head_dim % 2:
        raise SaccadeError(f"head_dim={head_dim} must be even and at least 16")

    def made() -> Iterator[tuple[str, list[Problem]]]:
        for name in listed:
            for size in sizes:
                own = generate(name, heads, kv_heads, head_dim, size, dtype, device, seed)
                yield name, [problem_of(own.q, own.k, own.v)]

    return made()


def _captured(
    given: str,
    task: str,
    file: Path | None,
    layers: str | None,
    sizes: list[int],
    dtype: str,
    device: str,
    threads: int,
) -> Iterator[tuple[str, list[Problem]]]:
    """Each length's layers, as the model asked and stored them in a dense prefill."""
    from saccade.bench.inputs import problem_of
    from saccade.cli.options import load_model
    from saccade.eval.capture import capture
    from saccade.eval.gates_attention import whole_prefill

    name = given.removeprefix(CAPTURE)
    if not name or name == given:
        raise SaccadeError(f"input={given!r} is unknown; write capture:MODEL, or give a --family")
    wanted = parse_layers(layers)
    llm = load_model(
        model=name,
        dtype=dtype,
        device=device,
        threads=threads,
        max_model_len=max(sizes) + 1,
        enable_prefix_caching=False,
    )
    for size in sizes:
        calls = capture(llm, _prompt(llm, task, file, size), "dense", layers=wanted)
        problems = []
        for layer in sorted({call.layer for call in calls.calls}):
            call = whole_prefill(calls.of(layer, "prefill"))
            if _plain(call.spec, call.q.shape[-1]):
                keys, values = call.kv.keys(), call.kv.values()
                problems.append(problem_of(call.q.to(device), keys.to(device), values.to(device)))
        if not problems:
            raise SaccadeError(
                f"input={given!r}: none of the layers attends to everything at the usual scale, without a window, a "
                "cap of logits or sinks of its own; choose other --layers"
            )
        yield given, problems


def _plain(spec: LayerAttention, head_dim: int) -> bool:
    usual = abs(spec.scale * head_dim**0.5 - 1) < 1e-6
    return usual and spec.window is None and spec.softcap is None and spec.sinks is None


def _prompt(llm: LLM, task: str, file: Path | None, size: int) -> list[int]:
    """``size`` token ids at most: a text's first ones, or a task's sample, with its middle cut out if it is longer."""
    if file is None:
        from saccade.eval_cli.inspect import task_prompts

        ids, end = task_prompts(llm, [task], size)[0], min(QUESTION, size // 2)
        return ids if len(ids) <= size else ids[: size - end] + ids[-end:]
    from saccade.cli.inputs import read_text
    from saccade.eval.capture import token_ids

    ids = token_ids(llm, read_text(file))
    if len(ids) < size:
        raise SaccadeError(
            f"prompt file {file} has {len(ids)} tokens, fewer than the length {size}; give a longer text"
        )
    return ids[:size]


def _check_room(problems: list[Problem], rows: int) -> None:
    """SaccadeError where the true weights of the sampled rows have no room."""
    import torch

    from saccade.bench.recall.measure import ORACLE_ROWS
    from saccade.machine import available_bytes, show_bytes

    shape = problems[0].shape
    sample = min(rows, shape.k_len)
    need = 4 * shape.heads * shape.k_len * (sample * len(problems) + 128) + 8 * shape.heads * ORACLE_ROWS * shape.k_len
    cuda = problems[0].q.is_cuda
    room = torch.cuda.mem_get_info(problems[0].q.device)[0] if cuda else available_bytes()
    if need > room:
        raise SaccadeError(
            f"rows={rows}: the true attention of so many rows takes {show_bytes(need)} at {shape.k_len} tokens, and "
            f"{show_bytes(room)} are free; give fewer --rows, heads or --layers"
        )
