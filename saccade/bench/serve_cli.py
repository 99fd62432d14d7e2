"""``saccade bench serve``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from saccade.bench import options
from saccade.errors import SaccadeError


def serve(
    url: Annotated[str, typer.Option(help="Where the server is, without /v1.")] = "http://127.0.0.1:8000",
    model: Annotated[
        str | None, typer.Option(help="What it calls the model; the first that it lists by default.")
    ] = None,
    api_key: Annotated[str | None, typer.Option(envvar="SACCADE_API_KEY", help="Its API key.")] = None,
    mix: Annotated[str, typer.Option(help="chat, documents, sessions or longbench.")] = "chat",
    requests: Annotated[int, typer.Option(help="Requests of the run.")] = 100,
    rate: Annotated[float | None, typer.Option(help="Arrivals a second, Poisson; all at once by default.")] = None,
    concurrency: Annotated[int, typer.Option(help="Most requests at work.")] = 32,
    scale: Annotated[float, typer.Option(help="Multiplies all lengths.")] = 1.0,
    trace: Annotated[
        Path | None,
        typer.Option(help="Lines of JSON with at (seconds), prompt_words and max_tokens, in place of a mix."),
    ] = None,
    policy: Annotated[str | None, typer.Option(help="The requests' policy, of a Saccade server.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Answers are as long as they may be.")] = False,
    first_limit: Annotated[float, typer.Option(help="Seconds to the first token that goodput allows.")] = 2.0,
    gap_limit: Annotated[float, typer.Option(help="Seconds between tokens that goodput allows.")] = 0.1,
    limit: Annotated[float, typer.Option(help="Seconds after which a request counts as failed.")] = 600.0,
    seed: Annotated[int, typer.Option(help="Of lengths, arrivals and texts.")] = 0,
    json_file: options.JsonFile = None,
) -> None:
    """Load an OpenAI server and say how long its clients waited: any server, so that peers can be measured alike."""
    import asyncio
    from dataclasses import replace

    from saccade.bench import serve as load
    from saccade.bench.serve_client import Target, get
    from saccade.files import write_text
    from saccade.machine import check_writable

    options.choice("mix", mix, load.MIXES)
    options.at_least("requests", requests, 1)
    options.at_least("concurrency", concurrency, 1)
    for name, value in (("rate", rate), ("scale", scale), ("limit", limit)):
        if value is not None and not 0 < value < float("inf"):
            raise SaccadeError(f"{name}={value} must be a number above 0")
    check_writable(json_file, "result file")
    fields: dict[str, Any] = {"temperature": 0.0} | ({"ignore_eos": True} if ignore_eos else {})
    fields |= {} if policy is None else {"policy": policy}
    target = Target(url, model, api_key, fields)
    wanted = load.Load(mix, requests, rate, concurrency, scale, seed, limit, trace)

    async def whole() -> tuple[list[load.Sample], float]:
        served = target
        if model is None:
            listed = await get(target, "/v1/models")
            served = replace(target, model=listed["data"][0]["id"])
        if policy is not None and mix == "sessions":  # only a Saccade server knows either
            served = replace(served, fields={**fields, "session_id": f"bench-{seed}"})
        return await load.run(served, wanted)

    samples, seconds = asyncio.run(whole())
    found = load.summary(samples, seconds, first_limit, gap_limit)
    for name, told in load.rows(found):
        typer.echo(f"{name:28} {told}")
    if json_file is not None:
        facts = {"url": url, "mix": mix, "rate": rate, "concurrency": concurrency, "scale": scale, "seed": seed}
        write_text(json_file, json.dumps({**facts, **found, "samples": load.as_json(samples)}, indent=1) + "\n")
    if not found["completed"]:
        raise typer.Exit(1)
