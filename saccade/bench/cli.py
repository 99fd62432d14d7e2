"""The ``saccade bench`` commands."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from saccade.bench import options, serve_cli
from saccade.errors import SaccadeError
from saccade.files import write_text
from saccade.machine import check_threads, check_writable

if TYPE_CHECKING:
    import torch

app = typer.Typer(
    no_args_is_help=True, context_settings={"help_option_names": ["-h", "--help"]}, pretty_exceptions_enable=False
)

app.command("serve")(serve_cli.serve)

DEFAULT_METHODS = {
    "prefill": "flexprefill;loopserve(alpha=0.996);minference(slash=800);xattention(threshold=0.5);a_shape;tri_shape",
    "decode": "lfps(unit=kv_head, a=0.02, epsilon=1, blocks=0, rest=none)@0.02;"
    "lfps(a=0.02, epsilon=1, blocks=0, rest=none)@0.02;lfps(unit=kv_head, blocks=0, rest=none);lfps(unit=kv_head);"
    "cis(k=0.02, unit=kv_head);cis(k=0.02);psa;streaming",
}

TTFT_METHODS = (
    "transformers",
    "dense",
    "a_shape@0.1",
    "flexprefill@0.1",
    "xattention@0.1",
    "minference@0.1",
    "tri_shape@0.1",
    "flexprefill",
    "xattention",
    "psaw",
    "etf",
    "psaw+etf",
    "flexprefill@0.1+psaw+etf",
)

GENERATE_METHODS = (
    "transformers",
    "dense",
    "streaming",
    "lfps(unit=kv_head, blocks=0)",
    "lfps(unit=kv_head)",
    "psa",
    "cis(unit=kv_head)",
    "quest",
    "loopserve",
    "topk(unit=kv_head)",
)

DEFAULTS = (";".join(TTFT_METHODS), ";".join(GENERATE_METHODS))  # which leave out what a model's files do not allow


@app.callback()
def _bench() -> None:
    """Measure kernels and methods against dense, against torch and against this machine's limits."""


@app.command("ops")
def ops(
    suite: Annotated[str, typer.Option(help="prefill or decode.")] = "prefill",
    contexts: options.Contexts = "4096,16384",
    heads: Annotated[int, typer.Option(help="Query heads.")] = 32,
    kv_heads: Annotated[int, typer.Option(help="KV heads.")] = 8,
    head_dim: Annotated[int, typer.Option(help="Channels of a head.")] = 128,
    dtype: options.Storage = "bfloat16",
    threads: options.Threads = 1,
    densities: Annotated[str, typer.Option(help="Densities of random block lists, separated by commas.")] = "0.25,0.1",
    methods: Annotated[
        str | None, typer.Option(help="Methods to measure, separated by semicolons; empty text for none.")
    ] = None,
    block_size: Annotated[int, typer.Option(help="Block size of random prefill lists: 64 or 128.")] = 128,
    repeats: options.Repeats = 5,
    backend: Annotated[str, typer.Option(help="auto, cpu or reference.")] = "auto",
    clock: options.Clock = "wall",
    json_file: options.JsonFile = None,
) -> None:
    """Attention operators: one row per method, context and density, with the machine's limits measured in the same
    run."""

    from saccade.bench import limits as machine_limits
    from saccade.bench.decode import TAIL
    from saccade.bench.ops import Settings, run
    from saccade.bench.timing import CLOCKS, torch_threads
    from saccade.ops.attend import BACKENDS

    options.choice("suite", suite, ("prefill", "decode"))
    chosen = options.storage(dtype)
    options.choice("backend", backend, BACKENDS)
    options.choice("clock", clock, tuple(CLOCKS))
    options.choice("block_size", block_size, (64, 128))
    for name, value in (("heads", heads), ("kv_heads", kv_heads), ("head_dim", head_dim), ("repeats", repeats)):
        options.at_least(name, value, 1)
    check_threads(threads)
    if heads % kv_heads:
        raise SaccadeError(f"heads={heads} must be a multiple of kv_heads={kv_heads}")
    wanted = DEFAULT_METHODS[suite] if methods is None else methods
    settings = Settings(
        suite=suite,
        contexts=options.lengths(contexts, TAIL if suite == "decode" else 1),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        dtype=chosen,
        threads=threads,
        densities=[options.density(part) for part in options.parts(densities, ",")],
        methods=[options.method_text(text, suite) for text in options.parts(wanted, ";")],
        block_size=block_size,
        repeats=repeats,
        backend=backend,
        clock=clock,
    )
    check_writable(json_file, "result file")
    with torch_threads(threads):
        limits = machine_limits.measure(settings.dtype, threads, clock)
        rows = []
        for row in run(settings, limits):
            rows.append(row)
            typer.echo(f"  {row.context} {row.method}: {row.ms:.2f} ms, density {row.density:.3f}", err=True)
    write_facts(json_file, clock, rows, limits, suite=suite)
    from saccade.bench.table import print_ops

    print_ops(rows, limits)


