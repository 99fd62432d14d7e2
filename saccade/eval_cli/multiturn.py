"""``saccade eval multiturn``: LoopServe's multi-turn LongBench as files, from LongBench's own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def multiturn(
    name: Annotated[str, typer.Argument(help="The set: hotpotqa, gov_report, trec, ...")],
    source: Annotated[Path, typer.Argument(help="LongBench's file of that set (jsonl).")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for NAME.jsonl and manifest.json.")] = Path("mtlb"),
    limit: Annotated[int | None, typer.Option(help="Instances: a prefix of the whole set (500; 199 few-shot).")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the construction.")] = 0,
    noise: Annotated[float | None, typer.Option(help="Irrelevant words as a share of a turn's.")] = None,
    window: Annotated[int | None, typer.Option(help="Tokens an instance may take; words without --model.")] = None,
    model: Annotated[str | None, typer.Option("--model", "-m", help="Whose tokenizer counts.")] = None,
    allow_unknown: Annotated[bool, typer.Option(help="Take a file whose SHA-256 is not known.")] = False,
) -> None:
    """Build multi-turn instances, position-free, with a manifest of hashes, counts and rejects."""
    from saccade.eval.multiturn import build
    from saccade.eval.runner import given_by

    given = given_by(model)
    manifest = build(
        name,
        source,
        out,
        instances=limit,
        seed=seed,
        noise=noise,
        window=window,
        allow_unknown=allow_unknown,
        count_tokens=given.count_tokens,
        tokenizer=model,
    )
    for key, value in manifest.items():
        print(f"{key}: {value}")