@app.command("ttft")
def ttft(
    model: options.Model = "random",
    contexts: options.Contexts = "8192,16384,32768",
    methods: Annotated[
        str, typer.Option(help="Policies, separated by semicolons; name@0.1 is a method with budgets for density 0.1.")
    ] = ";".join(TTFT_METHODS),
    dtype: options.Storage = "bfloat16",
    threads: options.Threads = 1,
    repeats: options.Repeats = 1,
    limit: options.Limit = 3600.0,
    chunk: options.Chunk = None,
    clock: options.Clock = "wall",
    device: options.Device = "auto",
    json_file: options.JsonFile = None,
    markdown_file: options.MarkdownFile = None,
) -> None:
    """Time to first token, end to end: dense, transformers and methods, and where the time goes."""
    from saccade.bench import ttft as bench

    options.at_least("repeats", repeats, 1)
    asked = _EndToEnd(model, contexts, methods, dtype, threads, limit, chunk, clock, device, json_file, markdown_file)
    asked.run(bench, bench.policy_at, 1, lambda row: f"{row.seconds:.2f} s", repeats=repeats)


@app.command("generate")
def generate(
    model: options.Model = "random",
    contexts: options.Contexts = "8192,32768,131072",
    methods: Annotated[str, typer.Option(help="Policies, separated by semicolons.")] = ";".join(GENERATE_METHODS),
    synthetic_kv: Annotated[
        bool,
        typer.Option("--synthetic-kv", help="Fill the KV pool with structured random keys instead of a prefill."),
    ] = False,
    tokens: Annotated[int, typer.Option(help="Decode steps that count.")] = 32,
    dtype: options.Storage = "bfloat16",
    threads: options.Threads = 1,
    limit: options.Limit = 3600.0,
    chunk: options.Chunk = None,
    clock: options.Clock = "wall",
    device: options.Device = "auto",
    json_file: options.JsonFile = None,
    markdown_file: options.MarkdownFile = None,
) -> None:
    """Tokens per second of decode, end to end: dense, transformers and methods, and where a step's time goes."""
    from saccade.bench import generate as bench
    from saccade.methods import Policy

    options.at_least("tokens", tokens, 1)
    asked = _EndToEnd(model, contexts, methods, dtype, threads, limit, chunk, clock, device, json_file, markdown_file)
    asked.run(
        bench,
        lambda text, _: Policy.parse(text),
        tokens + 64,
        lambda row: f"{row.ms_per_token:.2f} ms a token",
        repeats=1,
        tokens=tokens,
        synthetic=synthetic_kv,
    )


class _EndToEnd(NamedTuple):
    """The options that end-to-end measurements share."""

    model: str
    contexts: str
    methods: str
    dtype: str
    threads: int
    limit: float
    chunk: int | None
    clock: str
    device: str
    json_file: Path | None
    markdown_file: Path | None

    def run(
        self,
        bench: Any,
        parse: Callable[[str, int], object],
        room: int,
        said: Callable[[Any], str],
        **more: Any,
    ) -> None:
        """Measure, and show rows, as the module ``bench`` does. ``parse``: a policy text at a context;
        ``room``: tokens that a model must take beyond the longest context; ``said``: what progress tells of a row."""
        import tempfile

        from saccade.bench import limits as machine_limits
        from saccade.bench.cells import as_markdown, print_cells
        from saccade.bench.timing import CLOCKS, torch_threads
        from saccade.bench.ttft import TRANSFORMERS
        from saccade.models.baseline import refused_by_transformers
        from saccade.models.checkpoint import open_checkpoint

        chosen = options.storage(self.dtype)
        options.choice("clock", self.clock, tuple(CLOCKS))
        check_threads(self.threads)
        if self.chunk is not None:
            options.at_least("chunk", self.chunk, 1)
        where = options.device(self.device)
        check_writable(self.json_file, "result file")
        check_writable(self.markdown_file, "result file")
        lengths, wanted = options.lengths(self.contexts), options.parts(self.methods, ";")
        for text in wanted:
            if text != TRANSFORMERS:
                parse(text, max(lengths))
        rows, limits = [], None
        with tempfile.TemporaryDirectory() as folder, torch_threads(self.threads):
            if "tokens" in more:  # decode is held against the machine's bandwidth
                limits = machine_limits.measure(chosen, self.threads, self.clock, where)
                more["read_gbps"] = limits["read_gbps"]
            path = model_folder(self.model, Path(folder), chosen, positions=max(lengths) + room)
            if self.methods in DEFAULTS and (why_not := refused_by_transformers(open_checkpoint(path))):
                wanted = [text for text in wanted if text != TRANSFORMERS]
                typer.echo(f"  without the row of transformers: {why_not}", err=True)
            more |= {"limit": self.limit, "chunk": self.chunk, "clock": self.clock, "device": where}
            settings = bench.Settings(path, self.model, lengths, wanted, chosen, self.threads, **more)
            for row in bench.run(settings):
                rows.append(row)
                typer.echo(f"  {row.context} {row.method}: {said(row)}, density {row.density:.3f}", err=True)
        bench.compare(rows)
        rows.sort(key=lambda row: row.context)
        write_facts(self.json_file, self.clock, rows, limits, device=where)
        cells = [bench.cells(row) for row in rows]
        if self.markdown_file is not None:
            write_text(self.markdown_file, as_markdown(bench.COLUMNS, cells))
        print_cells(bench.COLUMNS, cells, bench.WIDTH)
        if missing := len(lengths) * len(wanted) - len(rows):
            asked = missing + len(rows)
            typer.echo(f"{missing} of {asked} measurements did not begin within {self.limit:g} seconds")


def model_folder(model: str, folder: Path, dtype: torch.dtype, positions: int = 0) -> Path:
    """The checkpoint ``model``; ``random`` is a random 125M Llama, ``random-8b`` and ``random-8b:LAYERS`` one of the
    8B shape, written to ``folder``.

    ``positions``: how many tokens a random model must take at least.
    """
    name, _, layers = model.partition(":")
    if name in ("random", "random-8b") and (layers == "" or name == "random-8b"):
        import torch

        from saccade.models.baseline import RANDOM_8B, RANDOM_LLAMA, save_random_llama

        shape: dict[str, Any] = dict(RANDOM_LLAMA if name == "random" else RANDOM_8B)
        if layers:
            if not layers.isdecimal() or not 1 <= int(layers) <= 32:
                raise SaccadeError(f"--model {model!r}: LAYERS is a number from 1 to 32, as in random-8b:8")
            shape["num_hidden_layers"] = int(layers)
        shape["max_position_embeddings"] = max(positions, shape["max_position_embeddings"])
        with torch.device("cuda" if name == "random-8b" and torch.cuda.is_available() else "cpu"):  # drawn sooner
            return save_random_llama(folder, dtype, **shape)
    from saccade.models.folders import checkpoint_folder

    return checkpoint_folder(model)


def write_facts(
    file: Path | None,
    clock: str,
    rows: Sequence[Any],
    limits: dict[str, float] | None = None,
    device: torch.device | None = None,
    **more: Any,
) -> None:
    from saccade.bench.limits import machine

    if file is None:
        return
    facts: dict[str, Any] = {**more, "clock": clock, "date": time.strftime("%Y-%m-%d"), "machine": machine(device)}
    if limits is not None:
        facts["limits"] = {name: round(value, 3) for name, value in limits.items()}
    facts["rows"] = [row.as_dict() for row in rows]
    write_text(file, json.dumps(facts, indent=1) + "\n")
